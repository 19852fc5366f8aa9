"""The gated feed-forward layer.

Knows nothing of experts.
"""

from torch import Tensor

from penstock.models.layers.linear import Linear
from penstock.models.layers.norm import Norm
from penstock.models.spec import Activation
from penstock.parallel.collectives import all_reduce
from penstock.parallel.groups import Group


class FeedForward:
    """down(activation(gate(x)) * up(x)), with gate and up stacked as one matrix."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, group: Group) -> None:
        self.gate_up = gate_up
        self.down = down
        self.group = group
        self.gelu = activation == "gelu_tanh"

    @property
    def linears(self) -> dict[str, Linear]:
        """The matrices that multiply every token, by place."""
        return {"gate_up": self.gate_up, "down": self.down}

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        return all_reduce(self.down.apply(self.gate_up.apply_gated(x, gelu=self.gelu)), self.group)

    def advance(self, x: Tensor, norm: Norm | None, stream: Tensor | None) -> Tensor | None:
        """As `forward`, of x normed first where a norm is given; adds to the stream as `Linear.advance` does."""
        return self.down.advance(self.gate_up.apply_gated(x, norm, gelu=self.gelu), stream, self.group)
