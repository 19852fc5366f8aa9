"""Names for full blocks of tokens: a chained, keyed hash.

A block's name covers its own tokens and, through its parent's name, every token before it. The first parent is the
salt: tenant, adapter and KV dtype. The key keeps names from being guessed by whoever can see them. The engine's
prefix index, its host tier and the gateway's routing all use these names.

Tokens that an operator declared public lie under a salt without the tenant, so that all tenants share their blocks.
The first block behind them is the tenant's own again: its parent covers both the public blocks and the tenant's salt.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

BlockHash = bytes
HASH_BYTES = 16
SHORT_NAME_BYTES = 8
_TOKEN_BYTES = array("I").itemsize


def short_name(name: BlockHash) -> int:
    """Return a block's name as gateways are told it: half as long, since two alike cost no more than a miss there."""
    return int.from_bytes(name[:SHORT_NAME_BYTES], "little")


@dataclass(frozen=True, slots=True)
class Salt:
    """Where the names of one request's blocks start."""

    own: BlockHash  # the parent of the first block that only its tenant may share
    public: BlockHash  # the parent of the first block, where that is public
    num_public_blocks: int = 0


class BlockHasher:
    """Hashes blocks under one key."""

    def __init__(self, key: bytes, block_tokens: int) -> None:
        self._key = key
        self.block_tokens = block_tokens

    def salt(self, *, tenant: str = "", adapter: str = "", kv_dtype: str = "", num_public_tokens: int = 0) -> Salt:
        """Return the salt of a request whose first `num_public_tokens` tokens anybody may share.

        Equal prompts under different salts share their whole public blocks and nothing else.
        """
        return Salt(
            own=self._root(b"salt", tenant, adapter, kv_dtype),
            public=self._root(b"public", adapter, kv_dtype),
            num_public_blocks=num_public_tokens // self.block_tokens,
        )

    def chain(self, salt: Salt, tokens: Sequence[int]) -> list[BlockHash]:
        """Return the names of all full blocks of `tokens`, in order."""
        names: list[BlockHash] = []
        self.extend(names, salt, tokens, len(tokens) // self.block_tokens)
        return names

    def extend(self, names: list[BlockHash], salt: Salt, tokens: Sequence[int], num_blocks: int) -> None:
        """Add to the names of the leading blocks of `tokens` until there are `num_blocks`."""
        size = self.block_tokens
        first = len(names)
        packed = array("I", tokens[first * size : num_blocks * size]).tobytes()
        assert len(packed) == max(num_blocks - first, 0) * size * _TOKEN_BYTES
        for start in range(0, len(packed), size * _TOKEN_BYTES):
            own = packed[start : start + size * _TOKEN_BYTES]
            parent = self._parent(names, salt)
            names.append(blake2b(parent + own, key=self._key, digest_size=HASH_BYTES).digest())

    def _parent(self, names: list[BlockHash], salt: Salt) -> BlockHash:
        if len(names) == salt.num_public_blocks:
            return self._digest(b"own", salt.own + names[-1]) if names else salt.own
        return names[-1] if names else salt.public

    def _root(self, purpose: bytes, *parts: str) -> BlockHash:
        encoded = [part.encode() for part in parts]
        return self._digest(purpose, b"".join(len(part).to_bytes(4, "little") + part for part in encoded))

    def _digest(self, purpose: bytes, data: bytes) -> BlockHash:
        return blake2b(data, key=self._key, digest_size=HASH_BYTES, person=purpose).digest()
