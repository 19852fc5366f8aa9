"""Our policies behind Ray Serve's request router, without a cluster."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'penstock[ray]'")

from penstock.deploy.ray_serve.request_router import PolicyRouter, query_of


def running(name, **stats):
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name),
        replica_metadata={"url": f"http://{name}:80"},
        routing_stats=stats,
    )


def pending(*arguments, session="", name="request", **named):
    metadata = SimpleNamespace(session_id=session, internal_request_id=name)
    return SimpleNamespace(args=list(arguments), kwargs=named, metadata=metadata)


def make_router(policy="least-loaded"):
    router = PolicyRouter.__new__(PolicyRouter)  # what its base makes belongs to a running Serve
    router.initialize_state(policy=policy)
    return router


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


def replicas(*loads):
    found = []
    for number, load in enumerate(loads):
        item = running(f"replica-{number}", num_running=float(load))
        item.replica_id = Hashable(unique_id=f"replica-{number}")
        found.append(item)
    return found


async def test_the_policys_choice_comes_first_and_the_others_behind_it():
    busy, idle = replicas(5, 1)
    assert await make_router().choose_replicas([busy, idle], pending({})) == [[idle], [busy]]


async def test_requests_on_their_way_count():
    first, second = replicas(0, 0)
    router = make_router()
    for _ in range(3):
        ((chosen,), _) = await router.choose_replicas([first, second], pending({}))
        router.on_request_routed(pending({}), first.replica_id, None)
    assert chosen is second
    for _ in range(3):
        router.on_request_completed(first.replica_id, "request")
    router.on_request_routed(pending({}), second.replica_id, None)
    assert (await router.choose_replicas([first, second], pending({})))[0] == [first]


async def test_a_policy_learns_when_requests_have_ended():
    (only,) = replicas(0)
    router = make_router("kv-aware")

    async def prompts_before(name):
        await router.choose_replicas([only], pending({"prompt": "x" * 4000}, name=name))
        return int(router._choices[name].reason.rpartition(", ")[2].partition(" prompts")[0])

    # The policy counts the first choice for "two" until that has ended.
    assert [await prompts_before(name) for name in ("one", "two", "two")] == [0, 1, 2]
    router.on_request_completed(only.replica_id, "one")
    router.on_request_completed(only.replica_id, "two")
    assert await prompts_before("three") == 0
    await router.choose_replicas([only])  # of which nobody would tell the end
    assert await prompts_before("four") == 1


async def test_a_session_stays_where_it_was():
    candidates = replicas(0, 0, 0)
    router = make_router("session-affinity")
    chosen = {
        (await router.choose_replicas(candidates, pending(b"pickled", session="one")))[0][0].replica_id.unique_id
        for _ in range(8)
    }
    assert len(chosen) == 1


async def test_without_candidates_there_is_no_choice():
    assert await make_router().choose_replicas([], pending({})) == []


def test_a_handles_request_is_known_whole():
    query = query_of(pending({"model": "tiny", "prompt": "hello", "user": "someone"}))
    assert (query.model, query.session, query.prompt_text) == ("tiny", "someone", "hello")


def test_a_body_that_is_wrong_is_routed_all_the_same():
    assert query_of(pending({"model": 7})).model == ""


def test_a_proxys_request_is_known_by_its_session():
    assert query_of(pending(b"pickled", session="one")).session == "one"
