"""Fleets in virtual time: who gets requests, when replicas come and go, and what that costs."""

import pytest

from penstock.config import gather
from penstock.errors import ConfigError
from penstock.tools.bench.shape import parse_shape
from penstock.tools.bench.workload import Workload
from penstock.tools.simulator.fleet import VirtualFleet
from penstock.tools.simulator.server import SimulatedServer, configure
from penstock.tools.simulator.simulation import Simulation, Ticks
from tests.fakes.small_profile import small_profile


def server(replicas: int, policy: str = "least-loaded") -> SimulatedServer:
    return configure(gather({}, environ={}), small_profile(), num_replicas=replicas, policy=policy)


def workload(shape: str, rate: float | None = None) -> Workload:
    load = Workload(name=shape, requests=parse_shape(shape).requests())
    return load if rate is None else load.at_rate(rate)


def finished(simulation: Simulation) -> list[int]:
    """Requests that each replica finished, those that ended last."""
    fleet = simulation.fleet
    return [sum(item.stats.num_finished.values()) for item in (*fleet.replicas, *fleet.ended)]


def test_round_robin_gives_every_replica_as_many():
    simulation = Simulation(server(4, "round-robin"), workload("16x50+10", rate=2))
    assert len(simulation.run()) == 16
    assert finished(simulation) == [4, 4, 4, 4]


@pytest.mark.parametrize("policy", ["least-loaded", "power-of-two", "session-affinity", "adapter-affinity"])
def test_every_policy_serves_every_request_and_the_same_way_each_time(policy: str):
    def run() -> list[float]:
        return [item.ended for _, item in Simulation(server(3, policy), workload("30x50+10", rate=5)).run()]

    first = run()
    assert len(first) == 30
    assert run() == first


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match="round-robin"):
        server(2, "coin")


def test_what_a_full_replica_refuses_another_takes():
    full = configure(
        gather({"max_running": 1, "max_waiting": 1}, environ={}), small_profile(), num_replicas=2, policy="round-robin"
    )
    measured = Simulation(full, workload("5x50+10")).run()
    assert [item.error for _, item in measured] == [None, None, None, None, "overloaded"]


def test_a_started_replica_gets_requests_when_it_is_ready_and_not_before():
    seen: list[tuple[float, int, int]] = []

    def scale(now: float, fleet: VirtualFleet) -> None:
        if now == 2.0:
            fleet.start_replica(ready_after_seconds=3.0)
        seen.append((now, fleet.num_starting, fleet.num_ready))

    simulation = Simulation(server(1), workload("40x20+5", rate=4), ticks=Ticks(1.0, scale))
    simulation.run()
    assert seen[:7] == [(0.0, 0, 1), (1.0, 0, 1), (2.0, 1, 1), (3.0, 1, 1), (4.0, 1, 1), (5.0, 0, 2), (6.0, 0, 2)]
    _, second = simulation.fleet.replicas
    assert second.started_at == 2.0 and second.ready_at == 5.0
    assert sum(second.stats.num_finished.values()) > 0


def test_a_drained_replica_finishes_what_it_has_and_then_costs_nothing():
    def scale(now: float, fleet: VirtualFleet) -> None:
        if now == 1.0:
            fleet.drain_replica(fleet.replicas[0])

    simulation = Simulation(server(2, "round-robin"), workload("40x20+100", rate=4), ticks=Ticks(1.0, scale))
    measured = simulation.run()
    fleet = simulation.fleet
    assert [item.error for _, item in measured] == [None] * 40
    (drained,) = fleet.ended
    assert drained.ended_at is not None and 1.0 < drained.ended_at < 5.0
    assert fleet.num_ready == 1
    assert fleet.replica_seconds == pytest.approx(fleet.now + drained.ended_at)


def test_an_idle_replica_ends_the_moment_it_is_drained():
    def scale(now: float, fleet: VirtualFleet) -> None:
        if now == 2.0:
            fleet.drain_replica(fleet.start_replica(ready_after_seconds=10.0))

    simulation = Simulation(server(1), workload("10x20+5", rate=1), ticks=Ticks(1.0, scale))
    simulation.run()
    assert [item.ended_at for item in simulation.fleet.ended] == [2.0]


def test_requests_are_held_until_the_first_replica_is_ready():
    def scale(now: float, fleet: VirtualFleet) -> None:
        if now == 1.0:
            fleet.start_replica(ready_after_seconds=4.0)

    simulation = Simulation(server(0), workload("3x20+5"), ticks=Ticks(1.0, scale))
    measured = simulation.run()
    assert all(item.error is None and item.token_times[0] > 5.0 for _, item in measured)


def test_requests_are_held_no_longer_than_the_gateway_would():
    measured = Simulation(server(0), workload("3x20+5"), hold_seconds=7.0).run()
    assert [(item.error, item.ended) for _, item in measured] == [("engine_unavailable", 7.0)] * 3


def test_the_gateway_knows_a_replicas_load_as_of_the_last_probe():
    loads: list[float] = []

    def look(now: float, fleet: VirtualFleet) -> None:
        known = fleet.known(fleet.replicas[0])
        assert known is not None
        loads.append(known.load.num_running + known.load.num_waiting)

    Simulation(server(1), workload("8x100+200"), ticks=Ticks(0.5, look)).run()
    # Before the first probe nothing is known; then all eight, until they end.
    assert loads[0] == 0
    assert loads[3] == 8
