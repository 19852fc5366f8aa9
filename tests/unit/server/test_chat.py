"""/v1/chat/completions through the real openai client and over plain HTTP."""

import asyncio
import json
import struct

import openai
import pytest

from penstock.request import FinishReason
from tests.unit.server.conftest import MODEL
from tests.unit.server.openai_schema import check
from tests.unit.server.sse import events_in, text_of

USER = [{"role": "user", "content": "hi"}]
ANSWER = "Hello, wörld! 🙂"


@pytest.fixture
async def openai_client(address):
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_openai_client_gets_a_whole_answer(openai_client):
    answer = await openai_client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_the_openai_client_streams_an_answer(openai_client):
    stream = await openai_client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


async def test_the_openai_client_raises_its_own_error_types(openai_client):
    with pytest.raises(openai.NotFoundError) as unknown:
        await openai_client.chat.completions.create(model="other", messages=USER)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await openai_client.chat.completions.create(model=MODEL, messages=USER, temperature=9)
    assert wrong.value.param == "temperature"


async def test_a_whole_answer_fits_the_published_schema(service):
    response = await service.chat(logprobs=True, top_logprobs=3, n=2)
    check("CreateChatCompletionResponse", response.json())
    assert "-Infinity" not in response.text


async def test_every_chunk_fits_the_published_schema(service):
    options = {"include_usage": True}
    response = await service.chat(stream=True, stream_options=options, logprobs=True, top_logprobs=2, n=2)
    *chunks, done = events_in(response.content)
    assert done == "[DONE]"
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)


async def test_a_stream_adds_up_to_the_whole_answer(service):
    whole = (await service.chat()).json()["choices"][0]["message"]["content"]
    streamed = text_of(events_in((await service.chat(stream=True)).content))
    assert streamed == whole == ANSWER


async def test_a_stream_is_not_to_be_cached_or_buffered(service):
    response = await service.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_usage_comes_in_a_last_chunk_when_asked_for(service):
    response = await service.chat(stream=True, stream_options={"include_usage": True})
    *chunks, last, _ = events_in(response.content)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(service.tokenizer.encode(ANSWER, add_special=False)) + 1


async def test_usage_is_absent_from_a_stream_unless_asked_for(service):
    *chunks, _ = events_in((await service.chat(stream=True)).content)
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_tells_the_cached_tokens(service):
    service.engine.script = lambda request: service.engine.say(request, "x", cached=16)
    usage = (await service.chat()).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_messages_reach_the_engine_through_the_chat_template(service):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    await service.post("/v1/chat/completions", messages=messages)
    prompt = service.tokenizer.decode(service.engine.submitted[0].prompt, skip_special=False)
    assert prompt == "<|start|>system\nbe brief<|end|>\n<|start|>user\na\nb<|end|>\n<|start|>assistant\n"


async def test_an_answer_of_ours_may_be_sent_back_as_it_came(service):
    first = (await service.chat()).json()["choices"][0]["message"]
    messages = [*USER, first, {"role": "user", "content": "and?"}]
    assert (await service.post("/v1/chat/completions", messages=messages)).status_code == 200


async def test_parameters_reach_the_engine(service):
    await service.chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, max_completion_tokens=9, min_tokens=2,
        stop=["a", "b"], stop_token_ids=[3], presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5,
        logit_bias={"5": -100}, ignore_eos=True, logprobs=True, top_logprobs=4,
    )  # fmt: skip
    params = service.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 7, 0.1, 11)
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (9, 2, ("a", "b"), (3,))
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert (params.logit_bias, params.ignore_eos, params.logprobs) == ({5: -100}, True, 4)


async def test_null_means_the_default(service):
    response = await service.chat(temperature=None, stop=None, n=None, logprobs=None, stream=None, max_tokens=None)
    assert response.status_code == 200
    params = service.engine.submitted[0].params
    assert (params.temperature, params.max_tokens, params.stop) == (1.0, None, ())


async def test_fields_without_effect_here_are_accepted(service):
    response = await service.chat(
        user="u", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True, tools=[],
        tool_choice="none", response_format={"type": "text"}, modalities=["text"],
    )  # fmt: skip
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}], "leave it out or give []"),
        ("tool_choice", "auto", 'leave it out or give "none"'),
        ("response_format", {"type": "json_object"}, 'leave it out or give {"type": "text"}'),
        ("audio", {"voice": "a", "format": "wav"}, "leave it out"),
        ("modalities", [], 'leave it out or give ["text"]'),
        ("reasoning_effort", "high", 'leave it out or give "none"'),
    ],
)
async def test_what_cannot_be_honoured_is_refused_with_the_value_and_what_would_be_right(service, field, value, right):
    response = await service.chat(**{field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert error["message"] == f"{field}: {json.dumps(value)} is not supported; {right}"


async def test_a_stop_string_ends_the_answer_and_the_engine_request(service):
    response = await service.chat(stop=["wörld"])
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == "Hello, "
    assert choice["finish_reason"] == "stop"
    assert service.engine.aborted == [service.engine.submitted[0].request_id]


async def test_usage_counts_the_tokens_up_to_a_stop_string(service):
    service.engine.script = lambda request: service.engine.say(request, "abcdefgh", chunk=8)
    usage = (await service.chat(stop="cd")).json()["usage"]
    assert usage["completion_tokens"] == len("abcd")


async def test_no_stop_string_counts_before_min_tokens(service):
    service.engine.script = lambda request: service.engine.say(request, "abab")
    content = (await service.chat(stop="ab", min_tokens=3)).json()["choices"][0]["message"]["content"]
    assert content == "abab"[:2]


async def test_a_stop_token_is_not_part_of_the_text(service):
    def script(request):
        event = service.engine.event(request, service.tokenizer.encode("ab", add_special=False))
        event.finish, event.stop_token = FinishReason.STOP, event.token_ids[-1]
        return [event]

    service.engine.script = script
    answer = (await service.chat(stop_token_ids=[66], logprobs=True)).json()
    assert answer["choices"][0]["message"]["content"] == "a"
    assert [token["token"] for token in answer["choices"][0]["logprobs"]["content"]] == ["a"]
    assert answer["usage"]["completion_tokens"] == 2


async def test_the_length_limit_is_told(service):
    choice = (await service.chat(max_tokens=3)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "Hello"


async def test_log_probabilities_stand_beside_the_text_they_belong_to(service):
    events = events_in((await service.chat(stream=True, logprobs=True, stop=["never"])).content)
    for event in events[:-1]:
        choice = event["choices"][0]
        tokens = choice["logprobs"]["content"] if choice["logprobs"] else []
        data = b"".join(struct.pack(f"{len(token['bytes'])}B", *token["bytes"]) for token in tokens)
        assert data.decode() == choice["delta"].get("content", "")


async def test_several_choices_come_interleaved_with_seeds_of_their_own(service):
    events = events_in((await service.chat(stream=True, n=3, seed=2**63 - 2)).content)
    assert [text_of(events, index) for index in range(3)] == [ANSWER] * 3
    finishes = [event["choices"][0]["index"] for event in events[:-1] if event["choices"][0]["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2]
    order = [event["choices"][0]["index"] for event in events[:-1]]
    assert order != sorted(order)
    assert [request.params.seed for request in service.engine.submitted] == [2**63 - 2, 2**63 - 1, -(2**63)]


async def test_the_prompt_is_counted_once_for_several_choices(service):
    one, three = (await service.chat()).json()["usage"], (await service.chat(n=3)).json()["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]


async def test_tokens_that_wait_together_leave_in_one_chunk(service):
    service.engine.script = lambda request: service.engine.say(request, "abcd", chunk=4)
    *chunks, _ = events_in((await service.chat(stream=True)).content)
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert texts.count("abcd") == 1


async def test_a_first_chunk_leaves_before_the_answer_is_done(service, address):
    more = asyncio.Event()
    service.engine.script = lambda request: [
        service.engine.event(request, [10]),
        more,
        *service.engine.say(request, "rest"),
    ]
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        texts = []
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)
            if texts[-1]:
                more.set()
    assert "".join(text or "" for text in texts).endswith("rest")


async def test_a_model_without_a_template_says_so(service):
    object.__setattr__(service.context, "template", None)
    response = await service.chat()
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


async def test_choices_of_any_length_count_as_long_as_the_context_for_their_log_probabilities(service):
    fields = {"logprobs": True, "top_logprobs": 20}
    response = await service.chat(n=128, **fields)
    assert response.status_code == 400
    assert "lower n, max_tokens or top_logprobs" in response.json()["error"]["message"]
    assert (await service.chat(n=2, **fields)).status_code == 200
