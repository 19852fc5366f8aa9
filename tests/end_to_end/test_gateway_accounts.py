"""Real gateways before servers that know nothing of their tenants: limits and books are exact."""

import asyncio

import httpx
import pytest
from aiohttp import web

from penstock.store.database import Database
from penstock.store.keys import KeyStore
from penstock.store.ledger import UsageLedger
from penstock.tenants import KeyTerms, Limits
from tests.fakes.fake_replica import FakeReplica
from tests.fakes.gateway_process import MODEL, GatewayProcess, start_replica, write_simulated_model
from tests.server_process import until

FOREIGN_FLEET = """
[[replicas]]
url = "{url}"
kind = "vllm"
"""
BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 7}


async def answer_with_usage(replica, request, body):
    """Use as much as was asked for, and take long enough for requests to overlap."""
    await asyncio.sleep(0.01)
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    return web.json_response({"choices": [], "usage": usage})


@pytest.fixture
def store(tmp_path):
    """A store's path, and the secrets of a tenant with a limit and one without."""
    path = str(tmp_path / "penstock.db")
    database = Database.open(path)
    keys = KeyStore(database)
    # Limits by the day do not refill while a slow test runs.
    secrets = {
        "limited": keys.create("limited", KeyTerms(limits=Limits(tokens_per_day=205))),
        "free": keys.create("free", KeyTerms()),
    }
    database.close()
    return path, secrets


def ledger(path):
    database = Database.open(path)
    entries = {entry.tenant: entry for entry in UsageLedger(database).read()}
    database.close()
    return entries


def num_written(path):
    return sum(entry.requests + entry.refused for entry in ledger(path).values())


async def test_two_gateways_admit_exactly_the_limit_and_book_exactly_what_was_served(store, tmp_path):
    path, secrets = store
    async with FakeReplica(answer=answer_with_usage).running() as replica:
        fleet = tmp_path / "fleet.toml"
        fleet.write_text(FOREIGN_FLEET.format(url=replica.url))
        arguments = ["--fleet", str(fleet)]
        with GatewayProcess(*arguments, store=path) as one, GatewayProcess(*arguments, store=path) as other:
            urls = [(await asyncio.to_thread(gateway.wait_ready)).url for gateway in (one, other)]
            async with httpx.AsyncClient(timeout=60) as client:

                async def ask(number, tenant):
                    headers = {"authorization": f"Bearer {secrets[tenant]}"}
                    response = await client.post(f"{urls[number % 2]}/v1/completions", json=BODY, headers=headers)
                    return response.status_code

                limited = [ask(number, "limited") for number in range(40)]
                free = [ask(number, "free") for number in range(40)]
                statuses = await asyncio.gather(*limited, *free)
                # Refusals are written behind their answers, as all is where the store is slow, and gateways are killed
                # at the end.
                await asyncio.to_thread(until, lambda: num_written(path) == 80, 30, "all of it in the ledger")
    # 10 tokens each: twenty fit into 205, whichever gateway they come through.
    assert (statuses[:40].count(200), statuses[:40].count(429)) == (20, 20)
    assert statuses[40:] == [200] * 40
    entries = ledger(path)
    assert (entries["limited"].requests, entries["limited"].refused) == (20, 20)
    assert (entries["free"].requests, entries["free"].refused) == (40, 0)
    for tenant, count in (("limited", 20), ("free", 40)):
        assert (entries[tenant].prompt_tokens, entries[tenant].output_tokens) == (3 * count, 7 * count)
    assert len(replica.received) == 60


@pytest.mark.slow
def test_limits_hold_before_a_penstock_server_without_a_store(store, tmp_path):
    path, secrets = store
    asked = {**BODY, "model": MODEL, "ignore_eos": True}
    headers = {"authorization": f"Bearer {secrets['limited']}"}
    with start_replica(write_simulated_model(tmp_path), pace="0.1") as server:
        server.wait_ready()
        with GatewayProcess("--replica", server.url, store=path) as gateway, httpx.Client(timeout=60) as client:
            url = f"{gateway.wait_ready().url}/v1/completions"
            answers = [
                client.post(url, json={**asked, "stream": number % 2 == 0}, headers=headers) for number in range(22)
            ]
            with httpx.Client(transport=httpx.HTTPTransport(uds=gateway.admin), base_url="http://admin") as admin:
                (replica,) = admin.get("/admin/replicas").json()["replicas"]
            until(lambda: num_written(path) == 22, 30, "all of it in the ledger")  # refusals are behind their answers
    assert [answer.status_code for answer in answers] == [200] * 20 + [429] * 2
    assert (replica["store"], replica["counted_by"]) == ("none", "gateway")
    entry = ledger(path)["limited"]
    assert (entry.requests, entry.prompt_tokens, entry.output_tokens, entry.refused) == (20, 60, 140, 2)
    assert sum("cannot keep this gateway's limits: it has no store" in line for line in gateway.lines) == 1
