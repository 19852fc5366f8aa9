"""Block names cover every token before them, the salt and the key."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.block_hash import HASH_BYTES, BlockHasher

tokens_strategy = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens_strategy)
def test_a_chain_names_each_full_block_once(tokens: list[int]) -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    names = hasher.chain(hasher.salt(), tokens)
    assert len(names) == len(tokens) // 4
    assert len(set(names)) == len(names)
    assert all(len(name) == HASH_BYTES for name in names)


@given(tokens_strategy, tokens_strategy)
def test_chains_agree_exactly_as_far_as_whole_blocks_do(left: list[int], right: list[int]) -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    left_names, right_names = hasher.chain(hasher.salt(), left), hasher.chain(hasher.salt(), right)
    for index, (left_name, right_name) in enumerate(zip(left_names, right_names, strict=False)):
        end = (index + 1) * 4
        assert (left_name == right_name) == (left[:end] == right[:end])


@given(tokens_strategy, st.integers(0, 40))
def test_a_chain_can_be_extended_block_by_block(tokens: list[int], num_public_tokens: int) -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    salt = hasher.salt(num_public_tokens=num_public_tokens)
    names: list[bytes] = []
    for count in range(len(tokens) // 4 + 1):
        hasher.extend(names, salt, tokens, count)
    assert names == hasher.chain(salt, tokens)


@given(tokens_strategy, st.integers(0, 40))
def test_tenants_share_the_whole_public_blocks_and_nothing_behind_them(
    tokens: list[int], num_public_tokens: int
) -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    first = hasher.chain(hasher.salt(tenant="a", num_public_tokens=num_public_tokens), tokens)
    second = hasher.chain(hasher.salt(tenant="b", num_public_tokens=num_public_tokens), tokens)
    public = min(num_public_tokens, len(tokens)) // 4
    assert first[:public] == second[:public]
    assert not set(first[public:]) & set(second[public:])


@given(tokens_strategy)
def test_public_and_private_names_of_equal_tokens_differ(tokens: list[int]) -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    private = hasher.chain(hasher.salt(), tokens)
    for num_public_tokens in range(4, len(tokens) + 1, 4):
        public = hasher.chain(hasher.salt(num_public_tokens=num_public_tokens), tokens)
        assert not set(public) & set(private)


def test_equal_tokens_under_other_salts_share_no_name() -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    salts = [
        hasher.salt(),
        hasher.salt(tenant="a"),
        hasher.salt(tenant="b"),
        hasher.salt(adapter="a"),
        hasher.salt(kv_dtype="a"),
        hasher.salt(num_public_tokens=4),
        hasher.salt(adapter="a", num_public_tokens=4),
        hasher.salt(kv_dtype="a", num_public_tokens=4),
    ]
    names = {hasher.chain(salt, [1, 2, 3, 4])[0] for salt in salts}
    assert len(names) == len(salts)


@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_the_parts_of_a_salt_cannot_run_into_each_other(tenant: str, adapter: str, tenant2: str, adapter2: str) -> None:
    hasher = BlockHasher(b"key", block_tokens=4)
    same = hasher.salt(tenant=tenant, adapter=adapter) == hasher.salt(tenant=tenant2, adapter=adapter2)
    assert same == ((tenant, adapter) == (tenant2, adapter2))


def test_another_key_gives_other_names() -> None:
    first, second = BlockHasher(b"one", 4), BlockHasher(b"two", 4)
    assert first.chain(first.salt(), [1, 2, 3, 4]) != second.chain(first.salt(), [1, 2, 3, 4])
