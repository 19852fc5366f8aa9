"""`penstock chat`: a conversation in the terminal with any server that speaks OpenAI's chat API.

Typed lines are turns or commands; piped lines are all turns, one each, answered with plain text. Knows the terminal and
the conversation; `chat_client` knows the server.
"""

import asyncio
import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from penstock.commands.chat_client import Answer, ChatClient, Message
from penstock.errors import ContextTooLong, PenstockError, RemoteError, RequestError
from penstock.home_folder import expand_home

HELP = """\
/help            this list
/reset           forget the conversation, keep the system message
/system [TEXT]   show or replace the system message
/save [FILE]     write the conversation to a JSON file
/quit            leave (so does Ctrl-D)
A line that ends in a backslash goes on in the next. Ctrl-C stops an answer."""

# Of an answer, where nobody said: a small model that does not end by itself only repeats itself from here on.
MAX_TOKENS = 512

# A model's text must not steer the terminal: no escape sequences, no bells.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(slots=True)
class Conversation:
    """What has been said. A turn enters when its answer does."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def with_question(self, text: str) -> list[Message]:
        """Return the messages to send for the next turn. Changes nothing."""
        opening = [Message("system", self.system)] if self.system else []
        return [*opening, *self.turns, Message("user", text)]

    def add(self, question: str, answer: str) -> None:
        self.turns += [Message("user", question), Message("assistant", answer)]


class Chat:
    """Runs turns until the lines end or the person leaves."""

    def __init__(
        self,
        client: ChatClient,
        runner: asyncio.Runner,
        console: Console,
        *,
        model: str,
        system: str | None = None,
        sampling: Mapping[str, float | int] | None = None,
        interactive: bool = True,
    ) -> None:
        self.conversation = Conversation(system)
        self._client = client
        self._runner = runner
        self._console = console
        self._model = model
        self._sampling = dict(sampling or {})
        self._interactive = interactive

    def run(self, lines: Iterable[str]) -> None:
        for number, turn in _joined(lines):
            text = turn.strip()
            if not _is_unicode(text):
                self._fail(RequestError(f"line {number} of the input is not UTF-8; convert it, for example with iconv"))
            elif self._interactive and text in ("/quit", "/exit"):
                return
            elif self._interactive and text.startswith("/"):
                self._command(text)
            elif text:
                self._turn(text)

    def _turn(self, question: str) -> None:
        answer = Answer(started=time.monotonic())
        try:
            self._runner.run(self._show_answer(self.conversation.with_question(question), answer))
        except RemoteError as error:
            self._fail(self._with_advice(error))
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._console.out()
            self._note("stopped")
        else:
            self._console.out()
            if self._interactive:
                self._note(describe(answer))
        # What was said before a stop or a failure is part of the conversation; a question without answer is not.
        if answer.text:
            self.conversation.add(question, answer.text)

    def _fail(self, error: PenstockError) -> None:
        """Tell a person; end a run of piped lines, whose answers nobody could tell apart behind a gap."""
        if not self._interactive:
            raise error
        self._console.out()
        self._note(str(error), style="red")

    def _with_advice(self, error: RemoteError) -> RemoteError:
        if error.remote_code != ContextTooLong.code or not self.conversation.turns or not self._interactive:
            return error
        return RemoteError(f"{error}. A line with /reset forgets what was said before")

    async def _show_answer(self, messages: list[Message], answer: Answer) -> None:
        waiting = self._console.status("") if self._interactive else contextlib.nullcontext()
        async with contextlib.aclosing(self._client.stream(messages, self._model, answer, self._sampling)) as pieces:
            with waiting:
                text = await anext(pieces, "")
            while text:
                self._write(text)
                text = await anext(pieces, "")

    def _write(self, text: str) -> None:
        # Past rich, which would expand tabs: what is piped on is what the model said.
        self._console.file.write(_CONTROL.sub("", text) if self._console.is_terminal else text)
        self._console.file.flush()

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        argument = argument.strip()
        if name == "/help":
            self._note(HELP)
        elif name == "/reset":
            self.conversation.turns.clear()
            self._note("forgotten")
        elif name == "/system":
            if argument:
                self.conversation.system = argument
            self._note(f"system message: {self.conversation.system or 'none'}")
        elif name == "/save":
            self._save(argument)
        else:
            self._note(f"there is no {name}; /help lists what there is", style="red")

    def _save(self, name: str) -> None:
        path = expand_home(name or time.strftime("penstock-chat-%Y%m%d-%H%M%S.json"))
        opening = [Message("system", self.conversation.system)] if self.conversation.system else []
        messages = [{"role": item.role, "content": item.content} for item in opening + self.conversation.turns]
        document = {"model": self._model, "messages": messages}
        try:
            path.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            self._note(f"{path} cannot be written ({error.strerror}); name another file", style="red")
        else:
            self._note(f"saved to {path}")

    def _note(self, text: str, style: str = "dim") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)


def describe(answer: Answer) -> str:
    """Return the line under an answer: how much, how fast, and why it ended if not by itself."""
    parts = []
    if answer.num_tokens is not None:
        parts.append(f"{answer.num_tokens} tokens")
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if answer.first_text_seconds is not None:
        parts.append(f"first after {answer.first_text_seconds:.2f} s")
    if answer.finish_reason == "length":
        parts.append("cut off at the limit of tokens")
    return " · ".join(parts) or "no text"


def run(
    url: str, api_key: str | None, model: str | None, system: str | None, sampling: Mapping[str, float | int]
) -> int:
    """Chat with the server at `url` on this process's own terminal or pipes."""
    interactive = sys.stdin.isatty()
    console = Console(highlight=False)
    client = ChatClient(url, api_key)
    with asyncio.Runner() as runner:
        try:
            served, context = _served_model(runner, client, model)
            sampling = {"max_tokens": _answer_tokens(context), **sampling}
            chat = Chat(
                client, runner, console, model=served, system=system, sampling=sampling, interactive=interactive
            )
            if interactive:
                console.print(Text(f"{served} at {client.url}. /help lists commands, Ctrl-D leaves.", style="dim"))
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="surrogateescape")  # or a wrong byte would hide the lines before it
            chat.run(_typed_lines(console) if interactive else sys.stdin)
        finally:
            runner.run(client.aclose())
    return 0


def _joined(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each turn with the number of its last line: a line that ends in a backslash goes on in the next."""
    held: list[str] = []
    number = 0
    for number, line in enumerate(lines, start=1):
        part = line.rstrip("\r\n")
        held.append(part.removesuffix("\\"))
        # A line that cannot be read is told by its own number.
        if not part.endswith("\\") or not _is_unicode(part):
            yield number, "\n".join(held)
            held.clear()
    if held:
        yield number, "\n".join(held)


def _is_unicode(text: str) -> bool:
    """Whether every character is one: Python has bytes that it cannot decode stand as halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _served_model(runner: asyncio.Runner, client: ChatClient, named: str | None) -> tuple[str, int | None]:
    """Return the model to talk to and its context, where the server tells; one that is named need not be listed."""
    try:
        models = runner.run(client.models())
    except RemoteError:
        if named is None:
            raise
        models = {}
    if named is not None:
        return named, models.get(named)
    if not models:
        raise RemoteError(f"{client.url} serves no model; name one with --model")
    return next(iter(models.items()))


def _answer_tokens(context: int | None) -> int:
    """Return the default limit of an answer: a small context keeps half for the conversation."""
    return MAX_TOKENS if context is None else max(1, min(MAX_TOKENS, context // 2))


def _typed_lines(console: Console) -> Iterator[str]:
    """Yield what is typed, with line editing where Python has it, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it gives input() its editing and history)
    lines: list[str] = []
    while True:
        try:
            line = input("… " if lines else "> ")
        except EOFError:
            console.out()
            return
        except KeyboardInterrupt:
            lines.clear()
            console.out("\n(Ctrl-D or /quit leaves)", highlight=False)
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(lines)
            lines.clear()
