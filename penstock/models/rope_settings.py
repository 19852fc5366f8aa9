"""Reads rotary-embedding settings, in every spelling that model files use, into a `RopeSpec`.

Two spellings exist in `config.json`: `rope_theta` with an optional `rope_scaling` object, and one `rope_parameters`
object that holds both; where a file has both objects, `rope_scaling` counts, as in transformers. GGUF has its own keys
and keeps per-frequency factors as small tensors. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import RopeSpec


def rope_section(settings: Settings) -> Settings | None:
    scaling = settings.section("rope_scaling")
    return scaling if scaling is not None and scaling.values else settings.section("rope_parameters")


def read_rope(
    settings: Settings,
    section: Settings | None,
    *,
    head_dim: int,
    max_position: int,
    theta: float = 10_000.0,
    theta_key: str = "rope_theta",
    may_be_partial: bool = False,
) -> RopeSpec:
    """Read a rope whose scaling, if any, lies in `section`. `theta` is the family's default.

    `may_be_partial`: the family can rotate a part of each head only (`partial_rotary_factor`).
    """
    section = section or Settings({}, settings.file)
    theta = section.positive("rope_theta", settings.positive(theta_key, theta))
    rotary_dim = _rotary_dim(settings, section, head_dim, may_be_partial=may_be_partial)
    # Phi-3 keeps the trained length outside the section; there it counts more than inside.
    trained = settings.integer(
        "original_max_position_embeddings", section.integer("original_max_position_embeddings", max_position)
    )
    plain = RopeSpec(theta, rotary_dim)
    return section.choice(_type_key(section), _SCALINGS, "default")(plain, section, max_position, trained)


def _rotary_dim(settings: Settings, section: Settings, head_dim: int, *, may_be_partial: bool) -> int:
    """How much of each head rotates."""
    if head_dim < 4 or head_dim % 2:
        if "head_dim" in settings:
            raise settings.refusal("head_dim", "its parts rotate in pairs: give an even number, at least 4")
        raise settings.refusal(
            "hidden_size", f"it leaves {head_dim} for each head, but that must be an even number, at least 4"
        )
    holder = section if "partial_rotary_factor" in section else settings
    partial = holder.positive("partial_rotary_factor", 1.0)
    if not may_be_partial:
        # The reference rotates whole heads of these families whatever the key says, and fails where a scaling reads it.
        if partial != 1.0 and section.text(_type_key(section), "default") != "default":
            raise holder.refusal("partial_rotary_factor", "models of this family rotate whole heads: remove it")
        return head_dim
    rotary_dim = int(head_dim * partial)
    if not 4 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise holder.refusal("partial_rotary_factor", f"it must leave an even part of the {head_dim} of a head")
    return rotary_dim


def _type_key(section: Settings) -> str:
    return "rope_type" if "rope_type" in section else "type"


def _none(plain: RopeSpec, section: Settings, max_position: int, trained: int) -> RopeSpec:
    return plain


def _linear(plain: RopeSpec, section: Settings, max_position: int, trained: int) -> RopeSpec:
    return replace(plain, scaling="linear", factor=section.positive("factor"))


def _dynamic(plain: RopeSpec, section: Settings, max_position: int, trained: int) -> RopeSpec:
    return replace(plain, scaling="dynamic", factor=section.positive("factor"), original_max_position=max_position)


def _llama3(plain: RopeSpec, section: Settings, max_position: int, trained: int) -> RopeSpec:
    low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
    if high <= low:
        raise section.refusal("high_freq_factor", f"it must be over low_freq_factor ({low:g})")
    return replace(
        plain,
        scaling="llama3",
        factor=section.positive("factor"),
        original_max_position=trained,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(plain: RopeSpec, section: Settings, max_position: int, trained: int) -> RopeSpec:
    return replace(
        plain,
        scaling="yarn",
        factor=section.positive("factor"),
        original_max_position=trained,
        beta_fast=section.positive("beta_fast", 32.0),
        beta_slow=section.positive("beta_slow", 1.0),
        attention_factor=section.optional_number("attention_factor"),
        mscale=section.optional_number("mscale"),
        mscale_all_dim=section.optional_number("mscale_all_dim"),
        truncate=section.flag("truncate", True),
    )


def _longrope(plain: RopeSpec, section: Settings, max_position: int, trained: int) -> RopeSpec:
    return replace(
        plain,
        scaling="longrope",
        factor=section.positive("factor", max_position / trained),
        original_max_position=trained,
        attention_factor=section.optional_number("attention_factor"),
        short_factor=_factors(section, "short_factor", plain.rotary_dim),
        long_factor=_factors(section, "long_factor", plain.rotary_dim),
    )


_SCALINGS: Mapping[str, Callable[[RopeSpec, Settings, int, int], RopeSpec]] = {
    "default": _none,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
}


def _factors(section: Settings, key: str, rotary_dim: int) -> tuple[float, ...]:
    factors = section.numbers(key)
    if len(factors) != rotary_dim // 2 or min(factors) <= 0:
        raise section.refusal(key, f"give {rotary_dim // 2} positive numbers, one for each frequency")
    return factors


_GGUF_TYPES: Mapping[str, str] = {"none": "none", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}


def read_gguf_rope(settings: GgufSettings, *, head_dim: int, theta: float = 10_000.0) -> RopeSpec:
    theta = settings.positive("rope.freq_base", theta)
    rotary_dim = settings.integer("rope.dimension_count", head_dim)
    if not 4 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise settings.refusal("rope.dimension_count", f"give an even number from 4 to {head_dim}")
    if "rope_freqs.weight" in settings.shapes:
        # Llama 3's scaling, written out as one divisor for each frequency: longrope without a choice to make.
        factors = settings.vector("rope_freqs.weight")
        return _gguf_longrope(settings, theta, rotary_dim, factors, factors, attention_factor=1.0)
    if "rope_factors_long.weight" in settings.shapes:
        return _gguf_longrope(
            settings,
            theta,
            rotary_dim,
            settings.vector("rope_factors_short.weight"),
            settings.vector("rope_factors_long.weight"),
            attention_factor=settings.optional_number("rope.scaling.attn_factor"),
        )
    scaling = settings.choice("rope.scaling.type", _GGUF_TYPES, "none")
    if scaling == "none":
        return RopeSpec(theta, rotary_dim)
    if scaling == "linear":
        return RopeSpec(theta, rotary_dim, "linear", factor=settings.positive("rope.scaling.factor"))
    if scaling == "longrope":
        raise settings.refusal("rope.scaling.type", "the file lacks the tensors rope_factors_short and _long")
    return RopeSpec(
        theta,
        rotary_dim,
        "yarn",
        factor=settings.positive("rope.scaling.factor"),
        original_max_position=settings.integer(
            "rope.scaling.original_context_length", settings.integer("context_length")
        ),
        beta_fast=settings.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=settings.positive("rope.scaling.yarn_beta_slow", 1.0),
    )


def _gguf_longrope(
    settings: GgufSettings,
    theta: float,
    rotary_dim: int,
    short: tuple[float, ...],
    long: tuple[float, ...],
    *,
    attention_factor: float | None,
) -> RopeSpec:
    if len(short) != rotary_dim // 2 or len(long) != rotary_dim // 2:
        raise settings.refusal("rope.dimension_count", f"the rope factor tensors hold {len(short)} and {len(long)}")
    context = settings.integer("context_length")
    trained = settings.integer("rope.scaling.original_context_length", context)
    return RopeSpec(
        theta,
        rotary_dim,
        "longrope",
        factor=context / trained,
        original_max_position=trained,
        attention_factor=attention_factor,
        short_factor=short,
        long_factor=long,
    )
