"""How soon one more request has its turn while replicas are full: from how fast places on them came free.

How long a request keeps its place is told by others whose answers could become about as long. Places on replicas of one
kind are as good as each other; a request waits for some of the kinds, and only for these it is told how they come free.
Time is the caller's. Knows nothing of replicas, policies or who waits in which order.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_SMOOTHING = 0.2
_MAX_TOKENS = 1 << 20  # answers that may become longer than this are as long as each other
_LEAST_SECONDS = 1e-9  # between two moments of which a rate is made


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
class _Length:
    """Requests whose answers may become about as long as each other's."""

    held: dict[Hashable, float] = field(default_factory=dict)  # places that they have, and since when: oldest first
    seconds_per_request: float | None = None

    def rate(self, typical: float, now: float) -> float:
        """Return how fast they end if each takes as long as is typical, or as long again as it has."""
        rate, num_left = 0.0, len(self.held)
        for began in self.held.values():  # those that took longer than is typical come first
            if now - began <= typical:
                break
            rate += 1 / max(now - began, _LEAST_SECONDS)
            num_left -= 1
        return rate + num_left / max(typical, _LEAST_SECONDS)


@dataclass(slots=True)
class _Pace:
    """How the places of one kind come free."""

    lengths: dict[int, _Length] = field(default_factory=dict)  # by how long answers may become, in powers of two
    length_of: dict[Hashable, int] = field(default_factory=dict)  # of whoever has a place
    seconds_per_release: float | None = None  # while others waited for them
    seconds_per_request: float | None = None
    released_at: float | None = None

    def begin(self, place: Hashable, max_tokens: int | None, now: float) -> None:
        length = min(max_tokens or 0, _MAX_TOKENS).bit_length()
        self.length_of[place] = length
        self.lengths.setdefault(length, _Length()).held[place] = now

    def end(self, place: Hashable, now: float, *, is_answered: bool) -> None:
        length = self.lengths[self.length_of.pop(place)]
        seconds = now - length.held.pop(place)
        if is_answered:
            length.seconds_per_request = _smoothed(length.seconds_per_request, seconds)
            self.seconds_per_request = _smoothed(self.seconds_per_request, seconds)

    def rate(self, now: float) -> float:
        """Return how many come free each second; 0 where there is none that could.

        As they did while others waited, but no faster than those who hold them can be expected to end, nor than they
        have come since the last one did: places that came free together say little of the next.
        """
        rates = []
        if self.seconds_per_release is not None:
            rates.append(1 / max(self.seconds_per_release, _LEAST_SECONDS))
        if self.length_of:
            rates.append(self._rate_of_held(now))
        if rates and self.released_at is not None:
            rates.append(max(1, len(self.length_of)) / max(now - self.released_at, _LEAST_SECONDS))
        return min(rates, default=0.0)

    def _rate_of_held(self, now: float) -> float:
        """Return how fast those who hold places end if each takes as long as others of its length did.

        As long as any did where none of its length has ended; where none has at all, as long as the oldest.
        """
        held = [length for length in self.lengths.values() if length.held]
        typical = self.seconds_per_request
        if typical is None:
            oldest = min(next(iter(length.held.values())) for length in held)
            typical = 0.0 if self.seconds_per_release is not None else now - oldest
        return sum(
            length.rate(typical if length.seconds_per_request is None else length.seconds_per_request, now)
            for length in held
        )


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
            pace.seconds_per_release = _smoothed(pace.seconds_per_release, now - pace.released_at)
        # Only while somebody waits for them do places come free as fast as they can.
        pace.released_at = now if any(want.fits(kind) for want in waiting) else None

    def observed_wait(self, kinds: Collection[PlaceKind], waiting: Mapping[Want, int], now: float) -> float | None:
        """Return how long one more must wait for a place of these kinds, as far as each has been seen to come free.

        None: of one nobody knows.
        """
        paces = [self._paces.get(kind) for kind in kinds]
        if any(pace is None or pace.seconds_per_release is None for pace in paces):
            return None
        return self.expected_wait(kinds, waiting, now)

    def expected_wait(self, kinds: Collection[PlaceKind], waiting: Mapping[Want, int], now: float) -> float | None:
        """Return in how many seconds one more would have its turn; None where nobody has a place that could come free.

        Behind all who can use the places of one version, and as fast as these come; or those of all versions, if that
        is sooner: others may want only some of them.
        """
        versions = {kind.version for kind in kinds}
        groups = [[kind for kind in kinds if kind.version == version] for version in versions]
        waits = [self._wait_of(group, waiting, now) for group in (*groups, kinds)]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def _wait_of(self, kinds: Collection[PlaceKind], waiting: Mapping[Want, int], now: float) -> float | None:
        rate = sum(self._paces[kind].rate(now) for kind in kinds if kind in self._paces)
        if not rate:
            return None
        ahead = sum(count for want, count in waiting.items() if any(want.fits(kind) for kind in kinds))
        return (ahead + 1) / rate


def _smoothed(known: float | None, value: float) -> float:
    return value if known is None else known + _SMOOTHING * (value - known)
