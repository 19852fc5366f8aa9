"""A real server with two API workers and a real engine: its tenants share limits exactly, and nothing else.

Random weights: what is answered does not matter here. The last test kills the server.
"""

import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock.store.database import Database
from penstock.store.keys import KeyStore
from penstock.store.ledger import UsageLedger
from penstock.store.quotas import LEASE_SECONDS
from penstock.tenants import KeyTerms, Limits
from tests.fakes.tiny_tokenizer import write_tokenizer
from tests.server_process import ServerProcess, until, write_tiny_model

SYSTEM = "You answer for the house of Penstock, briefly and kindly, and never about the weather. " * 2
PROMPT = [7 + index % 50 for index in range(64)]  # four blocks


class Tenants:
    """A server, its store and a secret for each tenant."""

    def __init__(self, server: ServerProcess, store: str, secrets: dict[str, str]) -> None:
        self.server = server
        self.store = store
        self.secrets = secrets

    def post(self, tenant, path, **body):
        # A new connection each time: either worker may take it.
        headers = {"authorization": f"Bearer {self.secrets[tenant]}"}
        return httpx.post(self.server.url + path, json={"model": "tiny", **body}, headers=headers, timeout=60)

    def complete(self, tenant, prompt=PROMPT):
        return self.post(tenant, "/v1/completions", prompt=prompt, max_tokens=2, ignore_eos=True)

    def chat(self, tenant, question):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return self.post(tenant, "/v1/chat/completions", messages=messages, max_tokens=2, ignore_eos=True)

    @property
    def admin_path(self) -> Path:
        (line,) = (line for line in self.server.lines if line.startswith("Admin:"))
        return Path(line.partition("unix:")[2].strip())

    def requests_in_ledger(self) -> dict[str, int]:
        database = Database.open(self.store)
        entries = UsageLedger(database).read()
        database.close()
        return {entry.tenant: entry.requests for entry in entries}


@pytest.fixture(scope="module")
def tenants(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    model = write_tiny_model(folder / "tiny")
    write_tokenizer(model)
    prefixes = folder / "prefixes.toml"
    prefixes.write_text(f'[[prefixes]]\nsystem = "{SYSTEM}"\n')
    store = str(folder / "penstock.db")
    database = Database.open(store)
    keys = KeyStore(database)
    # Limits by the day do not refill while a slow test runs.
    limits = {"carol": Limits(tokens_per_day=600)}
    secrets = {
        name: keys.create(name, KeyTerms(limits=limits.get(name, Limits())))
        for name in ("alice", "bob", "carol", "dave")
    }
    database.close()
    arguments = ["--load-format", "dummy", "--kv-memory", "64MiB", "--workers", "2", "--store", store]
    with ServerProcess(str(model), *arguments, "--shared-prefixes", str(prefixes)) as server:
        yield Tenants(server.wait_ready(), store, secrets)


@pytest.mark.slow
def test_a_killed_workers_place_is_free_again_when_its_lease_runs_out(tmp_path):
    model = write_tiny_model(tmp_path / "tiny")
    database = Database.open(str(tmp_path / "penstock.db"))
    secret = KeyStore(database).create("alice", KeyTerms(limits=Limits(concurrent_requests=1)))
    database.close()
    arguments = ["--load-format", "dummy", "--kv-memory", "64MiB", "--store", str(tmp_path / "penstock.db")]
    headers = {"authorization": f"Bearer {secret}"}
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with ServerProcess(str(model), *arguments) as server:
        server.wait_ready()

        def status(**changes) -> int:
            url = f"{server.url}/v1/completions"
            with httpx.stream("POST", url, json={**body, **changes}, headers=headers, timeout=60) as response:
                if "max_tokens" not in changes:
                    killed.extend(server.kill_workers())
                return response.status_code

        killed: list[int] = []
        assert status() == 200
        until(lambda: server.has_replaced(killed), 60, "a new worker")
        assert status(max_tokens=1) == 429
        until(lambda: status(max_tokens=1) == 200, LEASE_SECONDS + 30, "the lease's end")


def cached(response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_tenant_finds_its_own_prompt_in_the_cache_and_not_anothers(tenants):
    assert cached(tenants.complete("alice")) == 0
    assert cached(tenants.complete("alice")) == 48
    assert cached(tenants.complete("bob")) == 0, "nobody can tell what alice asked"
    assert cached(tenants.complete("bob")) == 48


def test_a_declared_system_message_is_shared_and_the_question_behind_it_is_not(tenants):
    question = "what is the secret of alice? " * 4
    whole = tenants.chat("alice", question)
    assert cached(whole) == 0
    own = cached(tenants.chat("alice", question))
    shared = cached(tenants.chat("bob", question))
    assert 0 < shared < own
    assert cached(tenants.chat("dave", "something else")) == shared


def test_workers_share_a_limit_exactly(tenants):
    with ThreadPoolExecutor(6) as pool:
        statuses = list(pool.map(lambda _: tenants.complete("carol").status_code, range(20)))
    # 66 tokens each.
    assert (statuses.count(200), statuses.count(429)) == (9, 11)
    assert "tokens_per_day = 600" in tenants.complete("carol").json()["error"]["message"]


def test_a_revoked_key_is_refused_by_every_worker_within_seconds(tenants):
    assert tenants.complete("dave").status_code == 200
    command = [sys.executable, "-m", "penstock", "keys", "revoke", "dave", "--store", tenants.store]
    subprocess.run(command, check=True, capture_output=True)
    until(lambda: all(tenants.complete("dave").status_code == 401 for _ in range(8)), 10, "the end of dave's key")


def test_the_admin_routes_are_on_a_socket_of_their_owner_alone(tenants):
    path = tenants.admin_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://admin") as admin:
        assert [key["name"] for key in admin.get("/admin/keys").json()["data"]][:2] == ["alice", "bob"]
        carol = {"tenant": "carol"}
        until(
            lambda: admin.get("/admin/usage", params=carol).json()["data"][0]["refused"] == 12, 10, "what was refused"
        )
    headers = {"authorization": f"Bearer {tenants.secrets['alice']}"}
    for route in ("/admin/keys", "/admin/usage"):
        assert httpx.get(tenants.server.url + route, headers=headers).status_code == 404


def test_nothing_that_was_answered_is_lost_when_every_process_is_killed(tenants):
    before = tenants.requests_in_ledger()["bob"]
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda _: tenants.complete("bob").status_code, range(12)))
    server = tenants.server
    for pid in [*server.worker_pids, server.engine_pid, server.process.pid]:
        os.kill(pid, signal.SIGKILL)
    assert statuses == [200] * 12
    assert tenants.requests_in_ledger()["bob"] == before + 12
