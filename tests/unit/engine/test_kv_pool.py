"""Blocks moved together between device and host are where they would be had each been moved alone."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.runner import kv_pool
from penstock.engine.runner.kv_pool import KvPool
from penstock.engine.scheduler.step_plan import TierCopy

NUM_BLOCKS, NUM_SLOTS = 6, 5


def make_pool(num_slots: int = NUM_SLOTS) -> KvPool:
    spec = SimpleNamespace(num_layers=3, num_kv_heads=2, head_dim=4)
    device = torch.device("cpu")
    pool = KvPool(
        spec, num_blocks=NUM_BLOCKS, num_host_slots=num_slots, block_tokens=4, dtype=torch.float32, device=device
    )
    for layer in pool.layers:
        layer.copy_(torch.randn(layer.shape))
    return pool


COPIES = st.lists(
    st.builds(TierCopy, st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_SLOTS - 1), to_host=st.booleans()),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(COPIES, st.integers(1, 4))
def test_copies_are_as_if_made_one_after_the_other(copies, most):
    pool = make_pool()
    pool._staged = pool._staged[:most]
    pool.copy([TierCopy(0, slot, to_host=True) for slot in range(NUM_SLOTS)])
    blocks = [pool.read(block) for block in range(NUM_BLOCKS)]
    slots = [blocks[0]] * NUM_SLOTS
    for item in copies:
        if item.to_host:
            slots[item.host_slot] = blocks[item.block]
        else:
            blocks[item.block] = slots[item.host_slot]
    pool.copy(copies)
    assert [pool.read(block) for block in range(NUM_BLOCKS)] == blocks
    for slot, content in enumerate(slots):
        pool.copy([TierCopy(1, slot, to_host=False)])
        assert pool.read(1) == content


def test_a_pool_without_a_host_tier_has_nothing_to_copy():
    pool = make_pool(num_slots=0)
    pool.copy([])
    assert pool.read(0) != pool.read(1)


def test_what_is_on_its_way_takes_bounded_memory(monkeypatch):
    monkeypatch.setattr(kv_pool, "_MOST_STAGED_BYTES", 2 * make_pool().block_bytes)
    assert len(make_pool()._staged) == 2
    monkeypatch.setattr(kv_pool, "_MOST_STAGED_BYTES", 1)
    assert len(make_pool()._staged) == 1
