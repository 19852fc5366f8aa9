"""What one tenant's prompt leaves in the cache, no other tenant can notice: its steps compute every token again."""

import pytest

from penstock.engine.messages import Submit
from penstock.request import SamplingParams
from tests.unit.engine.test_scheduler import BLOCK, drain, make_engine

PROMPT = list(range(1, 41))  # ten blocks


def serve(engine, tenant, prompt=PROMPT, *, public=0, name=None):
    """Run one request; return (cached tokens told, sizes of the slices that computed the prompt)."""
    planned = len(engine.runner.plans)
    request = Submit(
        request_id=name or f"{tenant}-{planned}",
        prompt=list(prompt),
        params=SamplingParams(max_tokens=2, seed=1, ignore_eos=True),
        arrival=0.0,
        tenant=tenant,
        num_public_tokens=public,
    )
    assert engine.submit(request) == []
    (events,) = drain(engine).values()
    slices = [piece.num_tokens for plan in engine.runner.plans[planned:] for piece in plan.slices]
    return max(event.num_cached_tokens for event in events), slices


@pytest.mark.parametrize("host_slots", [0, 20])
def test_another_tenants_cached_prompt_takes_as_many_steps_as_one_that_nobody_sent(host_slots):
    engine = make_engine(host_slots=host_slots)
    fresh = serve(engine, "alice")
    assert serve(engine, "bob") == fresh == (0, [16, 16, 8, 1])
    cached, slices = serve(engine, "alice")
    assert cached == 36, "alice herself does find it"
    assert slices == [4, 1]


def test_a_guess_of_another_tenants_prompt_token_by_token_finds_nothing():
    engine = make_engine()
    serve(engine, "alice")
    for length in range(BLOCK + 1, len(PROMPT) + 1, BLOCK):
        cached, slices = serve(engine, f"probe-{length}", PROMPT[:length])
        assert cached == 0
        assert sum(slices) == length + 1


def test_a_tenants_answer_is_not_in_anothers_cache_either():
    engine = make_engine()
    request = Submit(
        request_id="a",
        prompt=PROMPT[:8],
        params=SamplingParams(max_tokens=20, seed=1, ignore_eos=True),
        arrival=0.0,
        tenant="alice",
    )
    engine.submit(request)
    answer = [token for event in drain(engine)["a"] for token in event.token_ids]
    whole = PROMPT[:8] + answer
    assert serve(engine, "bob", whole)[0] == 0
    assert serve(engine, "alice", whole)[0] > 8


@pytest.mark.parametrize(("public", "shared"), [(0, 0), (3, 0), (4, 4), (19, 16), (20, 20), (40, 36)])
def test_a_declared_prefix_is_shared_in_whole_blocks_and_nothing_behind_it(public, shared):
    engine = make_engine()
    serve(engine, "alice", public=public)
    cached, slices = serve(engine, "bob", public=public)
    assert cached == shared
    assert sum(slices) == len(PROMPT) - shared + 1
    assert serve(engine, "alice", public=public)[0] == 36, "the rest is still alice's own"


def test_a_prompt_that_leaves_the_declared_prefix_shares_only_what_it_followed():
    engine = make_engine()
    serve(engine, "alice", PROMPT, public=20)
    strays = PROMPT[:10] + [90] * 20
    assert serve(engine, "bob", strays, public=10)[0] == 8


def test_prefixes_exchanged_between_engines_keep_their_tenant():
    engine, other = make_engine(), make_engine()
    serve(engine, "alice", public=8)
    blocks = engine.export_prefix(PROMPT, tenant="alice", num_public_tokens=8)
    assert len(blocks) == 10
    assert engine.export_prefix(PROMPT, tenant="bob") == []
    assert len(engine.export_prefix(PROMPT, tenant="bob", num_public_tokens=8)) == 2
    assert other.import_prefix(PROMPT, blocks, tenant="alice", num_public_tokens=8) == 40
    assert serve(other, "bob", public=8)[0] == 8
    assert serve(other, "alice", public=8)[0] == 36
