"""`penstock serve`: fetch, start, and tell the operator where the time went and where to look."""

import contextlib
import json
import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from penstock import telemetry
from penstock.commands.models import fetch
from penstock.config import Sourced
from penstock.engine import setup
from penstock.engine.ahead import ENGINE_AHEAD, ENGINE_MODULE
from penstock.engine.timeline import Timeline, process_started
from penstock.loopback import is_loopback
from penstock.run_folder import run_folder
from penstock.server import config as server_config
from penstock.server.engine_watch import Patience
from penstock.server.supervisor import Supervisor

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer

_PROXY_VARIABLES = ("http_proxy", "all_proxy", "ALL_PROXY")  # those that curl heeds for http
_BEGINNING = "The capital of France is"
_AMPLE_CONTEXT_TOKENS = 2048  # whatever a chat template adds to a question, an answer fits as well


def run(sourced: Sourced, *, engine_module: str = ENGINE_MODULE, patience: Patience | None = None) -> int:
    """Serve until told to stop; return the exit status.

    `engine_module` is what the engine process runs, and `patience` what is had with one that stands still.
    """
    timeline = Timeline(process_started())
    config, _ = server_config.resolve(sourced)
    telemetry.configure_logging(config.log_format, process="supervisor")
    timeline.mark("command line")
    if sourced.options.device == "simulated":
        ENGINE_AHEAD.cancel()  # it would not have begun, had this been known
    files = fetch(sourced.options)
    timeline.mark("model files")
    console = Console()
    with run_folder() as folder, _LoadingBar(Console(stderr=True)) as bar, contextlib.closing(ENGINE_AHEAD):

        def announce(supervisor: Supervisor) -> None:
            # Here, because it takes as long to import as all the rest, and the engine would begin later.
            from penstock.engine.tokenizer import Tokenizer

            bar.close()
            tokenizer = Tokenizer.load(files)
            chats = bool(config.chat_template or tokenizer.chat_template)
            question = first_question(tokenizer, chats=chats, context_tokens=supervisor.context_tokens)
            line = try_line(supervisor.url, config.served_name, question, has_keys=supervisor.config.needs_keys)
            console.print(banner(supervisor, config.served_name, line), soft_wrap=True)

        async def serve() -> int:
            supervisor = Supervisor(
                sourced,
                config,
                files,
                timeline,
                folder,
                ahead=ENGINE_AHEAD,
                on_ready=announce,
                on_progress=bar.show,
                engine_module=engine_module,
                patience=patience,
            )
            return await supervisor.run()

        return ENGINE_AHEAD.runner.run(serve())


def banner(supervisor: Supervisor, model: str, line: str) -> Group:
    """Return the start-up timeline, whose parts as printed sum to the total, and what to try first."""
    timeline = supervisor.timeline
    rows = Table.grid(padding=(0, 2))
    rows.add_column(justify="right")
    rows.add_column()
    hundredths = [round(seconds * 100) for _, seconds in timeline.phases]
    for count, (phase, _) in zip(hundredths, timeline.phases, strict=True):
        rows.add_row(Text(f"{count / 100:.2f} s", style="dim"), Text(phase, style="dim"))
    rows.add_row(Text(f"{sum(hundredths) / 100:.2f} s", style="bold"), Text(f"ready: {model}", style="bold"))
    # Beside the table, not in it: a cell would be wrapped, and a wrapped command does not run.
    return Group(
        rows,
        Text(),
        Text(f"Look:  {supervisor.url}/       {supervisor.url}/docs"),
        Text(f"Admin: {supervisor.admin_url}"),
        Text("Try:"),
        Text(line),
        Text(),
    )


def first_question(tokenizer: "Tokenizer", *, chats: bool, context_tokens: int) -> dict[str, object]:
    """Return the fields of a request that is answered whatever the context: prompt or messages, and a length."""
    if context_tokens >= _AMPLE_CONTEXT_TOKENS:
        if chats:
            return {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 64}
        return {"prompt": _BEGINNING, "max_tokens": 64}
    # Without a length the answer ends with the context at the latest; what a template adds might not fit.
    fits = len(tokenizer.encode(_BEGINNING, add_special=True)) < context_tokens
    return {"prompt": _BEGINNING if fits else [0]}


def try_line(url: str, model: str, question: Mapping[str, object], *, has_keys: bool) -> str:
    """Return a command that works as printed (with the caller's own key, where keys are needed)."""
    body = json.dumps({"model": model, **question, "temperature": 0})
    route = "chat/completions" if "messages" in question else "completions"
    key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if has_keys else ""
    # A proxy would look for a loopback address on its own machine.
    is_passed_on = is_loopback(urlsplit(url).hostname or "") and any(map(os.environ.get, _PROXY_VARIABLES))
    directly = " --noproxy '*'" if is_passed_on else ""
    return f"curl -sS {url}/v1/{route}{directly}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


class _LoadingBar:
    """Shows how far the weights are, where there is a terminal to show it on."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._bar.add_task("weights", total=None) if self._bar is not None else None

    def __enter__(self) -> "_LoadingBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, notice: setup.Progress) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.start()
            self._bar.update(self._task, completed=notice.done_bytes, total=notice.total_bytes)
            if notice.done_bytes >= notice.total_bytes:
                self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
