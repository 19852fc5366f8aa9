"""What `penstock serve` tells the operator once it is ready."""

import io
import json
import shlex
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from penstock.commands import serve
from penstock.engine.timeline import Timeline
from tests.fakes.tiny_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()


@dataclass
class ReadyServer:
    """What the banner needs to know of a server."""

    timeline: Timeline
    url: str = "http://127.0.0.1:8000"
    admin_url: str = "unix:/run/penstock-x/admin.sock"


@pytest.fixture
def server() -> ReadyServer:
    timeline = Timeline(started=0.0)
    timeline.extend([("import torch", 1.25), ("weights", 2.5)])
    return ReadyServer(timeline)


def lines(server: Any, *, has_keys: bool, chats: bool = True, context_tokens: int = 8192) -> list[str]:
    """Return the banner's lines on a narrow terminal."""
    question = serve.first_question(TOKENIZER, chats=chats, context_tokens=context_tokens)
    command = serve.try_line(server.url, "tiny", question, has_keys=has_keys)
    output = io.StringIO()
    console = Console(file=output, width=60, force_terminal=True, color_system=None)
    console.print(serve.banner(server, "tiny", command), soft_wrap=True)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def test_the_timeline_sums_to_the_total(server: ReadyServer) -> None:
    shown = lines(server, has_keys=False)
    assert shown[:3] == ["1.25 s  import torch", "2.50 s  weights", "3.75 s  ready: tiny"]


def test_it_says_where_to_look(server: ReadyServer) -> None:
    (look,) = (line for line in lines(server, has_keys=False) if line.startswith("Look:"))
    assert look.split() == ["Look:", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/docs"]


def test_it_says_where_the_admin_routes_are(server: ReadyServer) -> None:
    assert "Admin: unix:/run/penstock-x/admin.sock" in lines(server, has_keys=False)


def test_the_command_to_try_stays_on_one_line_however_narrow_the_terminal(server: ReadyServer) -> None:
    (command,) = (line for line in lines(server, has_keys=False) if line.startswith("curl"))
    arguments = shlex.split(command)
    assert arguments[2] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(arguments[-1])["model"] == "tiny"
    assert "Authorization" not in command


def test_with_keys_the_command_to_try_has_a_place_for_one(server: ReadyServer) -> None:
    (command,) = (line for line in lines(server, has_keys=True) if line.startswith("curl"))
    assert "Authorization: Bearer $PENSTOCK_API_KEY" in shlex.split(command)


@pytest.mark.parametrize(
    ("variable", "url", "passes_by"),
    [
        ("http_proxy", "http://127.0.0.1:8000", True),
        ("ALL_PROXY", "http://[::1]:8000", True),
        ("http_proxy", "http://10.0.0.7:8000", False),
        ("UNRELATED", "http://127.0.0.1:8000", False),
    ],
)
def test_the_command_to_try_passes_a_proxy_by_on_this_machine_only(
    monkeypatch: pytest.MonkeyPatch, variable: str, url: str, passes_by: bool
) -> None:
    for name in ("http_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://proxy.example:3128")
    arguments = shlex.split(serve.try_line(url, "tiny", {"prompt": "a"}, has_keys=False))
    assert arguments[:3] == ["curl", "-sS", f"{url}/v1/completions"]
    assert (arguments[3:5] == ["--noproxy", "*"]) == passes_by


def test_a_model_without_a_chat_template_is_tried_with_a_plain_prompt(server: ReadyServer) -> None:
    (command,) = (line for line in lines(server, has_keys=False, chats=False) if line.startswith("curl"))
    arguments = shlex.split(command)
    assert arguments[2] == "http://127.0.0.1:8000/v1/completions"
    assert "prompt" in json.loads(arguments[-1])


@pytest.mark.parametrize("chats", [True, False])
@pytest.mark.parametrize("context_tokens", [2, 16, 64, 2047])
def test_the_command_to_try_fits_a_short_context(server: ReadyServer, chats: bool, context_tokens: int) -> None:
    shown = lines(server, has_keys=False, chats=chats, context_tokens=context_tokens)
    (command,) = (line for line in shown if line.startswith("curl"))
    arguments = shlex.split(command)
    body = json.loads(arguments[-1])
    prompt = body["prompt"]
    token_ids = TOKENIZER.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt
    assert arguments[2] == "http://127.0.0.1:8000/v1/completions"
    assert 0 < len(token_ids) < context_tokens
    assert "max_tokens" not in body


def test_the_total_is_the_sum_of_the_parts_as_printed() -> None:
    timeline = Timeline(started=0.0)
    timeline.extend([("a", 1.004), ("b", 1.004), ("c", 1.004)])
    assert lines(ReadyServer(timeline), has_keys=False)[3] == "3.00 s  ready: tiny"
