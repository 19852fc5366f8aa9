"""Streams in frames, and answers that another server began."""

import pytest

from penstock.protocol.frames import FRAMES_HEADER, FrameReader
from penstock.protocol.openai_completions import CompletionRequest
from penstock.request import SamplingParams
from penstock.server.answer import Prompt
from penstock.server.continuation import check_continuation
from penstock.server.loop_turns import ENTRIES_A_PASS, LoopTurns
from tests.unit.server.conftest import MODEL
from tests.unit.server.sse import events_in, text_of

TEXT = "Grüße, wörld! 🙂 STOP and more"


@pytest.fixture(params=["chat", "completions"])
def route(request):
    if request.param == "chat":
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
    return "/v1/completions", {"prompt": "hi"}


async def stream(service, route, *, framed=True, **fields):
    path, body = route
    headers = {FRAMES_HEADER: "77"} if framed else {}
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 60, **body}
    return await service.client.post(path, json={**body, **fields}, headers=headers)


def say(service, text):
    service.engine.script = lambda request: service.engine.say(request, text)


def go_on(service, text):
    """Have the engine give the rest of a text behind the tokens that a request begins with."""
    tokens = service.tokenizer.encode(text, add_special=False)

    def script(request):
        so_far = request.num_answer_tokens
        assert request.prompt[len(request.prompt) - so_far :] == tokens[:so_far]
        return service.engine.say(request, text)[so_far:]

    service.engine.script = script


async def test_a_framed_stream_holds_the_same_events(service, route):
    say(service, TEXT)
    plain, framed = await stream(service, route, framed=False), await stream(service, route)
    reader = FrameReader()
    events = reader.feed(framed.content)
    assert reader.finished
    assert text_of(events_in(events)) == text_of(events_in(plain.content)) == TEXT
    assert framed.headers[FRAMES_HEADER] == "none"
    assert FRAMES_HEADER not in plain.headers


async def test_frames_are_comments_to_who_does_not_know_them(service, route):
    say(service, TEXT)
    framed = await stream(service, route)
    lines = [line for line in framed.text.splitlines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)


STOPS = [None, ["STOP"], ["wörld! 🙂 STAY"], ["e, wait", "more or less"]]
WISHES = {
    "plain": {},
    "scored": {"logprobs": 1},
    "several choices": {"n": 3},
    "several choices, scored": {"n": 2, "logprobs": 1},
}


def wishes(route, name):
    fields = dict(WISHES[name])
    if "chat" in route[0] and "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": 1}
    return fields


def seen_of(events):
    """What a caller knows of each choice: its text, its scores as they came, and why it ended."""
    seen = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            text, scores, finish = seen.setdefault(choice["index"], ("", [], []))
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            logprobs = choice.get("logprobs") or {}
            if "text_offset" in logprobs:
                scores += zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
            scores += [item["bytes"] for item in logprobs.get("content") or ()]
            finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            seen[choice["index"]] = (text, scores, finish)
    return seen


@pytest.mark.parametrize("name", WISHES)
@pytest.mark.parametrize("stop", STOPS)
async def test_an_answer_goes_on_wherever_it_was_cut(service, route, stop, name):
    go_on(service, TEXT)
    fields = wishes(route, name) | ({"stop": stop} if stop else {})
    whole = FrameReader()
    expected = events_in(whole.feed((await stream(service, route, **fields)).content))
    frames = _frames((await stream(service, route, **fields)).content)
    assert len(frames) > 5
    for seen in range(1, len(frames)):
        reader = FrameReader()
        shown = reader.feed(b"".join(frames[:seen]))
        began = {"id": "cmpl-1", "created": 5, "token_ids": reader.token_ids, "ended": reader.ended_choices}
        reader.start_over()
        shown += reader.feed((await stream(service, route, continue_from=began, **fields)).content)
        events = events_in(shown)
        assert events[-1] == "[DONE]"
        assert seen_of(events) == seen_of(expected)
        assert events[-2]["usage"] == expected[-2]["usage"]
        assert {(event["id"], event["created"]) for event in events[-3:-1]} == {("cmpl-1", 5)}


async def test_a_choice_that_had_ended_is_not_made_again(service, route):
    go_on(service, TEXT)
    tokens = service.tokenizer.encode(TEXT, add_special=False)
    began = {"id": "cmpl-1", "created": 5, "token_ids": [tokens, tokens[:3]], "ended": [0]}
    response = await stream(service, route, n=2, continue_from=began)
    events = events_in(FrameReader().feed(response.content))
    assert [request.num_answer_tokens for request in service.engine.submitted] == [3]
    assert [request.call_prompts for request in service.engine.submitted] == [[len(service.engine.submitted[0].prompt)]]
    assert {choice["index"] for event in events[:-1] for choice in event["choices"]} == {1}
    assert events[-2]["usage"]["completion_tokens"] == 2 * len(tokens) + 1  # and the end of the second


async def test_a_stream_without_a_seed_gets_the_gateways(service, route):
    await stream(service, route)
    await stream(service, route, seed=3)
    assert [request.params.seed for request in service.engine.submitted] == [77, 3]


async def test_an_answer_that_is_not_streamed_is_not_framed(service, route):
    response = await stream(service, route, stream=False, stream_options=None)
    assert response.status_code == 200
    assert FRAMES_HEADER not in response.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "continue_from.token_ids"),
        ({"token_ids": [[10**7]]}, "continue_from"),
        ({"token_ids": [[5] * 60]}, "continue_from"),
        ({"id": "a b"}, "continue_from.id"),
        ({"token_ids": [[5] * 600]}, "continue_from"),
        ({"token_ids": [[5], [6]]}, "continue_from"),
        ({"ended": [0]}, "continue_from"),
        ({"ended": [1]}, "continue_from"),
    ],
)
async def test_a_continuation_that_cannot_be_is_refused(service, route, fields, param):
    began = {"id": "cmpl-1", "created": 5, "token_ids": [[5]], **fields}
    response = await stream(service, route, continue_from=began)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not service.engine.submitted


async def test_an_answer_that_holds_its_stop_text_has_ended(service, route):
    tokens = service.tokenizer.encode("a STOP b", add_special=False)
    began = {"id": "cmpl-1", "created": 5, "token_ids": [tokens]}
    response = await stream(service, route, continue_from=began, stop="STOP")
    assert response.status_code == 400


def _frames(data: bytes) -> list[bytes]:
    frames = []
    while data:
        head, _, rest = data.partition(b"\n")
        length = int(head.split(b" ")[1])
        frames.append(head + b"\n" + rest[:length])
        data = rest[length:]
    return frames


async def test_what_an_answer_goes_on_behind_is_looked_at_in_turns(service):
    class Counting(LoopTurns):
        num_entries = 0

        async def take(self, num_entries):
            self.num_entries += num_entries
            await super().take(num_entries)

    turns = Counting()
    began = {"id": "cmpl-1", "created": 5, "token_ids": [[1] * 500] * 128}
    wanted = CompletionRequest(model=MODEL, prompt="hi", n=128, stream=True, continue_from=began)
    found = await check_continuation(wanted, SamplingParams(), [Prompt([1])], service.engine.info, turns)
    assert found is not None and len(found.token_ids) == 128
    assert turns.num_entries > ENTRIES_A_PASS // 2, "thousands of tokens are no single turn"
