"""How much of its limits a tenant has in use, and when a request would fit: arithmetic alone.

Each limit per minute is a bucket that leaks: what is used fills it, and it runs empty at the limit's own rate, so that
a minute without requests gives the whole limit back. A request fits when it does not make the bucket overflow. Knows
nothing of databases, leases or requests under way.
"""

import math
from datetime import date

import msgspec

from penstock.store.ledger import day_of
from penstock.tenants import Limits

MINUTE_SECONDS = 60.0
DAY_SECONDS = 86400.0

# What clocks and floats round away must not refuse a request that came just in time.
_ROUNDING_SECONDS = 0.001


class Bucket(msgspec.Struct, frozen=True):
    """One limit per minute and what of it is in use now."""

    limit: int
    in_use: float

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.limit - self.in_use))

    @property
    def reset_seconds(self) -> float:
        """When it will be empty if nothing is added."""
        return max(0.0, self.in_use) * MINUTE_SECONDS / self.limit

    def wait_seconds(self, amount: float) -> float:
        """When so much more will fit if nothing else is added; 0: now. The amount is no more than the limit."""
        seconds = (self.in_use + amount - self.limit) * MINUTE_SECONDS / self.limit
        return seconds if seconds > _ROUNDING_SECONDS else 0.0


class InUse(msgspec.Struct, kw_only=True):
    """What a tenant has in use, right for the moment `at`."""

    at: float
    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    day: str = ""
    day_tokens: int = 0
    mean_output_tokens: float | None = None

    def move_to(self, now: float, limits: Limits) -> None:
        """Let the buckets leak until `now`. A clock that was set back gives nothing, and time goes on from there."""
        seconds = max(0.0, now - self.at)
        self.requests = _leaked(self.requests, limits.requests_per_minute, seconds)
        self.input_tokens = _leaked(self.input_tokens, limits.input_tokens_per_minute, seconds)
        self.output_tokens = _leaked(self.output_tokens, limits.output_tokens_per_minute, seconds)
        self.at = now
        # A clock set back over midnight begins no day again: the later one goes on.
        if self.day not in (day_of(now), day_of(now + DAY_SECONDS)):
            is_next = bool(self.day) and _is_day_before(self.day, day_of(now))
            self.day, self.day_tokens = day_of(now), self._carried(limits.tokens_per_day) if is_next else 0

    def _carried(self, limit: int | None) -> int:
        """What the next day begins with: answers that outgrew their estimate cost it its tokens, and no day behind."""
        return 0 if limit is None else min(limit, max(0, self.day_tokens - limit))

    def add(self, *, requests: int, input_tokens: int, output_tokens: int, day: str) -> None:
        """Fill the buckets, and the day."""
        self.add_to_minute(requests=requests, input_tokens=input_tokens, output_tokens=output_tokens)
        self.add_to_day(input_tokens + output_tokens, day)

    def add_to_minute(self, *, requests: float, input_tokens: float, output_tokens: float) -> None:
        """Fill the buckets, or with negative counts empty them; never below nothing."""
        self.requests = max(0.0, self.requests + requests)
        self.input_tokens = max(0.0, self.input_tokens + input_tokens)
        self.output_tokens = max(0.0, self.output_tokens + output_tokens)

    def add_to_day(self, tokens: int, day: str) -> None:
        """Add to a day's tokens; of a day that is over only what was used beyond its reservation, to this day's."""
        if day == self.day or tokens > 0:
            self.day_tokens = max(0, self.day_tokens + tokens)

    def buckets(self, limits: Limits) -> dict[str, Bucket]:
        """Return the buckets of the limits that there are, by the limit's name."""
        pairs = {
            "requests_per_minute": (limits.requests_per_minute, self.requests),
            "input_tokens_per_minute": (limits.input_tokens_per_minute, self.input_tokens),
            "output_tokens_per_minute": (limits.output_tokens_per_minute, self.output_tokens),
        }
        return {name: Bucket(limit, in_use) for name, (limit, in_use) in pairs.items() if limit is not None}

    def waits(self, limits: Limits, *, input_tokens: int, output_tokens: int) -> dict[str, float]:
        """Return how long one more request must wait for each limit, whole milliseconds; 0: it fits now."""
        amounts = {
            "requests_per_minute": 1,
            "input_tokens_per_minute": input_tokens,
            "output_tokens_per_minute": output_tokens,
        }
        waits = {name: bucket.wait_seconds(amounts[name]) for name, bucket in self.buckets(limits).items()}
        if limits.tokens_per_day is not None:
            room = limits.tokens_per_day - input_tokens - output_tokens
            # Midnight gives a day's tokens; one that has come already, for a clock that was set back, does not.
            days = 1 + (self._carried(limits.tokens_per_day) > room) + (self.day != day_of(self.at))
            waits["tokens_per_day"] = 0.0 if self.day_tokens <= room else days * DAY_SECONDS - self.at % DAY_SECONDS
        return {name: math.ceil(round(seconds * 1000, 3)) / 1000 for name, seconds in waits.items()}


def _is_day_before(earlier: str, later: str) -> bool:
    return (date.fromisoformat(later) - date.fromisoformat(earlier)).days == 1


def _leaked(in_use: float, limit: int | None, seconds: float) -> float:
    return 0.0 if limit is None else max(0.0, in_use - seconds * limit / MINUTE_SECONDS)
