"""The parameters a decoder needs, by our names, and where each lies in a file.

A family gives a table from our names to the file's; the loader asks for a `Part` and never hears of a family. No torch.

Our names: `embedding`, `final_norm`, `lm_head`; in a layer `attention_norm`, `q`, `k`, `v`, `o`, `q_norm`, `k_norm`,
`post_attention_norm`, `feed_forward_norm`, `post_feed_forward_norm`, `gate`, `up`, `down`, `router` and
`experts.<number>.gate|up|down`, each under `layers.<number>.`; a bias is its matrix's name and `.bias`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import ModelError
from penstock.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the file, or some of its rows."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor in the file
    rows: tuple[int, int] | None = None  # with all dimensions but the last flattened; None: all


@dataclass(frozen=True, slots=True)
class Stack:
    """A file tensor that holds several parameters one below the other, such as Phi-3's fused q, k and v."""

    tensor: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """A file tensor [experts, out, in] that holds one matrix of every expert."""

    tensor: str


Names = Mapping[str, str | Stack | Experts]


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """How one file format of one family names and orders parameters.

    In the tables `{layer}` and `{expert}` stand for numbers and `{model}` for one of `prefixes`.
    """

    names: Names
    rotary_pairs: bool = False  # rows of q and k that rotate together are neighbours, not half a head apart
    prefixes: tuple[str, ...] = ("",)
    other_heads: tuple[str, ...] = ()  # names that some files have for the head
    ignorable: tuple[str, ...] = ()  # patterns of names that may stay unused, beyond those of every family


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model and its shape, [out, in] for a matrix."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, hidden), "final_norm": (hidden,)}
    if not spec.tie_embeddings:
        shapes["lm_head"] = (spec.vocab_size, hidden)
    for number, layer in enumerate(spec.layers):
        of_layer = _attention_shapes(spec) | (_moe_shapes(spec) if layer.moe else _feed_forward_shapes(spec))
        shapes.update({f"layers.{number}.{name}": shape for name, shape in of_layer.items()})
    return shapes


def _attention_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "feed_forward_norm": (hidden,),
        "q": (spec.q_size, hidden),
        "k": (spec.kv_size, hidden),
        "v": (spec.kv_size, hidden),
        "o": (hidden, spec.q_size),
    }
    if spec.attention_bias:
        shapes |= {f"{name}.bias": shapes[name][:1] for name in ("q", "k", "v")}
    if spec.output_bias:
        shapes["o.bias"] = (hidden,)
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    if spec.post_norms:
        shapes |= {"post_attention_norm": (hidden,), "post_feed_forward_norm": (hidden,)}
    return shapes


def _feed_forward_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shapes = _gated_shapes(spec.hidden_size, spec.intermediate_size)
    if spec.mlp_bias:
        shapes |= {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    return shapes


def _moe_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    assert spec.moe is not None
    shapes: dict[str, tuple[int, ...]] = {"router": (spec.moe.num_experts, spec.hidden_size)}
    of_expert = _gated_shapes(spec.hidden_size, spec.moe.intermediate_size)
    for expert in range(spec.moe.num_experts):
        shapes.update({f"experts.{expert}.{name}": shape for name, shape in of_expert.items()})
    return shapes


def _gated_shapes(hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}


def locate(spec: ModelSpec, layout: WeightLayout, has: Callable[[str], bool]) -> dict[str, Part]:
    """Say where each parameter lies; `has` tells which tensors the file holds.

    Raises ModelError where the layout has no place for a parameter that the spec asks for.
    """
    shapes = parameter_shapes(spec)
    prefix = _prefix(layout, has)
    num_experts = spec.moe.num_experts if spec.moe else 0
    names = {**layout.names, "lm_head": head_tensor(layout, has)}
    return {name: _part(name, shapes, names, prefix, num_experts) for name in shapes}


def head_tensor(layout: WeightLayout, has: Callable[[str], bool]) -> str:
    """Return the file's name of the head, whether it is there or not."""
    usual = layout.names["lm_head"]
    assert isinstance(usual, str)
    return next((name for name in layout.other_heads if has(name)), usual)


def _prefix(layout: WeightLayout, has: Callable[[str], bool]) -> str:
    embedding = layout.names["embedding"]
    assert isinstance(embedding, str)
    found = [prefix for prefix in layout.prefixes if has(embedding.format(model=prefix))]
    return found[0] if found else layout.prefixes[0]


def _part(name: str, shapes: Mapping[str, tuple[int, ...]], names: Names, prefix: str, num_experts: int) -> Part:
    numbers = {key: value for key, value in _NUMBERED.findall(name)}
    of_layer, of_expert = numbers.get("layers", ""), numbers.get("experts", "")
    general = _NUMBERED.sub(lambda match: f"{match[1]}.{{{match[1].removesuffix('s')}}}.", name)
    fields = {"layer": of_layer, "expert": of_expert, "model": prefix}
    place = names.get(general)
    if place is None:
        raise ModelError(f"this kind of file has no place for the parameter {name}, which the model's settings ask for")
    tensor = (place if isinstance(place, str) else place.tensor).format(**fields)
    shape = shapes[name]
    if isinstance(place, Experts):
        first = int(of_expert) * shape[0]
        return Part(tensor, (num_experts, *shape), (first, first + shape[0]))
    if isinstance(place, Stack):
        members = [member.format(**fields) for member in place.members]
        heights = [shapes[member][0] for member in members]
        first = sum(heights[: members.index(name)])
        return Part(tensor, (sum(heights), *shape[1:]), (first, first + shape[0]))
    return Part(tensor, shape)


_NUMBERED = re.compile(r"(layers|experts)\.(\d+)\.")
