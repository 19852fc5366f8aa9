"""Client and engine process over a real Unix socket, with the fake model behind the real scheduler."""

import asyncio
import contextlib
import os
import threading
import time
import tracemalloc

import pytest
import zmq
import zmq.asyncio

from penstock.child_setup import decode_setup, encode_setup
from penstock.config import gather
from penstock.engine.builder import BuiltEngine
from penstock.engine.client import EngineClient, TokenStream
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.memory_plan import MemoryPlan
from penstock.engine.messages import (
    ArrivedEvents,
    EngineInfo,
    Events,
    Hello,
    TokenEvent,
    TokenLogprob,
    decode_from_engine,
    encode,
)
from penstock.engine.process import EngineProcess
from penstock.engine.setup import EngineSetup
from penstock.engine.timeline import Timeline
from penstock.errors import EngineFailed, EngineUnavailable, Overloaded
from penstock.fleet.cached_blocks import CachedBlocks
from penstock.models.spec import LayerSpec, ModelSpec, RopeSpec
from penstock.models.store import ModelFiles
from penstock.protocol.block_events import BlockChanges, BlockSnapshot
from penstock.request import FinishReason, SamplingParams
from tests.fakes.fake_runner import expected_tokens
from tests.unit.engine.test_scheduler import BLOCK, VOCAB, make_engine, submit

SPEC = ModelSpec(
    family="llama", vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8,
    max_position=64, norm_eps=1e-5, layers=(LayerSpec(),), ropes=(RopeSpec(theta=1e4, rotary_dim=8),),
)  # fmt: skip
CONFIG = EngineConfig(
    memory=MemoryPlan(
        device="none",
        free_bytes=0,
        weight_bytes=0,
        kv_bytes=0,
        workspace_bytes=0,
        graph_bytes=0,
        block_tokens=16,
        num_blocks=0,
        max_context_tokens=64,
        max_running=4,
    ),
    device="cpu", threads=1, precision="auto", dtype="float32", attention_backend="reference", max_context_tokens=64,
    max_running=4, max_step_tokens=16, max_waiting=10, block_tokens=BLOCK, num_blocks=33, num_host_slots=0,
    prefix_cache=True, speculative="none", draft_tokens=0,
)  # fmt: skip


class RunningEngine:
    """An engine process's loop in a thread."""

    def __init__(self, path, use_idle_moment=lambda: False):
        self.engine = make_engine(vocab_size=VOCAB, max_waiting=10)
        self.engine.runner.use_idle_moment = use_idle_moment
        built = BuiltEngine(self.engine, CONFIG, SPEC, [])
        timeline = Timeline(time.monotonic())
        self.process = EngineProcess(built, str(path), timeline, parent_pid=os.getppid())
        self.thread = threading.Thread(target=self.process.run)
        self.thread.start()

    def stop(self):
        self.process.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def running(tmp_path):
    engine = RunningEngine(tmp_path / "engine.sock")
    yield engine
    engine.stop()


@contextlib.asynccontextmanager
async def connected(folder, identity):
    """A worker's connection to the engine in a folder."""
    client = await EngineClient.connect(str(folder / "engine.sock"), identity)
    await asyncio.wait_for(client.wait_ready(), 20)
    yield client
    await client.close()


@pytest.fixture
async def client(running, tmp_path):
    async with connected(tmp_path, b"worker-0") as client:
        yield client


def ask(client, name="a", prompt=(1, 2, 3), terms=None, **params):
    params.setdefault("max_tokens", 8)
    params.setdefault("ignore_eos", True)
    return client.submit(
        prompt=list(prompt),
        params=SamplingParams(seed=1, **params),
        request_id=name,
        arrival=time.monotonic(),
        **(terms or {}),
    )


async def collect(stream):
    events = [event async for event in stream]
    return [token for event in events for token in event.token_ids], events[-1]


async def settled(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never came true")


async def test_tokens_arrive_in_order_and_end_once(client):
    tokens, last = await collect(ask(client))
    assert tokens == expected_tokens([1, 2, 3], 1, VOCAB, 8)
    assert last.finish is FinishReason.LENGTH


async def test_many_requests_at_once_each_get_their_own_tokens(client):
    streams = [ask(client, f"r{i}", [i, 1, 2]) for i in range(10)]
    for index, (tokens, _) in enumerate(await asyncio.gather(*map(collect, streams))):
        assert tokens == expected_tokens([index, 1, 2], 1, VOCAB, 8)


async def test_events_that_wait_together_are_merged(client):
    stream = ask(client)
    await settled(lambda: stream.num_waiting_tokens == 8)
    events = [event async for event in stream]
    assert len(events) == 1
    assert len(events[0].token_ids) == 8


def arrived(*token_ids, finish=None, error=None):
    """An event as it comes from the engine, with a log-probability for each token."""
    event = TokenEvent(request_id="a", token_ids=list(token_ids), finish=finish, error=error)
    event.logprobs = [TokenLogprob(token_id, -0.5, [token_id, 0], [-0.5, -1.0]) for token_id in token_ids]
    message = decode_from_engine(encode(Events([event])))
    assert isinstance(message, ArrivedEvents)
    return message.events[0]


async def test_a_reader_takes_no_more_tokens_than_it_wants_to(client):
    stream = TokenStream(client, "a")
    for event in (arrived(1, 2), arrived(3), arrived(4, 5, 6), arrived(7, finish=FinishReason.LENGTH)):
        stream.push(event)
    taken = []
    while stream.has_more:
        taken.append(stream.take(3))
    # The third event comes whole, as each does.
    assert [event.token_ids for event in taken] == [[1, 2, 3], [4, 5, 6], [7]]
    assert [[score.top for score in event.logprobs] for event in taken[1:]] == [
        [[(token_id, -0.5), (0, -1.0)] for token_id in token_ids] for token_ids in ([4, 5, 6], [7])
    ]
    assert [event.finish for event in taken] == [None, None, FinishReason.LENGTH]
    assert stream.take(3) is None


async def test_an_error_comes_behind_the_tokens_that_were_made_before_it(client):
    stream = TokenStream(client, "a")
    for event in (arrived(1), arrived(2, 3), arrived(finish=FinishReason.ERROR, error="late")):
        stream.push(event)
    taken = [stream.take(), stream.take()]
    assert [(event.token_ids, event.error) for event in taken] == [([1, 2, 3], None), ([], "late")]
    assert not stream.has_more


@pytest.mark.parametrize(("scored", "most_bytes"), [(False, 16), (True, 320)])
async def test_what_waits_for_a_reader_takes_little_memory(client, scored, most_bytes):
    stream, num_tokens = TokenStream(client, "a"), 4000
    tracemalloc.start()
    try:
        for token_id in range(num_tokens):
            event = TokenEvent(request_id="a", token_ids=[token_id + 1000])
            event.logprobs = [TokenLogprob(token_id, -0.5, [0, 1], [-0.5, -1.0])] if scored else None
            of_another = TokenEvent(request_id="b", token_ids=[1] * 1000)
            message = decode_from_engine(encode(Events([event, of_another])))
            assert isinstance(message, ArrivedEvents)
            stream.push(message.events[0])
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes <= most_bytes * num_tokens
    taken = stream.take()
    assert taken.token_ids == list(range(1000, 1000 + num_tokens))
    assert (len(taken.logprobs) if scored else taken.logprobs) == (num_tokens if scored else None)


async def test_a_reader_that_is_behind_is_told_of_the_prompt_first_and_of_the_end_last(client):
    stream = TokenStream(client, "a")
    first, last = arrived(1, 2), arrived(finish=FinishReason.ERROR)
    first.num_cached_tokens, last.error_code = 5, "engine_failed"
    for event in (first, arrived(3), last):
        stream.push(event)
    taken = [stream.take(2), stream.take(2), stream.take(2)]
    assert [event.num_cached_tokens for event in taken] == [5, 0, 0]
    assert [event.finish for event in taken] == [None, None, FinishReason.ERROR]
    assert [event.error_code for event in taken] == [None, None, "engine_failed"]
    assert not stream.has_more


async def test_who_listens_is_told_of_what_came_before_and_of_the_engines_end(client):
    stream, calls = TokenStream(client, "a"), []
    stream.push(arrived(1))
    stream.listen(lambda: calls.append(stream.has_more))
    stream.fail(EngineFailed("gone"))
    assert calls == [True, True]
    assert stream.take(8).token_ids == [1]
    with pytest.raises(EngineFailed):
        stream.take(8)
    assert not stream.has_more


async def test_an_abort_ends_the_stream_and_frees_its_blocks(client, running):
    running.engine.runner.launch = _slowly(running.engine.runner.launch)
    stream = ask(client, max_tokens=60)
    await anext(stream)
    stream.abort()
    _, last = await collect(stream)
    assert last.finish is FinishReason.ABORT
    await settled(lambda: running.engine.scheduler.cache.pool.num_held == 0)


async def test_a_full_queue_is_told_as_an_event(client, running):
    running.engine.runner.launch = _slowly(running.engine.runner.launch)  # or those that came first may have ended
    streams = [ask(client, f"r{i}", max_tokens=20) for i in range(40)]
    ends = [last for _, last in await asyncio.gather(*map(collect, streams))]
    refused = [last for last in ends if last.error_code == "overloaded"]
    assert refused
    assert all(last.retry_after_seconds for last in refused)


async def test_a_crowd_that_is_refused_does_not_keep_those_that_run_from_their_steps(client, running):
    engine, sent, turns = running.engine, threading.Event(), []
    step, submit = engine.step, engine.submit

    def wait_and_step():
        sent.wait(5)
        turns.append(0)
        return step()

    def submit_and_count(message, name):
        refusals = submit(message, name)
        turns[-1:] = [turns[-1] + len(refusals)] if turns else []
        return refusals

    engine.step, engine.submit = wait_and_step, submit_and_count
    running_one = ask(client, "runs", max_tokens=30)
    await settled(lambda: engine.has_work)
    crowd = [ask(client, f"r{index}", [VOCAB], max_tokens=1) for index in range(200)]
    sent.set()
    ends = [last for _, last in await asyncio.gather(*map(collect, crowd))]
    tokens, _ = await collect(running_one)
    assert all(last.error_code is not None for last in ends) and len(tokens) == 30
    assert sum(turns) == 200 and max(turns) <= 16


async def test_whoever_knows_the_engine_knows_its_figures(client):
    assert client.stats_age_seconds < 60
    assert client.stats.num_blocks == 32


async def test_stats_come_by_themselves(client):
    await settled(lambda: client.stats_age_seconds < 1)
    await collect(ask(client))
    await settled(lambda: client.stats.generated_tokens >= 8)
    assert client.stats.num_blocks == 32


async def test_a_lost_engine_fails_open_streams_and_a_new_one_is_found(tmp_path):
    path = tmp_path / "engine.sock"
    first = RunningEngine(path)
    client = await EngineClient.connect(str(path), b"worker-0")
    epoch = (await asyncio.wait_for(client.wait_ready(), 20)).epoch
    first.engine.scheduler.next_step = lambda: __import__("time").sleep(0.05) or type("P", (), {"has_work": False})()
    stream = ask(client)
    first.stop()
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(collect(stream), 20)
    with pytest.raises(EngineUnavailable):
        ask(client, "b")
    second = RunningEngine(path)
    try:
        assert (await asyncio.wait_for(client.wait_ready(), 20)).epoch != epoch
        tokens, _ = await collect(ask(client, "c"))
        assert tokens == expected_tokens([1, 2, 3], 1, VOCAB, 8)
    finally:
        await client.close()
        second.stop()


async def test_a_call_that_is_left_keeps_no_places_though_its_first_answer_has_ended(client):
    terms = {"call_prompts": [3], "call_answers": client.info.max_open_requests}
    await collect(ask(client, "a", terms=terms))
    _, last = await collect(ask(client, "b", terms=terms))
    assert last.error_code == Overloaded.code
    client.leave_call("a")
    _, last = await collect(ask(client, "c", terms=terms))
    assert last.error_code is None


async def test_a_goodbye_drops_another_clients_requests(client, running, tmp_path):
    other = await EngineClient.connect(str(tmp_path / "engine.sock"), b"worker-1")
    await asyncio.wait_for(other.wait_ready(), 20)
    running.engine.runner.launch = _slowly(running.engine.runner.launch)
    ask(other, max_tokens=60)
    await settled(lambda: running.engine.scheduler.running)
    client.say_goodbye(b"worker-1")
    await settled(lambda: not running.engine.scheduler.requests)
    assert running.engine.scheduler.cache.pool.num_held == 0
    await other.close()


async def test_what_a_client_had_sent_is_dropped_though_it_comes_behind_the_word_that_it_is_gone(
    client, running, tmp_path
):
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as killed:
        killed.setsockopt(zmq.IDENTITY, b"worker-1")
        killed.connect(f"ipc://{tmp_path / 'engine.sock'}")

        async def say_hello():
            await killed.send(encode(Hello()))
            while not isinstance(decode_from_engine(await asyncio.wait_for(killed.recv(), 20)), EngineInfo):
                pass

        await say_hello()
        client.say_goodbye(b"worker-1")
        await collect(ask(client, prompt=(1, 2)))
        for name in ("a", "b"):
            await killed.send(encode(submit(name, [1, 2, 3], max_tokens=60, ignore_eos=True)))
        await say_hello()  # answered behind them
        assert running.engine.metrics.prompt_tokens == 2


async def test_a_prefix_travels_from_one_engine_to_another(client, tmp_path):
    prompt = list(range(20, 41))
    await collect(ask(client, prompt=prompt))
    blocks = await client.export_prefix(prompt, request_id="x")
    assert len(blocks) == 5
    second = RunningEngine(tmp_path / "second.sock")
    other = await EngineClient.connect(str(tmp_path / "second.sock"), b"worker-0")
    try:
        await asyncio.wait_for(other.wait_ready(), 20)
        assert await other.import_prefix(prompt, blocks, request_id="y") == 20
        tokens, _ = await collect(ask(other, prompt=prompt))
        assert tokens == expected_tokens(prompt, 1, VOCAB, 8)
        assert second.engine.metrics.prefix_hit_tokens == 20
    finally:
        await other.close()
        second.stop()


def _slowly(launch):
    def slow(plan):
        time.sleep(0.02)
        return launch(plan)

    return slow


def test_options_reach_the_engine_process_unchanged(tmp_path):
    sourced = gather({"port": 9000, "max_running": 3}, environ={})
    setup = EngineSetup(
        options=sourced.options, sources=dict(sourced.sources), files=ModelFiles("m", "gguf", tmp_path / "m.gguf"),
        socket_path="s", log_format="text", parent_pid=1, started=1.0,
    )  # fmt: skip
    assert decode_setup(encode_setup(setup), EngineSetup) == setup


async def test_idle_moments_are_used_until_nothing_is_left_to_do(tmp_path):
    left = [True, True, False]  # asked once more, the engine would end
    running = RunningEngine(tmp_path / "engine.sock", use_idle_moment=lambda: left.pop(0))
    await settled(lambda: not left)
    client = await EngineClient.connect(str(tmp_path / "engine.sock"), b"worker-0")
    await asyncio.wait_for(client.wait_ready(), 20)
    tokens, _ = await collect(ask(client))
    assert len(tokens) == 8
    await client.close()
    running.stop()


async def test_a_step_that_ends_sooner_than_foreseen_is_settled_at_once(running, client, monkeypatch):
    running.process._looks = True  # as for any device but a CPU
    far = property(lambda engine: 0.0 if engine._in_flight is None else time.monotonic() + 60.0)
    monkeypatch.setattr(Engine, "launch_due", far)
    tokens, _ = await asyncio.wait_for(collect(ask(client)), 20)
    assert len(tokens) == 8


async def test_blocks_are_told_over_the_socket_while_somebody_watches(client):
    told: asyncio.Queue[BlockSnapshot | BlockChanges | None] = asyncio.Queue()
    client.on_blocks = told.put_nowait
    client.watch_blocks()
    snapshot = await asyncio.wait_for(told.get(), 20)
    assert isinstance(snapshot, BlockSnapshot)
    blocks = CachedBlocks(snapshot)
    events = [event async for event in ask(client, prompt=range(4 * BLOCK))]
    note = next(event.prompt for event in events if event.token_ids)
    assert note is not None and note.num_tokens == 4 * BLOCK
    while not all(name in blocks for name in note.names):
        changes = await asyncio.wait_for(told.get(), 20)
        assert isinstance(changes, BlockChanges)
        blocks.apply(changes)
    client.leave_blocks()
    assert all([event.prompt is None async for event in ask(client, "b")])
