"""The chat client reads any cut of an event stream and turns every failure into a sentence."""

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.commands.chat_client import Answer, ChatClient, EventParser, Message
from penstock.errors import RemoteError
from tests.fakes.chat_server import ChatScript, serve_chat

STREAM = ': comment\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:first\ndata: second é\n\nid: 3\n\ndata: [DONE]\r\r'.encode()


async def ask(url: str, answer: Answer | None = None, api_key: str | None = None) -> list[str]:
    client = ChatClient(url, api_key)
    async with aclosing(client):
        pieces: AsyncIterator[str] = client.stream(
            [Message("user", "hi")], "tiny", answer or Answer(time.monotonic()), {"temperature": 0}
        )
        return [piece async for piece in pieces]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    parser = EventParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    events = [event for start, stop in itertools.pairwise(edges) for event in parser.push(STREAM[start:stop])]
    # The last event's end is a carriage return that may be half of a line's end: it is complete with the next byte.
    assert events + parser.push(b"\n") == ['{"a": 1}', "first\nsecond é", "[DONE]"]


def test_an_endless_event_is_refused() -> None:
    parser = EventParser(max_event_bytes=100)
    parser.push(b"data: " + b"x" * 50 + b"\n")
    with pytest.raises(RemoteError, match="an event of more than 100 bytes"):
        parser.push(b"data: " + b"x" * 50 + b"\n")


async def test_an_answer_streams_in_pieces_and_is_counted() -> None:
    script = ChatScript(pieces=["Hel", "lo ", "you"])
    answer = Answer(time.monotonic())
    with serve_chat(script) as url:
        assert await ask(url, answer) == ["Hel", "lo ", "you"]
    assert answer.text == "Hello you"
    assert answer.num_tokens == 3
    assert answer.finish_reason == "stop"
    assert answer.first_text_seconds is not None
    assert answer.first_text_seconds >= 0


async def test_the_request_is_a_streaming_chat_completion() -> None:
    script = ChatScript()
    with serve_chat(script) as url:
        await ask(url)
    assert script.requests == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
    ]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_url_may_be_written_with_or_without_v1(suffix: str) -> None:
    with serve_chat(ChatScript(models=["one", "two"])) as url:
        client = ChatClient(url + suffix)
        async with aclosing(client):
            assert list(await client.models()) == ["one", "two"]


async def test_the_key_is_sent_as_a_bearer_token() -> None:
    script = ChatScript()
    with serve_chat(script) as url:
        client = ChatClient(url, "secret")
        async with aclosing(client):
            await client.models()
    assert script.keys == ["Bearer secret"]


async def test_no_server_says_how_to_start_one() -> None:
    with serve_chat(ChatScript()) as url:
        pass
    with pytest.raises(RemoteError, match=r"no server answers at .* start one with `penstock serve`"):
        await ask(url)


async def test_a_refusal_carries_the_servers_sentence() -> None:
    script = ChatScript(status=400, error={"error": {"message": "temperature: 3 is not usable"}})
    with serve_chat(script) as url, pytest.raises(RemoteError, match="status 400: temperature: 3 is not usable"):
        await ask(url)


async def test_a_missing_key_says_where_to_give_it() -> None:
    script = ChatScript(status=401, error={"error": {"message": "no key"}})
    with serve_chat(script) as url, pytest.raises(RemoteError, match=r"\(no key\); give it with --api-key"):
        await ask(url)


async def test_an_error_in_the_stream_ends_it_with_the_servers_sentence() -> None:
    script = ChatScript(raw=[b'data: {"error": {"message": "the engine failed"}}\n\n'])
    with serve_chat(script) as url, pytest.raises(RemoteError, match="broke off: the engine failed"):
        await ask(url)


async def test_a_stream_that_ends_early_is_an_error() -> None:
    script = ChatScript(raw=[b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'])
    answer = Answer(time.monotonic())
    with serve_chat(script) as url, pytest.raises(RemoteError, match="ended the answer before it was complete"):
        await ask(url, answer)
    assert answer.text == "Hel"


@pytest.mark.parametrize(
    "raw", [b"data: nonsense\n\n", b"data: []\n\n", b"data: " + b"[" * 100_000 + b"\n\n"], ids=["text", "list", "deep"]
)
async def test_what_is_not_the_api_is_said_to_be_so(raw: bytes) -> None:
    with serve_chat(ChatScript(raw=[raw])) as url, pytest.raises(RemoteError, match="not OpenAI's API"):
        await ask(url)


@pytest.mark.parametrize(
    "document", ['{"choices": 3}', '{"choices": [3]}', '{"choices": [{"delta": 3}]}', '{"choices": [{}]}', "{}"]
)
async def test_odd_chunks_are_passed_over(document: str) -> None:
    raw = [f"data: {document}\n\n".encode(), b"data: [DONE]\n\n"]
    with serve_chat(ChatScript(raw=raw)) as url:
        assert await ask(url) == []


async def test_a_redirect_is_not_followed() -> None:
    with serve_chat(ChatScript(status=307, error={})) as url, pytest.raises(RemoteError, match="status 307"):
        await ask(url)


@pytest.mark.parametrize("url", ["not a url", "127.0.0.1:8000", "localhost:8000", "ftp://x", "http://[", "http://.."])
async def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(RemoteError, match=r"is not a URL; give one such as http://127\.0\.0\.1:8000"):
        await ask(url)
