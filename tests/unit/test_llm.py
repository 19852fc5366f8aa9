"""A model in this process: what it refuses, and by which errors."""

import asyncio
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.errors import (
    ConfigError,
    ContextTooLong,
    EngineUnavailable,
    InvalidParameter,
    ModelNotFound,
    RequestError,
    TemplateFailed,
)
from tests.fakes.tiny_tokenizer import write_tokenizer
from tests.tiny_engine import CONFIG

OPTIONS = {"load_format": "dummy", "precision": "exact", "kv_memory": "1MiB", "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 512}))
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 5}, "top_p"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop_token_ids": (512,)}, "stop_token_ids"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"logprobs": 50}, "logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"top_k": True}, "top_k"),
        ({"stop": b"end"}, "stop"),
    ],
)
def test_a_wrong_parameter_is_the_callers_mistake(llm, params, param):
    with pytest.raises(InvalidParameter) as caught:
        llm.generate([[5, 6]], SamplingParams(**params))
    assert caught.value.param == param


def test_an_answer_tells_when_its_tokens_were_there(llm):
    began = time.monotonic()
    answers = llm.generate([[5, 6], [7, 8, 9]], SamplingParams(max_tokens=6, ignore_eos=True))
    seconds = time.monotonic() - began
    for answer in answers:
        assert len(answer.token_seconds) == len(answer.token_ids) == 6
        assert 0 < answer.token_seconds[0] < answer.token_seconds[-1] < seconds
        assert answer.token_seconds == sorted(answer.token_seconds)


def test_prompts_are_scored_alone_and_with_an_answer(llm):
    prompts = [[5, 6, 7], [9]]
    answers = llm.generate(prompts, SamplingParams(max_tokens=2, prompt_logprobs=2))
    for prompt, answer, scores in zip(prompts, answers, llm.score(prompts), strict=True):
        first, *rest = answer.prompt_logprobs
        assert first is None and scores[0] is None
        assert [score.token_id for score in rest] == prompt[1:]
        assert [score.logprob for score in rest] == pytest.approx(scores[1:])
        assert all(len(score.top) == 2 and score.top_logprobs[0] >= score.logprob for score in rest)
    assert llm.generate(prompts, SamplingParams(max_tokens=1))[0].prompt_logprobs is None


def test_an_empty_prompt_is_the_callers_mistake(llm):
    with pytest.raises(InvalidParameter, match="at least one token"):
        llm.generate([[]])


@pytest.mark.parametrize("token_id", [512, -3])
def test_an_id_out_of_the_vocabulary_is_shown(llm, token_id):
    with pytest.raises(InvalidParameter, match=rf"^prompt: {token_id} is not usable; give token ids from 0 to 511$"):
        llm.generate([[1, token_id, 2]])


@pytest.mark.parametrize("prompts", [[[1.5]], [[5, "6"]], [[5, None]], [[5, True]], [1.5], [None]])
def test_what_is_neither_text_nor_token_ids_is_the_callers_mistake(llm, prompts):
    for call in (llm.generate, llm.score):
        with pytest.raises(InvalidParameter, match=r"is not usable; give a text or a list of token ids$"):
            call(prompts)


@pytest.mark.parametrize("prompts", [None, 5, {"prompt": "abc"}, {(1, 2): 3}, b"abc", {"a", "b"}, torch.tensor(5)])
def test_what_is_no_prompt_nor_a_list_of_them_is_the_callers_mistake(llm, prompts):
    for call in (llm.generate, llm.score):
        with pytest.raises(InvalidParameter, match=r"^prompt: .* is not usable; give a text or a list of token"):
            call(prompts)


@pytest.mark.parametrize("params", [5, "greedy", {"max_tokens": 2}, [5], [None]])
def test_params_of_another_type_are_the_callers_mistake(llm, params):
    with pytest.raises(InvalidParameter, match=r"^params: .* give SamplingParams, or a list with one for each prompt$"):
        llm.generate(["a"], params)


@pytest.mark.parametrize(
    "prompts", [[np.array([5, 6])], np.array([5, 6]), torch.tensor([5, 6]), torch.tensor([[5, 6]])]
)
def test_token_ids_of_other_libraries_are_token_ids(llm, prompts):
    (completion,) = llm.generate(prompts, SamplingParams(max_tokens=1))
    assert completion.num_prompt_tokens == 2


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hi", r'^messages: "hi" is not usable; give a list'),
        (None, r"^messages: null is not usable; give a list"),
        ([], r"^messages: \[\] is not usable; give at least 1 entry"),
        ([1], r"^messages\[0\]: 1 is not usable; give an object"),
        ([{"role": "user"}], r"^messages\[0\]\.content is required"),
        ([{"role": "user", "content": "\0"}], r"^messages\[0\]\.content: .* send texts without NUL"),
        ([{"role": "user", "content": "\ud800"}], r"^a message holds half of a surrogate pair; give whole characters"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"^messages\[0\]\.content: .* give text parts"),
    ],
)
def test_messages_are_refused_as_the_server_refuses_them(llm, messages, complaint):
    with pytest.raises(RequestError, match=complaint):
        llm.chat(messages)


def test_text_parts_of_a_message_are_one_text(llm):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    params = SamplingParams(max_tokens=1)
    joined, apart = (llm.chat([{"role": "user", "content": content}], params) for content in ("a\nb", parts))
    assert joined.num_prompt_tokens == apart.num_prompt_tokens


def test_a_chat_is_answered_where_an_event_loop_runs(llm):
    messages, params = [{"role": "user", "content": "hi"}], SamplingParams(max_tokens=4, temperature=0)

    async def cell():
        return llm.chat(messages, params).text

    assert asyncio.run(cell()) == llm.chat(messages, params).text


def test_a_chat_template_of_ones_own_replaces_the_models(folder, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}")
    with LLM(folder, chat_template=str(file), **OPTIONS) as llm:
        token_ids = llm.tokenizer.encode("abc", add_special=False)
        answer = llm.chat([{"role": "user", "content": "abc"}], SamplingParams(max_tokens=1))
        assert answer.num_prompt_tokens == len(token_ids)


@pytest.mark.parametrize(("content", "complaint"), [(None, "it cannot be read"), (" \n", "it is empty")])
def test_a_chat_template_that_is_none_is_refused(folder, tmp_path, content, complaint):
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"^--chat-template: .*own\.jinja' is not usable; {complaint}"):
        LLM(folder, chat_template=str(file), **OPTIONS)


def test_a_text_with_a_token_that_the_model_lacks_is_not_asked_for_token_ids(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, *, add_special: [5, 512])
    with pytest.raises(RequestError, match=r"^prompt: the tokenizer has token 512 for a part of this text"):
        llm.generate(["hi"])
    with pytest.raises(RequestError, match=r"^messages: the tokenizer has token 512 for a part of this text"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_a_prompt_over_the_context_is_refused_with_both_numbers(llm):
    with pytest.raises(ContextTooLong, match=r"100 tokens.* 96 tokens") as caught:
        llm.generate([[5] * 100])
    assert caught.value.param == "prompt"


def test_an_answer_that_would_not_fit_is_refused_with_what_does(llm):
    with pytest.raises(ContextTooLong, match=r"prompt \(90 tokens\) plus max_tokens \(7\).*give at most 6$"):
        llm.generate([[5] * 90], SamplingParams(max_tokens=7))
    (completion,) = llm.generate([[5] * 90], SamplingParams(max_tokens=6, ignore_eos=True))
    assert len(completion.token_ids) == 6


def test_an_answer_that_must_be_longer_than_the_context_is_refused(llm):
    with pytest.raises(ContextTooLong, match=r"prompt \(90 tokens\) plus min_tokens \(7\).*give at most 6$") as caught:
        llm.generate([[5] * 90], SamplingParams(min_tokens=7))
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        (["a", ""], r"^prompt\[1\]: \[\] is not usable"),
        ([[5], [1.5]], r"^prompt\[1\]: 1.5 is not usable"),
        ([[5], [5] * 100], r"^prompt\[1\] has 100 tokens"),
        (["a", "b\0"], r'^prompt\[1\]: "b\\u0000" is not usable; send texts without NUL'),
        ("b\0", r'^prompt: "b\\u0000" is not usable; send texts without NUL'),
    ],
)
def test_a_refusal_names_which_of_several_prompts_it_means(llm, prompts, complaint):
    with pytest.raises(RequestError, match=complaint):
        llm.generate(prompts, SamplingParams(max_tokens=1))


def test_a_model_may_be_given_as_a_path(folder, tmp_path):
    with LLM(Path(folder), **OPTIONS) as llm:
        assert llm.generate([[5]], SamplingParams(max_tokens=1))
    with pytest.raises(ModelNotFound, match="there is no model"):
        LLM(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match=r"^--model: None is not usable; give an alias"):
        LLM(None)


def test_one_wrong_prompt_is_told_before_any_runs(llm):
    before = llm._engine.stats().num_steps
    with pytest.raises(InvalidParameter):
        llm.generate([[5], [6], [512]], SamplingParams(max_tokens=4))
    assert llm._engine.stats().num_steps == before


def test_as_many_params_as_prompts_are_wanted(llm):
    with pytest.raises(RequestError, match="3 params for 2 prompts"):
        llm.generate([[5], [6]], [SamplingParams()] * 3)


def test_a_chat_needs_a_template(llm, monkeypatch):
    monkeypatch.setattr(llm, "_chat_template", None)
    with pytest.raises(TemplateFailed, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_a_type_that_a_parameter_cannot_have_is_told_with_the_right_one(llm):
    with pytest.raises(InvalidParameter, match=r"^max_tokens: 2\.5 is not usable; give an integer or None$"):
        llm.generate([[5]], [SamplingParams(max_tokens=2.5)])
    with pytest.raises(RequestError, match="give SamplingParams"):
        llm.generate([[5]], {"max_tokens": 2})


def test_numbers_of_numpy_are_numbers(llm):
    params = SamplingParams(max_tokens=np.int64(2), temperature=np.float64(0.5), ignore_eos=True)
    assert len(llm.generate([[5]], params)[0].token_ids) == 2


def test_arrays_of_numpy_and_their_numbers_are_token_ids(llm):
    own = SamplingParams(max_tokens=6, temperature=0, logit_bias={7: 100.0}, stop_token_ids=(9, 8))
    bias = {np.int64(7): np.float32(100)}
    for ids in (np.array([9, 8]), (np.int32(9), np.int64(8)), [9, np.uint8(8)]):
        theirs = SamplingParams(max_tokens=6, temperature=0, logit_bias=bias, stop_token_ids=ids)
        assert llm.generate([[5]], theirs)[0].token_ids == llm.generate([[5]], own)[0].token_ids
    for ids in (np.array([9.0]), np.array([[9]]), (np.True_,), (True,)):
        with pytest.raises(InvalidParameter, match=r"^stop_token_ids: "):
            llm.generate([[5]], SamplingParams(stop_token_ids=ids))


def test_a_text_is_one_stop_string(llm):
    whole = llm.generate([[5]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0].text
    stop = whole[len(whole) // 2 :]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, stop=stop)
    assert llm.generate([[5]], params)[0].text == whole[: whole.index(stop)]


def test_the_callers_own_tensors_have_as_many_threads_as_before(folder):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with LLM(folder, **OPTIONS) as llm, ThreadPoolExecutor(1) as later:
            llm.generate(["hi"], SamplingParams(max_tokens=1))
            assert (torch.get_num_threads(), later.submit(torch.get_num_threads).result()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_what_was_closed_says_so(folder):
    with LLM(folder, **OPTIONS) as llm:
        llm.close()
        for call in (llm.generate, llm.score):
            with pytest.raises(EngineUnavailable, match="was closed; make another"):
                call(["hi"])


@pytest.mark.parametrize("place", ["next_step", "commit"])
def test_an_interrupt_in_the_middle_of_a_step_leaves_the_engine_usable(llm, monkeypatch, place):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    expected = llm.generate([[5, 6], [7]], params)
    scheduler = llm._engine.scheduler
    done = getattr(scheduler, place)
    # A shell that starts a command in the background has it ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*arguments):
        outcome = done(*arguments)
        signal.raise_signal(signal.SIGINT)
        return outcome

    with monkeypatch.context() as patched:
        patched.setattr(scheduler, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7]], params)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert [answer.token_ids for answer in llm.generate([[5, 6], [7]], params)] == [one.token_ids for one in expected]


def test_what_another_signals_handler_raises_comes_out_of_the_call_at_the_end_of_a_step(llm, monkeypatch):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    expected = llm.generate([[5, 6], [7]], params)
    commit = llm._engine.scheduler.commit

    def ring(number, frame):
        raise TimeoutError("enough")

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGALRM)
        return commit(*arguments)

    before = signal.signal(signal.SIGALRM, ring)
    with monkeypatch.context() as patched:
        patched.setattr(llm._engine.scheduler, "commit", interrupted)
        with pytest.raises(TimeoutError, match="enough"):
            llm.generate([[5, 6], [7]], params)
    assert signal.signal(signal.SIGALRM, before) is ring
    assert [answer.token_ids for answer in llm.generate([[5, 6], [7]], params)] == [one.token_ids for one in expected]


def test_threads_other_than_the_main_one_generate(llm):
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(llm.generate([[5]], SamplingParams(max_tokens=1))))
    thread.start()
    thread.join()
    assert len(answers) == 1


def test_threads_that_call_at_once_each_get_their_own_answers(llm):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [[[5 + thread, 6 + index] for index in range(6)] for thread in range(3)]
    expected = [[answer.token_ids for answer in llm.generate(own, params)] for own in prompts]
    answers = [[] for _ in prompts]

    def ask(thread):
        answers[thread] += [answer.token_ids for answer in llm.generate(prompts[thread], params)]

    # Daemons: who waits for ever must not keep the tests from ending.
    threads = [threading.Thread(target=ask, args=(thread,), daemon=True) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert answers == expected


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_was_forked_off_is_told_to_make_its_own(llm):
    params = SamplingParams(max_tokens=2, temperature=0)
    expected = llm.generate([[5]], params)[0].token_ids
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.close()
            llm.generate([[5]], params)
        except EngineUnavailable as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as told:
        assert b"make another behind the fork" in told.read()
    os.waitpid(child, 0)
    assert llm.generate([[5]], params)[0].token_ids == expected


def test_the_shortest_context_that_holds_a_prompt_and_an_answer_is_served(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 512, "max_position_embeddings": 2}))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert len(llm.generate([[5]], SamplingParams(ignore_eos=True))[0].token_ids) == 1
