"""Prefill at the sizes it is made for: fresh and cached slices in one launch, with poison around, and from a graph."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.attention.interface import AttentionStep, LayerAttention
from penstock.kernels.attention.reference import ReferenceAttention
from tests.paged_batches import PagedBatch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from penstock.kernels.attention.triton_paged import TritonPagedAttention
from penstock.kernels.triton.paged_prefill import NO_TILE, SPARE_TILE, list_tiles
from penstock.kernels.triton.prefill_kernels import prefill_kernel

pytestmark = pytest.mark.gpu

LLAMA = LayerAttention(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
QWEN = replace(LLAMA, num_heads=16)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def reference(batch: PagedBatch, layer: LayerAttention) -> Tensor:
    backend = ReferenceAttention([layer], [batch.pool.float()])
    backend.prepare(batch.step)
    return backend.run(batch.q.float(), batch.k.float(), batch.v.float(), 0)


def check(queries: list[int], contexts: list[int], layer: LayerAttention, dtype: torch.dtype = torch.bfloat16) -> None:
    batch = PagedBatch.random(queries, contexts, layer, dtype=dtype, device="cuda")
    backend = TritonPagedAttention([layer], [batch.pool.clone()])
    backend.prepare(batch.step)
    found = backend.run(batch.q, batch.k, batch.v, 0)
    for begin, end in zip(batch.step.query_starts, batch.step.query_starts[1:], strict=False):
        assert relative_error(found[begin:end], reference(batch, layer)[begin:end]) < 1e-2


@pytest.mark.parametrize("layer", [LLAMA, QWEN])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fresh_and_cached_slices_in_one_step(layer: LayerAttention, dtype: torch.dtype) -> None:
    check([1, 1, 2, 63, 64, 65, 128, 129, 500], [7, 900, 2, 63, 1064, 65, 640, 1129, 501], layer, dtype)


@pytest.mark.parametrize("layer", [LLAMA, QWEN])
def test_long_contexts(layer: LayerAttention) -> None:
    check([5, 300, 2048], [32768, 20001, 2048], layer)


@pytest.mark.parametrize("past_a_tile", [-1, 0, 1])
def test_contexts_that_end_about_a_tile_of_keys(past_a_tile: int) -> None:
    lengths = [size + past_a_tile for size in (16, 32, 128, 256, 384)]
    check(lengths, lengths, LLAMA)
    check([min(length, 20) for length in lengths], lengths, QWEN)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (28, 4), (12, 2), (16, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_ratios_of_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check([3, 130, 40], [700, 300, 40], LayerAttention(num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5))


def test_the_same_launch_gives_the_same_bits() -> None:
    batch = PagedBatch.random([400, 90, 7], [1300, 90, 64], LLAMA, dtype=torch.bfloat16, device="cuda")
    backend = TritonPagedAttention([LLAMA], [batch.pool])
    backend.prepare(batch.step)
    first = backend.run(batch.q, batch.k, batch.v, 0)
    assert all(torch.equal(backend.run(batch.q, batch.k, batch.v, 0), first) for _ in range(50))


def test_rows_that_are_nobodys_are_cleared() -> None:
    batch = PagedBatch.random([50, 9], [50, 30], LLAMA, dtype=torch.bfloat16, device="cuda")
    expected = reference(batch, LLAMA)
    backend = TritonPagedAttention([LLAMA], [batch.pool])
    backend.prepare(batch.step)
    backend.run(batch.q, batch.k, batch.v, 0)  # leaves the keys and values in the pool
    kernel = prefill_kernel(LLAMA, batch.pool)
    step = batch.step
    assert step.lens is not None and step.starts is not None
    tiles = list_tiles(step.query_starts, step.context_lens, kernel.tile_tokens).tolist()
    spare = [[SPARE_TILE, first] for first in range(59, 200, kernel.tile_tokens)]
    listed = torch.tensor(tiles + spare + [[NO_TILE, NO_TILE]] * 300, dtype=torch.int32, device="cuda")
    q = functional.pad(batch.q, (0, 0, 0, 0, 0, 200 - 59))
    out = torch.full((200, 32 * 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    kernel.run(q, batch.pool, step.block_tables, step.lens, step.starts, listed, out, LLAMA)
    assert relative_error(out[:59], expected) < 1e-2
    assert not out[59:].any()


# With 200 tokens the prefill is launched before the decode, with 400 after it; without decodes alone.
@pytest.mark.parametrize(("num_tokens", "with_decodes"), [(200, True), (400, True), (400, False)])
def test_a_captured_step_follows_its_plan(num_tokens: int, with_decodes: bool) -> None:
    num_slices = 6
    mixes = [([num_tokens], [1000]), ([20, num_tokens - 100], [20, 700]), ([33], [33])]
    if with_decodes:
        mixes += [([1, 1, 90, num_tokens - 100], [900, 20, 90, 777]), ([1, 1, 1, 5], [64, 7, 65, 129])]
    widest = PagedBatch.random([num_tokens], [1040], LLAMA, dtype=torch.bfloat16, device="cuda")
    pool = torch.full((2, 200, 16, 8, 128), float("nan"), device="cuda").bfloat16()
    backend = TritonPagedAttention([LLAMA], [pool])
    tables = torch.zeros(num_slices, widest.step.block_tables.shape[1] + 1, dtype=torch.int32, device="cuda")
    lens, starts = (torch.zeros(num_slices + more, dtype=torch.int32, device="cuda") for more in (0, 1))
    slots = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
    plan = torch.zeros(backend.plan_size(num_tokens, num_slices), dtype=torch.int32, device="cuda")
    q, k, v = (torch.zeros(num_tokens, heads, 128, device="cuda").bfloat16() for heads in (32, 8, 8))

    def fill(batch: PagedBatch) -> None:
        step = batch.step
        assert step.lens is not None and step.starts is not None
        pool.fill_(float("nan"))
        pool[:, : batch.pool.shape[1]] = batch.pool
        tables.zero_()
        tables[: len(step.lens), : step.block_tables.shape[1]] = step.block_tables
        lens.zero_()
        lens[: len(step.lens)] = step.lens
        starts.fill_(len(batch.q))
        starts[: len(step.starts)] = step.starts
        slots.zero_()  # block 0 belongs to nobody
        slots[: len(step.slots)] = step.slots
        numbers = backend.plan(
            step.num_decodes,
            np.array(step.query_starts),
            np.array(step.context_lens),
            num_tokens=num_tokens,
            num_slices=num_slices,
        )
        plan.copy_(torch.from_numpy(numbers))
        for whole, part in ((q, batch.q), (k, batch.k), (v, batch.v)):
            whole.zero_()
            whole[: len(part)] = part

    def run() -> Tensor:
        backend.prepare(
            AttentionStep(
                num_decodes=num_slices if with_decodes else 0,
                query_starts=list(range(num_slices + 1)),
                context_lens=[1040] * num_slices,
                slots=slots,
                block_tables=tables,
                lens=lens,
                starts=starts,
                plan=plan,
            )
        )
        return backend.run(q, k, v, 0)

    fill(widest)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for queries, contexts in mixes:
        batch = PagedBatch.random(queries, contexts, LLAMA, dtype=torch.bfloat16, device="cuda")
        expected = reference(batch, LLAMA)
        fill(batch)
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out[: len(expected)], expected) < 1e-2
        assert not out[len(expected) :].any()
