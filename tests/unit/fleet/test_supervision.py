"""Work in the background: what it trips over is logged, and it goes on."""

import asyncio
import logging

import pytest

from penstock.fleet import supervision
from penstock.fleet.supervision import keep_running
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import running_gateway, until


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(supervision, "PAUSE_SECONDS", 0.0)


async def test_work_that_fails_is_logged_with_its_traceback_and_begun_again(caplog):
    failures = [IndexError("first"), RecursionError("second")]

    async def work():
        if failures:
            raise failures.pop(0)

    await keep_running("the work", work)
    logged = [(record.message, record.levelno, record.exc_info[0]) for record in caplog.records]
    assert logged == [
        ("the work failed", logging.ERROR, IndexError),
        ("the work failed", logging.ERROR, RecursionError),
    ]
    assert caplog.records[0].exc_info[2] is not None


async def test_work_whose_keeper_is_cancelled_has_ended_when_the_keeper_has():
    steps = []

    async def work():
        steps.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("ended")

    keeper = asyncio.create_task(keep_running("the work", work))
    await until(lambda: steps)
    keeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeper
    assert steps == ["began", "ended"]


async def test_a_gateway_goes_on_with_what_failed_in_the_background(monkeypatch, caplog):
    async with FakeReplica().running() as one, running_gateway(one) as running:
        gateway, calls = running.gateway, []

        def trip():
            calls.append(None)
            raise IndexError

        with monkeypatch.context() as patched:
            patched.setattr(gateway.monitor, "_known", trip)
            await until(lambda: len(calls) > 1)
        one.ready = 503
        await until(lambda: not gateway.pool.find(one.url).is_up)
    assert "the health monitor failed" in caplog.messages


async def test_a_probe_that_fails_leaves_those_of_others_alone(monkeypatch, caplog):
    async with (
        FakeReplica().running() as odd,
        FakeReplica().running() as one,
        running_gateway(odd, one) as running,
    ):
        pool = running.gateway.pool

        def trip(*arguments, **named):
            raise IndexError

        monkeypatch.setattr(pool.find(odd.url).breaker, "on_probe", trip)
        await until(lambda: f"the probe of {odd.name} failed" in caplog.messages)
        one.ready = 503
        await until(lambda: not pool.find(one.url).is_up)
    assert "the health monitor failed" not in caplog.messages
