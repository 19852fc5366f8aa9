"""Sparse feed-forward layers for a handful of tokens as Triton kernels, against torch one pick at a time."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.triton_device import DEVICE, DTYPES, TOLERANCE, relative_error  # isort: skip

from penstock.kernels.triton import experts, few_picks
from penstock.kernels.triton.few_picks import PickTile, Routing

HALF = [dtype for dtype in DTYPES if dtype.itemsize == 2]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE).mul(scale).to(dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_experts_are_scored_from_the_norm_of_the_stream(dtype: torch.dtype) -> None:
    num_experts, size = 5, 96
    stream, router = random(3, size, dtype=dtype), random(num_experts, size, dtype=dtype, scale=0.1)
    norm = torch.rand(size, device=DEVICE)
    before = stream.clone()
    x, logits = few_picks.score_experts(stream, norm, 1e-3, router)
    scale = (stream.double().square().mean(dim=-1, keepdim=True) + 1e-3).rsqrt()
    assert relative_error(x, stream.double() * scale * norm.double()) < TOLERANCE[dtype]
    assert relative_error(logits, x.double() @ router.double().T) < TOLERANCE[dtype]
    assert torch.equal(stream, before)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("gelu", "normalise"), [(False, True), (True, False)])
@pytest.mark.parametrize(("num_experts", "num_active"), [(4, 2), (12, 3), (2, 1)])
def test_a_token_adds_what_its_own_experts_make_of_it(
    num_experts: int, num_active: int, gelu: bool, normalise: bool, dtype: torch.dtype
) -> None:
    num_tokens, hidden, width = 2, 128, 128
    routing = Routing(num_experts, num_active, normalise)
    x, stream = random(num_tokens, hidden, dtype=dtype), random(num_tokens, hidden, dtype=dtype)
    gate_up = random(num_experts, 2 * width, hidden, dtype=dtype, scale=hidden**-0.5)
    down = random(num_experts, hidden, width, dtype=dtype, scale=width**-0.5)
    logits = random(num_tokens, num_experts, dtype=dtype)
    weights, picks = experts.route(logits, num_active, normalise=normalise)
    expected = stream.double()
    for token in range(num_tokens):
        for weight, pick in zip(weights[token].double(), picks[token].tolist(), strict=True):
            gate, up = (gate_up[pick].double() @ x[token].double()).chunk(2)
            active = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
            expected[token] += weight * (down[pick].double() @ (active * up))
    tile = PickTile(columns=32, depth=128, num_warps=1, num_stages=2)
    inner = few_picks.gated_product(x, logits, gate_up, routing, gelu=gelu, tile=tile)
    few_picks.add_product(inner, logits, down, routing, stream, tile=tile)
    assert relative_error(stream, expected) < TOLERANCE[dtype]


def test_the_lowest_of_equal_experts_are_picked_and_zeros_are_equal() -> None:
    num_experts, hidden = 6, 128
    logits = torch.tensor([[-1.0, -0.0, 0.0, -2.0, 0.0, -0.0]], device=DEVICE).half()
    x, stream = torch.ones(1, hidden, device=DEVICE).half(), torch.zeros(1, hidden, device=DEVICE).half()
    gate_up = torch.ones(num_experts, 2 * hidden, hidden, device=DEVICE).half() / hidden
    # Each expert's own number shows which were picked: a token's weights are halves.
    down = torch.ones(num_experts, hidden, hidden, device=DEVICE).half() / hidden
    down *= 2.0 ** torch.arange(num_experts, device=DEVICE).half()[:, None, None]
    routing = Routing(num_experts, 2, normalise=True)
    inner = few_picks.gated_product(x, logits, gate_up, routing, gelu=False)
    few_picks.add_product(inner, logits, down, routing, stream)
    silu = float(functional.silu(torch.ones(())))
    assert relative_error(stream, torch.full((1, hidden), silu * (2 + 4) / 2, device=DEVICE)) < 2e-3
