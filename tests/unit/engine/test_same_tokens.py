"""The same tokens always: real tensors, any batch, any chunks, hit or miss, preempted or not, drafted or not."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine.messages import Submit
from penstock.request import SamplingParams
from tests.tiny_engine import engine_of, load_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("tiny"))


def run(engine, requests, gaps=()):
    """Submit requests with steps between them; return each one's tokens."""
    tokens = {}
    gaps = dict(enumerate(gaps))

    def step():
        for _, event in engine.step():
            assert event.error is None
            tokens.setdefault(event.request_id, []).extend(event.token_ids)

    for index, (prompt, params) in enumerate(requests):
        engine.submit(Submit(request_id=str(index), prompt=prompt, params=params, arrival=time.monotonic()))
        for _ in range(gaps.get(index, 0)):
            step()
    while engine.has_work:
        step()
    engine.runner.close()
    return [tokens[str(index)] for index in range(len(requests))]


def alone(loaded, request):
    return run(engine_of(loaded, max_running=1, max_step_tokens=96), [request])[0]


REQUEST = st.builds(
    lambda family, shared, own, params: ([(family * 17 + i) % 96 for i in range(shared)] + own, params),
    st.integers(0, 2),
    st.integers(0, 30),
    st.lists(st.integers(0, 95), min_size=1, max_size=20),
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 24),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        top_p=st.sampled_from([1.0, 0.8]),
        top_k=st.sampled_from([0, 5]),
        seed=st.integers(0, 2**63 - 1),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
        min_tokens=st.just(0),
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(REQUEST, st.integers(0, 6)), min_size=1, max_size=10),
    max_running=st.integers(1, 16),
    chunk=st.integers(1, 40),
    num_blocks=st.integers(7, 24),
    host_slots=st.sampled_from([0, 4]),
    prefix_cache=st.booleans(),
    speculative=st.sampled_from(["none", "ngram"]),
)
def test_tokens_do_not_depend_on_the_schedule(
    tiny, requests, max_running, chunk, num_blocks, host_slots, prefix_cache, speculative
):
    engine = engine_of(
        tiny, max_running=max_running, max_step_tokens=max(max_running, chunk), num_blocks=num_blocks,
        num_host_slots=host_slots if prefix_cache else 0, prefix_cache=prefix_cache, speculative=speculative,
    )  # fmt: skip
    asked = [request for request, _ in requests]
    together = run(engine, asked, [gap for _, gap in requests])
    assert together == [alone(tiny, request) for request in asked]


def test_preemption_happens_and_changes_nothing(tiny):
    requests = [([index, 5, 7], SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)) for index in range(6)]
    engine = engine_of(tiny, max_running=6, max_step_tokens=32, num_blocks=13)
    engine.scheduler.placement.lengths.mean_tokens = 0.0
    metrics = engine.metrics
    together = run(engine, requests)
    assert metrics.num_preemptions > 0
    assert together == [alone(tiny, request) for request in requests]


def test_a_prefill_engine_hands_its_work_to_a_decode_engine(tiny):
    prompt = [(7 * i) % 96 for i in range(50)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prefill = engine_of(tiny, role="prefill")
    assert len(run_open(prefill, prompt, params)) == 1
    blocks = prefill.export_prefix(prompt)
    assert len(blocks) == 3
    decode = engine_of(tiny)
    assert decode.import_prefix(prompt, blocks) == 48
    assert run_open(decode, prompt, params) == alone(tiny, (prompt, params))
    assert decode.metrics.prefix_hit_tokens == 48
    assert decode.import_prefix(prompt, blocks) == 48, "importing again changes nothing"
    assert decode.scheduler.cache.pool.num_held == 0
    for engine in (prefill, decode):
        engine.runner.close()


def run_open(engine, prompt, params):
    """Run one request and leave the engine open."""
    engine.submit(Submit(request_id="a", prompt=prompt, params=params, arrival=time.monotonic()))
    tokens = []
    while engine.has_work:
        for _, event in engine.step():
            tokens += event.token_ids
    return tokens


def test_a_seed_gives_the_same_sample_and_another_seed_another(tiny):
    def sample(seed):
        return alone(tiny, ([1, 2, 3], SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)))

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)
