"""What a decoder does between two attentions, recorded once and run without Python.

A step of few rows on a CPU is a thousand small operations, and calling one from Python takes as long as many of them
run. From one attention's result to the next one's heads they are the same in every step, so torch records them as they
run and plays them back. Its recorder is deprecated in favour of compilers, which take minutes and are not there on
every machine. Knows layers, nothing of formats or families. CUDA has its graphs instead.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from penstock.kernels.attention.interface import AttentionBackend
from penstock.models.layers.decoder_layer import DecoderLayer
from penstock.models.layers.feed_forward import FeedForward

# From what attention returned and the residual stream, which advances in place, to the heads of the next layer.
Seam = Callable[[Tensor, Tensor], Tensor]


class RecordedSeams:
    """Runs all layers for up to `max_rows` tokens."""

    def __init__(self, layers: Sequence[DecoderLayer], seams: Sequence[Seam], max_rows: int) -> None:
        self._first, self._last = layers[0], layers[-1]
        self._seams = list(zip(layers, seams, strict=False))  # behind the last layer there is none
        self.max_rows = max_rows

    def run(self, residual: Tensor, rotations: list[Tensor], attention: AttentionBackend) -> Tensor | None:
        """As the layers' own `forward`, one behind the other: return the last one's update."""
        heads, _ = self._first.begin(None, residual)
        for layer, seam in self._seams:
            heads = seam(layer.attention.mix(heads, None, rotations[layer.rope], attention), residual)
        last = self._last
        return last.end(last.attention.mix(heads, None, rotations[last.rope], attention), residual)


def record_seams(layers: Sequence[DecoderLayer], dtype: torch.dtype) -> RecordedSeams | None:
    """Record what lies between the layers' attentions, or return None where it is not the same in every step.

    None as well where torch has no recorder any more.
    """
    if not hasattr(torch._C, "_create_graph_by_tracing"):
        return None
    if any(not isinstance(layer.feed_forward, FeedForward) or layer.attention.group.size > 1 for layer in layers):
        return None
    max_rows = min(linear.weight.uniform_rows for layer in layers for linear in layer.linears.values())
    if max_rows < 1:
        return None
    # One row would be taken for the only number there is.
    num_rows = min(2, max_rows)
    return RecordedSeams(layers, [_record(*pair, num_rows, dtype) for pair in pairwise(layers)], max_rows)


@torch.inference_mode()
def _record(layer: DecoderLayer, following: DecoderLayer, num_rows: int, dtype: torch.dtype) -> Seam:
    def seam(mixed: Tensor, residual: Tensor) -> Tensor:
        heads, scale = following.begin(layer.end(mixed, residual), residual)
        assert scale is None  # on a CPU nothing is left to do
        return heads

    output = layer.attention.output.weight
    mixed = torch.zeros(num_rows, output.in_features, dtype=dtype)
    residual = torch.zeros(num_rows, output.out_features, dtype=dtype)
    with warnings.catch_warnings():
        # It warns of every size that is looked at: those are the same for all numbers of rows, as formats promise.
        warnings.simplefilter("ignore")
        # Not `torch.jit.trace`: what that records it keeps, weights and all, to the end of the process.
        graph, _ = torch._C._create_graph_by_tracing(
            seam,
            (mixed, residual),
            lambda _: "",  # names of variables, for whoever reads the graph
            strict=True,
            force_outplace=False,
            argument_names=["mixed", "residual"],
        )
    recorded: Seam = torch._C._create_function_from_graph("seam", graph)
    return recorded
