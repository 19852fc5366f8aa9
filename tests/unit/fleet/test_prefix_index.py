"""What a gateway believes that a replica has cached."""

import pytest

from penstock.fleet.cached_blocks import BlocksMissed, CachedBlocks
from penstock.fleet.prefix_index import PrefixIndex
from penstock.protocol.block_events import BlockChanges, BlockSnapshot, pack
from penstock.protocol.prompt_note import PromptNote

LONG = [b"a", b"b", b"c", b"d"]
NOTE = PromptNote(256, 0, 64, [1, 2, 3, 4])


def test_what_was_sent_is_cached_and_a_longer_prompt_in_part():
    index = PrefixIndex(100)
    index.remember(LONG[:2])
    assert index.count_cached(LONG, None).num_cached == 2
    assert index.count_cached([b"b", b"c"], None).num_cached == 1
    assert index.count_cached([b"x"], None).num_cached == 0


def test_no_more_is_remembered_than_fits_and_tails_go_first():
    index = PrefixIndex(4)
    index.remember(LONG)
    index.remember([b"x", b"y"])
    assert len(index) == 4
    assert index.count_cached(LONG, None).num_cached == 2
    assert index.count_cached([b"x", b"y"], None).num_cached == 2


def test_what_is_used_again_stays():
    index = PrefixIndex(4)
    index.remember([b"a", b"b"])
    index.remember([b"x", b"y"])
    index.remember([b"a", b"b"])
    index.remember([b"z"])
    assert index.count_cached([b"a", b"b"], None).num_cached == 2
    assert index.count_cached([b"x", b"y"], None).num_cached == 1


def test_the_replicas_own_word_counts_more():
    index = PrefixIndex(100)
    index.remember(LONG)
    index.learn(LONG, NOTE)
    blocks = CachedBlocks(BlockSnapshot(0, 16, pack([1, 2, 3, 4])))
    assert index.count_cached(LONG, blocks).num_cached == 4
    blocks.apply(BlockChanges(1, removed=pack([3, 4])))
    assert index.count_cached(LONG, blocks).num_cached == 2
    blocks.apply(BlockChanges(2, stored=pack([3])))
    assert index.count_cached(LONG, blocks).num_cached == 3
    blocks.apply(BlockChanges(3, cleared=True))
    assert index.count_cached(LONG, blocks).num_cached == 0


def test_a_prompt_that_is_not_answered_yet_counts_as_cached():
    index = PrefixIndex(100)
    index.remember(LONG)
    assert index.count_cached(LONG, CachedBlocks(BlockSnapshot(0, 16, b""))).num_cached == 4


def test_what_the_replica_must_copy_to_its_device_first_is_counted_among_what_it_has():
    index = PrefixIndex(100)
    index.remember(LONG)
    index.learn(LONG, NOTE)
    blocks = CachedBlocks(BlockSnapshot(0, 16, pack([1, 2, 3, 4]), on_host=pack([3, 9])))
    assert index.count_cached(LONG, blocks) == (4, 1)
    blocks.apply(BlockChanges(1, to_host=pack([2])))
    assert index.count_cached(LONG, blocks) == (4, 2)
    assert index.count_cached(LONG[:2], blocks) == (2, 1)
    blocks.apply(BlockChanges(2, stored=pack([2, 3]), to_host=pack([4])))
    assert index.count_cached(LONG, blocks) == (4, 1)
    blocks.apply(BlockChanges(3, removed=pack([4])))
    assert index.count_cached(LONG, blocks) == (3, 0)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_gap_in_the_numbers_is_noticed(number):
    blocks = CachedBlocks(BlockSnapshot(1, 16, b""))
    with pytest.raises(BlocksMissed):
        blocks.apply(BlockChanges(number))
