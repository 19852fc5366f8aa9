"""Whatever a caller does wrong, the answer has the OpenAI shape and names what is wrong."""

import json
import math
import re

import httpx
import msgspec
import pytest

from penstock.engine.messages import TokenEvent
from penstock.errors import EngineFailed
from penstock.request import FinishReason
from tests.unit.server.conftest import MODEL
from tests.unit.server.openai_schema import check
from tests.unit.server.sse import events_in

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
PART = {"type": "text", "text": "x"}


def error_of(response: httpx.Response, status: int, code: str) -> dict[str, str]:
    assert response.status_code == status, response.text
    body = response.json()
    check("ErrorResponse", body)
    assert body["error"]["code"] == code
    assert response.headers["x-request-id"]
    return body["error"]


def body_with(**fields: object) -> bytes:
    message = {"role": "user", "content": "hi"}
    return json.dumps({"model": MODEL, "messages": [message], **fields}).encode()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"nonsense", b"\xff\xfe", b'{"model": "tiny", "messages": "\\ud800"}', b"null", b"[" * 10_000],
)
async def test_a_body_that_is_no_json_object_is_refused(service, body):
    error_of(await service.client.post(CHAT, content=body, headers=JSON), 400, "invalid_json")


async def test_deeply_nested_json_is_refused(service):
    nested = b'{"model": "tiny", "messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    error_of(await service.client.post(CHAT, content=nested, headers=JSON), 400, "invalid_json")


@pytest.mark.parametrize(
    ("literal", "shown"),
    [("NaN", "NaN"), ("Infinity", "Infinity"), ("-Infinity", "-Infinity"), ("1e999", "Infinity")],
)
async def test_numbers_that_are_none_are_refused_by_name(service, literal, shown):
    body = body_with().replace(b'"model"', f'"temperature": {literal}, "model"'.encode())
    response = await service.client.post(CHAT, content=body, headers=JSON)
    error = error_of(response, 400, "invalid_parameter")
    assert error["param"] == "temperature"
    assert error["message"] == f"temperature: {shown} is not usable; give a finite number"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 2),
        ("seed", "1"),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 129),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", 5),
        ("stop_token_ids", [10**9]),
        ("stop_token_ids", ["a"]),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", [1]),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("ignore_eos", "yes"),
        ("stream", "true"),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
        ("messages", "hi"),
        ("model", 5),
    ],
)
async def test_a_wrong_value_is_refused_with_its_name(service, field, value):
    response = await service.client.post(CHAT, content=body_with(**{field: value}), headers=JSON)
    error = error_of(response, 400, "invalid_parameter")
    assert (error["param"] or "").startswith(field)
    assert service.engine.submitted == []


async def test_the_sentence_names_parameter_value_and_what_would_be_right(service):
    error = error_of(await service.chat(temperature=7.5), 400, "invalid_parameter")
    assert error["message"] == "temperature: 7.5 is not usable; give a number from 0 to 2"


@pytest.mark.parametrize(
    ("message", "param", "word"),
    [
        ({"role": "king", "content": "x"}, "messages[0].role", "assistant"),
        ({"role": "user"}, "messages[0].content", "required"),
        ({"role": "user", "content": None}, "messages[0].content", "text"),
        ({"role": "user", "content": 5}, "messages[0].content", "string"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content", "image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content", "text"),
        ({"role": "user", "content": []}, "messages[0].content", "1 to 8192 parts"),
        ({"role": "user", "content": [{**PART, "colour": "red"}]}, "messages[0].content", "'colour'"),
        ({"role": "user", "content": [{**PART, "prompt_cache_breakpoint": 1}]}, "messages[0].content", "object"),
        ({"role": "user", "content": "x", "colour": "red"}, "messages[0].colour", "unknown"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0]", "tool_calls"),
        ("hi", "messages[0]", "object"),
    ],
)
async def test_a_wrong_message_is_refused_with_its_place(service, message, param, word):
    response = await service.post(CHAT, messages=[message])
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert word in error["message"]


async def test_an_unknown_parameter_is_named(service):
    error = error_of(await service.chat(temprature=1), 400, "invalid_request")
    assert error["param"] == "temprature"


async def test_a_missing_parameter_is_named(service):
    response = await service.client.post(CHAT, json={"model": MODEL})
    assert error_of(response, 400, "invalid_request")["message"] == "messages is required"


async def test_an_unknown_model_is_not_found(service):
    response = await service.client.post(CHAT, content=body_with(model="gpt-9"), headers=JSON)
    error = error_of(response, 404, "model_not_found")
    assert "gpt-9" in error["message"]
    assert MODEL in error["message"]


async def test_a_prompt_over_the_context_is_refused_with_both_numbers(service):
    error = error_of(await service.complete("x" * 600), 400, "context_length_exceeded")
    assert "600" in error["message"]
    assert "512" in error["message"]
    assert error["param"] == "prompt"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(service, path, monkeypatch):
    monkeypatch.setattr(service.tokenizer, "encode", None)
    text = "x" * 20_000
    wanted = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    error = error_of(await service.post(path, **wanted), 400, "context_length_exceeded")
    assert re.search(r"has at least 2\d{3} tokens, but the longest context here is 512 tokens", error["message"])
    assert error["param"] == next(iter(wanted))


async def test_an_answer_that_must_be_longer_than_the_context_is_told_how_long_it_may_be(service):
    error = error_of(await service.chat(min_tokens=100_000), 400, "context_length_exceeded")
    assert error["param"] == "min_tokens"
    assert "plus min_tokens (100000)" in error["message"]
    fits = int(error["message"].rpartition("give at most ")[2])
    error_of(await service.chat(min_tokens=fits + 1), 400, "context_length_exceeded")
    assert (await service.chat(min_tokens=fits)).status_code == 200


async def test_an_answer_that_would_not_fit_is_refused_with_the_numbers(service):
    error = error_of(await service.complete("x" * 500, max_tokens=13), 400, "context_length_exceeded")
    assert all(number in error["message"] for number in ("500", "13", "513", "512"))
    assert (await service.complete("x" * 500, max_tokens=12)).status_code == 200


async def test_a_default_length_that_does_not_fit_is_no_mistake_of_the_callers(service):
    assert (await service.complete("x" * 505)).status_code == 200


async def test_both_names_of_the_length_limit_may_not_disagree(service):
    error_of(await service.chat(max_tokens=3, max_completion_tokens=4), 400, "invalid_parameter")


async def test_text_with_a_nul_character_is_refused(service):
    assert "NUL" in error_of(await service.complete("a\0b"), 400, "invalid_parameter")["message"]


async def test_a_body_declared_too_large_is_refused_unread(service):
    headers = {**JSON, "content-length": "99999999"}
    response = await service.client.post(CHAT, content=b"{}", headers=headers)
    message = error_of(response, 413, "body_too_large")["message"]
    assert "65536" in message and "99999999" in message


async def test_a_chunked_body_is_refused_when_it_grows_too_large_and_read_on_only_so_far(service, monkeypatch):
    monkeypatch.setattr("penstock.server.body._MAX_DISCARDED_BYTES", 10_000)
    sent = 0

    async def endless():
        nonlocal sent
        for _ in range(1000):
            sent += 1024
            yield b"x" * 1024

    error_of(await service.client.post(CHAT, content=endless(), headers=JSON), 413, "body_too_large")
    assert sent <= service.context.config.max_body_bytes + 10_000 + 2048


async def test_a_body_of_another_type_is_refused(service):
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}, {}):
        response = await service.client.post(CHAT, content=body_with(), headers=headers)
        error_of(response, 415, "unsupported_media_type")


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "gzip, identity"])
async def test_a_compressed_body_is_refused(service, encoding):
    headers = {**JSON, "content-encoding": encoding}
    error = error_of(
        await service.client.post(CHAT, content=body_with(), headers=headers), 415, "unsupported_media_type"
    )
    assert error["message"] == f"send the body as it is, without 'Content-Encoding: {encoding}'"
    plain = {**JSON, "content-encoding": "identity"}
    assert (await service.client.post(CHAT, content=body_with(), headers=plain)).status_code == 200


async def test_a_body_that_is_compressed_on_its_way_is_refused(service):
    for encoding in ("gzip, chunked", "deflate,chunked"):
        refused = await service.client.post("/tokenize", headers={**JSON, "transfer-encoding": encoding}, content=b"{}")
        assert refused.status_code == 415
        assert refused.json()["error"]["message"] == f"send the body as it is, without 'Transfer-Encoding: {encoding}'"


async def test_an_unknown_route_is_not_found(service):
    error_of(await service.client.get("/v2/chat"), 404, "route_not_found")
    error_of(await service.client.get("/live/"), 404, "route_not_found")


async def test_a_wrong_method_is_told_with_the_right_one(service):
    response = await service.client.get(CHAT)
    error_of(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/live", "/v1/models", f"/v1/models/{MODEL}"])
async def test_head_answers_as_get_does_without_a_body(service, address, path):
    async with httpx.AsyncClient(base_url=address) as client:
        whole, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))


async def test_a_full_queue_is_429_with_the_time_to_wait(service):
    service.engine.script = lambda request: [
        TokenEvent(
            request_id=request.request_id,
            finish=FinishReason.ERROR,
            error_code="overloaded",
            error="8 requests are waiting, which is the limit",
            retry_after_seconds=2.25,
        )
    ]
    for stream in (False, True):
        response = await service.chat(stream=stream)
        error_of(response, 429, "overloaded")
        assert response.headers["retry-after"] == "3"
        assert response.headers["retry-after-ms"] == "2250"


async def test_no_engine_is_503(service):
    service.engine.connected = False
    response = await service.chat()
    error_of(response, 503, "engine_unavailable")
    assert int(response.headers["retry-after"]) > 0
    service.engine.info = None
    error_of(await service.chat(), 503, "engine_unavailable")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_before_the_first_token_is_500(service, stream):
    service.engine.script = lambda request: [EngineFailed("the engine stopped while it worked on this request")]
    error_of(await service.chat(stream=stream), 500, "engine_failed")


async def test_an_engine_that_fails_mid_stream_ends_it_with_an_error_event(service):
    service.engine.script = lambda request: [service.engine.event(request, [40]), EngineFailed("the engine stopped")]
    response = await service.chat(stream=True)
    *_, last = events_in(response.content)
    assert response.status_code == 200
    check("ErrorResponse", last)
    assert last["error"]["code"] == "engine_failed"


async def test_an_unexpected_abort_is_an_error_not_an_answer(service):
    service.engine.script = lambda request: [TokenEvent(request_id=request.request_id, finish=FinishReason.ABORT)]
    error_of(await service.chat(), 500, "engine_failed")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_of_an_unknown_exception_stays_inside(service, stream, caplog):
    service.engine.script = lambda request: [KeyError("secret")]
    response = await service.chat(stream=stream)
    error_of(response, 500, "internal_error")
    assert "secret" not in response.text
    assert "secret" in caplog.text


async def test_a_failing_handler_is_an_internal_error(service, monkeypatch, caplog):
    def fail(text, *, add_special):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(service.tokenizer, "encode", fail)
    response = await service.complete()
    error_of(response, 500, "internal_error")
    assert "secret" not in response.text


def test_the_judge_can_say_no():
    with pytest.raises(AssertionError):
        check("ErrorResponse", {"error": {"message": "m", "type": "t", "code": math.pi, "param": None}})


async def test_more_answers_than_can_ever_be_open_at_once_are_refused_with_both_numbers(service):
    service.engine.info = msgspec.structs.replace(service.engine.info, max_open_requests=6)
    for response, param in (
        (await service.chat(n=10), "n"),
        (await service.complete(n=10), "n"),
        (await service.complete(prompt=["hi"] * 5, n=2), "prompt"),
    ):
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_parameter", param)
        assert "10 answers" in error["message"] and "at most 6 requests" in error["message"]
    assert service.engine.submitted == []
    assert (await service.complete(n=6)).status_code == 200


async def test_stream_options_without_stream_are_shown_as_sent(service):
    content = body_with(stream_options={"include_usage": True})
    error = error_of(await service.client.post(CHAT, content=content, headers=JSON), 400, "invalid_parameter")
    assert error["message"] == 'stream_options: {"include_usage": true} is not usable; give it only with stream=true'


async def test_too_many_prompts_are_shown_as_sent_with_their_number(service):
    content = json.dumps({"model": MODEL, "prompt": ["a"] * 65, "n": 2}).encode()
    response = await service.client.post("/v1/completions", content=content, headers=JSON)
    message = error_of(response, 400, "invalid_parameter")["message"]
    assert message.startswith('prompt: ["a", "a", ')
    assert message.endswith("65 prompts × n (2) are 130; give at most 128")


async def test_a_text_with_a_token_that_the_model_lacks_is_not_asked_for_token_ids(service):
    (token_id,) = service.tokenizer.encode("<|end|>", add_special=False)
    service.engine.info = msgspec.structs.replace(service.engine.info, vocab_size=token_id)
    expected = f"token {token_id} for a part of this text, but the model knows 0 to {token_id - 1} only"
    for response, param in ((await service.complete("x<|end|>"), "prompt"), (await service.chat(), "messages")):
        error = error_of(response, 400, "invalid_request")
        assert error["param"] == param
        assert expected in error["message"]
        assert "give token ids" not in error["message"]
    assert service.engine.submitted == []
