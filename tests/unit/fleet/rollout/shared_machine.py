"""Two versions on one machine, in virtual time: whatever slows it at a moment slows both."""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.fleet.config import HealthSection, ReplicaEntry
from penstock.fleet.replica import ReplicaPool
from penstock.fleet.rollout.course import Rollout, go_on, start
from penstock.fleet.rollout.plan import RolloutSection
from penstock.fleet.rollout.shadow import ShadowCopy
from penstock.fleet.rollout.split import VersionSplit
from penstock.fleet.rollout.trial import Trial
from penstock.fleet.rollout.trials import Trials
from penstock.fleet.router.query import RouteQuery, read_head

ANSWER_TOKENS = 16
REQUESTS_PER_SECOND = 2.0
REQUESTS_THAT_DOUBLE_TIMES = 16  # under way at once, of both versions together
BODY = msgspec.json.encode({"model": "tiny", "prompt": "hello", "temperature": 0})
VERSIONS = "stable", "b"


class SharedMachine:
    """How slow it is: in random spells, of random strength."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._spell_seconds = self._draw.choice((0.5, 5.0, 60.0))
        self._ends_at = 0.0
        self._slowness = 1.0

    def slowness(self, moment: float) -> float:
        while moment >= self._ends_at:
            self._ends_at += self._draw.expovariate(1 / self._spell_seconds)
            self._slowness = self._draw.choice((1.0, 1.0, self._draw.uniform(1.0, 6.0)))
        return self._slowness


class VirtualRollout:
    """A rollout's first step: requests, their answers and copies, and the gate, which looks every second."""

    def __init__(self, seed: int, *, slowness: float, steps: tuple[str | float, ...], burst: float = 0.5) -> None:
        self._draw = random.Random(seed)
        self._machine = SharedMachine(seed)
        self._slowness = dict(zip(VERSIONS, (1.0, slowness), strict=True))
        self._burst = burst  # part of the requests that come together with another
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._num_under_way = 0
        self.moment = 0.0
        section = RolloutSection(steps=steps, shadow_percent=100.0)
        self.rollout: Rollout = start("tiny", "b", section, None, 0.0)
        self._split = VersionSplit({"tiny": section})
        self._split.replace([self.rollout])
        self._trials = Trials(self._split, self)  # type: ignore[arg-type]
        pool = ReplicaPool(HealthSection(), lambda: self.moment)
        self._replicas = {name: pool.add("test", ReplicaEntry(url=f"http://{name}", version=name)) for name in VERSIONS}

    def run(self, num_requests: int) -> Rollout:
        """Return the rollout when its first step has ended, or after so many requests."""
        arrival, looked_at = 0.0, 0.0
        for number in range(num_requests):
            if self._draw.random() >= self._burst:
                arrival += self._draw.expovariate(REQUESTS_PER_SECOND * (1 - self._burst))
            self._run_until(arrival)
            self._ask(number)
            if arrival >= looked_at + 1.0:
                looked_at = arrival
                self.rollout = go_on(self.rollout, self._trials.evidence_of(self.rollout), arrival)
                if self.rollout.epoch:
                    break
        return self.rollout

    def send(self, copy: ShadowCopy, rollout: Rollout, on_answer: Callable[[Trial], None], *_: Any, **__: Any) -> None:
        """Take a copy, as `Shadows` does: it begins some time within the next window."""
        begins_at = self.moment + self._draw.uniform(0.0, rollout.gate.window_seconds)
        self._plan(begins_at, lambda: self._begin("b", copy.seconds, on_answer))

    def _ask(self, number: int) -> None:
        query = RouteQuery(read_head(BODY), model="tiny", tenant="", session=str(number))
        version = self._split.versions_for(query)[0]
        assert self._trials.begin(query, self._replicas[version]) is not None
        size = self._draw.lognormvariate(0.0, 0.4)  # of the prompt
        copy = ShadowCopy("/v1/completions", BODY, True, 0, size)
        self._begin(version, size, lambda answer: self._trials.end(query, answer, copy))

    def _begin(self, version: str, size: float, on_answer: Callable[[Trial], None]) -> None:
        load = 1 + self._num_under_way / REQUESTS_THAT_DOUBLE_TIMES
        slow = self._slowness[version] * self._machine.slowness(self.moment) * load
        ttft = 0.2 * size * slow * self._draw.lognormvariate(0.0, 0.2)
        per_token = 0.02 * slow * self._draw.lognormvariate(0.0, 0.2)
        trial = Trial(version, began_at=self.moment, first_at=self.moment + ttft)
        trial.token_ids = list(range(ANSWER_TOKENS))
        trial.ended_at = self.moment + ttft + per_token * (ANSWER_TOKENS - 1)
        self._num_under_way += 1
        self._plan(trial.ended_at, lambda: self._end(trial, on_answer))

    def _end(self, trial: Trial, on_answer: Callable[[Trial], None]) -> None:
        self._num_under_way -= 1
        on_answer(trial)

    def _plan(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (moment, next(self._numbers), action))

    def _run_until(self, moment: float) -> None:
        while self._agenda and self._agenda[0][0] <= moment:
            self.moment, _, action = heapq.heappop(self._agenda)
            action()
        self.moment = moment
