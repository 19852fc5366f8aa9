"""Batches through OpenAI's own client, on a real server with two API workers over the simulated device."""

import json

import httpx
import openai
import pytest

from penstock.store.database import Database
from penstock.store.keys import KeyStore
from penstock.store.ledger import UsageLedger
from penstock.tenants import KeyTerms
from tests.fakes.tiny_tokenizer import write_tokenizer
from tests.server_process import ServerProcess, until, write_tiny_model

MODEL = "tiny"
CHAT = "/v1/chat/completions"


def line(custom_id, url=CHAT, **changes):
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"hello {custom_id}"}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**body, **changes}}


def jsonl(lines):
    return "".join(json.dumps(item) + "\n" for item in lines).encode()


class Tenant:
    """One tenant's client."""

    def __init__(self, name, client):
        self.name = name
        self.client = client

    def upload(self, content, name="requests.jsonl"):
        return self.client.files.create(file=(name, content), purpose="batch")

    def start(self, lines, endpoint=CHAT, **fields):
        file = self.upload(jsonl(lines))
        return self.client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)

    def wait(self, batch, *statuses, seconds=60):
        def has_come():
            return self.client.batches.retrieve(batch.id).status in statuses

        until(has_come, seconds, f"one of {statuses}")
        return self.client.batches.retrieve(batch.id)

    def results(self, file_id):
        if file_id is None:
            return []
        return [json.loads(text) for text in self.client.files.content(file_id).text.splitlines()]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return str(tmp_path_factory.mktemp("store") / "penstock.db")


@pytest.fixture(scope="module")
def secrets(store):
    database = Database.open(store)
    keys = KeyStore(database)
    made = {name: keys.create(name, KeyTerms()) for name in ("alice", "bob", "carol")}
    database.close()
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory, store, secrets):
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    write_tokenizer(folder)
    options = ["--device", "simulated", "--simulated-profile", "h200-llama-8b@0.1", "--workers", "2"]
    with ServerProcess(str(folder), "--load-format", "dummy", "--store", store, *options) as running:
        yield running.wait_ready()


@pytest.fixture
def tenant(server, secrets):
    def make(name):
        return Tenant(name, openai.OpenAI(base_url=f"{server.url}/v1", api_key=secrets[name], max_retries=0))

    made = []

    def remembered(name):
        made.append(make(name))
        return made[-1]

    yield remembered
    for item in made:
        item.client.close()


def test_a_batch_is_uploaded_run_and_downloaded(tenant, store):
    alice = tenant("alice")
    lines = [line(f"r{index}") for index in range(40)] + [line("wrong", temperature=9)]
    batch = alice.start(lines, metadata={"job": "nightly"})
    assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"job": "nightly"}, CHAT)
    ended = alice.wait(batch, "completed")
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
    assert batch.created_at <= ended.in_progress_at <= ended.finalizing_at <= ended.completed_at < ended.expires_at
    output, errors = alice.results(ended.output_file_id), alice.results(ended.error_file_id)
    assert [item["custom_id"] for item in output] == [f"r{index}" for index in range(40)]
    assert all(item["error"] is None and item["response"]["status_code"] == 200 for item in output)
    answer = output[0]["response"]["body"]
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] == 4
    (wrong,) = errors
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("wrong", 400)
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    database = Database.open(store)
    (entry,) = UsageLedger(database).read(tenant="alice")
    database.close()
    assert (entry.requests, entry.errors, entry.refused) == (40, 0, 0)
    assert entry.output_tokens == sum(item["response"]["body"]["usage"]["completion_tokens"] for item in output)


def test_texts_are_completed_as_well(tenant):
    alice = tenant("alice")
    url = "/v1/completions"
    lines = [{**line("t", url), "body": {"model": MODEL, "prompt": "hello", "max_tokens": 3}}]
    ended = alice.wait(alice.start(lines, url), "completed")
    (result,) = alice.results(ended.output_file_id)
    assert result["response"]["body"]["object"] == "text_completion"


def test_a_cancelled_batch_ends_within_seconds_and_keeps_what_is_finished(tenant):
    alice = tenant("alice")
    lines = [line("quick")] + [line(f"r{index}", max_tokens=3000, ignore_eos=True) for index in range(2000)]
    batch = alice.start(lines)
    until(lambda: alice.client.batches.retrieve(batch.id).request_counts.completed > 0, 60, "a finished line")
    assert alice.client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    ended = alice.wait(batch, "cancelled", seconds=20)
    output, errors = alice.results(ended.output_file_id), alice.results(ended.error_file_id)
    assert "quick" in {item["custom_id"] for item in output}
    assert sorted(item["custom_id"] for item in output + errors) == sorted(item["custom_id"] for item in lines)
    assert {item["error"]["code"] for item in errors} == {"batch_cancelled"}
    assert (len(output), len(errors)) == (ended.request_counts.completed, ended.request_counts.failed)
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        alice.client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a"), line("b", "/v1/completions")], "mismatched_url", 2),
        ([line("a"), line("b", model="other")], "mismatched_model", 2),
        ([line("a"), {**line("b"), "method": "GET"}], "invalid_line", 2),
        ([line("a"), {**line("b"), "body": []}], "invalid_body", 2),
    ],
)
def test_a_file_that_is_wrong_fails_the_batch_and_says_where(tenant, lines, code, number):
    alice = tenant("alice")
    ended = alice.wait(alice.start(lines), "failed")
    (error,) = ended.errors.data
    assert (error.code, error.line) == (code, number)
    assert ended.request_counts.total == 0 and ended.output_file_id is None and ended.failed_at is not None


def test_what_is_no_json_at_all_fails_the_batch(tenant):
    alice = tenant("alice")
    file = alice.upload(b"hello\n")
    batch = alice.client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert alice.wait(batch, "failed").errors.data[0].code == "invalid_json_line"


def test_no_tenant_sees_anothers_files_or_batches(tenant):
    bob, carol = tenant("bob"), tenant("carol")
    batch = bob.start([line("secret")])
    ended = bob.wait(batch, "completed")
    assert list(carol.client.files.list()) == [] and list(carol.client.batches.list()) == []
    for call in (
        lambda: carol.client.files.retrieve(batch.input_file_id),
        lambda: carol.client.files.content(ended.output_file_id),
        lambda: carol.client.files.delete(batch.input_file_id),
        lambda: carol.client.batches.retrieve(batch.id),
        lambda: carol.client.batches.cancel(batch.id),
        lambda: carol.client.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert bob.client.files.retrieve(batch.input_file_id).filename == "requests.jsonl"


def test_lists_come_in_pages_newest_first(tenant):
    carol = tenant("carol")
    files = [carol.upload(b"x\n", f"{index}.jsonl").id for index in range(5)]
    assert [file.id for file in carol.client.files.list(limit=2)] == files[::-1]
    assert [file.id for file in carol.client.files.list(limit=2, order="asc")] == files
    batches = [
        carol.client.batches.create(input_file_id=files[0], endpoint=CHAT, completion_window="24h").id for _ in range(3)
    ]
    assert [batch.id for batch in carol.client.batches.list(limit=1)] == batches[::-1]
    assert carol.client.files.delete(files[0]).deleted
    assert files[0] not in [file.id for file in carol.client.files.list()]


def test_wrong_requests_are_told(tenant, server, secrets):
    alice = tenant("alice")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        alice.client.files.create(file=("x", b"x"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="empty"):
        alice.upload(b"")
    file = alice.upload(jsonl([line("a", model="nobody")]))
    with pytest.raises(openai.NotFoundError, match="nobody"):
        alice.client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    for fields in ({"endpoint": "/v1/embeddings"}, {"completion_window": "1h"}, {"input_file_id": "file-none"}):
        asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **fields}
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            alice.client.batches.create(**asked)
    headers = {"authorization": f"Bearer {secrets['alice']}", "origin": "http://evil.example"}
    files = {"file": ("x.jsonl", b"x")}
    foreign = httpx.post(f"{server.url}/v1/files", headers=headers, files=files, data={"purpose": "batch"})
    assert foreign.status_code == 403
