"""Each policy chooses as it says, and every one only among the candidates."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.adapters.registry import ADAPTERS
from penstock.fleet.router.policies.adapter_affinity import AdapterAffinity
from penstock.fleet.router.policies.least_loaded import LeastLoaded
from penstock.fleet.router.policies.power_of_two import PowerOfTwo
from penstock.fleet.router.policies.registry import POLICIES
from penstock.fleet.router.policies.round_robin import RoundRobin
from penstock.fleet.router.policies.session_affinity import SessionAffinity
from tests.unit.fleet.conftest import make_query, make_replica


@pytest.mark.parametrize("name", POLICIES.names)
@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=6), text=st.text(max_size=20))
def test_the_choice_is_a_candidate_and_has_a_reason(name, loads, text):
    replicas = [make_replica(number, load) for number, load in enumerate(loads)]
    policy = POLICIES.load(name)()
    for _ in range(3):
        choice = policy.choose(make_query(prompt=text), replicas)
        assert choice.replica in replicas
        assert choice.reason and ";" not in choice.reason


def test_round_robin_gives_everybody_a_turn():
    replicas = [make_replica(number, running=number) for number in range(3)]
    policy = RoundRobin()
    chosen = collections.Counter(policy.choose(make_query(), replicas).replica.name for _ in range(9))
    assert set(chosen.values()) == {3}


def test_least_loaded_takes_the_one_with_the_fewest_requests():
    replicas = [make_replica(0, 3), make_replica(1, 1), make_replica(2, 2)]
    assert LeastLoaded().choose(make_query(), replicas).replica is replicas[1]


def test_requests_sent_since_the_last_probe_count():
    replicas = [make_replica(0, 0), make_replica(1, 1)]
    replicas[0].num_in_flight = 2
    assert LeastLoaded().choose(make_query(), replicas).replica is replicas[1]


def test_idle_replicas_share_what_comes():
    replicas = [make_replica(number) for number in range(3)]
    policy = LeastLoaded()
    assert len({policy.choose(make_query(), replicas).replica.name for _ in range(3)}) == 3


def test_power_of_two_never_takes_the_most_loaded_of_three():
    replicas = [make_replica(0, 9), make_replica(1, 1), make_replica(2, 2)]
    policy = PowerOfTwo(seed=1)
    chosen = {policy.choose(make_query(), replicas).replica.name for _ in range(50)}
    assert chosen == {replicas[1].name, replicas[2].name}


@given(st.text(min_size=1, max_size=10), st.integers(2, 6), st.data())
def test_a_session_stays_when_another_replica_goes(session, count, data):
    replicas = [make_replica(number) for number in range(count)]
    home = SessionAffinity().choose(make_query(session), replicas).replica
    gone = data.draw(st.sampled_from([replica for replica in replicas if replica is not home]))
    left = [replica for replica in replicas if replica is not gone]
    # Another gateway, in another order, thinks the same.
    assert SessionAffinity().choose(make_query(session), left[::-1]).replica is home


def test_a_session_is_what_the_caller_names_or_how_the_conversation_began():
    first = {"role": "user", "content": "tell me of rivers"}
    system = {"role": "system", "content": "be kind"}
    later = {"role": "user", "content": "and now of lakes"}
    begun, grown = make_query(messages=[system, first]), make_query(messages=[system, first, later])
    assert begun.session == grown.session
    assert make_query(messages=[system, later]).session != begun.session
    assert make_query(messages=[later], user="u1").session == make_query(messages=[first], user="u1").session == "u1"
    assert make_query("named", user="u1").session == "named"


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("input", "a text", "another"),
        ("input", ["a text", "and more"], ["another", "and more"]),
        ("input", [{"role": "user", "content": "hello"}], [{"role": "user", "content": "good day"}]),
        ("input", [1, 2], [1, 3]),
        ("prompt", [[1, 2], [3]], [[1, 3], [3]]),
    ],
)
def test_whatever_a_prompt_is_called_and_made_of_another_is_another_session(name, one, other):
    assert make_query(**{name: one}).session == make_query(**{name: one}).session
    assert make_query(**{name: one}).session != make_query(**{name: other}).session


def test_tenants_with_equal_sessions_do_not_move_together():
    replicas = [make_replica(number) for number in range(8)]
    policy = SessionAffinity()
    homes = {policy.choose(make_query("s", tenant=f"t{number}"), replicas).replica.name for number in range(40)}
    assert len(homes) > 1


def test_an_overloaded_replica_passes_its_sessions_on():
    replicas = [make_replica(number) for number in range(3)]
    policy = SessionAffinity()
    home = policy.choose(make_query("s"), replicas).replica
    home.num_in_flight = 50
    chosen = policy.choose(make_query("s"), replicas)
    assert chosen.replica is not home
    assert chosen.reason == "the session's replica no. 2"


def test_an_adapter_lives_on_few_replicas_and_takes_the_freer_one():
    replicas = [make_replica(number) for number in range(6)]
    policy = AdapterAffinity()
    homes = set()
    for _ in range(10):
        chosen = policy.choose(make_query(adapter="legal"), replicas).replica
        chosen.num_in_flight += 1
        homes.add(chosen.name)
    assert len(homes) == 2


def test_an_adapter_that_everybody_asks_for_comes_to_live_on_more_replicas():
    replicas = [make_replica(number) for number in range(8)]
    policy = AdapterAffinity()
    for number in range(160):
        name = "rare" if number % 20 == 0 else "hot"
        policy.choose(make_query(adapter=name), replicas).replica.num_in_flight += 1
    # Twice the mean is what a replica may have, and one more that was on its way.
    assert max(replica.num_in_flight for replica in replicas) <= 2 * 160 / 8 + 1


@pytest.mark.parametrize(
    "fields",
    [{"adapter": "legal"}, {"lora_path": "legal"}, {"adapter_id": "legal"}, {"adapter": "", "lora_path": "legal"}],
)
def test_an_adapter_is_known_by_whichever_name_a_server_has_for_it(fields):
    replicas = [make_replica(number) for number in range(6)]
    first = AdapterAffinity().choose(make_query(adapter="legal"), replicas)
    chosen = AdapterAffinity().choose(make_query(**fields), replicas)
    assert chosen.replica is first.replica and chosen.reason == first.reason
    assert make_query(prompt="a" * 300, **fields).prefix_hashes != make_query(prompt="a" * 300).prefix_hashes


@pytest.mark.parametrize("odd", [["a", None], {"a": 1}, 7, None, ""])
def test_what_is_no_adapters_name_is_for_the_server_to_refuse(odd):
    assert make_query(lora_path=odd, adapter_id=odd).adapter == ""


def test_a_model_that_replicas_list_as_an_adapter_is_one():
    listed = (
        b'{"data": [{"id": "tiny", "parent": "base"}, {"id": "base", "parent": null}, {"id": "odd", "parent": "odd"}]}'
    )
    models = ADAPTERS.load("vllm").models(listed)
    assert [model.is_adapter for model in models] == [True, False, False]
    replicas = [make_replica(number) for number in range(6)]
    for replica in replicas:
        replica.models = models
    policy, homes = AdapterAffinity(), set()
    for _ in range(10):
        chosen = policy.choose(make_query(), replicas)  # of the model tiny
        chosen.replica.num_in_flight += 1
        homes.add(chosen.replica.name)
    assert len(homes) == 2 and "adapter" in chosen.reason


def test_equal_beginnings_have_equal_hashes_and_tenants_share_none():
    text = "a" * 700
    one, other = make_query(prompt=text), make_query(prompt=text[:600] + "b" * 100)
    assert len(one.prefix_hashes) == 2
    assert one.prefix_hashes[:2] == other.prefix_hashes[:2]
    assert make_query(prompt=text, tenant="b").prefix_hashes[0] != one.prefix_hashes[0]
    assert len(make_query(prompt=list(range(130))).prefix_hashes) == 2
