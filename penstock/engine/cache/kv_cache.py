"""The cache as the scheduler sees it: prefixes matched, requests grown, named and freed.

Joins the block pool, the hasher and the host tier. Knows tokens and blocks; nothing of tensors, time or priorities.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.block_hash import BlockHash, BlockHasher, Salt
from penstock.engine.cache.block_log import BlockLog, Whereabouts
from penstock.engine.cache.block_pool import BlockPool
from penstock.engine.cache.host_tier import HostTier
from penstock.engine.scheduler.step_plan import TierCopy
from penstock.protocol.prompt_note import PromptNote, make_note


@dataclass(slots=True)
class RequestCache:
    """One request's blocks. `blocks[i]` holds tokens i*block_tokens and following."""

    salt: Salt
    blocks: list[int] = field(default_factory=list)
    names: list[BlockHash] = field(default_factory=list)  # of the leading full blocks, as far as hashed
    num_named: int = 0  # leading blocks that were offered to the index


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached run of whole blocks at the start of a prompt."""

    names: tuple[BlockHash, ...]
    num_held_blocks: int  # of these, how many other requests hold: adopting them uses up no free block


NO_MATCH = PrefixMatch((), 0)


class KvCache:
    """Every request's blocks, and the prefixes they share."""

    def __init__(
        self,
        num_blocks: int,
        hasher: BlockHasher,
        *,
        kv_dtype: str = "",
        share_prefixes: bool = True,
        host_tier: HostTier | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.hasher = hasher
        self.block_tokens = hasher.block_tokens
        self.host_tier = host_tier
        self.block_log: BlockLog | None = None  # where names that come and go are noted, while somebody listens
        if host_tier is not None:
            host_tier.on_loss = self._note_loss
        self._kv_dtype = kv_dtype
        self.shares_prefixes = share_prefixes
        self._copies: list[TierCopy] = []
        self._wipes: dict[int, None] = {}  # in order

    def open(self, *, tenant: str, adapter: str, num_public_tokens: int = 0) -> RequestCache:
        """Return an empty cache for a request whose blocks only its own tenant and adapter may share.

        Whole blocks of its first `num_public_tokens` tokens are shared with every tenant.
        """
        salt = self.hasher.salt(
            tenant=tenant, adapter=adapter, kv_dtype=self._kv_dtype, num_public_tokens=num_public_tokens
        )
        return RequestCache(salt)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def match(self, cache: RequestCache, tokens: Sequence[int]) -> PrefixMatch:
        """Return the longest cached run of whole blocks. Changes nothing but the request's own hashes.

        The blocks may be evicted until `adopt` holds them.
        """
        if not self.shares_prefixes:
            return NO_MATCH
        # Leave one token uncached: the model needs something to run to give logits.
        usable_blocks = (len(tokens) - 1) // self.block_tokens
        self._hash_up_to(cache, tokens, usable_blocks)
        num_found = num_held = 0
        for name in cache.names[:usable_blocks]:
            block = self.pool.find(name)
            if block is None and (self.host_tier is None or self.host_tier.find(name) is None):
                break
            num_found += 1
            num_held += block is not None and self.pool.is_held(block)
        return PrefixMatch(tuple(cache.names[:num_found]), num_held)

    def adopt(self, cache: RequestCache, match: PrefixMatch) -> int:
        """Hold the matched blocks for an empty request; return how many tokens they cover."""
        assert not cache.blocks
        for name in match.names:
            block = self.pool.find(name)
            if block is not None:
                self.pool.hold(block)
            else:
                block = self._load_from_host(name)
                if block is None:
                    break
            cache.blocks.append(block)
        cache.num_named = len(cache.blocks)
        return len(cache.blocks) * self.block_tokens

    def grow(self, cache: RequestCache, num_tokens: int) -> range:
        """Make room for `num_tokens` tokens; return the indices of the blocks that were added.

        The caller has checked that the pool has enough free blocks.
        """
        before = len(cache.blocks)
        for _ in range(self.blocks_for(num_tokens) - before):
            cache.blocks.append(self._take())
        return range(before, len(cache.blocks))

    def name_full_blocks(self, cache: RequestCache, tokens: Sequence[int], num_computed: int) -> None:
        """Make blocks findable whose tokens are all known and computed."""
        if not self.shares_prefixes:
            return
        full = min(num_computed, len(tokens)) // self.block_tokens
        if full <= cache.num_named:
            return
        self._hash_up_to(cache, tokens, full)
        for index in range(cache.num_named, full):
            self._give_name(cache.blocks[index], cache.names[index])
        cache.num_named = full

    def free(self, cache: RequestCache, *, forget: bool = False) -> None:
        """Give every block back, tails first so that they are reused before heads.

        `forget` also takes away the names of blocks that nobody else holds, and has the next step wipe them: their
        contents are not to be trusted.
        """
        for block in reversed(cache.blocks):
            self.pool.release(block)
            if forget and not self.pool.is_held(block):
                self._note_loss(self.pool.forget(block))
                self._wipes[block] = None
        cache.blocks.clear()
        cache.num_named = 0

    def find_prefix(self, cache: RequestCache, tokens: Sequence[int]) -> list[int]:
        """Return the device blocks that hold the leading whole blocks of `tokens`. Holds nothing."""
        self._hash_up_to(cache, tokens, len(tokens) // self.block_tokens)
        found = []
        for name in cache.names:
            block = self.pool.find(name)
            if block is None:
                break
            found.append(block)
        return found

    def plant_prefix(self, cache: RequestCache, tokens: Sequence[int], num_blocks: int) -> dict[int, int]:
        """Take and name blocks for the leading whole blocks of `tokens` that are not here yet.

        Returns block by index. The caller fills them and then `free`s the cache, which leaves them to be found.
        """
        assert self.shares_prefixes
        assert not cache.blocks
        self._hash_up_to(cache, tokens, min(num_blocks, len(tokens) // self.block_tokens))
        planted = {}
        for index, name in enumerate(cache.names):
            block = self.pool.find(name)
            if block is not None:
                self.pool.hold(block)
            elif self.pool.num_free == 0:
                break
            else:
                block = planted[index] = self._take()
                self._wipes.pop(block, None)  # it is filled at once, before the next step
                self._give_name(block, name)
            cache.blocks.append(block)
        return planted

    def names(self) -> set[BlockHash]:
        """Return the names of all blocks that a prompt can find, in whatever tier."""
        return {*self.pool.names(), *(self.host_tier.names() if self.host_tier is not None else ())}

    def names_on_host(self) -> list[BlockHash]:
        """Return the names of those blocks that the host tier alone has."""
        tier_names = self.host_tier.names() if self.host_tier is not None else []
        return [name for name in tier_names if self.pool.find(name) is None]

    def note(self, cache: RequestCache, num_tokens: int, num_cached_tokens: int) -> PromptNote:
        """Return what a gateway may know of a request's prompt."""
        names = cache.names[: num_tokens // self.block_tokens]
        return make_note(num_tokens, num_cached_tokens, names, self.block_tokens)

    def take_copies(self) -> list[TierCopy]:
        """Hand over the copies between tiers that the next step must make first."""
        copies, self._copies = self._copies, []
        return copies

    def take_wipes(self) -> list[int]:
        """Hand over the blocks that the next step must wipe before anything else."""
        wipes, self._wipes = self._wipes, {}
        return list(wipes)

    def forget_all(self) -> None:
        """Trust no content: no prefix is found any more, in no tier, and what nobody holds is wiped."""
        self._wipe_later(self.pool.forget_all())
        if self.host_tier is not None:
            self.host_tier.clear()
        if self.block_log is not None:
            self.block_log.clear()

    def distrust(self, copies: list[TierCopy], wipes: list[int]) -> None:
        """Forget what the host tier should have got from a step that failed, and wipe again what it should have."""
        self._wipe_later(wipes)
        if self.host_tier is not None:
            for copy in copies:
                if copy.to_host:
                    self.host_tier.drop_slot(copy.host_slot)

    def _wipe_later(self, blocks: list[int]) -> None:
        self._wipes.update((block, None) for block in blocks if not self.pool.is_held(block))

    def _hash_up_to(self, cache: RequestCache, tokens: Sequence[int], num_blocks: int) -> None:
        self.hasher.extend(cache.names, cache.salt, tokens, num_blocks)

    def _load_from_host(self, name: BlockHash) -> int | None:
        """Bring a block back, named and held. None if the tier lost it, perhaps to make this very room."""
        assert self.host_tier is not None
        if self.host_tier.find(name) is None or self.pool.num_free == 0:
            return None
        self.host_tier.touch(name)
        block = self._take()
        slot = self.host_tier.find(name)
        if slot is None:
            self.pool.release(block)
            return None
        self._copies.append(TierCopy(block, slot, to_host=False))
        self._give_name(block, name)
        return block

    def _take(self) -> int:
        block, lost = self.pool.take()
        if lost is not None:
            self._save(block, lost)
        return block

    def _save(self, block: int, name: BlockHash) -> None:
        """Queue an evicted block's copy to the host tier, where there is one."""
        if self.host_tier is not None:
            slot = self.host_tier.admit(name)
            if slot is not None:
                self._copies.append(TierCopy(block, slot, to_host=True))
        self._note_loss(name)

    def _give_name(self, block: int, name: BlockHash) -> None:
        if self.pool.give_name(block, name) and self.block_log is not None:
            self.block_log.note(name, Whereabouts.DEVICE)

    def _note_loss(self, name: BlockHash | None) -> None:
        """A tier has lost a block; tell those who listen, unless the device has it still."""
        if self.block_log is None or name is None or self.pool.find(name) is not None:
            return
        is_on_host = self.host_tier is not None and self.host_tier.find(name) is not None
        self.block_log.note(name, Whereabouts.HOST if is_on_host else Whereabouts.NOWHERE)
