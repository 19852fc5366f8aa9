"""Steps that raise, run out of memory or give no numbers: who was in them hears of it, everybody else goes on."""

import asyncio
import os
import signal

import httpx
import pytest

from tests.faults.caller import call, completion_body
from tests.faults.faulty_engine import BE_SLOW, CORRUPT_CACHE, GIVE_NAN, HANG, RAISE, RUN_OUT_OF_MEMORY
from tests.server_process import until


def ask(server, prompt=(5, 6, 7), **changes):
    body = completion_body(stream=False, prompt=list(prompt), **{"max_tokens": 5, **changes})
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=30)


def failures(server):
    found = [
        line for line in server.get("/metrics")[1].splitlines() if 'finished_requests_total{reason="error"}' in line
    ]
    return float(found[0].split()[-1])


@pytest.mark.parametrize("fault", [RAISE, RUN_OUT_OF_MEMORY])
def test_a_step_that_raises_fails_its_own_requests_and_no_later_one(faulty_server, fault):
    expected = ask(faulty_server).json()["choices"]
    engine, before = faulty_server.child("tests.faults.faulty_engine"), failures(faulty_server)
    # At the first step, and in the midst of an answer, where the bias makes the model meet the token.
    for changes in ({"prompt": [5, fault]}, {"prompt": [5], "logit_bias": {str(fault): 100}}):
        answer = ask(faulty_server, **changes)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        assert ask(faulty_server).json()["choices"] == expected
    # The canary may have been in one of these steps too.
    until(lambda: failures(faulty_server) >= before + 2, 10, "two failures counted")
    assert faulty_server.child("tests.faults.faulty_engine") == engine


async def test_only_the_batch_that_ran_the_step_fails(faulty_server):
    # Far longer than it takes to see that all three run.
    slow = completion_body(prompt=[BE_SLOW], max_tokens=60, logit_bias={str(BE_SLOW): 100})
    in_the_batch = [asyncio.create_task(call(faulty_server.url, slow)) for _ in range(3)]
    await asyncio.to_thread(
        until, lambda: faulty_server.metric("penstock_total_running_requests") == 3, 10, "three running requests"
    )
    broken = await call(faulty_server.url, completion_body(prompt=[RAISE]))
    after = await call(faulty_server.url, completion_body(max_tokens=5))
    assert broken.code == "engine_failed"
    assert after.state == "completed"
    assert {outcome.code for outcome in await asyncio.gather(*in_the_batch)} == {"engine_failed"}


async def test_a_row_of_nan_fails_that_request_alone_and_is_counted(faulty_server):
    expected = ask(faulty_server, max_tokens=300).json()["choices"]
    before = failures(faulty_server)
    neighbour = asyncio.create_task(asyncio.to_thread(ask, faulty_server, max_tokens=300))
    await asyncio.sleep(0.05)
    broken = await asyncio.gather(*[call(faulty_server.url, completion_body(prompt=[9, GIVE_NAN])) for _ in range(3)])
    assert {outcome.code for outcome in broken} == {"engine_failed"}
    assert (await neighbour).json()["choices"] == expected
    until(lambda: failures(faulty_server) >= before + 3, 10, "three failures counted")


def test_a_corrupted_cache_is_caught_told_and_emptied(faulty_server):
    until(lambda: faulty_server.get("/ready")[0] == 200, 10, "readiness")
    prompt = list(range(10, 60))
    ask(faulty_server, prompt)
    assert ask(faulty_server, prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    before = faulty_server.metric("penstock_canary_failures_total")
    ask(faulty_server, [5, CORRUPT_CACHE], max_tokens=1)
    until(lambda: "nobody wrote" in faulty_server.get("/ready")[1], 10, "the fault told by /ready")
    assert faulty_server.metric("penstock_canary_failures_total") > before
    assert any("penstock.canary" in line or "nobody wrote" in line for line in faulty_server.lines)
    until(lambda: faulty_server.get("/ready")[0] == 200, 10, "readiness")
    assert ask(faulty_server, prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def is_replaced(server, calls, dead):
    """Wait until the engine `dead` has been given up, and another serves."""
    assert {outcome.code for outcome in await asyncio.gather(*calls)} == {"engine_failed"}
    await asyncio.to_thread(until, lambda: server.get("/ready")[0] == 200, 60, "the engine's return")
    assert server.child("tests.faults.faulty_engine") != dead
    assert ask(server).status_code == 200
    assert server.get("/live")[0] == 200


async def test_an_engine_that_stands_still_for_good_is_replaced_and_its_streams_end_with_a_typed_error(faulty_server):
    slow = completion_body(prompt=[BE_SLOW], max_tokens=60, logit_bias={str(BE_SLOW): 100})
    calls = [asyncio.create_task(call(faulty_server.url, slow)) for _ in range(2)]
    await asyncio.to_thread(
        until, lambda: faulty_server.metric("penstock_total_running_requests") == 2, 10, "two running requests"
    )
    engine = faulty_server.child("tests.faults.faulty_engine")
    os.kill(engine, signal.SIGSTOP)
    await is_replaced(faulty_server, calls, engine)


@pytest.mark.faults
async def test_an_engine_that_never_ends_a_step_is_replaced_too(faulty_server):
    engine = faulty_server.child("tests.faults.faulty_engine")
    call_that_hangs = asyncio.create_task(call(faulty_server.url, completion_body(prompt=[5, HANG])))
    await is_replaced(faulty_server, [call_that_hangs], engine)
