"""The replica that will answer soonest: what it must still compute, what waits before it, and what decodes beside.

Where short prompts pass long ones, only those that are no longer are before it, and the longer ones wait for it: that
counts as if it waited itself.
The part of a prompt that a replica has cached costs nothing there, or a copy where its host tier has it
(`fleet.prefix_index`). Speeds are learnt from the answers. What one replica has is not lightly computed on another; but
the more often a prefix is met, the less that counts, so that one that everybody uses comes to live on several replicas.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from penstock.fleet.prefix_index import PrefixIndex
from penstock.fleet.replica import Replica
from penstock.fleet.router.policies.interface import Choice, Policy
from penstock.fleet.router.prefix_heat import PrefixHeat
from penstock.fleet.router.query import PIECE_TOKENS, RouteQuery
from penstock.fleet.router.ttft_model import PrefillWork, TtftModel, prefill_work
from penstock.protocol.prompt_note import PromptNote

_DEFAULT_KV_TOKENS = 500_000  # of a replica that does not tell
_BALANCE_SECONDS = 60.0  # after so long, work that was given counts a third
# What is computed here though another replica has it takes the device from everybody who comes later. For a prefix that
# comes all the time it is an investment, and counts as often as it pays off the less.
_COMPUTE_WEIGHT = 40.0
_HEAT_SECONDS = 60.0
_BALANCE_WEIGHT = 0.05  # seconds of cost for each second of work that a replica was given beyond the least


@dataclass(slots=True)
class _Pending:
    """A request that was sent and has not been answered yet."""

    hashes: Sequence[bytes]
    work: PrefillWork  # its own
    ahead: PrefillWork  # with what was before it
    num_decoding: float
    sent: float
    num_tokens: int  # of the whole prompt


@dataclass(slots=True)
class _View:
    """One replica as the policy sees it."""

    index: PrefixIndex
    pending: dict[Choice, _Pending] = field(default_factory=dict)  # in the order in which they were sent
    num_decoding: int = 0  # answered, not ended
    given_seconds: float = 0.0  # of work, older work decayed
    given_at: float = 0.0
    progress_from: float = 0.0  # since when it works on the oldest that is pending

    def decay(self, now: float) -> None:
        self.given_seconds *= math.exp((self.given_at - now) / _BALANCE_SECONDS)
        self.given_at = now


class KvAware(Policy):
    uses_blocks = True

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._views: WeakKeyDictionary[Replica, _View] = WeakKeyDictionary()
        self._model = TtftModel()
        self._heat = PrefixHeat(_HEAT_SECONDS)

    def choose(self, query: RouteQuery, candidates: Sequence[Replica]) -> Choice:
        now = candidates[0].clock()
        views = [self._view(replica, now) for replica in candidates]
        least_given = min(view.given_seconds for view in views)
        offers = [self._offer(query, replica, view, now) for replica, view in zip(candidates, views, strict=True)]
        most_cached = max(offer.num_cached for offer in offers) // PIECE_TOKENS
        heat = self._heat.meet(query.prefix_hashes[most_cached - 1], now) if most_cached else 0.0
        compute_weight = _COMPUTE_WEIGHT / (1.0 + heat)
        costs = [
            offer.seconds
            + offer.delay_seconds
            + compute_weight * self._model.compute_seconds(offer.work)
            + _BALANCE_WEIGHT * (view.given_seconds - least_given)
            for offer, view in zip(offers, views, strict=True)
        ]
        best = min(range(len(costs)), key=lambda index: (costs[index], self.random.random()))
        return self._take(query, candidates[best], views[best], offers[best], now)

    def on_first_byte(self, choice: Choice, seconds: float | None, prompt: PromptNote | None) -> None:
        view = self._views.get(choice.replica)
        pending = view.pending.pop(choice, None) if view is not None else None
        if view is None or pending is None:
            return
        view.num_decoding += 1
        view.progress_from = choice.replica.clock()
        ahead = pending.ahead
        if prompt is not None:
            view.index.learn(pending.hashes, prompt)
            # What was really to compute, in the place of what was expected.
            real = prefill_work(prompt.num_tokens, prompt.num_cached_tokens, pending.work.copied)
            ahead = ahead.plus(pending.work, -1.0).plus(real)
        if seconds is not None:
            self._model.observe(ahead, pending.num_decoding, seconds)

    def on_end(self, choice: Choice) -> None:
        view = self._views.get(choice.replica)
        if view is None:
            return
        if view.pending.pop(choice, None) is None and view.num_decoding:
            view.num_decoding -= 1

    def _view(self, replica: Replica, now: float) -> _View:
        view = self._views.get(replica)
        if view is None:
            view = self._views[replica] = _View(PrefixIndex(0), given_at=now)
        view.index.max_pieces = int(_cache_tokens(replica) // PIECE_TOKENS)
        view.decay(now)
        return view

    def _offer(self, query: RouteQuery, replica: Replica, view: _View, now: float) -> "_Offer":
        pieces = view.index.count_cached(query.prefix_hashes, replica.blocks)
        num_cached = pieces.num_cached * PIECE_TOKENS
        work = prefill_work(query.num_prompt_tokens, num_cached, pieces.num_on_host * PIECE_TOKENS)
        most_tokens = query.num_prompt_tokens if replica.adapter.runs_short_prompts_first else math.inf
        ahead = self._queue(view, now, most_tokens).plus(work)
        num_passed = sum(pending.num_tokens > most_tokens for pending in view.pending.values())
        # Others than this gateway may have sent it requests; those are taken to decode.
        num_decoding = max(float(view.num_decoding), replica.busyness - len(view.pending))
        return _Offer(
            num_cached,
            work,
            ahead,
            num_decoding,
            seconds=self._model.seconds(ahead, num_decoding),
            delay_seconds=num_passed * self._model.work_seconds(work),
        )

    def _queue(self, view: _View, now: float, most_tokens: float) -> PrefillWork:
        """What the replica has still to compute of prompts up to a length.

        Since it last answered, it has worked on the oldest requests.
        """
        queue = PrefillWork()
        worked = None
        for pending in view.pending.values():
            if worked is None:
                worked = now - max(view.progress_from, pending.sent)
            seconds = self._model.work_seconds(pending.work)
            done = min(seconds, worked)
            worked -= done
            if pending.num_tokens > most_tokens:
                continue
            queue = queue.plus(pending.work, 1.0 - done / seconds if seconds > 0 else 0.0)
        return queue

    def _take(self, query: RouteQuery, replica: Replica, view: _View, offer: "_Offer", now: float) -> Choice:
        choice = Choice(
            replica,
            f"{offer.num_cached} of {query.num_prompt_tokens} tokens cached, {len(view.pending)} prompts before it",
            predicted_ttft_seconds=offer.seconds,
            cached_tokens=offer.num_cached,
        )
        hashes = query.prefix_hashes
        view.pending[choice] = _Pending(
            hashes, offer.work, offer.ahead, offer.num_decoding, now, query.num_prompt_tokens
        )
        view.given_seconds += self._model.work_seconds(offer.work)
        view.index.remember(hashes)
        return choice


def _cache_tokens(replica: Replica) -> float:
    """How much a replica's cache holds, all tiers together where it tells of its blocks."""
    told = replica.load.kv_tokens or _DEFAULT_KV_TOKENS
    return told if replica.blocks is None else max(told, len(replica.blocks) * replica.blocks.block_tokens)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a request would cost on one replica."""

    num_cached: int
    work: PrefillWork
    ahead: PrefillWork
    num_decoding: float
    seconds: float
    delay_seconds: float  # of the prompts that it would pass, together
