"""A gateway that listens to its replicas' block events, and says what it learnt of each prompt."""

import asyncio
from contextlib import AbstractAsyncContextManager

import msgspec
from aiohttp import web

from penstock.protocol.block_events import BlockChanges, BlockSnapshot, pack
from penstock.protocol.prompt_note import PROMPT_HEADER, PromptNote, encode_note
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import QUICK, Running, running_gateway

KV_AWARE = msgspec.structs.replace(QUICK, policy="kv-aware")


def started(replica: FakeReplica) -> AbstractAsyncContextManager[Running]:
    return running_gateway(replica, config=KV_AWARE)


async def until_blocks(running: Running, count: int | None) -> None:
    async with asyncio.timeout(10):
        while True:
            (replica,) = running.gateway.pool
            if (None if replica.blocks is None else len(replica.blocks)) == count:
                return
            await asyncio.sleep(0.01)


async def test_a_replicas_blocks_are_known_as_they_change():
    messages = [BlockSnapshot(5, 16, pack([1, 2, 3])), BlockChanges(6, stored=pack([4]), removed=pack([1, 2]))]
    async with (
        FakeReplica(block_messages=messages).running() as replica,
        running_gateway(replica, config=KV_AWARE) as running,
    ):
        await until_blocks(running, 2)
        metrics = await (await running.client.get(f"{running.url}/metrics")).text()
    assert f'penstock_gateway_known_blocks{{replica="{replica.name}"}} 2.0' in metrics


async def test_after_a_gap_a_new_snapshot_is_asked_for():
    messages = [BlockSnapshot(5, 16, pack([1, 2, 3])), BlockChanges(8)]
    async with (
        FakeReplica(block_messages=messages).running() as replica,
        running_gateway(replica, config=KV_AWARE) as running,
    ):
        await asyncio.wait_for(replica.listened.wait(), 10)
        replica.block_messages = [BlockSnapshot(8, 16, pack([7]))]
        await until_blocks(running, 1)
        assert replica.num_listeners == 2


async def test_a_replica_that_tells_nothing_serves_all_the_same():
    async with FakeReplica().running() as replica, started(replica) as running:
        response = await running.ask()
        await until_blocks(running, None)
    assert response.status == 200


async def test_other_policies_do_not_listen():
    async with (
        FakeReplica(block_messages=[BlockSnapshot(1, 16, b"")]).running() as replica,
        running_gateway(replica) as running,
    ):
        await running.ask()
    assert replica.num_listeners == 0


async def answer_with_note(replica: FakeReplica, request: web.Request, body: dict) -> web.StreamResponse:
    headers = {PROMPT_HEADER: encode_note(PromptNote(100, 64, 16, [1, 2, 3, 4, 5, 6]))}
    return web.json_response({"text": "hello"}, headers=headers)


async def test_the_route_header_tells_what_was_cached_and_what_was_expected():
    async with (
        FakeReplica(answer=answer_with_note).running() as replica,
        running_gateway(replica, config=KV_AWARE) as running,
    ):
        response = await running.ask(prompt=list(range(128)))
        again = await running.ask(prompt=list(range(128)))
        metrics = await (await running.client.get(f"{running.url}/metrics")).text()
    route = response.headers["x-penstock-route"]
    assert "policy=kv-aware" in route and "predicted_ttft_ms=" in route
    assert "predicted_cached_tokens=0" in route and "; cached_tokens=64" in route
    assert "predicted_cached_tokens=128" in again.headers["x-penstock-route"]
    assert PROMPT_HEADER not in response.headers
    assert replica.headers[0][PROMPT_HEADER] == "1"
    assert 'penstock_gateway_cached_prompt_tokens_total{model="tiny"} 128.0' in metrics
