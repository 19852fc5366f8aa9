"""Block names cover every token before them, the salt and the key."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.block_hash import HASH_BYTES, BlockHasher

tokens_strategy = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens_strategy)
def test_a_chain_names_each_full_block_once(tokens: list[int]) -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    names = hasher.chain(hasher.root(), tokens)
    assert len(names) == len(tokens) // 4
    assert len(set(names)) == len(names)
    assert all(len(name) == HASH_BYTES for name in names)


@given(tokens_strategy, tokens_strategy)
def test_chains_agree_exactly_as_far_as_whole_blocks_do(left: list[int], right: list[int]) -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    left_names, right_names = hasher.chain(hasher.root(), left), hasher.chain(hasher.root(), right)
    for index, (left_name, right_name) in enumerate(zip(left_names, right_names, strict=False)):
        end = (index + 1) * 4
        assert (left_name == right_name) == (left[:end] == right[:end])


@given(tokens_strategy)
def test_a_chain_can_be_extended_block_by_block(tokens: list[int]) -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    parent, names = hasher.root(), []
    for start in range(0, len(tokens) - 3, 4):
        parent = hasher.child(parent, tokens[start : start + 4])
        names.append(parent)
    assert names == hasher.chain(hasher.root(), tokens)


def test_equal_tokens_under_other_salts_share_no_name() -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    roots = [
        hasher.root(),
        hasher.root(tenant="a"),
        hasher.root(tenant="b"),
        hasher.root(adapter="a"),
        hasher.root(kv_dtype="a"),
    ]
    names = {hasher.chain(root, [1, 2, 3, 4])[0] for root in roots}
    assert len(names) == len(roots)


@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_the_parts_of_a_salt_cannot_run_into_each_other(tenant: str, adapter: str, tenant2: str, adapter2: str) -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    same = hasher.root(tenant=tenant, adapter=adapter) == hasher.root(tenant=tenant2, adapter=adapter2)
    assert same == ((tenant, adapter) == (tenant2, adapter2))


def test_another_key_gives_other_names() -> None:
    first, second = BlockHasher(b"one", 4), BlockHasher(b"two", 4)
    assert first.child(first.root(), [1, 2, 3, 4]) != second.child(first.root(), [1, 2, 3, 4])
