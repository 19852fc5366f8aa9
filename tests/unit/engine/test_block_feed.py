"""Block events: whoever listens knows at any time what the cache holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.block_hash import BlockHasher, short_name
from penstock.engine.block_feed import BlockFeed
from penstock.engine.cache.host_tier import HostTier
from penstock.engine.cache.kv_cache import KvCache, RequestCache
from penstock.fleet.cached_blocks import CachedBlocks

BLOCK = 4


def make_cache(num_blocks: int = 9, num_slots: int = 0) -> KvCache:
    tier = HostTier(num_slots) if num_slots else None
    return KvCache(num_blocks, BlockHasher(b"key", BLOCK), host_tier=tier)


def run_prompt(cache: KvCache, tokens: list[int], *, forget: bool = False) -> RequestCache:
    """Serve a prompt as the scheduler does; return its blocks' names."""
    request = cache.open(tenant="", adapter="")
    cache.adopt(request, cache.match(request, tokens))
    cache.grow(request, len(tokens))
    cache.name_full_blocks(request, tokens, len(tokens))
    cache.free(request, forget=forget)
    cache.take_copies()
    return request


@settings(max_examples=60)
@given(
    num_slots=st.integers(0, 3),
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.sampled_from(["run", "forget", "all"])),
        max_size=20,
    ),
)
def test_a_listener_knows_what_the_cache_holds_after_every_change(num_slots, prompts):
    cache = make_cache(num_slots=num_slots)
    feed = BlockFeed(cache)
    known = CachedBlocks(feed.join(b"gateway")[1])
    for tokens, what in prompts:
        if what == "all":
            cache.forget_all()
        else:
            run_prompt(cache, tokens, forget=what == "forget")
        changes = feed.take()
        if changes is not None:
            known.apply(changes)
        assert len(known) == len(cache.names())
        assert all(short_name(name) in known for name in cache.names())
        on_host = set(cache.names_on_host())
        assert [known.is_on_host(short_name(name)) for name in cache.names()] == [
            name in on_host for name in cache.names()
        ]
        if not prompts[0][0][0]:  # whoever comes later hears the same
            late = CachedBlocks(feed.join(b"late")[1])
            assert all(late.is_on_host(short_name(name)) == (name in on_host) for name in cache.names())


def test_what_leaves_the_device_for_the_host_is_told_and_that_it_is_back():
    cache = make_cache(num_blocks=4, num_slots=8)
    feed = BlockFeed(cache)
    known = CachedBlocks(feed.join(b"gateway")[1])
    first = [short_name(name) for name in run_prompt(cache, list(range(9))).names]

    def look() -> list[tuple[bool, bool]]:
        changes = feed.take()
        assert changes is not None
        known.apply(changes)
        return [(name in known, known.is_on_host(name)) for name in first]

    assert look() == [(True, False)] * 2
    run_prompt(cache, list(range(50, 62)))
    assert look() == [(True, True)] * 2
    run_prompt(cache, list(range(9)))
    assert look() == [(True, False)] * 2


def test_a_snapshot_tells_what_was_there_before():
    cache = make_cache()
    request = run_prompt(cache, list(range(8)))
    known = CachedBlocks(BlockFeed(cache).join(b"gateway")[1])
    assert [short_name(name) in known for name in request.names] == [True, True]


def test_a_block_that_came_and_went_between_two_looks_is_told_once():
    cache = make_cache(num_blocks=3)
    feed = BlockFeed(cache)
    feed.join(b"gateway")
    for start in range(0, 40, 8):
        run_prompt(cache, list(range(start, start + 8)))
    changes = feed.take()
    assert changes is not None
    assert len(changes.stored) == 2 * 8  # two blocks of eight bytes are there in the end


def test_who_joins_later_gets_a_snapshot_and_the_others_what_it_holds_more():
    cache = make_cache()
    feed = BlockFeed(cache)
    first = CachedBlocks(feed.join(b"one")[1])
    request = run_prompt(cache, list(range(8)))
    changes, snapshot = feed.join(b"two")
    assert changes is not None
    first.apply(changes)
    second = CachedBlocks(snapshot)
    assert all(short_name(name) in known for known in (first, second) for name in request.names)
    assert feed.take() is None


def test_nothing_is_noted_while_nobody_listens():
    cache = make_cache()
    feed = BlockFeed(cache)
    feed.join(b"gateway")
    feed.leave(b"gateway")
    run_prompt(cache, list(range(8)))
    assert cache.block_log is None
    assert feed.take() is None
