"""`penstock generate` hands its options to the engine and prints the continuation, nothing else."""

from dataclasses import dataclass
from typing import Any, Self

import pytest

from penstock.commands import generate
from penstock.config import gather
from penstock.errors import ConfigError
from penstock.request import SamplingParams


@dataclass
class Continuation:
    text: str


@dataclass
class FakeConfig:
    max_context_tokens: int


class FakeTokenizer:
    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [1] * len(text)


class FakeLlm:
    """Remembers how it was made and what it was asked."""

    made: list[Self]

    def __init__(self, model: str, **options: Any) -> None:
        self.model, self.options = model, options
        self.asked: tuple[list[str], SamplingParams] | None = None
        self.closed = False
        self.config, self.tokenizer = FakeConfig(max_context_tokens=64), FakeTokenizer()
        self.made.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def generate(self, prompts: list[str], params: SamplingParams) -> list[Continuation]:
        self.asked = (prompts, params)
        return [Continuation(" Paris.")]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeLlm]:
    made: list[FakeLlm] = []
    monkeypatch.setattr(FakeLlm, "made", made, raising=False)
    monkeypatch.setattr(generate, "LLM", FakeLlm)
    monkeypatch.setattr(generate, "fetch", lambda options: None)
    return made


def test_the_continuation_is_all_that_is_printed(made: list[FakeLlm], capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    assert generate.run(gather({}, environ={}), "The capital of France is", params) == 0
    assert capsys.readouterr().out == " Paris.\n"
    (llm,) = made
    assert llm.asked == (["The capital of France is"], params)
    assert llm.closed


def test_options_reach_the_engine_wherever_they_were_given(made: list[FakeLlm]) -> None:
    sourced = gather({"model": "m.gguf", "threads": "2"}, environ={"PENSTOCK_PRECISION": "exact"})
    generate.run(sourced, "x", SamplingParams())
    (llm,) = made
    assert llm.model == "m.gguf"
    assert llm.options == {"threads": 2, "precision": "exact"}


@pytest.mark.parametrize(("num_characters", "length"), [(4, 60), (64, 1)])
def test_a_default_length_that_does_not_fit_is_shortened(made: list[FakeLlm], num_characters: int, length: int) -> None:
    generate.run(gather({}, environ={}), "x" * num_characters, SamplingParams())
    (llm,) = made
    assert llm.asked == (["x" * num_characters], SamplingParams(max_tokens=length))


def test_a_prompt_without_a_token_is_refused_with_what_to_give(made: list[FakeLlm]) -> None:
    with pytest.raises(ConfigError, match=r"^PROMPT: '' is not usable; give a text to continue, or - and the text"):
        generate.run(gather({}, environ={}), "", SamplingParams())
    (llm,) = made
    assert llm.asked is None and llm.closed


def test_a_prompt_that_is_no_utf_8_is_refused_with_the_place(made: list[FakeLlm]) -> None:
    with pytest.raises(ConfigError, match=r"^PROMPT: b'caf\\xe9' is not usable; byte 3 is not UTF-8"):
        generate.run(gather({}, environ={}), "caf\udce9", SamplingParams())
    assert made == []
