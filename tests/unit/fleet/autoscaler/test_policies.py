"""What each policy proposes for what it sees."""

from penstock.fleet.autoscaler.policies.promises import Promises
from penstock.fleet.autoscaler.policies.queue_length import QueueLength
from tests.unit.fleet.autoscaler.looks import look, section


def proposed(policy, looks):
    for signals in looks:
        proposal = policy.propose(signals)
    return proposal


def steady(seconds=20, **fields):
    return [look(float(second), **fields) for second in range(seconds)]


def test_the_floor_is_demand_by_what_a_replica_may_work():
    policy = Promises(section(target_utilization=0.5))
    assert proposed(policy, steady(num_ready=4, demand=1.9)).count == 4
    assert proposed(Promises(section(target_utilization=0.5)), steady(num_ready=4, demand=2.1)).count == 5


def test_rising_demand_is_met_before_it_is_there():
    looks = [look(float(second), 4, demand=2.0 + 0.05 * second) for second in range(20)]
    steady_count = proposed(Promises(section()), steady(num_ready=4, demand=looks[-1].demand)).count
    rising = proposed(Promises(section()), looks)
    # In 5 s, when a replica started now is ready, it will be 3.2 and not 2.95.
    assert (steady_count, rising.count) == (4, 5)


def test_noise_is_no_trend():
    looks = [look(float(second), 4, demand=2.9 + (0.1 if second % 2 else -0.1)) for second in range(20)]
    assert proposed(Promises(section()), looks).count == 4


def test_falling_demand_is_not_believed_before_it_has_fallen():
    looks = [look(float(second), 4, demand=3.5 - 0.1 * second) for second in range(16)]
    assert proposed(Promises(section()), looks).count >= 3


def test_a_predicted_wait_calls_for_what_would_clear_it():
    waiting = look(20.0, 2, demand=1.4, backlog_seconds=10.0, queue_seconds=5.0)
    proposal = proposed(Promises(section()), [*steady(num_ready=2, demand=1.4), waiting])
    # (1.4 + 10 s / 5 s) / 0.75
    assert proposal.count == 5
    assert "would wait 5.00 s" in proposal.reason


def test_missed_promises_count_as_demand_that_was_not_served():
    looks = steady(num_ready=2, demand=1.6, num_kept=60.0, num_missed=40.0)
    proposal = proposed(Promises(section()), looks)
    assert proposal.count == 4  # 1.6 / 0.6 / 0.75
    assert "40.0% of the promises were missed" in proposal.reason


def test_what_an_idle_fleet_misses_needs_no_more_replicas():
    looks = steady(num_ready=4, demand=0.2, num_kept=1.0, num_missed=1.0)
    assert proposed(Promises(section()), looks).count == 1


def test_a_full_kv_cache_calls_for_more():
    proposal = proposed(Promises(section()), steady(num_ready=4, demand=1.0, kv_utilization=0.99))
    assert proposal.count == 5
    assert "99% of the KV cache" in proposal.reason


def test_requests_that_are_held_call_for_one_more_and_for_no_second_one_while_it_is_coming():
    held = steady(num_ready=2, demand=0.5, num_held=3)
    assert proposed(Promises(section()), held).count == 3
    assert proposed(Promises(section()), [look(0.0, 2, demand=0.5, num_held=3, num_coming=1)]).count == 3


def test_a_prompt_that_waits_for_a_place_on_an_idle_device_calls_for_one_more():
    waiting = steady(num_ready=1, demand=0.02, queue_seconds=4.5)
    proposal = proposed(Promises(section()), waiting)
    assert proposal.count == 2
    assert "would wait 4.50 s for a place" in proposal.reason


def test_replicas_stay_while_fewer_would_have_too_few_places():
    policy = Promises(section())
    policy.propose(look(0.0, 1, demand=0.02, num_running=2.0, num_requests=2.0, num_held=6))
    assert policy.propose(look(1.0, 2, demand=0.02, num_running=4.0, num_requests=4.0)).count == 2
    assert policy.propose(look(2.0, 2, demand=0.02, num_running=2.0, num_requests=2.0)).count == 1


def test_places_that_a_replica_turns_out_to_have_count():
    policy = Promises(section())
    policy.propose(look(0.0, 2, demand=0.02, num_running=2.0, num_requests=2.0, num_held=6))
    policy.propose(look(1.0, 2, demand=0.02, num_running=80.0, num_requests=80.0))
    assert policy.propose(look(2.0, 2, demand=0.02, num_running=40.0, num_requests=40.0)).count == 1


def test_promises_broken_below_the_stated_utilization_lower_it():
    policy = Promises(section(target_utilization=0.8))
    for second in range(60):
        policy.propose(look(float(second), 4, demand=2.4, num_kept=90.0, num_missed=10.0))
    for second in range(60, 80):
        after = policy.propose(look(float(second), 4, demand=2.4, num_kept=100.0))
    assert after.count > 3  # 2.4 / 0.8 would be 3


def test_promises_kept_near_the_stated_utilization_raise_it():
    policy = Promises(section(target_utilization=0.7))
    for second in range(200):
        proposal = policy.propose(look(float(second), 3, demand=2.2, num_kept=100.0))
    assert proposal.count == 3  # 2.2 / 0.7 would be 4


def test_the_queue_length_rule_divides_requests_among_replicas():
    policy = QueueLength(section(requests_per_replica=10))
    assert policy.propose(look(num_ready=2, num_requests=45.0, num_held=3)).count == 5
    assert policy.propose(look(num_ready=4, num_requests=8.0)).count == 1


def test_the_queue_length_rule_leaves_a_fleet_that_is_nearly_right():
    policy = QueueLength(section(requests_per_replica=10))
    assert policy.propose(look(num_ready=4, num_requests=43.0)).count == 4
    assert policy.propose(look(num_ready=4, num_requests=45.0)).count == 5
