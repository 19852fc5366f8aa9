"""/v1/completions through the real openai client and over plain HTTP."""

import asyncio
from array import array

import msgspec
import openai
import pytest

from penstock.engine.messages import PromptLogprobs, TokenEvent, TokenLogprob
from penstock.errors import EngineFailed
from penstock.request import FinishReason
from penstock.server import answer_size
from penstock.server.answer_size import MAX_CALL_LOGPROBS
from penstock.server.loop_turns import ENTRIES_A_PASS, LoopTurns
from tests.unit.server.conftest import MODEL
from tests.unit.server.openai_schema import check
from tests.unit.server.sse import events_in, text_of

ANSWER = "Hello, wörld"


@pytest.fixture
def short(service):
    """An answer shorter than the default length."""
    service.engine.script = lambda request: service.engine.say(request, ANSWER)
    return service


async def test_the_openai_client_gets_and_streams_completions(short, address):
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        whole = await client.completions.create(model=MODEL, prompt="hi")
        stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].text == ANSWER
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_a_whole_answer_fits_the_published_schema(short):
    check("CreateCompletionResponse", (await short.complete(logprobs=3, n=2)).json())


async def test_every_chunk_fits_the_published_schema(short):
    response = await short.complete(stream=True, stream_options={"include_usage": True}, logprobs=1)
    *chunks, done = events_in(response.content)
    assert done == "[DONE]"
    for chunk in chunks:
        # The schema describes whole answers only; OpenAI's own chunks hold null here until the last.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        if chunk["usage"] is None:
            del chunk["usage"]
        check("CreateCompletionResponse", chunk)


async def test_sixteen_tokens_are_the_default_length(service):
    service.engine.script = lambda request: service.engine.say(request, "x" * 40)
    answer = (await service.complete()).json()
    assert answer["choices"][0] == {"index": 0, "text": "x" * 16, "logprobs": None, "finish_reason": "length"}


async def test_a_prompt_may_be_token_ids(short):
    assert (await short.complete([1, 2, 3])).status_code == 200
    assert short.engine.submitted[0].prompt == [1, 2, 3]


@pytest.mark.parametrize("prompts", [["a", "bc"], [[1, 2], [3]]])
async def test_several_prompts_give_their_choices_in_order(short, prompts):
    short.engine.script = lambda request: short.engine.say(request, f"{len(request.prompt)} tokens", cached=1)
    answer = (await short.complete(prompts, n=2)).json()
    sizes = [len(request.prompt) for request in short.engine.submitted]
    assert [choice["text"] for choice in answer["choices"]] == [f"{size} tokens" for size in sizes]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == sizes[0] + sizes[2]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


async def test_the_first_of_several_answers_tells_the_engine_what_all_of_them_need(short):
    await short.complete([[5, 6], [7, 8, 9]], n=2)
    first = short.engine.submitted[0].request_id
    assert [request.call_prompts for request in short.engine.submitted] == [[2, 3], None, None, None]
    assert [request.call_answers for request in short.engine.submitted] == [4, 1, 1, 1]
    assert [request.follows for request in short.engine.submitted] == [None, first, first, first]
    assert short.engine.left_calls == []
    await short.complete([[5, 6]])
    assert short.engine.submitted[-1].call_prompts is None


async def test_of_a_call_that_cannot_be_sent_as_a_whole_the_engine_waits_for_no_more(short):
    def end_after_two(request):
        short.engine.connected = len(short.engine.submitted) < 2
        return short.engine.say(request, ANSWER)

    short.engine.script = end_after_two
    assert (await short.complete([5, 6], n=4)).status_code == 503
    assert len(short.engine.aborted) == 2
    assert short.engine.left_calls == [short.engine.submitted[0].request_id]


async def test_echo_puts_the_prompt_before_the_answer(short):
    assert (await short.complete("say: ", echo=True)).json()["choices"][0]["text"] == "say: " + ANSWER
    streamed = events_in((await short.complete("say: ", echo=True, stream=True)).content)
    assert text_of(streamed) == "say: " + ANSWER


async def test_echo_shows_the_text_of_a_prompt_of_token_ids(short):
    prompt = short.tokenizer.encode("héllo", add_special=False)
    assert (await short.complete(prompt, echo=True)).json()["choices"][0]["text"] == "héllo" + ANSWER


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
async def test_echo_keeps_a_character_whole_that_begins_in_the_prompt(short, cut):
    *token_ids, end = short.tokenizer.encode("h🙂é", add_special=False)
    prompt, rest = token_ids[:cut], token_ids[cut:]
    last = TokenEvent(request_id="", token_ids=[end], finish=FinishReason.LENGTH)
    short.engine.script = lambda request: (
        [TokenEvent(request_id="", token_ids=[token_id]) for token_id in rest] + [last]
    )
    assert (await short.complete(prompt, echo=True, max_tokens=9)).json()["choices"][0]["text"] == "h🙂é"
    streamed = events_in((await short.complete(prompt, echo=True, max_tokens=9, stream=True)).content)
    assert text_of(streamed) == "h🙂é"


async def test_a_character_that_nobody_completes_is_echoed_as_half_of_one(short):
    prompt = short.tokenizer.encode("h🙂", add_special=False)[:2]
    short.engine.script = lambda request: [TokenEvent(request_id="", finish=FinishReason.STOP)]
    assert (await short.complete(prompt, echo=True)).json()["choices"][0]["text"] == "h\N{REPLACEMENT CHARACTER}"
    scored = await short.complete(prompt, echo=True, max_tokens=0)
    assert scored.json()["choices"][0]["text"] == "h\N{REPLACEMENT CHARACTER}"


async def test_echo_with_scores_covers_prompt_and_answer(short):
    choice = (await short.complete("hé", echo=True, logprobs=0)).json()["choices"][0]
    scores = choice["logprobs"]
    assert scores["token_logprobs"][:3] == [None, -1.25, -1.25]
    assert scores["token_logprobs"][3] == -0.5
    assert scores["text_offset"][:4] == [0, 1, 1, 2]
    assert len({len(column) for column in scores.values()}) == 1


async def test_an_echoed_token_behind_bytes_that_are_no_character_begins_behind_what_stands_for_them(short):
    h, half, x = (short.tokenizer.encode(text, add_special=False)[0] for text in "h🙂x")
    choice = (await short.complete([h, half, half, x], echo=True, logprobs=0, max_tokens=0)).json()["choices"][0]
    assert choice["text"] == "h\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}x"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


async def test_special_tokens_of_an_echoed_text_have_their_places_in_it(short):
    text = "<|start|>hé<|end|>x"
    choice = (await short.complete(text, echo=True, logprobs=0)).json()["choices"][0]
    assert choice["text"] == text + ANSWER
    assert choice["logprobs"]["tokens"][0] == "<|start|>"
    assert choice["logprobs"]["text_offset"][:7] == [0, 9, 10, 10, 11, 18, 19]


async def test_special_tokens_of_echoed_ids_are_no_part_of_the_text(short):
    prompt = short.tokenizer.encode("<|start|>hi<|end|>x", add_special=False)
    choice = (await short.complete(prompt, echo=True, logprobs=0)).json()["choices"][0]
    assert choice["text"] == "hix" + ANSWER
    assert choice["logprobs"]["text_offset"][:6] == [0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_with_scores_tells_the_likeliest_in_each_place(short, as_ids, stream, max_tokens):
    text = "hxc"
    prompt = short.tokenizer.encode(text, add_special=False) if as_ids else text
    fields = {"echo": True, "logprobs": 3, "max_tokens": max_tokens, "stream": stream}
    response = await short.complete(prompt, **fields)
    chunks = events_in(response.content)[:-1] if stream else [response.json()]
    scores = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        for name, column in choice["logprobs"].items():
            scores.setdefault(name, []).extend(column)
    answer = [[], ["H", "e", "llo"]][max_tokens > 0]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text + "".join(answer)
    assert scores["tokens"] == [*text, *answer]
    assert scores["token_logprobs"] == [None, -1.25, -1.25] + [-0.5] * max_tokens
    # A token has its own score, whether or not it is one of the best; what JSON cannot write is -9999.
    best = {"b": -0.25, "c": -1.25, "d": -9999.0}
    assert scores["top_logprobs"][:3] == [None, {**best, "x": -1.25}, best]
    assert scores["text_offset"] == list(range(3 + max_tokens))


async def test_a_long_prompt_is_echoed_in_pieces_that_add_up(short, monkeypatch):
    taken = []
    take = LoopTurns.take
    monkeypatch.setattr(LoopTurns, "take", lambda self, entries: taken.append(entries) or take(self, entries))
    short.engine.info = msgspec.structs.replace(short.engine.info, max_context_tokens=1 << 12)
    prompt = short.tokenizer.encode("aé" * 300, add_special=False)
    own, ids = array("f", [-place / 2 for place in range(1, 900)]), array("i", [place % 90 for place in range(899)])
    told = PromptLogprobs(own.tobytes(), 1, ids.tobytes(), own.tobytes())
    end = TokenEvent(request_id="", token_ids=[5], finish=FinishReason.LENGTH, prompt_logprobs=told)
    end.logprobs = [TokenLogprob(5, -0.5)]
    short.engine.script = lambda request: [end]
    answer = (await short.complete(prompt, echo=True, logprobs=1, max_tokens=0)).json()["choices"][0]
    assert answer["text"] == "aé" * 300
    scores = answer["logprobs"]
    assert scores["token_logprobs"] == [None, *own]
    names = short.tokenizer.token_names
    places = zip(ids, prompt[1:], own, strict=True)
    assert scores["top_logprobs"] == [
        None,
        *[{names[best]: score, names[token]: score} for best, token, score in places],
    ]
    assert len(taken) >= 900 * (4 + 1) // ENTRIES_A_PASS and set(taken) == {ENTRIES_A_PASS}


async def test_a_prompt_can_be_scored_without_an_answer(short):
    answer = (await short.complete("abc", echo=True, logprobs=0, max_tokens=0)).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.25, -1.25]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("num_longest", [512, 100])
async def test_a_prompt_that_is_scored_alone_may_fill_the_context(short, num_longest):
    short.engine.info = msgspec.structs.replace(short.engine.info, max_context_tokens=num_longest)
    answer = await short.complete([5] * num_longest, echo=True, max_tokens=0)
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_longest, 0)
    assert short.engine.submitted[-1].params.max_tokens == 1
    longer = await short.complete([5] * (num_longest + 1), echo=True, max_tokens=0)
    assert longer.json()["error"]["code"] == "context_length_exceeded"
    assert "give a shorter one" in longer.json()["error"]["message"]
    answered = await short.complete([5] * num_longest, echo=True, max_tokens=1)
    assert "at least one token must be left for the answer" in answered.json()["error"]["message"]


async def test_a_least_length_that_does_not_fit_behind_the_prompt_is_too_long_for_the_context(short):
    longest = short.engine.info.max_context_tokens
    error = (await short.complete([5] * (longest - 5), min_tokens=10)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "min_tokens")
    assert str(longest + 5) in error["message"] and "give at most 5" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_once_for_all_its_choices(short, stream):
    scored = asyncio.Event()

    def script(request):
        steps = short.engine.say(request, ANSWER)
        return [scored, *steps] if request.params.prompt_logprobs is not None else steps

    short.engine.script = script
    asyncio.get_running_loop().call_later(0.02, scored.set)  # long after the others have all their tokens
    response = await short.complete(["hé", "x"], echo=True, logprobs=2, n=3, stream=stream)
    assert [request.params.prompt_logprobs for request in short.engine.submitted] == [2, None, None] * 2
    chunks = events_in(response.content)[:-1] if stream else [response.json()]
    shown = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        shown.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    assert [shown[index][:3] for index in range(3)] == [[None, -1.25, -1.25]] * 3
    assert [shown[index][:2] for index in range(3, 6)] == [[None, -0.5]] * 3


@pytest.mark.parametrize("fields", [{"n": 128}, {"prompt": ["a"] * 128}])
async def test_many_answers_with_more_log_probabilities_than_a_call_may_tell_are_refused(service, fields):
    response = await service.complete(**{"prompt": "a", "max_tokens": 400, "logprobs": 20, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == next(iter(fields))
    assert all(word in error["message"] for word in ("1075200", str(MAX_CALL_LOGPROBS), "max_tokens", "logprobs"))
    assert service.engine.submitted == []
    assert (await service.complete("a", n=128, max_tokens=390, logprobs=20)).status_code == 200


async def test_echoed_prompts_count_among_the_log_probabilities_of_a_call(service):
    service.engine.info = msgspec.structs.replace(service.engine.info, max_context_tokens=1 << 14)
    prompt = [5] * (MAX_CALL_LOGPROBS // 128)
    refused = await service.complete(prompt, echo=True, logprobs=0, n=128, max_tokens=1)
    assert refused.json()["error"]["param"] == "n"
    assert (await service.complete(prompt[::2], echo=True, logprobs=1, n=128, max_tokens=1)).status_code == 400
    assert (await service.complete(prompt, echo=True, logprobs=0, max_tokens=1)).status_code == 200


async def test_an_echoed_prompt_alone_may_have_no_more_log_probabilities_than_a_call(service, monkeypatch):
    monkeypatch.setattr(answer_size, "MAX_CALL_LOGPROBS", 1000)
    refused = await service.complete([5] * 48, echo=True, logprobs=20, max_tokens=0)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "logprobs")
    assert "1008 log-probabilities" in error["message"] and "at most 1000" in error["message"]
    assert service.engine.submitted == []
    assert (await service.complete([5] * 48, echo=True, logprobs=19, max_tokens=0)).status_code == 200
    assert (await service.complete([5] * 47, echo=True, logprobs=20, max_tokens=48)).status_code == 200


async def test_offsets_go_on_from_chunk_to_chunk(short):
    *chunks, _ = events_in((await short.complete(stream=True, logprobs=0)).content)
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 5, 6, 8, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], [10**9], [1]]}, "prompt[1]"),
        ({"prompt": ["a", "b" * 10_000]}, "prompt[1]"),
        ({"prompt": [1, 10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(service, fields, param):
    response = await service.complete(**{"prompt": "hi", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert service.engine.submitted == []


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": [[1, 2], []]}, "prompt[1] is empty; give at least one token"),
        ({"prompt": ["a", 5]}, "a list of lists of token ids: entry 1 is something else"),
        ({"prompt": [1, 2, True]}, "a list of lists of token ids: entry 2 is something else"),
        ({"prompt": [[1], [1] * 5000]}, "prompt[1] has 5000 tokens"),
        ({"prompt": [[1], [1] * 500], "max_tokens": 20}, "prompt[1] (500 tokens) plus max_tokens (20)"),
        ({"logit_bias": {"1": 5, "2": 101}}, 'logit_bias: {"2": 101.0} is not usable; give a number from -100 to 100'),
        ({"best_of": 3}, "best_of: 3 is not supported; leave it out or give n (1)"),
        ({"suffix": "x"}, 'suffix: "x" is not supported; leave it out or give ""'),
    ],
)
async def test_a_refusal_says_which_of_several_is_wrong_and_what_would_be_right(service, fields, sentence):
    response = await service.complete(**{"prompt": "hi", **fields})
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


async def test_best_of_n_is_the_same_as_n(short):
    assert len((await short.complete(n=2, best_of=2)).json()["choices"]) == 2


async def test_one_failed_choice_ends_the_whole_answer(short):
    def script(request):
        if request.request_id.endswith("-1"):
            return [EngineFailed("the engine stopped")]
        return [TokenEvent(request_id=request.request_id, token_ids=[40])] * 1000

    short.engine.script = script
    response = await short.complete(n=3, max_tokens=500)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_failed"
    assert {request_id[-2:] for request_id in short.engine.aborted} >= {"-0", "-2"}
