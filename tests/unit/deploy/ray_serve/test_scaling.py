"""Our controller behind Ray Serve's autoscaling hook, with the context that Serve would give it."""

from types import SimpleNamespace

from penstock.deploy.ray_serve.scaling import ControllerPolicy, replica_views
from tests.unit.fleet.conftest import FakeClock


def point(value, timestamp):
    return SimpleNamespace(value=value, timestamp=timestamp)


def context(metrics, *, current=1, target=1, queued=0.0):
    return SimpleNamespace(
        current_num_replicas=current, target_num_replicas=target, raw_metrics=metrics, total_queued_requests=queued
    )


def told(number, timestamp, **loads):
    return {
        name: {f"replica-{index}": [point(value, timestamp)] for index in range(number)}
        for name, value in loads.items()
    }


def busy(clock, policy, seconds, *, current=1):
    """Let replicas work all of their time for so long; return the last decision."""
    count = 0
    for _ in range(seconds):
        clock.now += 1
        metrics = told(current, clock.now, work_seconds=clock.now, num_running=8.0)
        count, _state = policy(context(metrics, current=current, target=current))
    return count


def make_policy(clock, **settings):
    return ControllerPolicy(clock=clock, min_replicas=1, max_replicas=4, interval_seconds=1.0, **settings)


def test_replicas_that_work_all_of_their_time_get_another():
    clock = FakeClock()
    assert busy(clock, make_policy(clock), 20) > 1


def test_idle_replicas_are_brought_down_to_the_fewest():
    clock = FakeClock()
    policy = make_policy(clock, scale_down_seconds=5.0)
    busy(clock, policy, 10, current=3)
    for _ in range(120):
        clock.now += 1
        count, _ = policy(context(told(3, clock.now, work_seconds=5000.0), current=3, target=3))
    assert count == 1


def test_it_never_goes_beyond_its_limits():
    clock = FakeClock()
    policy = make_policy(clock)
    metrics = told(4, clock.now, work_seconds=1.0, queue_seconds=500.0)
    assert policy(context(metrics, current=4, target=4))[0] == 4


def test_between_two_looks_the_answer_stays():
    clock = FakeClock()
    policy = make_policy(clock)
    first, _ = policy(context(told(1, clock.now, queue_seconds=0.0)))
    clock.now += 0.1  # Serve asks ten times a second
    assert policy(context(told(1, clock.now, queue_seconds=500.0)))[0] == first


def test_it_says_why():
    clock = FakeClock()
    _, state = make_policy(clock)(context({}))
    assert "forecast" in state["reason"]


def test_only_the_last_value_of_what_we_know_counts():
    metrics = {
        "num_running": {"a": [point(1.0, 10.0), point(3.0, 12.0)]},
        "ray_serve_running_requests": {"a": [point(9.0, 12.0)]},
    }
    (view,) = replica_views(metrics)
    assert (view.load.num_running, view.load_at) == (3.0, 12.0)
