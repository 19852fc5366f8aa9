"""Batches whose processes are killed while they run: every line is answered once, and paid once."""

import json
import os
import signal
from collections import Counter

import httpx
import pytest

from penstock.store.database import Database
from penstock.store.ledger import UsageLedger
from tests.fakes.tiny_tokenizer import write_tokenizer
from tests.server_process import ServerProcess, until, write_tiny_model

MODEL, COMPLETIONS = "tiny", "/v1/completions"
MAX_TOKENS = 60


class BatchServers:
    """Servers on one store, and a client that finds one of them."""

    def __init__(self, folder):
        self.model = write_tiny_model(folder / MODEL)
        write_tokenizer(self.model)
        self.store = str(folder / "penstock.db")

    def start(self, *options):
        # Slow enough that something is under way whenever somebody is killed.
        profile = ["--device", "simulated", "--simulated-profile", "h200-llama-8b@4", "--load-format", "dummy"]
        return ServerProcess(str(self.model), *profile, "--store", self.store, *options)

    def create(self, server, count):
        lines = [
            {"custom_id": f"r{index}", "method": "POST", "url": COMPLETIONS,
             "body": {"model": MODEL, "prompt": [5 + index % 90, 6, 7], "max_tokens": MAX_TOKENS, "ignore_eos": True}}
            for index in range(count)
        ]  # fmt: skip
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        url = f"{server.url}/v1"
        files, form = {"file": ("in.jsonl", content)}, {"purpose": "batch"}
        file = httpx.post(f"{url}/files", files=files, data=form, timeout=60).json()
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        return httpx.post(f"{url}/batches", json=body, timeout=60).json()["id"]

    def look(self, server, batch_id):
        return httpx.get(f"{server.url}/v1/batches/{batch_id}", timeout=20).json()

    def wait_for(self, server, batch_id, num_completed):
        def has_come():
            return self.look(server, batch_id)["request_counts"]["completed"] >= num_completed

        until(lambda: self.ask_again(has_come), 120, f"{num_completed} answers")

    def wait_end(self, server, batch_id):
        until(lambda: self.ask_again(lambda: self.look(server, batch_id)["status"] == "completed"), 120, "its end")
        return self.look(server, batch_id)

    @staticmethod
    def ask_again(question):
        try:
            return question()
        except (httpx.HTTPError, KeyError):  # a worker that is just being replaced
            return False

    def check(self, server, batch, count):
        """Every line is in one file once, and the ledger has each answer once."""
        content = httpx.get(f"{server.url}/v1/files/{batch['output_file_id']}/content", timeout=60).text
        results = [json.loads(line) for line in content.splitlines()]
        assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
        assert Counter(result["custom_id"] for result in results) == {f"r{index}": 1 for index in range(count)}
        assert {result["response"]["body"]["usage"]["completion_tokens"] for result in results} == {MAX_TOKENS}
        database = Database.open(self.store)
        entries = UsageLedger(database).read(tenant="open")
        database.close()
        assert sum(entry.requests for entry in entries) == count
        assert sum(entry.output_tokens for entry in entries) == count * MAX_TOKENS
        assert sum(entry.errors for entry in entries) == 0, "a run that left no result leaves no trace"


@pytest.fixture
def servers(tmp_path):
    return BatchServers(tmp_path)


def test_a_killed_engine_and_a_killed_worker_cost_no_line_and_double_none(servers):
    count = 120
    with servers.start() as server:
        server.wait_ready()
        batch_id = servers.create(server, count)
        servers.wait_for(server, batch_id, 10)
        os.kill(server.engine_pid, signal.SIGKILL)
        servers.wait_for(server, batch_id, 40)
        server.kill_workers()
        batch = servers.wait_end(server, batch_id)
        servers.check(server, batch, count)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_another_server_goes_on_where_one_was_killed_with_all_its_processes(servers, patience):
    count = 300
    with servers.start("--workers", "2") as first, servers.start() as second:
        first.wait_ready()
        second.wait_ready()
        batch_id = servers.create(first, count)
        servers.wait_for(second, batch_id, 20)
        for pid in [*first.worker_pids, first.engine_pid, first.process.pid]:
            os.kill(pid, signal.SIGKILL)
        num_before = servers.look(second, batch_id)["request_counts"]["completed"]
        seconds = until(
            lambda: servers.look(second, batch_id)["request_counts"]["completed"] > num_before, 60, "another answer"
        )
        assert seconds < 20.0 * patience
        batch = servers.wait_end(second, batch_id)
        servers.check(second, batch, count)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_server_that_was_killed_goes_on_when_it_is_started_again(servers):
    count = 200
    with servers.start() as server:
        server.wait_ready()
        batch_id = servers.create(server, count)
        servers.wait_for(server, batch_id, 20)
        os.kill(server.process.pid, signal.SIGKILL)
    with servers.start() as server:
        server.wait_ready()
        servers.wait_for(server, batch_id, 40)
        server.stop(signal.SIGTERM)  # drains: it lets go of the batch at once
    with servers.start() as server:
        server.wait_ready()
        batch = servers.wait_end(server, batch_id)
        servers.check(server, batch, count)
