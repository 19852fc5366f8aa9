"""/block_events and the note of a prompt: what gateways learn of the cache."""

import asyncio
import hashlib

import httpx
import pytest

from penstock.engine.messages import TokenEvent
from penstock.protocol.block_events import BlockChanges, BlockSnapshot, KeepAlive, MessageReader, pack
from penstock.protocol.prompt_note import PROMPT_HEADER, PromptNote, decode_note
from penstock.server.block_feed import BlockFeed
from penstock.tenants import ApiKey
from tests.fakes.fake_engine import FakeEngine, Step, Submitted
from tests.fakes.tiny_tokenizer import make_tokenizer
from tests.unit.server.conftest import Service, running_service

SNAPSHOT = BlockSnapshot(3, 16, pack([1, 2]))
CHANGES = [BlockChanges(number, stored=pack([number])) for number in (4, 5)]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(make_tokenizer())


async def started(feed: BlockFeed):
    """A listener that has begun to wait."""
    messages = feed.messages()
    first = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    return messages, first


async def test_a_listener_gets_a_snapshot_and_then_every_change(engine):
    feed = BlockFeed(engine)
    messages, first = await started(feed)
    assert engine.is_watched
    engine.on_blocks(BlockChanges(2))  # of before its snapshot: none of its business
    engine.on_blocks(SNAPSHOT)
    reader = MessageReader()
    assert list(reader.feed(await first)) == [SNAPSHOT]
    for change in CHANGES:
        engine.on_blocks(change)
    assert list(reader.feed(await anext(messages))) == CHANGES
    await messages.aclose()
    assert not engine.is_watched


async def test_who_comes_second_gets_a_snapshot_that_the_first_does_not(engine):
    feed = BlockFeed(engine)
    first, first_message = await started(feed)
    engine.on_blocks(SNAPSHOT)
    await first_message
    second, second_message = await started(feed)
    later = BlockSnapshot(3, 16, pack([7]))
    engine.on_blocks(later)
    assert list(MessageReader().feed(await second_message)) == [later]
    engine.on_blocks(CHANGES[0])
    for messages in (first, second):
        assert list(MessageReader().feed(await anext(messages))) == CHANGES[:1]
        await messages.aclose()


async def test_a_slow_listener_is_cut_and_holds_no_more_than_it_may(engine):
    feed = BlockFeed(engine, max_waiting_bytes=1000)
    messages, first = await started(feed)
    engine.on_blocks(SNAPSHOT)
    await first
    for number in range(4, 104):
        engine.on_blocks(BlockChanges(number, stored=bytes(64)))
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


async def test_listeners_end_with_the_engine_and_with_the_worker(engine):
    for end in (lambda feed: engine.on_blocks(None), BlockFeed.close):
        feed = BlockFeed(engine)
        messages, first = await started(feed)
        engine.on_blocks(SNAPSHOT)
        await first
        waiting = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        end(feed)
        with pytest.raises(StopAsyncIteration):
            await waiting


async def test_silence_is_told_from_a_broken_connection(engine, monkeypatch):
    monkeypatch.setattr("penstock.server.block_feed._LOOK_SECONDS", 0.001)
    messages, first = await started(BlockFeed(engine))
    assert list(MessageReader().feed(await first)) == [KeepAlive()]
    await messages.aclose()


async def test_without_an_engine_there_is_nothing_to_listen_to():
    async with running_service() as service:
        service.engine.connected = False
        response = await service.client.get("/block_events")
    assert response.status_code == 503


async def test_only_an_admins_key_may_listen():
    async with running_service(keys=(ApiKey("alice", hashlib.sha256(b"sk-client").hexdigest()),)) as service:
        response = await service.client.get("/block_events", headers={"authorization": "Bearer sk-client"})
    assert response.status_code == 403


def answer(service: Service, note: PromptNote | None) -> None:
    def script(request: Submitted) -> list[Step]:
        steps = service.engine.say(request, "hello", cached=16)
        assert isinstance(steps[0], TokenEvent)
        steps[0].prompt = note
        return steps

    service.engine.script = script


@pytest.mark.parametrize("stream", [False, True])
async def test_a_gateway_that_asks_is_told_of_the_prompt(stream):
    async with running_service() as service:
        note = PromptNote(40, 16, 16, [11, 12])
        answer(service, note)
        response: httpx.Response = await service.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "hi", "stream": stream},
            headers={PROMPT_HEADER: "1"},
        )
    assert decode_note(response.headers[PROMPT_HEADER]) == note


async def test_without_listeners_the_note_tells_lengths_and_nobody_else_gets_one():
    async with running_service() as service:
        answer(service, None)
        body = {"model": "tiny", "prompt": [1, 2, 3]}
        asked = await service.client.post("/v1/completions", json=body, headers={PROMPT_HEADER: "1"})
        plain = await service.client.post("/v1/completions", json=body)
    assert decode_note(asked.headers[PROMPT_HEADER]) == PromptNote(3, 16)
    assert PROMPT_HEADER not in plain.headers
