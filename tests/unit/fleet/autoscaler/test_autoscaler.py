"""The autoscaler between pool and backend: who takes requests, who leaves first, and what is told."""

import math

import pytest

from penstock.errors import RemoteError
from penstock.fleet.adapters.interface import Load, ServedModel
from penstock.fleet.autoscaler.autoscaler import Autoscaler
from penstock.fleet.autoscaler.backends.interface import Failure, Trouble
from penstock.fleet.autoscaler.report import report
from penstock.fleet.config import HealthSection, ReplicaEntry
from penstock.fleet.replica import ReplicaPool
from tests.unit.fleet.autoscaler.looks import FakeBackend, section
from tests.unit.fleet.conftest import FakeClock


class Scene:
    """A pool of replicas that are up, and an autoscaler by requests: 10 for each."""

    def __init__(self, num_replicas, *, policy="queue-length", **fields):
        self.clock = FakeClock()
        self.pool = ReplicaPool(HealthSection(), self.clock)
        self.backend = FakeBackend(num_replicas)
        self.num_held = 0
        self.num_calls = 0
        for _ in range(num_replicas):
            self.add()
        settings = section(policy=policy, requests_per_replica=10, scale_down_seconds=0.0, **fields)
        self.told_callers = []
        self.autoscaler = Autoscaler(
            "tiny", settings, self.backend, self.pool, num_held=lambda: self.num_held, on_change=self._call,
            on_trouble=self.told_callers.append,
        )  # fmt: skip

    def add(self, **fields):
        replica = self.pool.add("test", ReplicaEntry(url=f"http://replica-{len(self.pool)}:80", **fields))
        replica.models = (ServedModel("tiny"),)
        replica.breaker.on_probe(True)
        return replica

    def _call(self):
        self.num_calls += 1

    async def look(self, *running):
        self.clock.now += 1.0
        for replica, count in zip(self.pool, running, strict=True):
            replica.num_in_flight = count
            replica.note_load(Load(num_running=count))
        await self.autoscaler.step()
        return self.backend.told[-1]

    def standing_by(self):
        return [replica.name for replica in self.pool if replica.is_standby]


async def test_load_is_answered_by_asking_for_more():
    scene = Scene(1)
    assert await scene.look(25) == (3, [])


async def test_whoever_has_least_to_do_is_sent_nothing_more_and_leaves_first():
    scene = Scene(3)
    await scene.look(9, 8, 9)
    assert await scene.look(9, 0, 2) == (2, ["http://replica-1:80"])
    assert scene.standing_by() == ["replica-1:80"]
    assert not scene.pool.find("http://replica-1:80").is_usable


async def test_warm_replicas_stand_by_until_they_are_needed():
    scene = Scene(3, warm_replicas=1, min_replicas=2)
    assert (await scene.look(5, 4, 0))[0] == 3
    assert scene.standing_by() == ["replica-2:80"]
    assert scene.num_calls == 0
    assert (await scene.look(15, 10, 0))[0] == 4  # three at work, and another one warm
    assert scene.standing_by() == []
    assert scene.num_calls == 1  # requests that wait may go to it


async def test_requests_that_are_held_wake_a_warm_replica():
    scene = Scene(2, policy="promises", warm_replicas=1, max_replicas=2)
    await scene.look(2, 0)
    assert scene.standing_by() == ["replica-1:80"]
    scene.num_held = 6
    await scene.look(2, 0)
    assert scene.standing_by() == []
    assert (scene.autoscaler.signals.num_coming, scene.autoscaler.signals.num_warm) == (0, 1)


async def test_a_candidates_replica_is_neither_counted_nor_marked():
    scene = Scene(1, max_replicas=1)
    candidate = scene.add(version="b")
    assert await scene.look(1, 9) == (1, [])
    assert scene.standing_by() == []
    assert scene.autoscaler.signals.num_ready == 1
    assert scene.autoscaler.signals.num_requests == 1.0
    assert candidate.is_usable


async def test_a_replica_that_gets_another_version_is_let_go_of():
    scene = Scene(2)
    await scene.look(9, 9)
    await scene.look(1, 0)
    assert scene.standing_by() == ["replica-1:80"]
    scene.pool.add("test", ReplicaEntry(url="http://replica-1:80", version="b"))
    await scene.look(1, 0)
    assert scene.standing_by() == []


async def test_a_held_request_wakes_a_fleet_of_none():
    scene = Scene(0, min_replicas=0)
    assert await scene.look() == (0, [])
    scene.num_held = 1
    assert await scene.look() == (1, [])


async def test_a_backend_that_fails_is_told_and_asked_again():
    scene = Scene(1)
    scene.backend.error = RemoteError("it is gone")
    await scene.autoscaler.step()
    assert report(scene.autoscaler, scene.clock()).failure.endswith(": it is gone")
    scene.backend.error = None
    assert await scene.look(25) == (3, [])
    assert report(scene.autoscaler, scene.clock()).failure is None


async def test_every_kind_of_failure_is_counted_by_its_reason():
    scene = Scene(1)
    scene.backend.error = RemoteError("it is gone")
    await scene.autoscaler.step()
    await scene.autoscaler.step()
    scene.backend.error = None
    scene.backend.trouble = Trouble("it serves another model", "", Failure.USELESS_REPLICA)
    await scene.look(1)
    scene.backend.trouble = Trouble("it ended with status 2", "")
    scene.backend.num_failed_starts = 3
    await scene.look(1)
    assert scene.autoscaler.num_failures == {
        Failure.BACKEND_REFUSED: 2, Failure.USELESS_REPLICA: 1, Failure.START_FAILED: 3, Failure.POLICY_ERROR: 0,
    }  # fmt: skip


async def test_a_policy_that_fails_leaves_the_fleet_as_it_is_and_is_asked_again():
    scene = Scene(1)
    await scene.look(5)
    assert await scene.look(math.inf) == (1, [])  # as before
    assert "OverflowError" in report(scene.autoscaler, scene.clock()).failure
    assert scene.autoscaler.num_failures[Failure.POLICY_ERROR] == 1
    assert await scene.look(25) == (3, [])
    assert report(scene.autoscaler, scene.clock()).failure is None


async def test_why_replicas_do_not_come_is_told_to_operators_and_in_short_to_callers():
    scene = Scene(0)
    scene.backend.trouble = Trouble("it ended with status 2", "no such model: /home/alice/model")
    await scene.look()
    assert report(scene.autoscaler, scene.clock()).failure == "it ended with status 2: no such model: /home/alice/model"
    scene.backend.trouble = None
    await scene.look()
    assert report(scene.autoscaler, scene.clock()).failure is None
    assert scene.told_callers == ["it ended with status 2", None]


async def test_the_report_has_signals_the_number_and_every_change_with_its_reason():
    scene = Scene(1)
    await scene.look(25)
    scene.clock.now += 4.0
    told = report(scene.autoscaler, scene.clock())
    assert (told.desired, told.active, told.proposed) == (3, 3, 3)
    assert told.signals.num_requests == 25.0
    (change,) = told.changes
    assert (change.before, change.after, change.seconds_ago) == (1, 3, 4.0)
    assert change.reason == "25 requests at 10 for each replica"


@pytest.mark.parametrize(("running", "direction"), [((25,), "up"), ((0,), None)])
async def test_changes_are_counted(running, direction):
    scene = Scene(1)
    await scene.look(*running)
    assert scene.autoscaler.num_rises == (direction == "up")
    assert scene.autoscaler.num_falls == 0


async def test_closing_lets_go_of_the_backend():
    scene = Scene(1)
    await scene.autoscaler.close()
    assert scene.backend.is_closed
