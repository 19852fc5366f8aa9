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
    ask(canary, engine)  # runs the prompt and remembers its blocks
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


def test_blocks_that_stay_are_no_fault_and_cost_no_step(engine, canary, clock):
    steps = engine.metrics.num_steps
    for _ in range(3):
        clock.now += 61
        assert ask(canary, engine) == []
    assert (canary.fault, canary.num_failures) == (None, 0)
    assert engine.metrics.num_steps == steps


def test_blocks_given_to_others_are_computed_and_remembered_anew(engine, canary, clock):
    engine.scheduler.cache.forget_all()
    steps = engine.metrics.num_steps
    clock.now += 61
    ask(canary, engine)
    assert engine.metrics.num_steps > steps
    corrupt(engine, canary.find_blocks())
    clock.now += 61
    ask(canary, engine)
    assert canary.num_failures == 1


def test_another_rounding_of_the_same_prompt_is_no_fault(engine, canary, clock, monkeypatch):
    # As where a prompt runs beside others in one step, and alone the next time.
    forward = engine.runner._model.forward
    monkeypatch.setattr(engine.runner._model, "forward", lambda *arguments: forward(*arguments).mul_(1.01))
    engine.scheduler.cache.forget_all()
    for _ in range(3):
        clock.now += 61
        ask(canary, engine)
    assert (canary.fault, canary.num_failures) == (None, 0)


@pytest.mark.parametrize("which", [0, 1])
def test_a_corrupted_block_is_caught(engine, canary, clock, which, caplog):
    corrupt(engine, [canary.find_blocks()[which]])
    clock.now += 61
    ask(canary, engine)
    assert canary.num_failures == 1
    assert "nobody wrote" in canary.fault
    assert "nobody wrote" in caplog.text


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


def test_the_fault_ends_when_a_look_finds_what_it_should(engine, canary, clock):
    corrupt(engine, canary.find_blocks())
    clock.now += 61
    ask(canary, engine)
    clock.now += 0.5
    ask(canary, engine)
    assert canary.fault is not None
    clock.now += 1.0
    ask(canary, engine)  # computed anew
    assert canary.fault is not None
    clock.now += 1.0
    ask(canary, engine)
    assert (canary.fault, canary.num_failures) == (None, 1)


def test_a_refusal_teaches_nothing(engine, canary, clock):
    engine.scheduler.config = dataclasses.replace(engine.scheduler.config, max_waiting=-100)
    engine.scheduler.cache.forget_all()
    clock.now += 61
    ask(canary, engine)
    assert (canary.fault, canary.num_failures) == (None, 0)


def test_failing_with_a_neighbour_once_is_no_fault_but_failing_on_is(engine, canary, clock, monkeypatch):
    monkeypatch.setattr(engine.runner._model, "forward", None)  # every step raises
    engine.scheduler.cache.forget_all()
    faults = []
    for _ in range(3):
        clock.now += 61
        ask(canary, engine)
        faults.append(canary.fault is not None)
    assert faults == [False, False, True]


def test_other_requests_events_pass_through(engine, canary, clock):
    engine.scheduler.cache.forget_all()
    clock.now += 61
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    engine.submit(Submit(request_id="a", prompt=[1, 2], params=params, arrival=0.0), b"caller")
    others = ask(canary, engine)
    assert [client for client, _ in others] == [b"caller"] * 3
