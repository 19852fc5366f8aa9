"""A foreign server's stream that tells that it failed, behind a status of 200: what is read of it, and what follows."""

import pytest
from aiohttp import web

from penstock.fleet.router.foreign_failure import FailureWatch
from penstock.metering.counts import StoreCounts
from penstock.metering.tenancy import Tenancy
from penstock.store.database import Database
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import running_gateway, until
from tests.unit.fleet.test_accounts import Settings, booked

TEXT = b'data: {"choices": [{"index": 0, "text": "error {\\"error\\": {"}]}\n\n'
DONE = b"data: [DONE]\n\n"
FAILURES = [
    (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', 500),
    (b'data: {"error":{"message":"too long","code":400}}\r\n\r\n', 400),
    (b'data:{"error":"it broke","error_type":"generation"}\n\n', 500),
    (b'data: {"object": "error", "message": "no", "code": "422"}\n\n', 422),
    (b'data: {"error": {"message": "half', 500),
]


@pytest.fixture
async def tenancy(tmp_path):
    tenancy = Tenancy(Settings(), StoreCounts(), Database.open(str(tmp_path / "s.db")))
    yield tenancy
    await tenancy.close()


def streaming(*events):
    async def answer(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        return response

    return answer


@pytest.mark.parametrize("num_bytes", [1, 7, 4096])
@pytest.mark.parametrize(("event", "status"), FAILURES)
@pytest.mark.parametrize("before", [b"", b": ping\n\n", TEXT])
def test_a_failure_is_read_however_it_is_written_and_cut_up(before, event, status, num_bytes):
    watch, data = FailureWatch(), before + event
    for start in range(0, len(data), num_bytes):
        watch.feed(data[start : start + num_bytes])
    assert (watch.status(), watch.has_answer) == (status, before == TEXT)


@pytest.mark.parametrize(
    "event",
    [
        TEXT,
        b'data: {"choices": [{"index": 0, "text": "error"}], "error": null}\n\n',
        b'data: {"error": null, "choices": []}\n\n',
        b'data: {"object": "text_completion", "choices": [{"text": "\\ndata: {\\"error\\": {"}]}\n\n',
    ],
)
def test_what_an_answer_says_of_errors_is_no_failure(event):
    watch = FailureWatch()
    watch.feed(event + DONE)
    assert watch.status() is None


@pytest.mark.parametrize(
    ("events", "counts"),
    [
        ((FAILURES[0][0], DONE), (0, 0, 0, 0, 0, 1)),
        ((TEXT, FAILURES[0][0], DONE), (1, 3, 0, 1, 0, 1)),
        ((FAILURES[1][0], DONE), None),
        ((TEXT, FAILURES[1][0], DONE), (1, 3, 0, 1, 0, 0)),
    ],
)
async def test_a_stream_that_tells_its_failure_passes_and_is_booked_as_one(tenancy, events, counts):
    replica = FakeReplica(answer=streaming(*events))
    async with replica.running(), running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        answer = await running.ask(stream=True, prompt=[1, 2, 3])
        assert await answer.read() == b"".join(events)
        if counts is not None:
            await until(lambda: booked(tenancy) is not None)
        assert booked(tenancy) == counts
        (decision,) = running.gateway.context.decisions.newest(1)
    assert decision.error_code == ("engine_failed" if counts is not None and counts[-1] else "")
