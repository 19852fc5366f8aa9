"""Sparse layers on a CUDA device: stacked experts give what running every expert on every token gives."""

import pytest
import torch
from torch import Tensor

from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.linear import Linear
from penstock.models.layers.moe import Moe
from penstock.models.layers.norm import Norm
from penstock.models.quant.dense import DenseWeight
from penstock.models.spec import MoeSpec
from penstock.parallel.groups import SINGLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SPEC = MoeSpec(num_experts=16, num_active=4, intermediate_size=256, normalise_weights=True)
HIDDEN = 512


def moe_of(matrices: dict[str, Tensor], dtype: torch.dtype) -> Moe:
    def linear(matrix: Tensor) -> Linear:
        return Linear(DenseWeight(matrix.to(dtype)))

    experts = [
        FeedForward(linear(gate_up), linear(down), "silu", SINGLE)
        for gate_up, down in zip(matrices["gate_up"], matrices["down"], strict=True)
    ]
    return Moe(linear(matrices["router"]), experts, SPEC, SINGLE)


def moes() -> tuple[Moe, Moe]:
    """The same layer for the kernels and, in float32, for torch."""
    matrices = {
        "router": torch.randn(16, HIDDEN, device="cuda"),
        "gate_up": torch.randn(16, 512, HIDDEN, device="cuda") * HIDDEN**-0.5,
        "down": torch.randn(16, HIDDEN, 256, device="cuda") * 256**-0.5,
    }
    matrices = {name: matrix.bfloat16().float() for name, matrix in matrices.items()}
    stacked, plain = moe_of(matrices, torch.bfloat16), moe_of(matrices, torch.float32)
    assert stacked.stacked is not None and plain.stacked is None
    return stacked, plain


@pytest.mark.parametrize("num_tokens", [1, 40, 600])
def test_stacked_experts_give_the_result_of_running_all(num_tokens: int) -> None:
    x = torch.randn(num_tokens, HIDDEN, device="cuda").bfloat16()
    stacked, plain = moes()
    assert stacked.stacked is not None
    logits = stacked.router.apply(x)  # the same picks for both: a rounded logit may change a close one
    found = stacked.stacked.run(x, logits, SPEC)
    wanted = plain.run_all(x.float(), *route_of(logits.float()))
    assert (found.float() - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_a_handful_of_tokens_advances_the_stream_as_running_all_does(num_tokens: int) -> None:
    stacked, plain = moes()
    stream = torch.randn(num_tokens, HIDDEN, device="cuda").bfloat16()
    norm = Norm(torch.rand(HIDDEN, device="cuda"), 1e-6)
    normed = norm.apply(stream)
    update = plain.run_all(normed.float(), *route_of(stacked.router.apply(normed).float()))
    found = stream.clone()
    assert stacked.advance(found, norm, found) is None
    wanted = stream.float() + update
    assert (found.float() - wanted).norm() / wanted.norm() < 1e-2


def test_many_tokens_return_their_update() -> None:
    stacked, _ = moes()
    stream = torch.randn(40, HIDDEN, device="cuda").bfloat16()
    norm = Norm(torch.rand(HIDDEN, device="cuda"), 1e-6)
    before = stream.clone()
    update = stacked.advance(stream, norm, stream)
    assert update is not None and torch.equal(stream, before)
    assert torch.equal(update, stacked.forward(norm.apply(stream)))


def route_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, picks = logits.softmax(dim=-1).topk(SPEC.num_active, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), picks
