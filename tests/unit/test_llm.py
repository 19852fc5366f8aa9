"""A model in this process: what it refuses, and by which errors."""

import json

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import ContextTooLong, EngineUnavailable, InvalidParameter, RequestError, TemplateFailed
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
        ({"top_k": True}, "top_k"),
        ({"stop": "end"}, "stop"),
    ],
)
def test_a_wrong_parameter_is_the_callers_mistake(llm, params, param):
    with pytest.raises(InvalidParameter) as caught:
        llm.generate([[5, 6]], SamplingParams(**params))
    assert caught.value.param == param


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


def test_token_ids_of_numpy_are_token_ids(llm):
    params = SamplingParams(max_tokens=1)
    assert llm.generate([np.array([5, 6])], params)[0].num_prompt_tokens == 2


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


def test_one_wrong_prompt_is_told_before_any_runs(llm):
    before = llm._engine.stats().num_steps
    with pytest.raises(InvalidParameter):
        llm.generate([[5], [6], [512]], SamplingParams(max_tokens=4))
    assert llm._engine.stats().num_steps == before


def test_as_many_params_as_prompts_are_wanted(llm):
    with pytest.raises(RequestError, match="3 params for 2 prompts"):
        llm.generate([[5], [6]], [SamplingParams()] * 3)


def test_a_chat_needs_a_template(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
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


def test_what_was_closed_says_so(folder):
    with LLM(folder, **OPTIONS) as llm:
        llm.close()
        for call in (llm.generate, llm.score):
            with pytest.raises(EngineUnavailable, match="was closed; make another"):
                call(["hi"])
