"""Sparse feed-forward layers as Triton kernels, against torch one pick at a time."""

import pytest
import torch
from torch.nn import functional

from tests.triton_device import DEVICE, DTYPES, TOLERANCE, relative_error  # isort: skip

from penstock.kernels.triton import experts

HALF = [dtype for dtype in DTYPES if dtype.itemsize == 2]


@pytest.mark.parametrize("normalise", [False, True])
def test_routing_picks_the_highest_and_weighs_them(normalise: bool) -> None:
    logits = torch.randn(5, 12, device=DEVICE)
    weights, picks = experts.route(logits, 3, normalise=normalise)
    expected, numbers = logits.softmax(dim=-1).topk(3, dim=-1)
    if normalise:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    assert torch.equal(picks.long(), numbers)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("num_tokens", [1, 7, 700])
def test_picks_are_listed_expert_by_expert(num_tokens: int) -> None:
    picks = torch.randint(0, 6, (num_tokens, 2), dtype=torch.int32, device=DEVICE)
    picks[picks == 4] = 5  # one expert has nothing to do
    groups = experts.group_picks(picks, 6)
    counts = torch.bincount(picks.flatten().long(), minlength=6)
    assert groups.starts.tolist() == [0, *counts.cumsum(0).tolist()]
    assert torch.equal(groups.order.long(), picks.flatten().argsort(stable=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9, 40, 60])
def test_each_token_runs_through_its_own_experts(num_tokens: int, gelu: bool, dtype: torch.dtype) -> None:
    num_experts, num_active, hidden, width = 4, 2, 256, 128
    x = torch.randn(num_tokens, hidden, device=DEVICE).to(dtype)
    gate_up = torch.randn(num_experts, 2 * width, hidden, device=DEVICE).mul(hidden**-0.5).to(dtype)
    down = torch.randn(num_experts, hidden, width, device=DEVICE).mul(width**-0.5).to(dtype)
    weights, picks = experts.route(torch.randn(num_tokens, num_experts, device=DEVICE), num_active, normalise=True)
    groups = experts.group_picks(picks, num_experts)
    inner = experts.gated_product(x, gate_up, groups, num_active, gelu=gelu)
    found = experts.add_up(experts.product(inner, down, weights, groups), num_active)
    expected = torch.zeros(num_tokens, hidden, dtype=torch.float64, device=DEVICE)
    for token in range(num_tokens):
        for weight, pick in zip(weights[token].double(), picks[token].tolist(), strict=True):
            gate, up = (gate_up[pick].double() @ x[token].double()).chunk(2)
            active = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
            expected[token] += weight * (down[pick].double() @ (active * up))
    assert relative_error(found, expected) < 2 * TOLERANCE[dtype]
