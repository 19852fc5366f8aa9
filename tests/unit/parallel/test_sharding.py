import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.parallel.groups import Group
from penstock.parallel.sharding import shard, shard_shared


@given(size=st.integers(1, 16), share=st.integers(1, 50), unit=st.integers(1, 8))
def test_shards_cover_everything_once_and_in_order(size: int, share: int, unit: int) -> None:
    total = size * share * unit
    shards = [shard(total, Group(rank, size), what="rows", unit=unit) for rank in range(size)]
    assert [index for first, last in shards for index in range(first, last)] == list(range(total))
    assert all(first % unit == 0 for first, _ in shards)


def test_an_uneven_split_is_refused_with_what_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel: 2 .* attention heads \(9 in units of 1\)"):
        shard(9, Group(0, 2), what="attention heads")


def test_heads_fewer_than_ranks_are_held_by_neighbouring_ranks() -> None:
    assert [shard_shared(2, Group(rank, 4), what="key-value heads") for rank in range(4)] == [
        (0, 1),
        (0, 1),
        (1, 2),
        (1, 2),
    ]


def test_a_rank_outside_its_group_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="rank 2 is outside a group of 2"):
        Group(2, 2)
