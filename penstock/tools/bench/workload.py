"""What a load is made of: prompts, answer lengths and when each request starts.

Knows nothing of servers, HTTP or time as it passes.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

# Prompts are random token ids below this, which every real vocabulary has.
VOCABULARY_TOKENS = 10001
SEEDED_BLOCK_TOKENS = 512


def sweep_suffix(rate: float) -> str:
    """Return what a workload's name ends with where it runs at several rates."""
    return f" @ {rate:g}/s"


class Prompt(Protocol):
    """A prompt that can be written out as token ids, the same ones each time."""

    @property
    def num_tokens(self) -> int: ...

    def token_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class FixedPrompt:
    ids: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def token_ids(self) -> Sequence[int]:
        return self.ids


@dataclass(frozen=True, slots=True)
class SeededPrompt:
    """Blocks of 512 tokens, each made from its seed when asked for: equal seeds are equal tokens.

    A trace of an hour holds hundreds of millions of tokens; this keeps only what they are made from.
    """

    seeds: Sequence[int]
    num_tokens: int

    def token_ids(self) -> Sequence[int]:
        ids: list[int] = []
        for seed in self.seeds:
            words = array("H", random.Random(seed).randbytes(2 * SEEDED_BLOCK_TOKENS))
            ids += [word % VOCABULARY_TOKENS for word in words]
        return ids[: self.num_tokens]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to come. `start_seconds` counts from the start of the run."""

    prompt: Prompt
    max_tokens: int
    start_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, and how they arrive: at their start times, or `concurrency` at a time in a closed loop.

    `shift` renames every token without changing which prompts share a prefix: the same work, but nothing that a
    prefix cache has seen before.
    """

    name: str
    requests: tuple[PlannedRequest, ...]
    rate: float | None = None  # requests per second, where arrivals are Poisson
    concurrency: int | None = None
    temperature: float = 0.0
    shift: int = 0

    @property
    def is_timed(self) -> bool:
        """Whether start times mean something: not all at once, and not a closed loop."""
        return self.concurrency is None and any(request.start_seconds > 0 for request in self.requests)

    def limited(self, count: int) -> "Workload":
        """Return the first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def shifted(self, shift: int) -> "Workload":
        return replace(self, shift=self.shift + shift)

    def at_rate(self, rate: float, seed: int = 0) -> "Workload":
        """Return the same requests with Poisson arrivals; the first arrives at once.

        Gaps are drawn and then stretched so that they last as long as the rate says: a few hundred draws would miss it
        by up to a tenth either way.
        """
        rng = random.Random(f"arrivals {seed}")
        gaps = [rng.expovariate(rate) for _ in self.requests]
        stretch = len(gaps) / rate / sum(gaps) if gaps else 1.0
        starts = accumulate((gap * stretch for gap in gaps[:-1]), initial=0.0)
        requests = tuple(
            replace(request, start_seconds=start) for request, start in zip(self.requests, starts, strict=False)
        )
        return replace(self, requests=requests, rate=rate, concurrency=None)

    def in_closed_loop(self, concurrency: int) -> "Workload":
        """Return the same requests with `concurrency` of them open at any time."""
        return replace(self, requests=self._at_once(), rate=None, concurrency=concurrency)

    def faster(self, speed: float) -> "Workload":
        """Return the same requests with time compressed by `speed`."""
        requests = (replace(item, start_seconds=item.start_seconds / speed) for item in self.requests)
        return replace(self, requests=tuple(requests), rate=None if self.rate is None else self.rate * speed)

    def warm_up(self, count: int) -> "Workload":
        """Return up to `count` requests as long as these, of tokens that these do not have."""
        requests = tuple(replace(item, start_seconds=0.0) for item in self.requests[:count])
        return replace(self, requests=requests, rate=None, concurrency=None).shifted(VOCABULARY_TOKENS // 2)

    def token_ids(self, request: PlannedRequest) -> Sequence[int]:
        """Return the tokens of one of the requests."""
        ids = request.prompt.token_ids()
        shift = self.shift % VOCABULARY_TOKENS
        return [(token + shift) % VOCABULARY_TOKENS for token in ids] if shift else ids

    def _at_once(self) -> tuple[PlannedRequest, ...]:
        return tuple(replace(item, start_seconds=0.0) for item in self.requests)
