"""The gated feed-forward layer.

`GATES` maps a spec's activation to its kernel. Knows nothing of experts.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from penstock.kernels.activation import gelu_tanh_gate, silu_gate
from penstock.models.layers.linear import Linear
from penstock.models.layers.norm import Norm
from penstock.models.spec import Activation
from penstock.parallel.collectives import all_reduce
from penstock.parallel.groups import Group

GATES: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": silu_gate, "gelu_tanh": gelu_tanh_gate}
)


class FeedForward:
    """down(activation(gate(x)) * up(x)), with gate and up stacked as one matrix."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, group: Group) -> None:
        self.gate_up = gate_up
        self.down = down
        self.group = group
        self.activation = activation
        self._gate = GATES[activation]

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        return all_reduce(self.down.apply(self._gate(self.gate_up.apply(x))), self.group)

    def advance(self, x: Tensor, norm: Norm | None, stream: Tensor | None) -> Tensor | None:
        """As `forward`, of x normed first where a norm is given; adds to the stream as `Linear.advance` does."""
        return self.down.advance(self._gate(self.gate_up.apply(x, norm)), stream, self.group)
