"""docs/api.md tells the limits that the code keeps."""

import re
from pathlib import Path

import pytest

from penstock.protocol.generation import (
    MAX_CHOICES,
    MAX_CONTINUED,
    MAX_MILLISECONDS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKEN_LIST,
    GenerationRequest,
)
from penstock.protocol.labels import MAX_LABELS
from penstock.protocol.openai_batches import MAX_CUSTOM_ID_CHARACTERS, MAX_LINES
from penstock.protocol.openai_chat import MAX_MESSAGES, MAX_NAME_CHARACTERS, MAX_PARTS, ChatRequest
from penstock.protocol.openai_completions import DEFAULT_MAX_TOKENS, CompletionRequest
from penstock.protocol.wire import MAX_ENTRIES
from penstock.request import MAX_COUNT, MAX_LOGPROBS, MAX_PRIORITY
from penstock.tenants import LARGEST_WEIGHT, LEAST_WEIGHT, MAX_OVERLAP_SECONDS

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
PARAMETERS = PAGE.split("## Parameters")[1].split("\n## ")[0]


def rows(parameter: str) -> str:
    """The rows of the table of parameters that name one."""
    found = [
        line for line in PARAMETERS.splitlines() if line.startswith("|") and f"`{parameter}`" in line.split("|")[1]
    ]
    return "\n".join(found)


def holds(text: str, number: float) -> bool:
    """Whether a number stands in a text, with or without commas between its thousands."""
    return re.search(rf"(?<![\d.]){number:.15g}(?!\d)", re.sub(r"(?<=\d),(?=\d{3})", "", text)) is not None


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_parameter_has_a_row(kind):
    named = {"stream_options": "stream_options.include_usage", "targets": "targets.ttft_ms"}
    missing = [name for name in kind.model_fields if not rows(named.get(name, name)) and name != "best_of"]
    assert missing == []
    assert set(GenerationRequest.model_fields) <= set(kind.model_fields)


@pytest.mark.parametrize(
    ("parameter", "limit"),
    [
        ("messages", MAX_MESSAGES),
        ("messages", MAX_PARTS),
        ("messages", MAX_NAME_CHARACTERS),
        ("prompt", MAX_CHOICES),
        ("n", MAX_CHOICES),
        ("max_tokens", DEFAULT_MAX_TOKENS),
        ("max_tokens", MAX_COUNT),
        ("max_completion_tokens", MAX_COUNT),
        ("min_tokens", MAX_COUNT),
        ("top_k", MAX_COUNT),
        ("stop", MAX_STOPS),
        ("stop", MAX_STOP_CHARACTERS),
        ("stop_token_ids", MAX_TOKEN_LIST),
        ("logit_bias", MAX_TOKEN_LIST),
        ("logprobs", MAX_LOGPROBS),
        ("top_logprobs", MAX_LOGPROBS),
        ("priority", MAX_PRIORITY),
        ("targets.ttft_ms", MAX_MILLISECONDS),
        ("targets.time_per_token_ms", MAX_MILLISECONDS),
        ("deadline_ms", MAX_MILLISECONDS),
    ],
)
def test_a_parameters_row_tells_its_limit(parameter, limit):
    assert holds(rows(parameter), limit)


@pytest.mark.parametrize(
    ("section", "limits"),
    [
        ("Keys", [LEAST_WEIGHT, LARGEST_WEIGHT, MAX_PRIORITY]),
        ("Admin routes", [MAX_OVERLAP_SECONDS]),
        ("Through a gateway", [MAX_CONTINUED]),
        ("Batches", [MAX_LINES, MAX_LABELS, MAX_CUSTOM_ID_CHARACTERS]),
        ("Parameters", [MAX_ENTRIES, MAX_ENTRIES // 4, MAX_ENTRIES * 2]),
    ],
)
def test_a_section_tells_the_limits_of_what_it_describes(section, limits):
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    assert [limit for limit in limits if not holds(text, limit)] == []
