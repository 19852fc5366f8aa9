"""Whether one replica is trusted: ready, ejected for a while, or on trial.

Fed with the outcomes of probes and of requests. After an ejection, each longer than the one before, a probe must
succeed, and then one request at a time until one was answered. Probes that fail meanwhile make it no longer: a replica
that starts again is back as soon as it says so. Knows nothing of HTTP; time is the caller's clock.
"""

import enum
from collections.abc import Callable

from penstock.fleet.config import HealthSection


class Standing(enum.StrEnum):
    UNKNOWN = "unknown"  # not asked yet
    READY = "ready"
    NOT_READY = "not_ready"  # it says itself that it should not be sent work: starting, draining
    EJECTED = "ejected"
    TRIAL = "trial"  # back, one request at a time


class Breaker:
    def __init__(self, settings: HealthSection, clock: Callable[[], float]) -> None:
        self.standing = Standing.UNKNOWN
        self.reason = "not asked yet"
        self.num_ejections = 0
        self._settings = settings
        self._clock = clock
        self._num_failures = 0  # in a row
        self._num_rounds = 0  # ejections since it last went well
        self._until = 0.0

    def admits(self, num_in_flight: int) -> bool:
        """Whether it may be sent a request now."""
        return self.standing is Standing.READY or (self.standing is Standing.TRIAL and num_in_flight == 0)

    def on_probe(self, ready: bool, reason: str = "") -> None:
        """Take what a probe found: an answer, be it that the replica is not ready."""
        if self.standing is Standing.EJECTED and self._clock() < self._until:
            return
        if not ready:
            self.standing, self.reason = Standing.NOT_READY, reason
            return
        if self.standing is Standing.EJECTED:
            self.standing, self.reason = Standing.TRIAL, "back: one request at a time until one is answered"
        elif self.standing is not Standing.TRIAL:
            self.standing, self.reason = Standing.READY, "it says that it is ready"
        if self.standing is Standing.READY:
            self._num_failures = 0

    def on_answer(self) -> None:
        """Take that it began to answer a request: it may have others beside that."""
        if self.standing is Standing.TRIAL:
            self.standing, self.reason = Standing.READY, "it answers requests"

    def on_success(self) -> None:
        """Take that a request went well, to its end."""
        self.on_answer()
        self._num_failures = self._num_rounds = 0

    def on_failure(self, reason: str, *, is_fatal: bool = False) -> None:
        """Take that a probe or a request failed. What is fatal, a refused connection, ejects at once."""
        if self.standing is Standing.EJECTED:
            return
        self._num_failures += 1
        too_many = self._num_failures >= self._settings.failures_to_eject
        if is_fatal or too_many or self.standing is Standing.TRIAL:
            self._eject(reason)

    def _eject(self, reason: str) -> None:
        backoff = min(self._settings.first_backoff_seconds * 2**self._num_rounds, self._settings.max_backoff_seconds)
        self._num_rounds = min(self._num_rounds + 1, 32)
        self._until = self._clock() + backoff
        self._num_failures = 0
        self.num_ejections += 1
        self.standing, self.reason = Standing.EJECTED, f"for {backoff:g} s: {reason}"
