"""An API worker process: one event loop that serves HTTP on an inherited socket.

`python -m penstock.server.worker` with a `WorkerSetup` as JSON on standard input. Its owner's signal (`stop_signals`)
drains: no new connections, open requests go on for `drain_seconds`, then end with an error; a second one ends at once.
Ends when its parent is gone. Never loads torch.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import uvicorn
import uvloop
from fastapi import FastAPI

from penstock.child_setup import decode_setup
from penstock.connection_limits import ConnectionLimits, raise_file_limit
from penstock.engine.client import EngineClient
from penstock.engine.setup import Refused
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import EngineUnavailable, ModelError, TemplateFailed
from penstock.server.app import create_admin_app, create_app
from penstock.server.batch.runner import BatchRunner
from penstock.server.chat_template import ChatTemplate
from penstock.server.connection import connection_class
from penstock.server.context import ServerContext, build_context
from penstock.server.listeners import let_in
from penstock.server.prefix_file import DeclaredPrefix
from penstock.server.readiness import MAX_STILL_SECONDS
from penstock.server.shared_prefixes import SharedPrefixes, tokenize_prefixes
from penstock.server.standstill import LOOK_SECONDS
from penstock.server.worker_setup import WorkerNotice, WorkerSetup, encode_worker_notice
from penstock.stop_signals import OWNERS_SIGNAL, leave_to_owner
from penstock.store.database import Database
from penstock.telemetry import configure_logging, log_event

_PARENT_SECONDS = 0.5
# For files, keys and the like: few, so that they wait for each other and not all for them.
_THREADS = 2
# How long a new worker waits for a step's end: /live is not answered meanwhile where it is the only one.
_MEETING_SECONDS = 10.0
_LOOK_SECONDS = 0.25
# Behind the drain: time for the error events of requests that ran out of it to leave.
_LAST_WORDS_SECONDS = 2

log = logging.getLogger("penstock.worker")


class HttpServer(uvicorn.Server):
    """uvicorn, with our signals: it must not raise them again when it is done. Calls `on_started` when it serves."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Worker:
    """Serves until told to stop."""

    def __init__(self, setup: WorkerSetup, context: ServerContext) -> None:
        self._context = context
        self._parent = setup.parent_pid
        self._notice_fd = setup.notice_fd
        self._drain_seconds = setup.config.drain_seconds
        limits = ConnectionLimits()
        self._limits = replace(limits, max_connections=raise_file_limit(limits))
        self._servers = [(self._serve(create_app(context)), socket.socket(fileno=setup.listen_fd))]
        if setup.admin_fd is not None:
            admin = socket.socket(fileno=setup.admin_fd)
            # Who can open a Unix socket in a private folder owns the server; a port anybody here can open.
            app = create_admin_app(context, needs_key=admin.family != socket.AF_UNIX)
            self._servers.append((self._serve(app), admin))

    def _serve(self, app: FastAPI) -> HttpServer:
        return HttpServer(
            uvicorn.Config(
                app,
                http=connection_class(self._limits, self._context.metrics),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(self._limits.idle_seconds),
                timeout_graceful_shutdown=int(self._drain_seconds) + _LAST_WORDS_SECONDS,
            ),
            self._note_started,
        )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, "penstock-work"))
        loop.add_signal_handler(OWNERS_SIGNAL, self._on_signal)
        self._watch_parent()
        self._watch_time()
        if not self._listen():
            _tell(self._notice_fd, WorkerNotice.PORT_TAKEN)
            return
        await asyncio.gather(*[server.serve(sockets=[listener]) for server, listener in self._servers])

    def _listen(self) -> bool:
        """Let callers in; return whether they come to us and not to a server that was sooner."""
        try:
            for _, listener in self._servers:
                let_in(listener)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True

    def _note_started(self) -> None:
        """Tell the supervisor once all sockets are served."""
        if all(server.started for server, _ in self._servers):
            _tell(self._notice_fd, WorkerNotice.SERVES)

    def _on_signal(self) -> None:
        if self._context.answers.draining:
            self._stop_now()
            return
        self._context.answers.draining = True
        self._context.blocks.close()
        for server, _ in self._servers:
            server.should_exit = True
        asyncio.get_running_loop().call_later(self._drain_seconds, self._end_drain)
        if len(self._context.answers):
            log_event(log, "draining", open_requests=len(self._context.answers))

    def _end_drain(self) -> None:
        self._context.answers.end_all(EngineUnavailable("the server is shutting down; try again in a moment"))

    def _stop_now(self) -> None:
        for server, _ in self._servers:
            server.should_exit = True
            server.force_exit = True

    def _watch_parent(self) -> None:
        """Look now and then whether anybody is left to serve for."""
        if os.getppid() == self._parent:
            asyncio.get_running_loop().call_later(_PARENT_SECONDS, self._watch_parent)
        else:
            self._stop_now()

    def _watch_time(self) -> None:
        self._context.standstill.look()
        asyncio.get_running_loop().call_later(LOOK_SECONDS, self._watch_time)


def _tell(notice_fd: int, notice: WorkerNotice | Refused) -> None:
    """Say to the supervisor the one thing that it hears of a start."""
    with contextlib.suppress(BrokenPipeError):  # it is gone, as will soon be noticed
        os.write(notice_fd, encode_worker_notice(notice))
    os.close(notice_fd)


async def serve(setup: WorkerSetup, tokenizer: Tokenizer) -> None:
    """Run one API worker to its end."""
    engine = await EngineClient.connect(setup.engine_socket, setup.identity.encode())
    template: ChatTemplate | None = None
    context: ServerContext | None = None
    batches: BatchRunner | None = None
    try:
        template = await _start_template(setup.config.chat_template or tokenizer.chat_template, tokenizer)
        context = build_context(
            setup.config,
            engine,
            tokenizer,
            template,
            created=int(time.time()),
            database=Database.open(setup.config.store) if setup.config.store is not None else None,
            shared_prefixes=await _share_prefixes(setup.config.shared_prefixes, tokenizer, template),
        )
        context.tenancy.start()
        if context.tenancy.database is not None:
            batches = BatchRunner(context, context.tenancy.database)
            batches.start()
        if setup.is_replacement:
            await _meet(engine)
        await Worker(setup, context).run()
    finally:
        if batches is not None:
            await batches.close()
        if context is not None:
            context.texts.close()
            await context.tenancy.close()
        if template is not None:
            await template.close()
        await engine.close()


async def _meet(engine: EngineClient) -> None:
    """Wait for the word of an engine that is there, but may be in a step: until then this worker could only refuse.

    Its callers wait for it, or are another worker's; a server that starts tells its own at once, who may go elsewhere.
    Where there is no engine, or it stands still, return at once: somebody must tell them.
    """
    deadline = time.monotonic() + _MEETING_SECONDS
    while not engine.connected and engine.pulse_age_seconds < MAX_STILL_SECONDS and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.wait_ready(), _LOOK_SECONDS)


async def _share_prefixes(
    declared: Sequence[DeclaredPrefix], tokenizer: Tokenizer, template: ChatTemplate | None
) -> SharedPrefixes:
    try:
        return await tokenize_prefixes(declared, tokenizer, template)
    except TemplateFailed as error:
        # Nothing is wrong but slower; what is shared must never depend on a template that failed.
        log_event(log, f"no prefix is shared: {error}", level=logging.ERROR)
        return SharedPrefixes([])


async def _start_template(text: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    if text is None:
        return None
    template = ChatTemplate(text, bos_token=tokenizer.bos_text or "", eos_token=tokenizer.eos_text or "")
    try:
        await template.start()
    except TemplateFailed as error:
        # The model can still be used without it, and each chat request will say the same.
        log_event(log, str(error), level=logging.WARNING)
    return template


def main() -> int:
    leave_to_owner()
    setup = decode_setup(sys.stdin.buffer.read(), WorkerSetup)
    for inherited in (setup.listen_fd, setup.notice_fd, setup.admin_fd):
        if inherited is not None:
            os.set_inheritable(inherited, False)  # or the template process would keep it open behind us
    configure_logging(setup.config.log_format, process=setup.identity)
    # What was imported stays: a full collection need not look through all of it, which holds up every stream.
    gc.collect()
    gc.freeze()
    try:
        tokenizer = Tokenizer.load(setup.files)
    except ModelError as error:
        _tell(setup.notice_fd, Refused(str(error)))
        return 2
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(setup, tokenizer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
