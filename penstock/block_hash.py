"""Names for full blocks of tokens: a chained, keyed hash.

A block's name covers its own tokens and, through its parent's name, every token before it. The first parent is the
salt: tenant, adapter and KV dtype. The key keeps names from being guessed by whoever can see them. The engine's
prefix index, its host tier and the gateway's routing all use these names.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes
HASH_BYTES = 16


class BlockHasher:
    """Hashes blocks under one key."""

    def __init__(self, key: bytes, block_tokens: int) -> None:
        self._key = key
        self.block_tokens = block_tokens

    def root(self, *, tenant: str = "", adapter: str = "", kv_dtype: str = "") -> BlockHash:
        """Return the parent of a first block. Equal prompts under different salts share nothing."""
        parts = [part.encode() for part in (tenant, adapter, kv_dtype)]
        salt = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return blake2b(salt, key=self._key, digest_size=HASH_BYTES, person=b"salt").digest()

    def child(self, parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
        """Return the name of a full block that follows `parent`."""
        assert len(tokens) == self.block_tokens
        return blake2b(parent + array("I", tokens).tobytes(), key=self._key, digest_size=HASH_BYTES).digest()

    def chain(self, root: BlockHash, tokens: Sequence[int]) -> list[BlockHash]:
        """Return the names of all full blocks of `tokens`, in order."""
        names: list[BlockHash] = []
        parent = root
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            parent = self.child(parent, tokens[start : start + self.block_tokens])
            names.append(parent)
        return names
