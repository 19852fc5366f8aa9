"""Whether one replica is trusted: ready, ejected for a while, or on trial.

Fed with the outcomes of probes and of requests. Each ejection in a row waits twice as long as the one before, and one
that stays away is tried ever more seldom. When a probe succeeds it gets one request at a time until one was answered
or, where none comes, until as many probes in a row went well as failures eject. Knows nothing of HTTP; time is the
caller's clock.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from penstock.fleet.config import HealthSection

_MAX_ROUNDS = 32  # 2 ** 32 first waits are longer than any wait may be
# Of the time that it has been away: so it is back within five quarters of that, and a long absence costs few probes.
_RETRY_PART = 0.25


class Standing(enum.StrEnum):
    UNKNOWN = "unknown"  # not asked yet
    READY = "ready"
    NOT_READY = "not_ready"  # it says itself that it should not be sent work: starting, draining
    EJECTED = "ejected"
    TRIAL = "trial"  # back, one request at a time


@dataclass(frozen=True, slots=True)
class StandingChange:
    """That a replica stands otherwise than before, or for another reason."""

    before: Standing
    now: Standing
    reason: str
    seconds: float  # that the standing before lasted
    wait_seconds: float | None = None  # before an ejected replica is tried again


class Breaker:
    def __init__(
        self,
        settings: HealthSection,
        clock: Callable[[], float],
        on_change: Callable[[StandingChange], None] | None = None,
    ) -> None:
        self.standing = Standing.UNKNOWN
        self.reason = "not asked yet"
        self.num_ejections = 0
        self._settings = settings
        self._clock = clock
        self._on_change = on_change
        self._since = clock()  # the standing holds
        self._num_failures = 0  # in a row
        self._num_good_probes = 0  # in a row, on trial
        self._num_rounds = 0  # ejections since it last went well
        self._until = 0.0

    @property
    def seconds_until_try(self) -> float | None:
        """How long an ejected replica is left alone yet; None where it is not ejected."""
        return max(0.0, self._until - self._clock()) if self.standing is Standing.EJECTED else None

    @property
    def seconds_ejected(self) -> float:
        """How long it has been ejected, whatever was tried meanwhile; 0 where it is not."""
        return self._clock() - self._since if self.standing is Standing.EJECTED else 0.0

    def admits(self, num_in_flight: int) -> bool:
        """Whether it may be sent a request now."""
        return self.standing is Standing.READY or (self.standing is Standing.TRIAL and num_in_flight == 0)

    def on_probe(self, ready: bool, reason: str = "", *, is_idle: bool = True, is_needed: bool = False) -> None:
        """Take what a probe found: an answer, be it that the replica is not ready.

        `is_idle`: no request shows how it is. `is_needed`: there are too few others for any wait to be kept.
        """
        if self.standing is Standing.EJECTED and self._clock() < self._until and not is_needed:
            return
        if not ready:
            self._stand(Standing.NOT_READY, reason)
        elif self.standing is Standing.EJECTED:
            self._num_good_probes = 0
            self._stand(Standing.TRIAL, "back: one request at a time until one is answered")
        elif self.standing is Standing.TRIAL:
            self._num_good_probes = self._num_good_probes + 1 if is_idle else 0
            if self._num_good_probes >= self._settings.failures_to_eject:
                self._stand(Standing.READY, f"no request came, and {self._num_good_probes} probes went well")
        else:
            self._num_failures = 0
            self._stand(Standing.READY, "it says that it is ready")

    def on_answer(self) -> None:
        """Take that it began to answer a request: it may have others beside that."""
        if self.standing is Standing.TRIAL:
            self._stand(Standing.READY, "it answers requests")

    def on_success(self) -> None:
        """Take that a request went well, to its end."""
        self.on_answer()
        self._num_failures = self._num_rounds = 0

    def on_failure(self, reason: str, *, is_fatal: bool = False) -> None:
        """Take that a probe or a request failed. What is fatal, a refused connection, ejects at once."""
        now, limit = self._clock(), self._settings.max_backoff_seconds
        if self.standing is Standing.EJECTED:
            if now >= self._until:
                first = self._settings.first_backoff_seconds
                self._wait(min(max(first, _RETRY_PART * (now - self._since)), limit), reason)
            return
        self._num_failures += 1
        too_many = self._num_failures >= self._settings.failures_to_eject
        if is_fatal or too_many or self.standing is Standing.TRIAL:
            if self.standing is Standing.READY and now - self._since >= limit:
                self._num_rounds = 0  # whatever was, it has been well for longer than any wait lasts
            self._num_failures = 0
            self.num_ejections += 1
            self._wait(min(self._settings.first_backoff_seconds * 2**self._num_rounds, limit), reason)
            self._num_rounds = min(self._num_rounds + 1, _MAX_ROUNDS)

    def _wait(self, seconds: float, reason: str) -> None:
        """Leave it alone for a while."""
        self._until = self._clock() + seconds
        self._stand(Standing.EJECTED, f"for {seconds:.3g} s: {reason}", seconds)

    def _stand(self, standing: Standing, reason: str, wait_seconds: float | None = None) -> None:
        before, is_new = self.standing, standing is not self.standing
        is_news = is_new or (standing is Standing.NOT_READY and reason != self.reason)
        seconds = self._clock() - self._since
        self.standing, self.reason = standing, reason
        if is_new:
            self._since = self._clock()
        if is_news and self._on_change is not None:
            self._on_change(StandingChange(before, standing, reason, seconds, wait_seconds))
