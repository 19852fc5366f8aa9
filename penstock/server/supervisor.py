"""The parent of all processes of one server: starts them, watches them, restarts them, and ends them in order.

Holds the socket on which API workers listen, so that no connection is lost while one of them is replaced. Never sees a
request, never loads torch.
"""

import asyncio
import contextlib
import io
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.child_setup import encode_setup
from penstock.config import Sourced
from penstock.engine.ahead import ENGINE_MODULE, EngineAhead
from penstock.engine.client import EngineClient
from penstock.engine.setup import EngineSetup, Progress, Refused, decode_notice
from penstock.engine.timeline import Timeline
from penstock.errors import PenstockError
from penstock.loopback import local_address
from penstock.models.store import ModelFiles
from penstock.run_folder import socket_path
from penstock.server.config import ServerConfig
from penstock.server.engine_watch import LOOK_SECONDS, EngineWatch, Patience
from penstock.server.listeners import bind, joined, listen_for_admin, remove_socket
from penstock.server.registration import Registrations
from penstock.server.restarts import Restarts
from penstock.server.worker_setup import WorkerNotice, WorkerSetup, decode_worker_notice
from penstock.stop_signals import OWNERS_SIGNAL, stop_signals
from penstock.telemetry import log_event

log = logging.getLogger("penstock.supervisor")

# Beyond the drain: what a worker may need to close its sockets, and the engine to end its step.
_STOP_SECONDS = 5.0


class StartFailed(PenstockError):
    """The server cannot start; the sentence says why."""

    code = "start_failed"


class Supervisor:
    """One server's processes. `folder` is where they meet; whoever made it takes it away."""

    def __init__(
        self,
        sourced: Sourced,
        config: ServerConfig,
        files: ModelFiles,
        timeline: Timeline,
        folder: Path,
        *,
        ahead: EngineAhead,
        on_ready: Callable[["Supervisor"], None],
        on_progress: Callable[[Progress], None],
        engine_module: str = ENGINE_MODULE,
        patience: Patience | None = None,
    ) -> None:
        self.config = config
        self.timeline = timeline
        self._sourced = sourced
        self._files = files
        self._on_ready = on_ready
        self._on_progress = on_progress
        self._ahead = ahead
        self._engine_module = engine_module
        self._patience = patience or Patience()
        self._folder = folder
        self._socket_path = str(socket_path(folder, "engine.sock"))
        self._listener = bind(config.host, config.port)
        self._admin = listen_for_admin(config.admin, self._folder)
        self._stopping = asyncio.Event()
        self._draining = asyncio.Event()
        self._serving = asyncio.Event()  # a worker has come to accept callers
        self._engine: asyncio.subprocess.Process | None = None
        self._workers: dict[int, asyncio.subprocess.Process] = {}
        self._client: EngineClient | None = None
        self._refused: str | None = None
        host, port = self._listener.getsockname()[:2]
        self._address = local_address(host), port  # kept: a drain closes the listener
        self._registrations = Registrations(config.gateways, config.host, port, os.environ.get("PENSTOCK_API_KEY"))

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        return f"http://{joined(*self._address)}"

    @property
    def admin_url(self) -> str:
        """Where an operator on this machine finds the admin routes."""
        name = self._admin.getsockname()
        return f"unix:{name}" if self._admin.family == socket.AF_UNIX else f"http://{joined(*name[:2])}"

    async def run(self) -> int:
        """Serve until a signal or a hopeless failure. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal)
        watchers = [asyncio.create_task(self._keep_engine())]
        self._client = await EngineClient.connect(self._socket_path, b"supervisor")
        try:
            self.config = await asyncio.to_thread(_prepare_store, self.config)
            watchers += [asyncio.create_task(self._keep_worker(index)) for index in range(self.config.workers)]
            watchers.append(asyncio.create_task(self._announce()))
            await self._until_stopped(watchers)
        finally:
            await self._end(watchers)
        return 0

    async def _until_stopped(self, tasks: list["asyncio.Task[None]"]) -> None:
        """Wait for a signal, or for a task that gave up: then its error is raised."""
        stopped = asyncio.create_task(self._draining.wait())
        try:
            pending: set[asyncio.Task[object]] = {stopped, *tasks}
            while not stopped.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            stopped.cancel()

    def _on_signal(self) -> None:
        """The first signal drains, the second ends everything at once."""
        if not self._draining.is_set():
            log_event(log, "draining: open requests may finish", seconds=self.config.drain_seconds)
            # Whoever connects now must be refused at once, not left to wait for nobody.
            self._listener.close()
            self._admin.close()
            self._draining.set()
        else:
            self._stopping.set()
            self._kill()

    # ------------------------------------------------------------ engine

    async def _keep_engine(self) -> None:
        """Run the engine, again and again if it dies."""
        restarts = Restarts()
        while True:
            restarts.note_end(has_served=await self._run_engine())
            if self._draining.is_set():
                return
            if self._refused is not None:
                raise StartFailed(self._refused)
            if self._client is not None and self._client.info is None:
                raise StartFailed("the engine died while it started for the first time; see the log above")
            if restarts.are_hopeless:
                raise StartFailed(f"the engine died {restarts.num_failed} times while it started; see the log above")
            assert self._engine is not None
            status = self._engine.returncode
            log_event(log, "the engine ended and is started again", level=logging.ERROR, status=status)
            await asyncio.sleep(restarts.pause_seconds)

    async def _run_engine(self) -> bool:
        """Run one engine process to its end; return whether it ever served."""
        setup = EngineSetup(
            options=self._sourced.options,
            sources=dict(self._sourced.sources),
            files=self._files,
            socket_path=self._socket_path,
            log_format=self.config.log_format,
            parent_pid=os.getpid(),
            started=time.monotonic(),
        )
        begun = await self._ahead.take() if self._engine_module == ENGINE_MODULE else None
        engine = self._engine = begun or await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._engine_module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        watching = asyncio.create_task(self._watch(engine))
        before = self._client.info.epoch if self._client is not None and self._client.info is not None else None
        try:
            await _feed(engine, encode_setup(setup))
            await self._follow(engine)
        finally:
            watching.cancel()
        assert self._client is not None
        return self._client.info is not None and self._client.info.epoch != before

    async def _follow(self, engine: asyncio.subprocess.Process) -> None:
        """Take in what an engine says of its start; return when it has ended."""
        assert engine.stdout is not None
        async for line in engine.stdout:
            notice = decode_notice(line)
            if isinstance(notice, Refused):
                self._refused = notice.message
            else:
                self._on_progress(notice)
        await engine.wait()

    async def _watch(self, engine: asyncio.subprocess.Process) -> None:
        """End an engine that stands still for good: then it has died, and all else follows."""
        assert self._client is not None
        watch = EngineWatch(self._client, self._patience)
        while (why := watch.look()) is None:  # noqa: ASYNC110 - another process's state has no event
            await asyncio.sleep(LOOK_SECONDS)
        log_event(log, "the engine is given up and ended", level=logging.ERROR, reason=why)
        _signal(engine, signal.SIGKILL)

    # ------------------------------------------------------------ API workers

    async def _keep_worker(self, index: int) -> None:
        """Run one API worker, again and again if it dies; tell the engine of the dead.

        Raises StartFailed where it cannot be started and no other answers: who is served meanwhile stays so. At once
        where it says itself that trying again would not help. Also where its port is another server's: both were bound
        to it before either listened.
        """
        generation = 0
        restarts = Restarts()
        while not self._draining.is_set():
            identity = f"worker-{index}-{generation}".encode()
            notice = await self._run_worker(index, identity, is_replacement=generation > 0)
            restarts.note_end(has_served=notice is WorkerNotice.SERVES)
            if self._client is not None:
                self._client.say_goodbye(identity)
            if self._draining.is_set():
                return
            if notice is WorkerNotice.PORT_TAKEN:
                raise StartFailed(
                    f"another server came to listen on {self.url} while this one started; give another --port"
                )
            refusal = notice.message if isinstance(notice, Refused) else None
            is_hopeless = refusal is not None or restarts.are_hopeless
            if is_hopeless and not await _answers(*self._address, "/live") and not self._draining.is_set():
                raise StartFailed(refusal or "an API worker died again and again while it started; see the log above")
            status = self._workers[index].returncode
            known = {"worker": index, "status": status} if refusal is None else {"worker": index, "reason": refusal}
            log_event(log, "an API worker ended and is started again", level=logging.ERROR, **known)
            generation += 1
            await asyncio.sleep(restarts.pause_seconds)

    async def _run_worker(self, index: int, identity: bytes, *, is_replacement: bool) -> WorkerNotice | Refused | None:
        """Run one API worker process to its end; return what it said of its start."""
        reading, writing = os.pipe()
        # Nobody may be waited for here: the worker may have left the other end to a process of its own.
        os.set_blocking(reading, False)
        with io.FileIO(reading) as notices:
            try:
                # One worker serves the admin socket.
                worker = await self._spawn_worker(identity, writing, admin=index == 0, is_replacement=is_replacement)
            finally:
                os.close(writing)
            self._workers[index] = worker
            return await self._hear(worker, notices)

    async def _hear(self, worker: asyncio.subprocess.Process, notices: io.FileIO) -> WorkerNotice | Refused | None:
        """Wait for the end of a worker; return what it said of its start, which counts from when it said so."""
        notice: WorkerNotice | Refused | None = None

        def read() -> None:
            nonlocal notice
            loop.remove_reader(notices)
            if said := notices.read(select.PIPE_BUF):
                notice = decode_worker_notice(said)
                if notice is WorkerNotice.SERVES:
                    self._serving.set()

        loop = asyncio.get_running_loop()
        loop.add_reader(notices, read)
        try:
            await worker.wait()
        finally:
            loop.remove_reader(notices)
        read()  # its last word may have come with its end
        return notice

    async def _spawn_worker(
        self, identity: bytes, notice_fd: int, *, admin: bool, is_replacement: bool
    ) -> asyncio.subprocess.Process:
        inherited = (self._listener.fileno(), notice_fd, *([self._admin.fileno()] if admin else []))
        setup = WorkerSetup(
            config=self.config,
            files=self._files,
            engine_socket=self._socket_path,
            identity=identity.decode(),
            parent_pid=os.getpid(),
            listen_fd=self._listener.fileno(),
            notice_fd=notice_fd,
            is_replacement=is_replacement,
            admin_fd=self._admin.fileno() if admin else None,
        )
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.server.worker",
            stdin=asyncio.subprocess.PIPE,
            pass_fds=inherited,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._metrics_folder())},
        )
        await _feed(worker, encode_setup(setup))
        return worker

    def _metrics_folder(self) -> Path:
        """Where the workers keep their HTTP counts, so that any of them can tell the sum."""
        folder = self._folder / "metrics"
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def context_tokens(self) -> int:
        """The longest context served. Known once the engine is ready."""
        assert self._client is not None
        assert self._client.info is not None
        return self._client.info.max_context_tokens

    # ------------------------------------------------------------ start and end

    async def _announce(self) -> None:
        """Wait until a request would be served, then say so once."""
        assert self._client is not None
        info = await self._client.wait_ready()
        self.timeline.extend(info.timeline)
        await self._serving.wait()  # or another server's answer on this port would be taken for ours
        while not await _answers(*self._address, "/ready"):  # noqa: ASYNC110 - another process's state has no event
            await asyncio.sleep(0.05)
        self.timeline.mark("API workers")
        self._on_ready(self)
        await self._registrations.run()

    async def _end(self, tasks: list["asyncio.Task[None]"]) -> None:
        """End workers first, so that their open requests can finish, then the engine; leave nothing behind."""
        self._draining.set()
        await self._registrations.leave()
        for worker in self._workers.values():
            _signal(worker, OWNERS_SIGNAL)
        limit = self.config.drain_seconds + _STOP_SECONDS
        await self._ended(list(self._workers.values()), limit)
        if self._engine is not None:
            _signal(self._engine, OWNERS_SIGNAL)
            await self._ended([self._engine], _STOP_SECONDS)
        await self._reap(self._kill())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        self._listener.close()
        self._admin.close()
        remove_socket(self.config.admin)

    async def _ended(self, processes: list[asyncio.subprocess.Process], limit: float) -> None:
        """Wait for processes, but no longer than the limit or the second signal."""

        async def all_ended() -> None:
            for process in processes:
                await process.wait()

        tasks = [asyncio.create_task(all_ended()), asyncio.create_task(self._stopping.wait())]
        await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    def _kill(self) -> list[asyncio.subprocess.Process]:
        processes = [*self._workers.values(), *([self._engine] if self._engine else [])]
        for process in processes:
            _signal(process, signal.SIGKILL)
        return processes

    async def _reap(self, killed: list[asyncio.subprocess.Process]) -> None:
        """See that processes are gone, and their memory with them. None that the kernel holds is waited for long."""
        waits = [asyncio.create_task(process.wait()) for process in killed]
        if waits:
            await asyncio.wait(waits, timeout=_STOP_SECONDS)


def _prepare_store(config: ServerConfig) -> ServerConfig:
    # Imported while the engine loads: on the way there it would delay everything.
    from penstock.server.store_opening import prepare_store

    return prepare_store(config)


async def _feed(process: asyncio.subprocess.Process, document: bytes) -> None:
    """Give a child its setup and close its standard input."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(document)
        await process.stdin.drain()
    process.stdin.close()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


async def _answers(host: str, port: int, path: str) -> bool:
    """Whether GET path is answered with 200."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        status = await asyncio.wait_for(reader.readline(), 2.0)
        return b" 200 " in status
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()
