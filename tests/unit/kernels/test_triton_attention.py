"""Paged attention as Triton kernels, against the reference backend in float64 over a pool full of poison."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.triton_device import DEVICE, DTYPES, TOLERANCE, relative_error  # isort: skip

from penstock.kernels.attention.interface import AttentionStep, HeadNorm, LayerAttention, WantedTokens
from penstock.kernels.attention.reference import ReferenceAttention
from penstock.kernels.attention.triton_paged import TritonPagedAttention
from penstock.kernels.norm_rope import RowScale
from penstock.kernels.triton.paged_decode import (
    ChosenSplits,
    DecodeTile,
    DecodeWorkspace,
    Splits,
    choose_splits,
    most_parts,
    paged_decode,
)
from penstock.kernels.triton.paged_prefill import list_tiles
from tests.paged_batches import PagedBatch

LAYER = LayerAttention(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2)


def reference(batch: PagedBatch, layer: LayerAttention) -> Tensor:
    backend = ReferenceAttention([layer], [batch.pool.double()])
    backend.prepare(batch.step)
    return backend.run(batch.q.double(), batch.k.double(), batch.v.double(), 0)


def triton(batch: PagedBatch, layer: LayerAttention) -> Tensor:
    backend = TritonPagedAttention([layer], [batch.pool.clone()])
    backend.prepare(batch.step)
    return backend.run(batch.q, batch.k, batch.v, 0)


def check(queries: list[int], contexts: list[int], layer: LayerAttention, dtype: torch.dtype = torch.float32) -> None:
    batch = PagedBatch.random(queries, contexts, layer, dtype=dtype, device=DEVICE)
    assert relative_error(triton(batch, layer), reference(batch, layer)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_sees_exactly_the_context(dtype: torch.dtype) -> None:
    check([1, 1, 1, 1], [1, 16, 77, 150], LAYER, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_is_causal(dtype: torch.dtype) -> None:
    check([2, 37, 65], [2, 37, 65], LAYER, dtype)


def test_a_chunk_sees_what_was_cached_before_it() -> None:
    check([3, 40], [90, 171], LAYER)


def test_a_step_mixes_decoding_and_prefill() -> None:
    check([1, 1, 5, 20], [33, 7, 130, 20], LAYER)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (7, 1), (20, 1)])
def test_query_heads_share_key_heads(num_heads: int, num_kv_heads: int) -> None:
    check([1, 9], [70, 30], replace(LAYER, num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 256])
def test_head_sizes(head_dim: int) -> None:
    check([1, 9], [70, 30], replace(LAYER, head_dim=head_dim, num_kv_heads=1, num_heads=2))


@pytest.mark.parametrize("window", [1, 5, 64, 1000])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    check([1, 1, 7, 70], [3, 150, 140, 70], replace(LAYER, window=window))


def test_scores_are_capped() -> None:
    check([1, 9], [70, 30], replace(LAYER, softcap=2.0, scale=1.0))


@pytest.mark.parametrize("count", [2, 3, 16])
def test_parts_of_a_context_are_merged(count: int) -> None:
    contexts = [1, 31, 150]
    batch = PagedBatch.random([1] * 3, contexts, LAYER, dtype=torch.float32, device=DEVICE)
    expected = reference(batch, LAYER)
    filled = ReferenceAttention([LAYER], [batch.pool])
    filled.prepare(batch.step)
    filled.run(batch.q, batch.k, batch.v, 0)
    splits = Splits(count, 16)
    workspace = DecodeWorkspace.of(splits.num_parts(3), LAYER, torch.device(DEVICE))
    assert batch.step.lens is not None
    for _ in range(2):  # the second launch finds the workspace as the first left it
        out = torch.full((3, LAYER.num_heads * LAYER.head_dim), float("nan"), device=DEVICE)
        paged_decode(
            batch.q,
            batch.pool,
            batch.step.block_tables,
            batch.step.lens,
            out,
            LAYER,
            splits,
            workspace,
            DecodeTile(tokens=16, num_warps=4, num_stages=3),
        )
        assert relative_error(out, expected) < 1e-5
    assert not workspace.arrivals.any()


@pytest.mark.parametrize(("count", "most"), [(1, 3), (1, 11), (2, 6), (3, 9), (3, 14), (0, 7)])
def test_into_how_many_parts_contexts_are_cut_may_be_found_on_the_device(count: int, most: int) -> None:
    batch = PagedBatch.random([1] * 3, [1, 31, 150], LAYER, dtype=torch.float32, device=DEVICE)
    expected = reference(batch, LAYER)
    filled = ReferenceAttention([LAYER], [batch.pool])
    filled.prepare(batch.step)
    filled.run(batch.q, batch.k, batch.v, 0)
    chosen = ChosenSplits(torch.tensor([count, 16], dtype=torch.int32, device=DEVICE), most)
    workspace = DecodeWorkspace.of(most, LAYER, torch.device(DEVICE))
    assert batch.step.lens is not None
    for _ in range(2):
        out = torch.full((3, LAYER.num_heads * LAYER.head_dim), float("nan"), device=DEVICE)
        paged_decode(batch.q, batch.pool, batch.step.block_tables, batch.step.lens, out, LAYER, chosen, workspace)
        assert relative_error(out, expected) < 1e-5
    assert not workspace.arrivals.any()


@given(
    most_slices=st.integers(1, 2048),
    num_slices=st.integers(1, 2048),
    kv_heads=st.sampled_from([1, 2, 4, 8, 16, 32]),
    max_context=st.integers(1, 200_000),
    context=st.integers(1, 200_000),
)
def test_there_is_room_for_every_part_that_may_be_chosen(
    most_slices: int, num_slices: int, kv_heads: int, max_context: int, context: int
) -> None:
    num_slices, context = min(num_slices, most_slices), min(context, max_context)
    chosen = choose_splits(num_slices, kv_heads, context, 132)
    assert chosen.num_parts(num_slices) <= most_parts(most_slices, kv_heads, max_context, 132)


def test_a_slice_without_context_is_left_alone() -> None:
    batch = PagedBatch.random([1, 1], [20, 5], LAYER, dtype=torch.float32, device=DEVICE)
    out = torch.full((2, LAYER.num_heads * LAYER.head_dim), 7.0, device=DEVICE)
    splits = Splits(2, 16)
    lens = torch.tensor([20, 0], dtype=torch.int32, device=DEVICE)
    workspace = DecodeWorkspace.of(splits.num_parts(2), LAYER, out.device)
    pool = torch.nan_to_num(batch.pool)
    paged_decode(batch.q, pool, batch.step.block_tables, lens, out, LAYER, splits, workspace)
    assert torch.isfinite(out).all() and (out[1] == 7.0).all() and not (out[0] == 7.0).any()
    assert not workspace.arrivals.any()


def planned(batch: PagedBatch, layer: LayerAttention, *, num_tokens: int, num_slices: int) -> PagedBatch:
    """The same step as a graph would see it: room for more tokens and slices, filled with what belongs to nobody."""
    backend = TritonPagedAttention([layer], [batch.pool])
    step = batch.step
    plan = backend.plan(
        step.num_decodes,
        np.array(step.query_starts),
        np.array(step.context_lens),
        num_tokens=num_tokens,
        num_slices=num_slices,
    )
    more_slices, spare = num_slices - len(step.context_lens), num_tokens - len(batch.q)
    assert step.lens is not None and step.starts is not None
    wide = AttentionStep(
        num_decodes=num_slices,
        query_starts=list(range(num_slices + 1)),
        context_lens=[100] * num_slices,
        slots=functional.pad(step.slots, (0, spare)),  # block 0 belongs to nobody
        block_tables=functional.pad(step.block_tables, (0, 0, 0, more_slices)),
        lens=functional.pad(step.lens, (0, more_slices)),
        starts=functional.pad(step.starts, (0, more_slices), value=len(batch.q)),
        plan=torch.from_numpy(plan).to(DEVICE),
    )
    tensors = (functional.pad(tensor, (0, 0, 0, 0, 0, spare)) for tensor in (batch.q, batch.k, batch.v))
    return PagedBatch(wide, batch.pool, *tensors)


@pytest.mark.parametrize("layer", [LAYER, replace(LAYER, window=20), replace(LAYER, num_heads=14)])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [([1, 1, 5, 40], [33, 7, 130, 40]), ([9, 33], [9, 90]), ([1, 1, 1], [1, 50, 90]), ([1, 60], [200, 60])],
)
def test_a_planned_step_gives_what_the_plain_one_gives(
    queries: list[int], contexts: list[int], layer: LayerAttention
) -> None:
    batch = PagedBatch.random(queries, contexts, layer, dtype=torch.float32, device=DEVICE)
    expected = triton(batch, layer)
    found = triton(planned(batch, layer, num_tokens=80, num_slices=6), layer)
    torch.testing.assert_close(found[: len(expected)], expected)
    assert not found[len(expected) :].any()


@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_fused_heads_give_what_the_separate_operations_give(with_norm: bool, with_scale: bool) -> None:
    batch = PagedBatch.random([1, 1, 6], [40, 3, 20], LAYER, dtype=torch.float32, device=DEVICE)
    heads = torch.cat([batch.q, batch.k, batch.v], dim=1)
    angles = torch.rand(len(heads), 1, LAYER.head_dim // 2, device=DEVICE)
    rotation = torch.polar(torch.ones_like(angles), angles)
    norm = HeadNorm(torch.rand(6, LAYER.head_dim, device=DEVICE), 1e-5) if with_norm else None
    scale = RowScale(7 * torch.randn(len(heads), 40, device=DEVICE), 1e-5) if with_scale else None
    plain = ReferenceAttention([LAYER], [batch.pool.clone()])
    fused = TritonPagedAttention([LAYER], [batch.pool.clone()])
    plain.prepare(batch.step)
    fused.prepare(batch.step)
    expected = plain.run_heads(heads.clone(), rotation, norm, 0, scale)
    assert relative_error(fused.run_heads(heads.clone(), rotation, norm, 0, scale), expected) < 1e-5
    torch.testing.assert_close(fused.kv_pool[0], plain.kv_pool[0], equal_nan=True)


@pytest.mark.parametrize("window", [None, 20])
def test_wanted_tokens_get_what_they_would_get_among_all(window: int | None) -> None:
    layer = replace(LAYER, window=window)
    queries, contexts = [1, 1, 7, 20], [33, 7, 130, 20]
    batch = PagedBatch.random(queries, contexts, layer, dtype=torch.float32, device=DEVICE)
    num_heads = layer.num_heads + 2 * layer.num_kv_heads
    heads = torch.randn(sum(queries), num_heads, layer.head_dim, device=DEVICE)
    angles = torch.rand(sum(queries), 1, layer.head_dim // 2, device=DEVICE)
    rotation = torch.polar(torch.ones_like(angles), angles)
    # In another order; the second again, for a draw that is nobody's.
    slices = [3, 0, 2, 1, 1]
    ends = torch.tensor([sum(queries[: index + 1]) - 1 for index in slices], device=DEVICE)
    lens = torch.tensor([contexts[index] for index in slices], dtype=torch.int32, device=DEVICE)
    wanted = WantedTokens(ends, lens, batch.step.block_tables[slices])
    backend = TritonPagedAttention([layer], [batch.pool.clone()])
    backend.prepare(batch.step)
    expected = backend.run_heads(heads.clone(), rotation, None, 0)[ends]
    backend = TritonPagedAttention([layer], [batch.pool.clone()])
    backend.prepare(replace(batch.step, wanted=wanted))
    assert relative_error(backend.run_wanted(heads.clone(), rotation, None, 0, wanted), expected) < 1e-5


def test_tiles_cover_every_query_token_and_the_longest_come_first() -> None:
    tiles = list_tiles([4, 5, 15, 15], [100, 10, 7], tile_tokens=4)
    assert tiles.tolist() == [[0, 0], [1, 8], [1, 4], [1, 0]]


def test_contexts_are_split_until_the_device_is_full() -> None:
    assert choose_splits(1, 8, 8192, 132) == Splits(50, 32)
    assert choose_splits(1, 8, 640, 132) == Splits(20, 32)
    assert choose_splits(32, 8, 8192, 132).count == 2
    assert choose_splits(64, 8, 4096, 132).count == 1
    assert choose_splits(256, 8, 4096, 132).count == 1
    assert choose_splits(256, 8, 32768, 132) == Splits(8, 4096)
