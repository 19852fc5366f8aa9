"""Counters of replicas become what a policy sees."""

from penstock.fleet.adapters.interface import Load
from penstock.fleet.autoscaler.signals import ReplicaView, SignalTracker
from penstock.fleet.autoscaler.start_times import StartTimes


def view(number, at, *, is_ready=True, **load):
    return ReplicaView(f"http://replica-{number}", Load(**load), at, is_ready)


def observe(tracker, moment, *views):
    return tracker.observe(moment, views, num_held=0, num_coming=0, start_seconds=5.0)


def test_demand_is_how_fast_the_replicas_work_adds_up():
    tracker = SignalTracker(10)
    observe(tracker, 0.0, view(1, 0.0, work_seconds=5.0), view(2, 0.5, work_seconds=0.0))
    seen = observe(tracker, 2.0, view(1, 2.0, work_seconds=6.0), view(2, 2.5, work_seconds=1.5))
    assert seen.demand == 0.5 + 0.75


def test_a_replica_that_told_nothing_new_works_on_as_before():
    tracker = SignalTracker(10)
    observe(tracker, 0.0, view(1, 0.0, work_seconds=0.0))
    observe(tracker, 2.0, view(1, 2.0, work_seconds=1.0))
    assert observe(tracker, 2.5, view(1, 2.0, work_seconds=1.0)).demand == 0.5


def test_a_counter_that_began_again_is_not_a_fall():
    tracker = SignalTracker(10)
    observe(tracker, 0.0, view(1, 0.0, work_seconds=100.0, num_kept=50.0))
    seen = observe(tracker, 2.0, view(1, 2.0, work_seconds=1.0, num_kept=4.0))
    assert (seen.demand, seen.num_kept) == (0.5, 4.0)


def test_promises_and_tokens_are_those_since_the_last_look():
    tracker = SignalTracker(10)
    observe(tracker, 0.0, view(1, 0.0, num_kept=10.0, num_missed=1.0, prompt_tokens=100.0, generated_tokens=10.0))
    seen = observe(
        tracker, 2.0, view(1, 2.0, num_kept=15.0, num_missed=3.0, prompt_tokens=300.0, generated_tokens=20.0)
    )
    assert (seen.num_kept, seen.num_missed) == (5.0, 2.0)
    assert (seen.prompt_tokens_per_second, seen.generated_tokens_per_second) == (100.0, 5.0)


def test_waits_and_memory_are_those_of_replicas_that_take_requests():
    seen = observe(
        SignalTracker(10),
        0.0,
        view(1, 0.0, queue_seconds=2.0, kv_utilization=0.5),
        view(2, 0.0, queue_seconds=1.0, kv_utilization=0.7),
        view(3, 0.0, is_ready=False, queue_seconds=9.0, kv_utilization=0.9, num_running=4.0),
    )
    assert (seen.backlog_seconds, seen.queue_seconds, seen.kv_utilization) == (3.0, 1.5, 0.6)
    assert (seen.num_ready, seen.num_requests, seen.is_idle) == (2, 4.0, False)


def test_a_kind_that_does_not_tell_its_work_counts_by_requests_or_memory():
    seen = observe(
        SignalTracker(10),
        0.0,
        view(1, 0.0, num_running=4.0, num_waiting=1.0),
        view(2, 0.0, num_running=1.0, kv_utilization=0.8),
    )
    assert seen.demand == 0.5 + 0.8


def test_a_replica_that_tells_nothing_counts_by_what_was_sent_there():
    silent = ReplicaView("http://replica-1", Load(), None, True, num_in_flight=5)
    seen = observe(SignalTracker(10), 0.0, silent)
    assert (seen.demand, seen.num_requests, seen.is_idle) == (0.5, 5.0, False)


def test_what_a_replica_said_long_ago_is_forgotten():
    tracker = SignalTracker(10)
    observe(tracker, 0.0, view(1, 0.0, work_seconds=0.0))
    observe(tracker, 2.0, view(1, 2.0, work_seconds=1.0, num_running=3.0, num_kept=9.0))
    seen = observe(tracker, 20.0, view(1, 2.0, work_seconds=1.0, num_running=3.0, num_kept=9.0))
    assert (seen.demand, seen.is_idle) == (0.0, True)
    back = observe(tracker, 21.0, view(1, 21.0, work_seconds=5.0, num_kept=9.0))
    assert (back.demand, back.num_kept) == (0.0, 0.0)


def test_how_long_starts_take_is_learnt():
    starts = StartTimes(100.0)
    for moment in range(40):
        starts.observe(float(moment), target=1 if moment < 2 else 3, num_there=1 if moment < 9 else 3)
    assert starts.seconds < 100.0
    for begin in range(40, 1040, 50):
        for moment in range(50):
            target, there = (4, 4 if moment >= 7 else 3) if moment < 20 else (3, 3)
            starts.observe(float(begin + moment), target, there)
    assert abs(starts.seconds - 7.0) < 0.5


def test_a_start_that_is_not_wanted_any_more_teaches_nothing():
    starts = StartTimes(5.0)
    for moment in range(100):
        starts.observe(float(moment), target=2 if moment == 3 else 1, num_there=1)
    starts.observe(100.0, target=1, num_there=2)
    assert starts.seconds == 5.0
