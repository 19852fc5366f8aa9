"""Every request has an id and one log line, which never holds what was said."""

import logging

import pytest

from penstock.errors import EngineFailed


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "penstock.access")
    return lambda: [record.penstock_fields for record in caplog.records if record.name == "penstock.access"]


async def test_a_request_id_comes_back_as_it_was_sent(service):
    response = await service.client.get("/live", headers={"x-request-id": "trace-1:2.3_4"})
    assert response.headers["x-request-id"] == "trace-1:2.3_4"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "<script>", 'a"b'])
async def test_an_unfit_request_id_is_replaced(service, given):
    response = await service.client.get("/live", headers={"x-request-id": given})
    assert response.headers["x-request-id"] not in ("", given)


async def test_a_completion_is_logged_in_one_line(service, lines):
    service.engine.script = lambda request: service.engine.say(request, "ab", cached=7)
    await service.client.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 2},
        headers={"x-request-id": "abc"},
    )
    (line,) = lines()
    expected = {
        "request_id": "abc", "route": "/v1/chat/completions", "status": 200, "model": "tiny", "num_choices": 2,
        "cached_tokens": 7, "output_tokens": 6, "finish": "stop", "stream": False,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    assert line["prompt_tokens"] == len(service.engine.submitted[0].prompt)
    assert 0 < line["ttft_seconds"] <= line["total_seconds"]
    assert line["completion_id"].startswith("chatcmpl-")


@pytest.mark.parametrize("stream", [False, True])
async def test_neither_prompt_nor_answer_is_logged(service, caplog, stream):
    caplog.set_level(logging.DEBUG)
    service.engine.script = lambda request: service.engine.say(request, "classified answer")
    await service.chat("classified question", stream=stream)
    await service.chat("classified question", temperature="classified")
    service.engine.script = lambda request: [EngineFailed("stopped")]
    await service.chat("classified question", stream=stream)
    ours = [record for record in caplog.records if record.name.startswith("penstock")]
    assert ours
    assert not any("classified" in str(record.__dict__) for record in ours)


async def test_a_refusal_is_logged_with_its_code(service, lines):
    await service.chat(temperature=9)
    (line,) = lines()
    assert (line["status"], line["error_code"]) == (400, "invalid_parameter")


async def test_an_error_mid_stream_is_logged_with_its_code(service, lines):
    service.engine.script = lambda request: [service.engine.event(request, [40]), EngineFailed("stopped")]
    await service.chat(stream=True)
    (line,) = lines()
    assert (line["status"], line["error_code"]) == (200, "engine_failed")


async def test_probes_do_not_fill_the_log(service, lines):
    for connected in (True, False):
        service.engine.connected = connected
        for path in ("/live", "/ready", "/metrics"):
            await service.client.get(path)
    assert lines() == []
