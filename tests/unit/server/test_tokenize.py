"""/tokenize and /detokenize."""

import asyncio
import threading
from dataclasses import replace

import pytest

from penstock.tenants import Caller

TEXT = "hello wörld 🙂"


async def test_a_text_becomes_its_token_ids_and_back(service):
    tokens = (await service.post("/tokenize", prompt=TEXT)).json()
    assert tokens["tokens"] == service.tokenizer.encode(TEXT, add_special=True)
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_context_tokens"] == 512
    assert (await service.post("/detokenize", tokens=tokens["tokens"])).json() == {"prompt": TEXT}


async def test_messages_go_through_the_chat_template(service):
    messages = [{"role": "user", "content": "x"}]
    tokens = (await service.post("/tokenize", messages=messages)).json()["tokens"]
    expected = "<|start|>user\nx<|end|>\n<|start|>assistant\n"
    assert (await service.post("/detokenize", tokens=tokens)).json() == {"prompt": expected}


async def test_each_tokens_text_is_told_when_asked_for(service):
    assert (await service.post("/tokenize", prompt="hello", return_token_strs=True)).json()["token_strs"] == [
        "he",
        "llo",
    ]


async def test_the_model_may_be_left_out(service):
    assert (await service.client.post("/tokenize", json={"prompt": "x"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_wrong_requests_are_refused_by_name(service, path, fields, param):
    response = await service.post(path, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_long_text_does_not_hold_up_the_event_loop(service, monkeypatch):
    threads = []
    encode = service.tokenizer.encode

    def noted(text, *, add_special):
        threads.append(threading.current_thread())
        return encode(text, add_special=add_special)

    monkeypatch.setattr(service.tokenizer, "encode", noted)
    await service.post("/tokenize", prompt="x" * 4200)
    await service.post("/tokenize", prompt="x")
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


async def test_many_short_texts_are_tokenised_in_a_thread_as_a_long_one_is(service, monkeypatch):
    in_loop = []
    encode = service.tokenizer.encode

    def noted(text, *, add_special):
        in_loop.append(threading.current_thread() is threading.main_thread())
        return encode(text, add_special=add_special)

    monkeypatch.setattr(service.tokenizer, "encode", noted)
    await service.complete(["x" * 100] * 60, max_tokens=1)
    assert in_loop[:60] == [True] * 40 + [False] * 20


async def test_a_text_that_cannot_fit_the_context_is_refused_before_it_is_tokenised(service, monkeypatch):
    monkeypatch.setattr(service.tokenizer, "encode", None)
    response = await service.post("/tokenize", prompt="x" * 20_000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_of_a_text_that_may_fit_only_a_part_is_tried_first(service, monkeypatch):
    sizes = []
    encode = service.tokenizer.encode

    def noted(text, *, add_special):
        sizes.append(len(text))
        return encode(text, add_special=add_special)

    monkeypatch.setattr(service.tokenizer, "fewest_tokens", lambda text: 0)
    monkeypatch.setattr(service.tokenizer, "encode", noted)
    error = (await service.post("/tokenize", prompt="x" * 20_000)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "at least 819 tokens" in error["message"]
    assert "answer" not in error["message"]
    assert sizes == [2 * 512]


async def test_more_tokens_than_the_context_are_not_turned_into_text(service):
    response = await service.post("/detokenize", tokens=[1] * 513)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


async def test_a_text_may_have_as_many_tokens_as_the_context_and_no_more(service):
    assert (await service.post("/tokenize", prompt="x" * 512)).json()["count"] == 512
    response = await service.post("/tokenize", prompt="x" * 513)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "has 513 tokens" in error["message"]
    assert "answer" not in error["message"]


async def test_messages_that_exceed_the_context_are_not_tokenised(service):
    response = await service.post("/tokenize", messages=[{"role": "user", "content": "x" * 512}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


async def test_before_the_engine_has_told_its_context_nothing_is_tokenised(service):
    service.engine.info = None
    for path, fields in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert (await service.post(path, **fields)).status_code == 503


class LateEngine:
    """One that its worker hears of when somebody has waited for it for a moment."""

    def __init__(self, info):
        self.connected, self.info, self._told = False, None, info

    async def wait_ready(self):
        await asyncio.sleep(0)
        self.connected, self.info = True, self._told
        return self.info


async def test_who_asks_a_worker_that_is_about_to_hear_of_the_engine_waits_for_it(service):
    info = service.engine.info
    context = replace(service.context, engine=LateEngine(info))
    assert await context.meet_engine(Caller(tenant="a")) == info
