"""Servers that register themselves with a gateway, on one store with keys: one fleet, whichever replica answers.

The test before the last stops a replica, and the last brings its own and ends them.
"""

import json
import signal

import httpx
import openai
import pytest

from penstock.store.database import Database
from penstock.store.keys import KeyStore
from penstock.store.ledger import UsageLedger
from penstock.tenants import KeyTerms, Limits
from tests.fakes.gateway_process import MODEL, GatewayProcess, kill_all, start_replica, write_simulated_model
from tests.server_process import until

QUESTION = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 7, "ignore_eos": True}


class Fleet:
    def __init__(self, gateway, servers, store, secrets):
        self.gateway = gateway
        self.servers = servers
        self.store = store
        self.secrets = secrets

    def headers(self, tenant):
        return {"authorization": f"Bearer {self.secrets[tenant]}"}

    def replicas(self):
        url = f"{self.gateway.url}/admin/replicas"
        found = httpx.get(url, headers=self.headers("operator"), timeout=60).json()["replicas"]
        return {item["url"]: item["standing"] for item in found}

    def ask(self, tenant):
        headers = self.headers(tenant)
        return httpx.post(f"{self.gateway.url}/v1/completions", json=QUESTION, headers=headers, timeout=60)

    def stream(self, client, tenant):
        """Begin a stream of 300 tokens; return it, its lines, and the replica that has it."""
        body = {**QUESTION, "max_tokens": 300, "stream": True}
        url, headers = f"{self.gateway.url}/v1/completions", self.headers(tenant)
        response = client.send(client.build_request("POST", url, json=body, headers=headers), stream=True)
        lines = response.iter_lines()
        next(lines)
        return response, lines, response.headers["x-penstock-route"].partition(";")[0]

    def client(self, tenant):
        return openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key=self.secrets[tenant], max_retries=0)

    def ledger(self):
        database = Database.open(self.store)
        entries = {entry.tenant: entry for entry in UsageLedger(database).read()}
        database.close()
        return entries

    def num_booked(self, tenant):
        return sum(entry.requests for name, entry in self.ledger().items() if name == tenant)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    store = str(folder / "penstock.db")
    database = Database.open(store)
    keys = KeyStore(database)
    terms = {
        "operator": KeyTerms(admin=True),
        "alice": KeyTerms(),
        "limited": KeyTerms(limits=Limits(tokens_per_day=65)),
        "alias-only": KeyTerms(models=("gpt-4o",)),
        # Two answers of 303 tokens, and not three.
        "SIGTERM": KeyTerms(limits=Limits(tokens_per_day=700, concurrent_requests=1)),
        "SIGKILL": KeyTerms(limits=Limits(tokens_per_day=700, concurrent_requests=1)),
    }
    secrets = {name: keys.create(name, value) for name, value in terms.items()}
    database.close()
    (folder / "key").write_text(secrets["operator"])
    aliases = f'aliases = {{ "gpt-4o" = "{MODEL}" }}\n'
    (folder / "fleet.toml").write_text(f'key_file = "{folder / "key"}"\npolicy = "round-robin"\n{aliases}')
    model = write_simulated_model(folder)
    with GatewayProcess("--fleet", str(folder / "fleet.toml"), store=store) as gateway:
        gateway.wait_ready()
        variables = {"PENSTOCK_API_KEY": secrets["operator"]}
        arguments = ("--gateway", gateway.url)
        with (
            start_replica(model, *arguments, store=store, variables=variables) as one,
            start_replica(model, *arguments, store=store, variables=variables) as other,
        ):
            running = Fleet(gateway, [one.wait_ready(), other.wait_ready()], store, secrets)
            until(lambda: list(running.replicas().values()) == ["ready"] * 2, 60, "their registration")
            yield running


def test_servers_register_themselves_with_an_admin_key(fleet):
    assert set(fleet.replicas()) == {server.url for server in fleet.servers}
    assert fleet.ask("alice").status_code == 200
    stranger = {"url": "http://127.0.0.1:9"}
    refused = httpx.post(f"{fleet.gateway.url}/admin/replicas", json=stranger, headers=fleet.headers("alice"))
    assert refused.status_code == 403


def test_a_limit_holds_through_the_gateway_and_is_counted_once(fleet):
    # 10 tokens each: six fit into 65, whichever replica they go to.
    assert [fleet.ask("limited").status_code for _ in range(8)] == [200] * 6 + [429] * 2
    until(lambda: fleet.ledger()["limited"].refused == 2, 10, "what was refused")  # nobody's answer waits for that
    entry = fleet.ledger()["limited"]
    assert (entry.requests, entry.prompt_tokens, entry.output_tokens, entry.refused) == (6, 18, 42, 2)


def test_a_key_that_allows_an_alias_only_can_use_it_and_only_through_the_gateway(fleet):
    with fleet.client("alias-only") as client:
        assert [model.id for model in client.models.list()] == ["gpt-4o"]
        assert client.completions.create(model="gpt-4o", prompt=[5, 6], max_tokens=2).usage.completion_tokens == 2
    direct = f"{fleet.servers[0].url}/v1/completions"
    assert httpx.post(direct, json=QUESTION, headers=fleet.headers("alias-only")).status_code == 404


def test_files_and_batches_work_whichever_replica_answers(fleet):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body} for number in range(6)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with fleet.client("alice") as client:
        file = client.files.create(file=("requests.jsonl", content), purpose="batch")
        assert client.files.content(file.id).read() == content
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).status == "completed", 60, "the batch's end")
        results = client.files.content(client.batches.retrieve(batch.id).output_file_id).text.splitlines()
        assert {json.loads(line)["custom_id"] for line in results} == {line["custom_id"] for line in lines}
        assert batch.id in [item.id for item in client.batches.list(limit=5)]
        assert client.files.delete(file.id).deleted
    with fleet.client("limited") as other, pytest.raises(openai.NotFoundError):
        other.batches.retrieve(batch.id)


def test_a_server_that_stops_leaves_at_once_and_finishes_its_streams(fleet):
    leaver = fleet.servers[0]
    body = {**QUESTION, "max_tokens": 1200, "stream": True}  # seconds longer than its leave takes
    streams = []
    with httpx.Client(timeout=60, headers=fleet.headers("alice")) as client:
        for _ in range(2):  # one on each
            response = client.send(
                client.build_request("POST", f"{fleet.gateway.url}/v1/completions", json=body), stream=True
            )
            streams.append((response, response.iter_lines()))
            next(streams[-1][1])
        assert len({response.headers["x-penstock-route"].partition(";")[0] for response, _ in streams}) == 2
        leaver.process.send_signal(signal.SIGTERM)
        until(lambda: leaver.url not in fleet.replicas(), 5, "its leave")
        assert leaver.process.poll() is None  # its stream goes on
        assert [[line for line in lines if line][-1] for _, lines in streams] == ["data: [DONE]"] * 2
        for response, _ in streams:
            response.close()
    assert leaver.process.wait(30) == 0
    metrics = httpx.get(f"{fleet.gateway.url}/metrics", headers=fleet.headers("operator")).text
    assert "penstock_gateway_resumptions_total{" not in metrics  # nothing was cut


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stream_that_moves_counts_once_against_its_limits_and_in_the_ledger(fleet, number, tmp_path):
    tenant, variables = number.name, {"PENSTOCK_API_KEY": fleet.secrets["operator"]}
    arguments = ("--gateway", fleet.gateway.url, "--drain-seconds", "1")
    model = write_simulated_model(tmp_path)
    with (
        start_replica(model, *arguments, pace="3", store=fleet.store, variables=variables) as leaver,
        httpx.Client(timeout=60) as client,
    ):
        leaver.wait_ready()
        until(lambda: fleet.replicas().get(leaver.url) == "ready", 60, "its registration")
        leaver_name = leaver.url.removeprefix("http://")
        if leaver_name not in fleet.ask("alice").headers["x-penstock-route"]:
            fleet.ask("alice")
        fleet.ask("alice")  # by the other: the next is the leaver's
        response, lines, replica = fleet.stream(client, tenant)
        assert leaver_name in replica
        if number == signal.SIGKILL:
            kill_all(leaver)
        else:
            leaver.process.send_signal(number)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        response.close()
        again, lines, _ = fleet.stream(client, tenant)
        assert again.status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"
        again.close()
    # An answer waits for a slow store for a second at most.
    until(lambda: fleet.num_booked(tenant) == 2, 10, "both answers in the ledger")
    entry = fleet.ledger()[tenant]
    assert (entry.requests, entry.prompt_tokens, entry.output_tokens, entry.errors) == (2, 6, 600, 0)
