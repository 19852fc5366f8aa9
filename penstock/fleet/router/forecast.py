"""How soon one more request has its turn while replicas are full: from how fast places on them came free.

How long a request keeps its place is told by others whose answers could become about as long; of those that took longer
than it has by now, since it will be one of these. Places on replicas of one
kind are as good as each other; a request waits for some of the kinds, and only for these it is told how they come free.
Time is the caller's. Knows nothing of replicas, policies or who waits in which order.
"""

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

_SMOOTHING = 0.2
_MAX_TOKENS = 1 << 20  # answers that may become longer than this are as long as each other
_LEAST_SECONDS = 1e-9  # between two moments of which a rate is made
_MAX_REMEMBERED = 32  # of what ended: enough to tell times that are alike from times that are not
_MAX_LOOKED_AT = 64  # of those who hold places, for when each will end; where there are more, one matters little


class PlaceKind(NamedTuple):
    """What decides who can use a place."""

    version: str
    can_frame: bool
    is_counted_here: bool

    def can_go_on(self, *, counted_here: bool) -> bool:
        """Whether an answer that began elsewhere can be gone on with there."""
        return self.can_frame and self.is_counted_here == counted_here


class Want(NamedTuple):
    """What a request waits for."""

    versions: tuple[str, ...]  # that may answer it, the wanted one first
    must_frame: bool
    counted_here: bool

    def fits(self, kind: PlaceKind) -> bool:
        return kind.version in self.versions and (not self.must_frame or kind.can_go_on(counted_here=self.counted_here))


@dataclass(slots=True)
class _Times:
    """How long something took, as often as it has happened."""

    typical: float | None = None  # the mean, of which older ones are less and less
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_REMEMBERED))

    def note(self, seconds: float) -> None:
        self.typical = seconds if self.typical is None else self.typical + _SMOOTHING * (seconds - self.typical)
        self.recent.append(seconds)

    def left(self, age: float) -> float | None:
        """Return how much longer those took that took longer than so long; None where none did."""
        longer = [seconds for seconds in self.recent if seconds > age]
        return sum(longer) / len(longer) - age if longer else None


@dataclass(slots=True)
class _Length:
    """Requests whose answers may become about as long as each other's."""

    held: dict[Hashable, float] = field(default_factory=dict)  # places that they have, and since when: oldest first
    times: _Times = field(default_factory=_Times)

    def rate(self, unknown: float) -> float:
        """Return how fast they end if each takes as long as others did; `unknown`: where none of its length has."""
        return len(self.held) / max(unknown if self.times.typical is None else self.times.typical, _LEAST_SECONDS)

    def rate_now(self, others: _Times, unknown: float, now: float) -> float:
        """Return how fast they end from now on, the first of them: each as others that took longer than it has.

        As long again as it has where none took longer. `others`: all requests, where none of this length has ended;
        `unknown`: what each has before it where nobody knows anything.
        """
        times = self.times if self.times.recent else others
        rate = 0.0
        for began in islice(self.held.values(), _MAX_LOOKED_AT):
            age = now - began
            left = times.left(age)
            if left is None:
                left = age if times.recent else max(unknown, age)
            rate += 1 / max(left, _LEAST_SECONDS)
        num_others = max(0, len(self.held) - _MAX_LOOKED_AT)  # the youngest
        return rate + num_others / max(unknown if times.typical is None else times.typical, _LEAST_SECONDS)


@dataclass(slots=True)
class _Pace:
    """How the places of one kind come free."""

    lengths: dict[int, _Length] = field(default_factory=dict)  # by how long answers may become, in powers of two
    length_of: dict[Hashable, int] = field(default_factory=dict)  # of whoever has a place
    releases: _Times = field(default_factory=_Times)  # from one to the next, while others waited for them
    requests: _Times = field(default_factory=_Times)
    released_at: float | None = None

    def begin(self, place: Hashable, max_tokens: int | None, now: float) -> None:
        length = min(max_tokens or 0, _MAX_TOKENS).bit_length()
        self.length_of[place] = length
        self.lengths.setdefault(length, _Length()).held[place] = now

    def end(self, place: Hashable, now: float, *, is_answered: bool) -> None:
        length = self.lengths[self.length_of.pop(place)]
        seconds = now - length.held.pop(place)
        if is_answered:
            length.times.note(seconds)
            self.requests.note(seconds)

    def first(self, now: float) -> float | None:
        """Return in how many seconds the next comes free; None where there is none that could.

        When it is due by how they came while others waited, but not before one of those who hold them is due to end.
        """
        waits = []
        if self.length_of:
            unknown = self._unknown(now)
            held = [length for length in self.lengths.values() if length.held]
            waits.append(1 / sum(length.rate_now(self.requests, unknown, now) for length in held))
        if self.releases.recent and self.released_at is not None:
            since = now - self.released_at
            left = self.releases.left(since)
            waits.append(since if left is None else left)
        elif self.releases.typical is not None and not (len(self.length_of) == 1 and self.requests.recent):
            # Of several who began together the first is not due sooner for that; of one alone its own time says all.
            waits.append(self.releases.typical)
        return max(waits, default=None)

    def rate(self, now: float) -> float:
        """Return how many come free each second behind the next; 0 where there is none that could.

        As they did while others waited, but no faster than if those who come next take as long as those who hold them
        are expected to in all.
        """
        rates = []
        if self.releases.typical is not None:
            rates.append(1 / max(self.releases.typical, _LEAST_SECONDS))
        if self.length_of:
            unknown = self._unknown(now) if self.requests.typical is None else self.requests.typical
            held = [length for length in self.lengths.values() if length.held]
            rates.append(sum(length.rate(unknown) for length in held))
        return min(rates, default=0.0)

    def _unknown(self, now: float) -> float:
        """Return what to expect of whoever holds a place while no request has ended: as long as the oldest has it.

        Nothing, where it is known at least how places come free.
        """
        if self.releases.typical is not None:
            return 0.0
        return now - min(next(iter(length.held.values())) for length in self.lengths.values() if length.held)


class Forecast:
    """Of one model's places."""

    def __init__(self) -> None:
        self._paces: dict[PlaceKind, _Pace] = {}

    @property
    def has_held(self) -> bool:
        """Whether a request has a place."""
        return any(pace.length_of for pace in self._paces.values())

    def note_begin(self, kind: PlaceKind, place: Hashable, now: float, max_tokens: int | None = None) -> None:
        """Take that a request has a place; `max_tokens`: how long each of its answers may become, where it says so."""
        self._paces.setdefault(kind, _Pace()).begin(place, max_tokens, now)

    def note_end(
        self, kind: PlaceKind, place: Hashable, now: float, waiting: Iterable[Want], *, is_answered: bool
    ) -> None:
        """Take that a place is free while requests of these wants wait.

        A request that was answered tells how long one takes.
        """
        pace = self._paces[kind]
        pace.end(place, now, is_answered=is_answered)
        if pace.released_at is not None:
            pace.releases.note(now - pace.released_at)
        # Only while somebody waits for them do places come free as fast as they can.
        pace.released_at = now if any(want.fits(kind) for want in waiting) else None

    def observed_wait(self, kinds: Collection[PlaceKind], before: Mapping[Want, float], now: float) -> float | None:
        """Return how long one more must wait for a place of these kinds, as far as each has been seen to come free.

        `before`: what those want, and how many of them each, who are served before. None: of one nobody knows.
        """
        paces = [self._paces.get(kind) for kind in kinds]
        if any(pace is None or pace.releases.typical is None for pace in paces):
            return None
        return self.expected_wait(kinds, before, now)

    def expected_wait(self, kinds: Collection[PlaceKind], before: Mapping[Want, float], now: float) -> float | None:
        """Return in how many seconds one more would have its turn; None where nobody has a place that could come free.

        Behind all of `before` who can use the places of one version, and as fast as these come; or those of all
        versions, if that is sooner: others may want only some of them.
        """
        versions = {kind.version for kind in kinds}
        groups = [[kind for kind in kinds if kind.version == version] for version in versions]
        waits = [self._wait_of(group, before, now) for group in (*groups, kinds)]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def _wait_of(self, kinds: Collection[PlaceKind], before: Mapping[Want, float], now: float) -> float | None:
        paces = [self._paces[kind] for kind in kinds if kind in self._paces]
        firsts = [first for pace in paces if (first := pace.first(now)) is not None]
        if not firsts:
            return None
        ahead = sum(count for want, count in before.items() if any(want.fits(kind) for kind in kinds))
        soonest = 1 / sum(1 / max(first, _LEAST_SECONDS) for first in firsts)
        return soonest + ahead / sum(pace.rate(now) for pace in paces)
