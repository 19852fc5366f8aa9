"""The chat keeps the conversation, obeys its commands and survives what goes wrong in a turn."""

import asyncio
import io
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from penstock.commands.chat import Chat, Conversation, describe, run
from penstock.commands.chat_client import Answer, ChatClient, Message
from penstock.errors import RemoteError, RequestError
from tests.fakes.chat_server import ChatScript, serve_chat


class Terminal:
    """A chat with a scripted server, typed into by the test."""

    def __init__(self, url: str, *, interactive: bool = True, system: str | None = None) -> None:
        self.output = io.StringIO()
        console = Console(file=self.output, force_terminal=interactive, color_system=None, width=100)
        self.client = ChatClient(url)
        self.runner = asyncio.Runner()
        self.chat = Chat(self.client, self.runner, console, model="tiny", system=system, interactive=interactive)

    def type(self, *lines: str) -> str:
        """Run the lines and return what they printed."""
        start = len(self.output.getvalue())
        self.chat.run(lines)
        return self.output.getvalue()[start:]

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()


@pytest.fixture
def script() -> ChatScript:
    return ChatScript()


@pytest.fixture
def terminal(script: ChatScript) -> Iterator[Terminal]:
    with serve_chat(script) as url:
        terminal = Terminal(url, system="Be brief.")
        yield terminal
        terminal.close()


def sent(script: ChatScript) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in script.requests[-1]["messages"]]


def test_a_turn_shows_the_answer_and_its_speed(terminal: Terminal) -> None:
    shown = terminal.type("hi")
    assert "Hello\n" in shown
    assert "2 tokens" in shown
    assert "first after" in shown


def test_the_second_turn_carries_the_first(script: ChatScript, terminal: Terminal) -> None:
    terminal.type("one", "two")
    assert sent(script) == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "Hello"),
        ("user", "two"),
    ]


def test_reset_forgets_the_turns_and_keeps_the_system_message(script: ChatScript, terminal: Terminal) -> None:
    terminal.type("one", "/reset", "two")
    assert sent(script) == [("system", "Be brief."), ("user", "two")]


def test_system_replaces_the_system_message(script: ChatScript, terminal: Terminal) -> None:
    terminal.type("/system Speak Latin.", "one")
    assert sent(script)[0] == ("system", "Speak Latin.")


def test_save_writes_the_conversation(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    assert f"saved to {file}" in terminal.type("hé", f"/save {file}")
    assert json.loads(file.read_text()) == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hé"},
            {"role": "assistant", "content": "Hello"},
        ],
    }


def test_save_to_a_folder_that_is_not_there_says_so(terminal: Terminal, tmp_path: Path) -> None:
    assert "cannot be written" in terminal.type(f"/save {tmp_path}/no/chat.json")
    assert "cannot be written" in terminal.type("/save ~nobody-of-this-name/chat.json")


def test_quit_ends_the_chat(script: ChatScript, terminal: Terminal) -> None:
    terminal.type("/quit", "unheard")
    assert script.requests == []


def test_help_lists_every_command(terminal: Terminal) -> None:
    shown = terminal.type("/help")
    assert all(name in shown for name in ("/help", "/reset", "/system", "/save", "/quit"))


def test_an_unknown_command_is_not_sent_to_the_model(script: ChatScript, terminal: Terminal) -> None:
    assert "there is no /frobnicate" in terminal.type("/frobnicate")
    assert script.requests == []


def test_empty_lines_are_no_turns(script: ChatScript, terminal: Terminal) -> None:
    terminal.type("", "   ")
    assert script.requests == []


def test_a_refused_turn_leaves_the_conversation_as_it_was(script: ChatScript, terminal: Terminal) -> None:
    script.status, script.error = 503, {"error": {"message": "the engine restarts"}}
    assert "the engine restarts" in terminal.type("one")
    script.status = 200
    terminal.type("two")
    assert sent(script) == [("system", "Be brief."), ("user", "two")]


def test_ctrl_c_stops_the_answer_and_not_the_chat(script: ChatScript, terminal: Terminal) -> None:
    script.hang_after_pieces = True
    main_thread = threading.get_ident()
    # A shell that starts a command in the background has it ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press_when_shown() -> None:
        while "Hello" not in terminal.output.getvalue():
            time.sleep(0.01)
        signal.pthread_kill(main_thread, signal.SIGINT)

    presser = threading.Thread(target=press_when_shown)
    presser.start()
    assert "stopped" in terminal.type("one")
    presser.join()
    assert script.hung_up.wait(30), "the server must see the client leave"
    script.hang_after_pieces = False
    terminal.type("two")
    assert sent(script)[1:3] == [("user", "one"), ("assistant", "Hello")]
    signal.signal(signal.SIGINT, before)


def test_an_answer_cannot_steer_the_terminal(script: ChatScript, terminal: Terminal) -> None:
    script.pieces = ["a\x1b]0;title\x07b", "\x9b31mc\r", "👩\u200d🚀\n\td"]
    shown = terminal.type("hi")
    assert "a]0;titleb31mc👩\u200d🚀\n\td\n" in shown


def test_piped_lines_are_answered_with_plain_text_only(script: ChatScript) -> None:
    with serve_chat(script) as url:
        terminal = Terminal(url, interactive=False)
        assert terminal.type("one\n", "two\n") == "Hello\nHello\n"
        terminal.close()


def test_a_piped_line_that_ends_in_a_backslash_goes_on_in_the_next(script: ChatScript) -> None:
    with serve_chat(script) as url:
        terminal = Terminal(url, interactive=False)
        terminal.type("one \\\n", "  two\\\r\n", "three\n", "four\\\n")
        terminal.close()
    asked = [request["messages"][-1]["content"] for request in script.requests]
    assert asked == ["one \n  two\nthree", "four"]


def test_a_piped_turn_that_fails_ends_the_run(script: ChatScript) -> None:
    script.status, script.error = 400, {"error": {"message": "no"}}
    with serve_chat(script) as url:
        terminal = Terminal(url, interactive=False)
        with pytest.raises(RemoteError, match="status 400: no"):
            terminal.type("one")
        terminal.close()


def test_a_piped_line_that_looks_like_a_command_is_a_turn(script: ChatScript) -> None:
    with serve_chat(script) as url:
        terminal = Terminal(url, interactive=False)
        assert terminal.type("/etc/hosts is what?\n", "/reset\n", "/quit\n") == "Hello\nHello\nHello\n"
        terminal.close()
    asked = [request["messages"][-1]["content"] for request in script.requests]
    assert asked == ["/etc/hosts is what?", "/reset", "/quit"]


@pytest.mark.parametrize("interactive", [True, False])
def test_a_conversation_that_outgrows_the_context_is_told_of_reset_where_it_is_typed(
    script: ChatScript, interactive: bool
) -> None:
    too_long = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    with serve_chat(script) as url:
        terminal = Terminal(url, interactive=interactive)
        terminal.type("one")
        script.status, script.error = 400, too_long
        if interactive:
            advice = "status 400: too long. A line with /reset forgets what was said before"
            assert advice in terminal.type("two")
        else:
            with pytest.raises(RemoteError, match=r"status 400: too long$"):
                terminal.type("two")
        terminal.close()


def test_a_first_question_over_the_context_is_not_told_of_reset(script: ChatScript, terminal: Terminal) -> None:
    script.status, script.error = 400, {"error": {"message": "too long", "code": "context_length_exceeded"}}
    assert "/reset" not in terminal.type("one")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_piped_line_that_is_not_utf_8_is_told_by_its_number(
    script: ChatScript, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], errors: str
) -> None:
    lines = io.BytesIO("hé\n".encode() + b"caf\xe9\nunheard\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(lines, encoding="utf-8", errors=errors))
    with serve_chat(script) as url, pytest.raises(RequestError, match=r"^line 2 of the input is not UTF-8; convert it"):
        run(url, None, None, None, {})
    assert capsys.readouterr().out == "Hello\n"
    assert [request["messages"][-1]["content"] for request in script.requests] == ["hé"]


def test_a_typed_line_that_is_not_utf_8_does_not_end_the_chat(script: ChatScript, terminal: Terminal) -> None:
    assert "line 1 of the input is not UTF-8" in terminal.type("caf\udce9", "one")
    assert [request["messages"][-1]["content"] for request in script.requests] == ["one"]


def test_the_first_served_model_is_the_default(
    script: ChatScript, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.models = ["first", "second"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    with serve_chat(script) as url:
        assert run(url, None, None, None, {"temperature": 0.5}) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert script.requests[0]["model"] == "first"
    assert script.requests[0]["temperature"] == 0.5


@pytest.mark.parametrize("model", [None, "tiny"])
@pytest.mark.parametrize(("context", "limit"), [(None, 512), (8192, 512), (512, 256)])
def test_an_answer_is_limited_unless_told_otherwise(
    script: ChatScript, monkeypatch: pytest.MonkeyPatch, context: int | None, limit: int, model: str | None
) -> None:
    script.max_context_tokens = context
    with serve_chat(script) as url:
        for sampling in ({}, {"max_tokens": 700}):
            monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
            run(url, None, model, None, sampling)
    assert [request["max_tokens"] for request in script.requests] == [limit, 700]


@pytest.mark.parametrize("models", [[], None])
def test_a_named_model_need_not_be_listed(
    script: ChatScript, monkeypatch: pytest.MonkeyPatch, models: list[str] | None
) -> None:
    script.models = models
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    with serve_chat(script) as url:
        assert run(url, None, "hidden", None, {}) == 0
    assert script.requests[0]["model"] == "hidden"


def test_a_question_does_not_enter_the_conversation_by_itself() -> None:
    conversation = Conversation()
    assert conversation.with_question("hi") == [Message("user", "hi")]
    assert conversation.turns == []


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Answer(started=0.0), "no text"),
        (Answer(started=0.0, first_text=0.5, ended=2.5, num_tokens=5), "5 tokens · 2.0 tokens/s · first after 0.50 s"),
        (Answer(started=0.0, first_text=0.5, ended=0.5, num_tokens=1), "1 tokens · first after 0.50 s"),
        (
            Answer(started=0.0, first_text=0.25, ended=1.25, num_pieces=3, finish_reason="length"),
            "2.0 tokens/s · first after 0.25 s · cut off at the limit of tokens",
        ),
    ],
)
def test_the_line_under_an_answer(answer: Answer, text: str) -> None:
    assert describe(answer) == text
