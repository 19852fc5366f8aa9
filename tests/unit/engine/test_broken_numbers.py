"""NaN in one request's numbers: that request ends with an error, and nobody else ever meets what it left."""

import math
import struct

import pytest

from penstock.engine.messages import Submit
from penstock.request import FinishReason, SamplingParams
from tests.tiny_engine import engine_of, load_tiny

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
NOT_A_NUMBER = struct.pack("<f", math.nan)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("tiny"))


def submit(name, prompt):
    return Submit(request_id=name, prompt=prompt, params=GREEDY, arrival=0.0)


def drain(engine):
    events = {}
    while engine.has_work:
        for _, event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def tokens_of(events):
    return [token for event in events for token in event.token_ids]


def alone(loaded, prompt):
    engine = engine_of(loaded)
    engine.submit(submit("only", prompt))
    tokens = tokens_of(drain(engine)["only"])
    engine.runner.close()
    return tokens


def poison(engine, name):
    """Write NaN over everything that a running request has in the cache, and return where."""
    (request,) = [request for request in engine.scheduler.running if request.request_id == name]
    blocks = list(request.cache.blocks)
    size = len(engine.runner.read_blocks(blocks[:1])[0])
    engine.runner.write_blocks(blocks, [NOT_A_NUMBER * (size // 4)] * len(blocks))
    return blocks


# Longer than a block, and ending in the midst of one: the rest of that block is masked, not written.
PROMPTS = {"broken": [5, 6, 7] * 7, "neighbour": [9, 8] * 11, "later": [3, 4, 5, 6] * 5}


@pytest.fixture
def engine(tiny):
    # Blocks for no more than two of the requests: a third must reuse what the first had.
    engine = engine_of(tiny, num_blocks=7, max_context_tokens=48, prefix_cache=True)
    yield engine
    engine.runner.close()


def test_only_the_request_with_broken_numbers_fails(tiny, engine):
    engine.submit(submit("broken", PROMPTS["broken"]))
    engine.submit(submit("neighbour", PROMPTS["neighbour"]))
    events = [event for _ in range(4) for _, event in engine.step()]
    poison(engine, "broken")
    later = drain(engine)
    assert later["broken"][-1].finish is FinishReason.ERROR
    assert later["broken"][-1].error_code == "engine_failed"
    neighbour = [event for event in events if event.request_id == "neighbour"] + later["neighbour"]
    assert tokens_of(neighbour) == alone(tiny, PROMPTS["neighbour"])
    assert engine.metrics.num_finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}


def test_blocks_with_broken_numbers_are_wiped_before_their_next_owner(tiny, engine):
    engine.submit(submit("broken", PROMPTS["broken"]))
    for _ in range(4):
        engine.step()
    blocks = poison(engine, "broken")
    drain(engine)
    for number in range(3):  # whatever order blocks are handed out in, these meet all of them
        engine.submit(submit(f"later-{number}", PROMPTS["later"]))
        engine.submit(submit(f"same-{number}", PROMPTS["broken"]))
        found = drain(engine)
        assert tokens_of(found[f"later-{number}"]) == alone(tiny, PROMPTS["later"])
        assert tokens_of(found[f"same-{number}"]) == alone(tiny, PROMPTS["broken"])
    for content in engine.runner.read_blocks(blocks):
        assert not any(math.isnan(value) for (value,) in struct.iter_unpack("<f", content))


def test_a_block_filled_from_elsewhere_is_not_wiped_behind_it(tiny):
    source, target = engine_of(tiny), engine_of(tiny, num_blocks=7, max_context_tokens=48)
    prompt = PROMPTS["neighbour"]
    source.submit(submit("first", prompt))
    expected = tokens_of(drain(source)["first"])
    target.submit(submit("broken", PROMPTS["broken"]))
    for _ in range(4):
        target.step()
    poison(target, "broken")
    drain(target)
    assert target.import_prefix(prompt, source.export_prefix(prompt)) == 16
    target.submit(submit("second", prompt))
    events = drain(target)["second"]
    assert events[0].num_cached_tokens == 16
    assert tokens_of(events) == expected
    for engine in (source, target):
        engine.runner.close()


def test_wipes_of_a_step_that_failed_are_made_by_a_later_one(tiny, engine, monkeypatch):
    engine.submit(submit("broken", PROMPTS["broken"]))
    for _ in range(4):
        engine.step()
    blocks = poison(engine, "broken")
    drain(engine)
    pool = engine.runner._kv_pool
    wipe = pool.wipe
    attempts = []

    def fail_once(blocks):
        attempts.append(blocks)
        if len(attempts) == 1:
            raise MemoryError
        wipe(blocks)

    monkeypatch.setattr(pool, "wipe", fail_once)
    engine.submit(submit("unlucky", [1, 2]))
    assert drain(engine)["unlucky"][-1].finish is FinishReason.ERROR
    engine.submit(submit("later", PROMPTS["later"]))
    assert tokens_of(drain(engine)["later"]) == alone(tiny, PROMPTS["later"])
    contents = b"".join(engine.runner.read_blocks(blocks))
    assert not any(math.isnan(value) for (value,) in struct.iter_unpack("<f", contents))
