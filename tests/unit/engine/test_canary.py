"""The canary: a changed block in the cache is noticed, told, and never served again."""

import dataclasses

import numpy as np
import pytest

from penstock.engine.canary import Canary
from penstock.engine.messages import Submit
from penstock.request import SamplingParams
from tests.tiny_engine import engine_of, load_tiny


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(tiny):
    engine = engine_of(tiny)
    yield engine
    engine.runner.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def canary(engine, clock):
    canary = Canary(engine, 60.0, clock)
    clock.now += 61
    ask(canary, engine)  # computed
    ask(canary, engine)  # from the cache
    return canary


def ask(canary, engine):
    """Let it ask if it wants to; return the events that are not its own."""
    canary.tick()
    others = []
    while engine.has_work:
        others += canary.sift(engine.step())
    return others


def corrupt(engine, blocks):
    """Turn the keys and values of some blocks around, in each of which nothing looks broken."""
    contents = [np.frombuffer(content, np.float32)[::-1] * 3 for content in engine.runner.read_blocks(blocks)]
    engine.runner.write_blocks(blocks, [content.tobytes() for content in contents])


def test_the_same_answer_from_the_cache_is_no_fault(engine, canary, clock):
    for _ in range(3):
        clock.now += 61
        assert ask(canary, engine) == []
    assert (canary.fault, canary.num_failures) == (None, 0)
    assert engine.metrics.prefix_hit_tokens == 4 * 32


def test_it_asks_only_when_it_is_time_to(engine, canary, clock):
    steps = engine.metrics.num_steps
    clock.now += 59
    ask(canary, engine)
    assert engine.metrics.num_steps == steps


@pytest.mark.parametrize("which", [0, 1])
def test_a_corrupted_block_is_caught(engine, canary, clock, which, caplog):
    corrupt(engine, [canary.find_blocks()[which]])
    clock.now += 61
    ask(canary, engine)
    assert canary.num_failures == 1
    assert "known prompt" in canary.fault
    assert "known prompt" in caplog.text


def test_a_caught_corruption_empties_the_prefix_cache(engine, canary, clock):
    prompt = list(range(40))
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

    def cached_tokens(name):
        engine.submit(Submit(request_id=name, prompt=prompt, params=params, arrival=0.0), b"caller")
        return ask(canary, engine)[0][1].num_cached_tokens

    assert cached_tokens("first") == 0
    assert cached_tokens("second") == 32
    corrupt(engine, canary.find_blocks())
    clock.now += 61
    ask(canary, engine)
    assert engine.scheduler.cache.pool.num_named == 0
    assert cached_tokens("third") == 0


def test_the_fault_ends_with_the_next_right_answer(engine, canary, clock):
    corrupt(engine, canary.find_blocks())
    clock.now += 61
    ask(canary, engine)
    clock.now += 0.5
    ask(canary, engine)
    assert canary.fault is not None
    clock.now += 1.0
    ask(canary, engine)
    assert (canary.fault, canary.num_failures) == (None, 1)


def test_a_refusal_teaches_nothing(engine, canary, clock):
    engine.scheduler.config = dataclasses.replace(engine.scheduler.config, max_waiting=-100)
    clock.now += 61
    ask(canary, engine)
    assert (canary.fault, canary.num_failures) == (None, 0)


def test_failing_with_a_neighbour_once_is_no_fault_but_failing_on_is(engine, canary, clock, monkeypatch):
    monkeypatch.setattr(engine.runner._model, "forward", None)  # every step raises
    faults = []
    for _ in range(3):
        clock.now += 61
        ask(canary, engine)
        faults.append(canary.fault is not None)
    assert faults == [False, False, True]


def test_other_requests_events_pass_through(engine, canary, clock):
    clock.now += 61
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    engine.submit(Submit(request_id="a", prompt=[1, 2], params=params, arrival=0.0), b"caller")
    others = ask(canary, engine)
    assert [client for client, _ in others] == [b"caller"] * 3
