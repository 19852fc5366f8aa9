"""Batches in one API worker over the fake engine: what runs, waits, is tried again and is paid."""

import asyncio
import contextlib
import json

import pytest
from sqlalchemy import select

from penstock.engine.messages import EngineStats, TokenEvent
from penstock.errors import EngineFailed, StoreUnavailable
from penstock.request import FinishReason, Tier
from penstock.server.batch import held_batch, window
from penstock.server.batch.held_batch import HeldBatch
from penstock.server.batch.line_run import count_answers
from penstock.server.batch.runner import POLL_SECONDS, BatchRunner
from penstock.server.batch.window import FEWEST, MOST, Window
from penstock.server.claim import Claim
from penstock.server.text_work import TextWork
from penstock.store import batch_work, batches
from penstock.store.batch_work import MAX_ATTEMPTS, BatchWork
from penstock.store.batches import BatchStore, NewBatch
from penstock.store.database import Database
from penstock.store.files import FileStore
from penstock.store.keys import KeyStore
from penstock.store.ledger import UsageLedger
from penstock.store.schema import files
from penstock.tenants import OPEN_TENANT, KeyTerms, Limits
from tests.unit.server.conftest import MODEL, running_service, until
from tests.unit.server.openai_schema import check

URL = "/v1/completions"


def line(custom_id, **changes):
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 3, **changes}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


class Desk:
    """A worker with its batch runner, and one tenant's calls to it."""

    def __init__(self, service, key):
        self.service = service
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def call(self, method, path, **request):
        response = await self.service.client.request(method, f"/v1{path}", headers=self.headers, **request)
        assert response.status_code == 200, response.text
        return response

    async def start(self, *lines):
        content = "".join(json.dumps(item) + "\n" for item in lines).encode()
        files = {"file": ("in.jsonl", content)}
        file = (await self.call("POST", "/files", files=files, data={"purpose": "batch"})).json()
        body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        return (await self.call("POST", "/batches", json=body)).json()["id"]

    async def look(self, batch_id):
        return (await self.call("GET", f"/batches/{batch_id}")).json()

    async def ended(self, batch_id):
        for _ in range(600):
            batch = await self.look(batch_id)
            if batch["status"] in ("completed", "failed", "cancelled", "expired"):
                return batch
            await asyncio.sleep(0.02)
        raise AssertionError(f"the batch did not end: {batch}")

    async def results(self, file_id):
        return [json.loads(text) for text in (await self.call("GET", f"/files/{file_id}/content")).text.splitlines()]

    def ledger(self):
        return UsageLedger(self.service.context.tenancy.database).read()


@contextlib.asynccontextmanager
async def running_desk(folder, terms=None, *, poll_seconds=0.02):
    store = str(folder / "penstock.db")
    key = None
    if terms is not None:
        database = Database.open(store)
        key = KeyStore(database).create("alice", terms)
        database.close()
    async with running_service(store=store) as service:
        if key is not None:
            await until(lambda: not service.context.tenancy.ring.is_open)
        runner = BatchRunner(service.context, service.context.tenancy.database, poll_seconds=poll_seconds)
        runner.start()
        yield Desk(service, key)
        await runner.close()


async def test_a_batch_begins_at_once_where_it_was_taken_in_however_rarely_the_store_is_looked_at(tmp_path):
    async with running_desk(tmp_path, poll_seconds=3600) as desk:
        ended = await desk.ended(await desk.start(line("a")))
        assert ended["request_counts"]["completed"] == 1


async def test_where_there_are_no_batches_the_store_is_asked_once_in_four_seconds(tmp_path, monkeypatch):
    pauses, enough = [], asyncio.Event()

    async def note(_runner, seconds):
        pauses.append(seconds)
        if len(pauses) >= 6:
            enough.set()
        await asyncio.sleep(0)
        return False

    monkeypatch.setattr(BatchRunner, "_is_called_within", note)
    async with running_desk(tmp_path, poll_seconds=POLL_SECONDS):
        await enough.wait()
    assert pauses[:6] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


async def test_lines_run_in_the_batch_tier_with_their_tenants_terms(tmp_path):
    async with running_desk(tmp_path, KeyTerms(weight=3.0, priority=4)) as desk:
        ended = await desk.ended(await desk.start(line("a"), line("b", priority=-2)))
        assert ended["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        terms = [request.terms for request in desk.service.engine.submitted]
        assert {term.tier for term in terms} == {Tier.BATCH}
        assert sorted((term.weight, term.priority) for term in terms) == [(3.0, -2), (3.0, 4)]
        assert {request.tenant for request in desk.service.engine.submitted} == {"alice"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"stream": True}, "stream"), ({"deadline_ms": 5}, "deadline_ms"), ({"targets": {"ttft_ms": 5}}, "targets")],
)
async def test_what_only_somebody_who_waits_can_want_is_refused(tmp_path, changes, param):
    async with running_desk(tmp_path) as desk:
        ended = await desk.ended(await desk.start(line("a", **changes)))
        (error,) = await desk.results(ended["error_file_id"])
        assert (error["response"]["status_code"], error["response"]["body"]["error"]["param"]) == (400, param)
        assert ended["output_file_id"] is None and desk.ledger() == []


async def test_a_line_during_which_the_engine_failed_runs_again_and_is_paid_once(tmp_path):
    async with running_desk(tmp_path) as desk:
        engine, failures = desk.service.engine, [EngineFailed("gone"), EngineFailed("gone")]
        engine.script = lambda request: [failures.pop()] if failures else engine.say(request, "well")
        ended = await desk.ended(await desk.start(line("a")))
        assert ended["request_counts"]["completed"] == 1 and len(engine.submitted) == 3
        (entry,) = desk.ledger()
        assert (entry.requests, entry.errors, entry.output_tokens) == (1, 0, 3)


async def test_a_line_that_always_fails_is_told_and_not_tried_for_ever(tmp_path):
    async with running_desk(tmp_path) as desk:
        desk.service.engine.script = lambda request: [EngineFailed("gone")]
        ended = await desk.ended(await desk.start(line("a")))
        (error,) = await desk.results(ended["error_file_id"])
        assert error["response"]["status_code"] == 500
        assert error["response"]["body"]["error"]["code"] == "engine_failed"
        assert len(desk.service.engine.submitted) == MAX_ATTEMPTS
        assert [entry.errors for entry in desk.ledger()] == [1]


async def test_lines_begin_a_few_at_a_time_however_much_room_there_is(tmp_path, monkeypatch):
    claim, counts = BatchWork.claim, []

    def note(work, held, count):
        counts.append(count)
        return claim(work, held, count)

    monkeypatch.setattr(BatchWork, "claim", note)
    monkeypatch.setattr(window, "FEWEST", 200)
    async with running_desk(tmp_path) as desk:
        ended = await desk.ended(await desk.start(*[line(f"r{index}") for index in range(100)]))
        assert ended["request_counts"]["completed"] == 100
    assert 1 < max(counts) <= 32


async def test_a_full_queue_makes_a_batch_wait_and_leaves_no_trace(tmp_path):
    async with running_desk(tmp_path) as desk:
        engine, refusals = desk.service.engine, [0.01] * (MAX_ATTEMPTS + 1)

        def script(request):
            if not refusals:
                return engine.say(request, "well")
            return [
                TokenEvent(
                    request_id=request.request_id, finish=FinishReason.ERROR, error_code="overloaded", error="full",
                    retry_after_seconds=refusals.pop(),
                )
            ]  # fmt: skip

        engine.script = script
        ended = await desk.ended(await desk.start(line("a")))
        assert ended["request_counts"]["completed"] == 1
        assert [(entry.requests, entry.refused) for entry in desk.ledger()] == [(1, 0)]


async def test_nothing_is_tried_while_the_engine_is_away(tmp_path):
    async with running_desk(tmp_path) as desk:
        desk.service.engine.connected = False
        batch_id = await desk.start(line("a"))
        await asyncio.sleep(0.3)
        assert desk.service.engine.submitted == []
        desk.service.engine.connected = True
        assert (await desk.ended(batch_id))["status"] == "completed"


async def test_only_the_days_tokens_limit_a_batch(tmp_path):
    limits = Limits(requests_per_minute=1, output_tokens_per_minute=3, concurrent_requests=1, tokens_per_day=1000)
    async with running_desk(tmp_path, KeyTerms(limits=limits)) as desk:
        ended = await desk.ended(await desk.start(*[line(f"r{index}") for index in range(5)]))
        assert ended["request_counts"]["completed"] == 5
        response = await desk.service.client.post(
            URL, json={"model": MODEL, "prompt": "hi", "max_tokens": 3}, headers=desk.headers
        )
        assert response.status_code == 200, "the minute is still the online requests' own"


async def test_a_batch_never_uses_more_than_the_days_tokens(tmp_path):
    # "hi" and three tokens each: only two fit.
    async with running_desk(tmp_path) as desk:
        (await desk.ended(await desk.start(line("measure"))))
        (entry,) = desk.ledger()
        size = entry.prompt_tokens + entry.output_tokens
    other = tmp_path / "other"
    other.mkdir()
    async with running_desk(other, KeyTerms(limits=Limits(tokens_per_day=2 * size + 1))) as desk:
        batch_id = await desk.start(*[line(f"r{index}") for index in range(4)])
        for _ in range(600):
            if (await desk.look(batch_id))["request_counts"]["completed"] == 2:
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        assert (await desk.look(batch_id))["request_counts"] == {"total": 4, "completed": 2, "failed": 0}
        assert [(entry.requests, entry.refused) for entry in desk.ledger()] == [(2, 0)]


async def test_batches_that_wait_for_their_tenants_limits_leave_places_to_others(tmp_path):
    async with running_desk(tmp_path, KeyTerms()) as desk:
        poor = KeyTerms(limits=Limits(tokens_per_day=10))
        keys = KeyStore(desk.service.context.tenancy.database)
        tenants = [Desk(desk.service, keys.create(f"poor-{index}", poor)) for index in range(5)]
        await until(lambda: desk.service.context.tenancy.ring.caller_named("poor-4") is not None)
        for tenant in tenants:
            await tenant.start(*[line(f"r{index}") for index in range(4)])
        ended = await desk.ended(await desk.start(line("a")))
        assert ended["request_counts"]["completed"] == 1


async def test_a_batch_that_nobody_can_work_on_keeps_no_other_from_running(tmp_path, monkeypatch):
    read = HeldBatch._read_input
    reads = []

    def fail_first(held):
        reads.append(held.batch.id)
        if held.batch.id == reads[0]:
            raise RuntimeError("nobody foresaw this")
        return read(held)

    monkeypatch.setattr(HeldBatch, "_read_input", fail_first)
    async with running_desk(tmp_path) as desk:
        broken = await desk.start(line("a"))
        await until(lambda: broken in reads)
        assert (await desk.ended(await desk.start(line("b"))))["request_counts"]["completed"] == 1
        assert reads.count(broken) == 1, "it is tried again when its hold has run out"


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_batch_whose_file_nobody_gets_to_the_end_of_is_given_up_with_a_reason(
    tmp_path, monkeypatch, is_cancelled
):
    reads = []

    def fail(*args):
        reads.append(args)
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(held_batch, "InputFile", fail)
    monkeypatch.setattr(batch_work, "HOLD_SECONDS", 0.0)
    async with running_desk(tmp_path) as desk:
        batch_id = await desk.start(line("a"))
        if is_cancelled:
            await desk.call("POST", f"/batches/{batch_id}/cancel")
        ended = await desk.ended(batch_id)
    assert len(reads) == 10
    if is_cancelled:
        assert ended["status"] == "cancelled"
    else:
        (error,) = ended["errors"]["data"]
        assert (ended["status"], error["code"]) == ("failed", "file_unreadable")
        assert "nobody foresaw" not in error["message"]


def failing_writes(monkeypatch, num_failures):
    """Let so many attempts to write a file of results fail halfway; return the list in which they are noted."""
    fill, attempts = FileStore.fill, []

    def fail(files, file_id, pieces):
        attempts.append(file_id)
        if len(attempts) > num_failures:
            return fill(files, file_id, pieces)
        fill(files, file_id, [next(iter(pieces))])
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(held_batch.FileStore, "fill", fail)
    monkeypatch.setattr(batch_work, "HOLD_SECONDS", 0.0)
    return attempts


def files_of_results(desk):
    with desk.service.context.tenancy.database.reading() as connection:
        return connection.execute(select(files.c.id).where(files.c.purpose == "batch_output")).scalars().all()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_batch_whose_results_nobody_gets_written_is_given_up_with_a_reason(tmp_path, monkeypatch, is_cancelled):
    attempts = failing_writes(monkeypatch, 1000)
    async with running_desk(tmp_path) as desk:
        batch_id = await desk.start(line("a"), line("b"))
        if is_cancelled:
            await until(lambda: attempts)
            await desk.call("POST", f"/batches/{batch_id}/cancel")
        ended = await desk.ended(batch_id)
        (error,) = ended["errors"]["data"]
        assert (ended["status"], error["code"]) == ("failed", "results_unwritable")
        assert "nobody foresaw" not in error["message"]
        assert ended["output_file_id"] is None and ended["error_file_id"] is None
        assert len(attempts) == 10 and len(desk.service.engine.submitted) == 2, "nothing has run twice"
        assert files_of_results(desk) == [], "what was half written is gone"


async def test_results_that_are_written_at_last_are_whole_and_nothing_has_run_twice(tmp_path, monkeypatch):
    failing_writes(monkeypatch, 9)
    async with running_desk(tmp_path) as desk:
        ended = await desk.ended(await desk.start(line("a"), line("b")))
        assert ended["status"] == "completed"
        assert [result["custom_id"] for result in await desk.results(ended["output_file_id"])] == ["a", "b"]
        assert len(desk.service.engine.submitted) == 2
        assert files_of_results(desk) == [ended["output_file_id"]]


async def test_a_store_that_fails_behind_the_end_of_a_batch_costs_no_result(tmp_path, monkeypatch):
    forget, failures = BatchWork._forget_rows, []

    def fail_once(work, batch_id):
        forget(work, batch_id)
        if not failures:
            failures.append(batch_id)
            raise StoreUnavailable("the store does not work")

    monkeypatch.setattr(BatchWork, "_forget_rows", fail_once)
    monkeypatch.setattr(held_batch, "_RETRY_SECONDS", 0.01)
    async with running_desk(tmp_path) as desk:
        batch_id = await desk.start(line("a"))
        await desk.ended(batch_id)
        await until(lambda: failures)
        await desk.ended(await desk.start(line("b")))
        ended = await desk.look(batch_id)
        assert [result["custom_id"] for result in await desk.results(ended["output_file_id"])] == ["a"]


async def test_a_line_larger_than_the_days_tokens_is_told(tmp_path):
    async with running_desk(tmp_path, KeyTerms(limits=Limits(tokens_per_day=10))) as desk:
        ended = await desk.ended(await desk.start(line("a", max_tokens=100)))
        (error,) = await desk.results(ended["error_file_id"])
        assert error["response"]["body"]["error"]["code"] == "limit_too_small"


async def test_a_cancelled_batch_aborts_what_runs(tmp_path):
    async with running_desk(tmp_path) as desk:
        engine = desk.service.engine
        engine.script = lambda request: [asyncio.Event()]
        batch_id = await desk.start(line("a"), line("b"))
        await until(lambda: len(engine.submitted) == 2)
        await desk.call("POST", f"/batches/{batch_id}/cancel")
        assert (await desk.ended(batch_id))["status"] == "cancelled"
        assert len(engine.aborted) == 2 and desk.ledger() == []


async def test_a_batch_that_was_cancelled_before_it_was_read_tells_of_every_line(tmp_path):
    async with running_desk(tmp_path) as desk:
        desk.service.engine.connected = False
        batch_id = await desk.start(line("a"), line("b"))
        await desk.call("POST", f"/batches/{batch_id}/cancel")
        desk.service.engine.connected = True
        ended = await desk.ended(batch_id)
        assert (ended["status"], ended["request_counts"]) == ("cancelled", {"total": 2, "completed": 0, "failed": 2})
        errors = await desk.results(ended["error_file_id"])
        assert [(item["custom_id"], item["error"]["code"]) for item in errors] == [
            ("a", "batch_cancelled"), ("b", "batch_cancelled"),
        ]  # fmt: skip
        assert desk.service.engine.submitted == []


@pytest.mark.parametrize(("tenant", "model"), [(OPEN_TENANT, "gone"), ("revoked", MODEL)])
@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_batch_ends_though_its_model_is_no_longer_served_or_its_key_is_gone(tmp_path, tenant, model, status):
    async with running_desk(tmp_path) as desk:
        database = desk.service.context.tenancy.database
        file_store, store = FileStore(database), BatchStore(database)
        file_id = file_store.begin(tenant, "in.jsonl", "batch")
        file_store.fill(file_id, [json.dumps(line("a", model=model)).encode()])
        new = NewBatch(
            endpoint=URL, model=model, input_file_id=file_id, completion_window="24h", labels=None,
            window_seconds=0.0 if status == "expired" else 1000.0,
        )  # fmt: skip
        batch = store.create(tenant, new)
        if status == "cancelled":
            store.cancel(tenant, batch.id)
        await until(lambda: store.find(tenant, batch.id).status == status)
        assert store.find(tenant, batch.id).num_failed == 1
        assert not desk.service.engine.submitted


async def test_a_server_that_drains_lets_go_of_its_batches(tmp_path):
    async with running_desk(tmp_path) as desk:
        engine = desk.service.engine
        engine.script = lambda request: [asyncio.Event()]
        batch_id = await desk.start(line("a"))
        await until(lambda: engine.submitted)
        desk.service.context.answers.draining = True
        await until(lambda: engine.aborted)
    async with running_desk(tmp_path) as desk:  # at once, though nobody waited for the hold to run out
        await until(lambda: desk.service.engine.submitted)
        assert (await desk.ended(batch_id))["status"] == "completed"


async def test_a_batch_too_many_is_refused_before_its_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "MAX_OPEN_BATCHES", 0)
    monkeypatch.setattr(FileStore, "read", lambda *_: pytest.fail("the file was read"))
    async with running_desk(tmp_path) as desk:
        with pytest.raises(AssertionError, match="storage_limit_reached"):
            await desk.start(line("a"))


async def test_a_file_is_looked_into_in_its_tenants_turn(tmp_path, monkeypatch):
    turns, run = [], TextWork.run
    monkeypatch.setattr(TextWork, "run", lambda *given: turns.append(given[1:3]) or run(*given))
    async with running_desk(tmp_path) as desk:
        await desk.ended(await desk.start(line("a")))
        assert turns[0] == (Claim(OPEN_TENANT), len(json.dumps(line("a"))) + 1)


async def test_a_deleted_input_file_fails_its_batch(tmp_path):
    async with running_desk(tmp_path) as desk:
        desk.service.engine.connected = False
        batch_id = await desk.start(line("a"))
        await desk.call("DELETE", f"/files/{(await desk.look(batch_id))['input_file_id']}")
        desk.service.engine.connected = True
        ended = await desk.ended(batch_id)
        assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "file_not_found")


async def test_answers_have_openais_shapes(tmp_path):
    async with running_desk(tmp_path) as desk:
        batch_id = await desk.start(line("a"), line("b", temperature=9))
        ended = await desk.ended(batch_id)
        # The real API writes null where its schema has nothing.
        check("Batch", {name: value for name, value in ended.items() if value is not None})
        check("OpenAIFile", (await desk.call("GET", f"/files/{ended['input_file_id']}")).json())
        check("ListFilesResponse", (await desk.call("GET", "/files")).json())
        listed = (await desk.call("GET", "/batches")).json()
        assert listed.pop("data") == [ended]
        check("ListBatchesResponse", {**listed, "data": []})
        check("DeleteFileResponse", (await desk.call("DELETE", f"/files/{ended['output_file_id']}")).json())


async def test_every_line_of_a_result_file_is_whole_however_a_script_finds_its_ends(tmp_path):
    ends = "one\x85two\u2028three\u2029four\\\x85\r\n\x0b\x0c\x1c\x1d\x1e"
    async with running_desk(tmp_path) as desk:
        engine = desk.service.engine
        engine.script = lambda request: engine.say(request, ends)
        lines = line("good\u2028", max_tokens=len(ends.encode())), line("bad\x85\u2029", temperature=7)
        ended = await desk.ended(await desk.start(*lines))
        (answer,) = await desk.results(ended["output_file_id"])
        (error,) = await desk.results(ended["error_file_id"])
        assert [answer["custom_id"], error["custom_id"]] == ["good\u2028", "bad\x85\u2029"]
        assert answer["response"]["body"]["choices"][0]["text"] == ends


async def test_batches_are_counted(tmp_path):
    async with running_desk(tmp_path) as desk:
        await desk.ended(await desk.start(line("a"), line("b", temperature=9)))
        wanted = (
            'penstock_batch_requests_total{outcome="completed"} 1.0',
            'penstock_batch_requests_total{outcome="failed"} 1.0',
            'penstock_batches_total{status="completed"} 1.0',
        )
        text = ""
        for _ in range(500):  # a batch is counted just after it is seen to have ended
            text = (await desk.service.client.get("/metrics")).text
            if all(line in text for line in wanted):
                return
            await asyncio.sleep(0.01)
        pytest.fail(text)


async def test_without_a_store_there_are_no_files(service):
    for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches/x/cancel")):
        response = await service.client.request(method, path)
        assert (response.status_code, "--store" in response.text) == (400, True)


def test_the_window_grows_while_nobody_waits_and_shrinks_by_those_who_do():
    window, now = Window(), 0.0
    for _ in range(20):
        window.look(now, num_waiting=0, is_full=True)
        now += 1
    assert window.size == MOST
    window.look(now, num_waiting=200, is_full=True)
    assert window.size == MOST - 200
    window.look(now + 0.01, num_waiting=200, is_full=True)
    assert window.size == MOST - 200, "the same news count once"
    for _ in range(20):
        window.shrink()
    assert window.size == FEWEST


def test_a_window_that_is_not_filled_does_not_grow():
    window = Window()
    for now in range(10):
        window.look(float(now), num_waiting=0, is_full=False)
    assert window.size == FEWEST


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ('{"prompt": "a"}', 1),
        ('{"prompt": "a", "n": 128}', 128),
        ('{"prompt": ["a", "b"], "n": 3}', 6),
        ('{"prompt": [1, 2, 3]}', 1),
        ('{"prompt": [[1], [2]]}', 2),
        ('{"messages": [], "n": 4}', 4),
        ('{"n": "many"}', 1),
        ('{"n": -4}', 1),
    ],
)
def test_a_line_counts_as_many_answers_as_it_asks_for(body, answers):
    assert count_answers(body) == answers


async def test_the_window_is_filled_with_answers_not_with_lines(tmp_path):
    async with running_desk(tmp_path) as desk:
        engine, may_end = desk.service.engine, asyncio.Event()
        engine.stats = EngineStats(num_waiting=1)  # so few that the window stays as it is
        engine.script = lambda request: [may_end, *engine.say(request, "well")]
        batch_id = await desk.start(*(line(f"{index}", n=FEWEST // 2) for index in range(6)))
        await until(lambda: len(engine.submitted) >= FEWEST)
        await asyncio.sleep(0.1)
        assert len(engine.submitted) == FEWEST
        may_end.set()
        assert (await desk.ended(batch_id))["request_counts"]["completed"] == 6
