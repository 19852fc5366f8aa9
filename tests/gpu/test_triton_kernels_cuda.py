"""Triton kernels at the sizes they are made for: parity in bfloat16 with poison around, and replay from a graph."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.interface import HeadNorm, LayerAttention
from penstock.kernels.attention.reference import ReferenceAttention
from tests.paged_batches import PagedBatch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from penstock.kernels import sampling as plain
from penstock.kernels.attention.triton_paged import TritonPagedAttention
from penstock.kernels.norm_rope import RowScale
from penstock.kernels.triton import sampling
from penstock.kernels.triton.activation import gate
from penstock.kernels.triton.few_rows import product_for
from penstock.kernels.triton.norm import add_rms_norm

pytestmark = pytest.mark.gpu

LLAMA = LayerAttention(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
# (heads, kv_heads) of grouped-query ratios 1, 2, 4, 7 and 16.
RATIOS = [(8, 8), (16, 8), (32, 8), (28, 4), (16, 1)]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def reference(batch: PagedBatch, layer: LayerAttention) -> Tensor:
    backend = ReferenceAttention([layer], [batch.pool.float()])
    backend.prepare(batch.step)
    return backend.run(batch.q.float(), batch.k.float(), batch.v.float(), 0)


def check(queries: list[int], contexts: list[int], layer: LayerAttention, *, seed: int = 0) -> None:
    batch = PagedBatch.random(queries, contexts, layer, dtype=torch.bfloat16, device="cuda", seed=seed)
    backend = TritonPagedAttention([layer], [batch.pool.clone()])
    backend.prepare(batch.step)
    assert relative_error(backend.run(batch.q, batch.k, batch.v, 0), reference(batch, layer)) < 1e-2


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), RATIOS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_ratio_and_head_size(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    layer = LayerAttention(num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)
    check([1, 1, 1, 3, 130], [1, 257, 999, 700, 300], layer)


@pytest.mark.parametrize("batch_size", [1, 3, 64, 300])
def test_decoding_over_ragged_contexts(batch_size: int) -> None:
    lengths = torch.randint(1, 1500, (batch_size,), generator=torch.Generator().manual_seed(batch_size))
    check([1] * batch_size, lengths.tolist(), LLAMA)


@pytest.mark.parametrize("context", [1, 16, 17, 4096, 32768])
def test_short_and_long_contexts(context: int) -> None:
    check([1], [context], LLAMA)


@pytest.mark.parametrize("window", [1, 100, 4096])
def test_windows(window: int) -> None:
    check([1, 1, 200, 2048], [5000, 3, 3000, 2048], replace(LLAMA, window=window))


def test_soft_cap() -> None:
    check([1, 300], [2000, 500], replace(LLAMA, softcap=30.0))


def test_prefill_of_many_lengths_with_and_without_a_cached_prefix() -> None:
    check([2, 63, 64, 65, 1000, 2048], [2, 63, 1064, 65, 1000, 6000], LLAMA)


@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_fused_heads_give_what_the_separate_operations_give(with_norm: bool, with_scale: bool) -> None:
    batch = PagedBatch.random([1, 1, 60], [400, 3, 200], LLAMA, dtype=torch.bfloat16, device="cuda")
    heads = torch.cat([batch.q, batch.k, batch.v], dim=1)
    angles = torch.rand(len(heads), 1, 64, device="cuda")
    rotation = torch.polar(torch.ones_like(angles), angles)
    norm = HeadNorm(torch.rand(40, 128, device="cuda") + 0.5, 1e-5) if with_norm else None
    scale = RowScale((7 * torch.randn(len(heads), 4096, device="cuda")).bfloat16(), 1e-5) if with_scale else None
    exact = ReferenceAttention([LLAMA], [batch.pool.float()])
    fused = TritonPagedAttention([LLAMA], [batch.pool.clone()])
    exact.prepare(batch.step)
    fused.prepare(batch.step)
    expected = exact.run_heads(heads.float(), rotation, norm, 0, scale)
    assert relative_error(fused.run_heads(heads.clone(), rotation, norm, 0, scale), expected) < 1e-2


def test_a_captured_decode_follows_its_lengths() -> None:
    batch = PagedBatch.random([1] * 5, [900, 20, 333, 1, 640], LLAMA, dtype=torch.bfloat16, device="cuda")
    backend = TritonPagedAttention([LLAMA], [batch.pool])
    assert batch.step.lens is not None
    backend.prepare(batch.step)
    backend.run(batch.q, batch.k, batch.v, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.prepare(batch.step)
        out = backend.run(batch.q, batch.k, batch.v, 0)
    for contexts in ([900, 20, 333, 1, 640], [64, 7, 65, 1, 0], [129, 20, 320, 1, 500]):
        batch.step.lens.copy_(torch.tensor(contexts))
        out.fill_(float("nan"))
        graph.replay()
        exact = ReferenceAttention([LLAMA], [batch.pool.float()])
        exact.prepare(replace(batch.step, context_lens=[max(context, 1) for context in contexts]))
        expected = exact.run(batch.q.float(), batch.k.float(), batch.v.float(), 0)
        runs = torch.tensor(contexts, device="cuda") > 0
        assert relative_error(out[runs], expected[runs]) < 1e-2
        assert bool(out[~runs].isnan().all())  # others' rows are left alone


def test_the_same_launch_gives_the_same_bits() -> None:
    batch = PagedBatch.random([1] * 3, [3000, 20, 1333], LLAMA, dtype=torch.bfloat16, device="cuda")
    backend = TritonPagedAttention([LLAMA], [batch.pool])
    backend.prepare(batch.step)
    first = backend.run(batch.q, batch.k, batch.v, 0)
    assert all(torch.equal(backend.run(batch.q, batch.k, batch.v, 0), first) for _ in range(50))


@pytest.mark.parametrize("num_tokens", [1, 257])
def test_norm_and_gate_at_full_width(num_tokens: int) -> None:
    x, residual = torch.randn(2, num_tokens, 4096, device="cuda").bfloat16()
    weight = torch.rand(4096, device="cuda")
    summed = (x + residual).float()
    expected = summed * (summed.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * weight
    assert relative_error(add_rms_norm(x, residual, weight, 1e-5), expected) < 5e-3
    gate_up = torch.randn(num_tokens, 2 * 14336, device="cuda").bfloat16()
    gates, ups = gate_up.float().chunk(2, dim=-1)
    assert relative_error(gate(gate_up, gelu=False), torch.nn.functional.silu(gates) * ups) < 5e-3
    scale = RowScale(residual, 1e-5)
    gates, ups = (gate_up.float() * scale.factors()).chunk(2, dim=-1)
    assert relative_error(gate(gate_up, gelu=False, scale=scale), torch.nn.functional.silu(gates) * ups) < 5e-3


@pytest.mark.parametrize(("width", "depth"), [(28672, 4096), (6144, 4096), (4096, 14336), (1024, 3072)])
def test_products_of_few_rows_at_full_size_are_right_and_repeat_to_the_bit(width: int, depth: int) -> None:
    weight = torch.randn(width, depth, device="cuda").bfloat16()
    product = product_for(weight)
    if product is None:
        pytest.skip("this device is older than the kernel was measured on")
    for num_rows in (1, 8, 16):
        x = torch.randn(num_rows, depth, device="cuda").bfloat16()
        found = product.multiply(x)
        assert relative_error(found, x.double() @ weight.double().T) < 5e-3
        assert all(torch.equal(product.multiply(x), found) for _ in range(20))


@pytest.mark.parametrize("num_rows", [1, 256])
def test_draws_at_full_vocabulary(num_rows: int) -> None:
    logits = 4 * torch.randn(num_rows, 128256, device="cuda")
    temperatures = torch.full((num_rows,), 0.8, device="cuda")
    temperatures[::3] = 0.0
    seeds = torch.arange(num_rows, device="cuda")
    positions = torch.full((num_rows,), 11, device="cuda")
    workspace = sampling.SamplingWorkspace.of(num_rows, logits.device)
    tokens, best = sampling.sample(logits, temperatures, seeds, positions, workspace)
    assert torch.equal(best, logits.amax(dim=-1))
    greedy = temperatures == 0.0
    assert torch.equal(tokens[greedy], logits[greedy].argmax(dim=-1))
    drawn = ~greedy
    if drawn.any():
        wanted = plain.draw(logits[drawn], temperatures[drawn], seeds[drawn], positions[drawn])
        # But for two sums of score and noise that only rounding tells apart.
        assert (tokens[drawn] != wanted).sum() <= 1


@pytest.mark.parametrize(("width", "depth"), [(5120, 2048), (2048, 4096)])
def test_one_row_is_normed_on_its_way_in_and_added_to_a_stream(width: int, depth: int) -> None:
    weight = (torch.randn(width, depth, device="cuda") * depth**-0.5).bfloat16()
    x, stream = torch.randn(1, depth, device="cuda").bfloat16(), torch.randn(1, width, device="cuda").bfloat16()
    norm = torch.rand(depth, device="cuda")
    product = product_for(weight)
    assert product is not None and product.norms(1) and not product.norms(2)
    normed = x.double() * (x.double().square().mean() + 1e-6).rsqrt() * norm
    assert relative_error(product.multiply_normed(x, norm, 1e-6), normed @ weight.double().T) < 5e-3
    wanted = stream.double() + x.double() @ weight.double().T
    product.add(x, stream)
    assert relative_error(stream, wanted) < 5e-3
