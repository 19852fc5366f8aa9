"""Replicas that are processes of this machine: `penstock serve`, started and drained here.

A replica joins the pool when it says that it is ready. One that is to go is sent nothing more, finishes what it has
from this gateway, and is then told to end, at which it drains whatever others sent it; signals that an operator sends
to all processes are the gateway's to act upon. None outlives the gateway, whatever ends that (`penstock.leash`). Where
one ends before it was ever ready, the next are started one at a time until one is; each after a longer pause, until one
has been ready for a while. One that was ready and has not answered for long is killed, and replaced as one that died.
Where one is ready but of no use here, no other is added. Knows nothing of how many there should be.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass

import aiohttp
import msgspec

from penstock.errors import RemoteError
from penstock.fleet.autoscaler.backends.interface import BackendContext, Failure, ScaleBackend, Trouble
from penstock.fleet.autoscaler.backends.last_words import LastWords
from penstock.fleet.breaker import Standing
from penstock.fleet.config import ReplicaEntry
from penstock.fleet.replica import Replica
from penstock.stop_signals import OWNERS_SIGNAL
from penstock.telemetry import log_event

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 1.0  # between looks at one that drains
_READY_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_FIRST_PAUSE_SECONDS = 1.0  # after a start that failed; doubled with each that follows
_MAX_PAUSE_SECONDS = 60.0
_STABLE_SECONDS = 60.0  # that one must have been ready, or its end counts as a failed start
_LOST_SECONDS = 60.0  # that one may be ejected before it is taken to hang
_SHOWN_LINES = 5  # of what a process said last
_OWN_OPTIONS = ("--host", "--port")  # given to each process by this backend

log = logging.getLogger("penstock.autoscaler")


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    serve: tuple[str, ...]  # what follows `penstock serve`: the model and its options, without host and port
    devices: tuple[str, ...] = ()  # values of CUDA_VISIBLE_DEVICES, one process on each; none: all see all
    key_file: str | None = None  # holds the key with which the gateway asks for models and metrics

    def __post_init__(self) -> None:
        for argument in self.serve:
            if argument.partition("=")[0] in _OWN_OPTIONS:
                own = "every replica gets an address of its own"
                raise ValueError(f"serve: {argument!r} is not usable; leave {' and '.join(_OWN_OPTIONS)} out: {own}")
        for number, device in enumerate(self.devices):
            if device in self.devices[:number]:
                right = "each is for one process: name it once"
                raise ValueError(f"devices[{number}]: {device!r} is not usable; {right}")


@dataclass(eq=False, slots=True)
class _Child:
    process: asyncio.subprocess.Process
    url: str
    device: str | None
    last_words: LastWords
    replica: Replica | None = None  # None until it is ready
    ready_at: float | None = None  # on the pool's clock
    was_killed: bool = False  # by us, because it hung

    def was_stable(self, now: float) -> bool:
        return self.ready_at is not None and now - self.ready_at >= _STABLE_SECONDS

    @property
    def is_lost(self) -> bool:
        """Whether it runs and has not answered for so long that it never will."""
        return self.replica is not None and self.replica.breaker.seconds_ejected >= _LOST_SECONDS

    def is_proof(self, failed_at: float, now: float) -> bool:
        """Whether it shows that what failed then is over: it came later, and stayed."""
        return self.ready_at is not None and self.ready_at > failed_at and self.was_stable(now)


class LocalProcesses(ScaleBackend):
    Settings = LocalSettings

    def __init__(self, settings: LocalSettings, context: BackendContext) -> None:
        self._settings = settings
        self._pool = context.pool
        self._session = context.session
        self._environment = context.environment
        self._model = context.model
        self._source = f"autoscaler:{context.model}"
        self.version = context.version
        self._children: list[_Child] = []
        self._joining: set[asyncio.Task[None]] = set()
        self._draining: set[asyncio.Task[None]] = set()
        self._used_devices: set[str] = set()
        self._failed_start: Trouble | None = None  # the last, until one goes well
        self._num_pauses = 0  # since one was last ready for long enough; failures of one look are one
        self._start_after = self._failed_at = 0.0  # on the pool's clock
        self._is_doubtful = False  # since a start failed, none has become ready

    def owns(self, replica: Replica) -> bool:
        return any(child.replica is replica for child in self._children)

    async def count(self) -> int:
        await self._bury()
        return len(self._children)

    async def scale_to(self, count: int, leave_first: Collection[str] = ()) -> None:
        await self._bury()
        while len(self._children) < count and self._may_start():
            await self._start()
        if len(self._children) > count:
            order = {url: place for place, url in enumerate(leave_first)}
            # Those named first, then the newest: the oldest have the warmest caches.
            leaving = sorted(reversed(self._children), key=lambda child: order.get(child.url, len(order)))
            for child in leaving[: len(leaving) - count]:
                self._children.remove(child)
                self._drain(child, "it is not needed any more")

    async def close(self) -> None:
        for child in self._children:
            self._drain(child, "the gateway ends")
        self._children.clear()
        await asyncio.gather(*self._draining, *self._joining)

    async def _start(self) -> None:
        device = self._free_device()
        environment = {**os.environ, **self._environment}
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        port = _free_port()
        command = [
            sys.executable,
            "-m",
            "penstock",
            "serve",
            *self._settings.serve,
            "--host",
            _HOST,
            "--port",
            str(port),
        ]
        try:
            process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "penstock.leash", *command],
                stdin=asyncio.subprocess.PIPE,  # the leash: held, and never written to
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RemoteError(f"no process can be started ({error.strerror})") from error
        if device is not None:
            self._used_devices.add(device)
        assert process.stderr is not None
        child = _Child(process, f"http://{_HOST}:{port}", device, LastWords(process.stderr))
        self._children.append(child)
        _keep(self._joining, asyncio.create_task(self._join(child)))
        log_event(log, "replica started", replica=child.url, pid=process.pid)

    async def _join(self, child: _Child) -> None:
        """Tell the pool of a replica once it is ready: before, it would be ejected for refusing connections."""
        while not await self._is_ready(child):  # noqa: ASYNC110 - another process's state has no event
            await asyncio.sleep(_POLL_SECONDS)
        if child in self._children:
            entry = ReplicaEntry(url=child.url, key_file=self._settings.key_file, version=self.version)
            child.replica = self._pool.add(self._source, entry)
            child.ready_at = self._pool.clock()
            self._is_doubtful, self._failed_start, self.trouble = False, None, None

    async def _is_ready(self, child: _Child) -> bool:
        """Whether it is, or never will be."""
        if child not in self._children:
            return True
        try:
            async with self._session.get(f"{child.url}/ready", timeout=_READY_TIMEOUT) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def _may_start(self) -> bool:
        """Whether another may be started now: after a failure only when no other is on its way, and not at once."""
        if self._useless() is not None or self._pool.clock() < self._start_after:
            return False
        return not self._is_doubtful or all(child.replica for child in self._children)

    async def _bury(self) -> None:
        """Forget those that ended by themselves, and note what those said that were not ready, or not for long."""
        now = self._pool.clock()
        if any(child.is_proof(self._failed_at, now) for child in self._children):
            self._num_pauses = 0
        for child in self._children:
            if child.is_lost and child.process.returncode is None:
                await self._kill(child)
        ended = [child for child in self._children if child.process.returncode is not None]
        failed = [child for child in ended if not child.was_stable(now)]
        for child in ended:
            self._children.remove(child)
            self._forget(child)
            await child.last_words.end()
            lines, status = child.last_words.lines(_SHOWN_LINES), child.process.returncode
            log_event(
                log,
                f"replica ended {'' if child.was_killed else 'by itself '}with status {status}",
                level=logging.ERROR,
                replica=child.url,
                was_ready=child.replica is not None,
                last_line=lines[-1] if lines else "",
            )
            if child in failed:
                when = "before it was ready" if child.replica is None else "soon after it was ready"
                summary = f"a server that was started ended with status {status} {when}"
                self._failed_start = Trouble(summary, "\n".join(lines) or "it said nothing")
        self.num_failed_starts += len(failed)
        if failed:
            self._pause(now)
        self.trouble = self._failed_start or self._useless()

    @staticmethod
    async def _kill(child: _Child) -> None:
        """End a process that hangs: nobody else would, and it counts as one that there is."""
        message = f"a replica has not answered for {_LOST_SECONDS:g} s and is killed"
        log_event(log, message, level=logging.ERROR, replica=child.url, pid=child.process.pid)
        child.was_killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)  # the leash and all that it holds
        await child.process.wait()

    def _useless(self) -> Trouble | None:
        """Why a server that was started and is ready serves no request for the model, where there is one."""
        for replica in (child.replica for child in self._children if child.replica is not None):
            if replica.serves(self._model):
                continue
            if replica.models:
                names = ", ".join(model.name for model in replica.models)
                advice = f"it serves {names}, not {self._model}: give --served-name {self._model} in `serve`"
                return Trouble("a server that was started serves another model", advice, Failure.USELESS_REPLICA)
            if replica.breaker.standing is Standing.NOT_READY:
                reason = f"autoscaler.{self._model}.backend: {replica.breaker.reason}"
                summary = "a server that was started does not tell this gateway what it serves"
                return Trouble(summary, reason, Failure.USELESS_REPLICA)
        return None

    def _pause(self, now: float) -> None:
        """Start nothing for a while: longer, the more starts have failed in a row."""
        seconds = min(_FIRST_PAUSE_SECONDS * 2**self._num_pauses, _MAX_PAUSE_SECONDS)
        self._num_pauses = min(self._num_pauses + 1, 32)
        self._failed_at, self._start_after, self._is_doubtful = now, now + seconds, True
        log_event(log, f"the next replica is started after a pause of {seconds:g} s", level=logging.WARNING)

    def _drain(self, child: _Child, reason: str) -> None:
        self._pool.remove(self._source, child.url, reason)
        _keep(self._draining, asyncio.create_task(self._end(child)))

    async def _end(self, child: _Child) -> None:
        while (  # noqa: ASYNC110 - a plain number
            child.replica is not None and child.replica.num_in_flight and child.process.returncode is None
        ):
            await asyncio.sleep(_POLL_SECONDS)
        if child.process.returncode is None:
            child.process.send_signal(OWNERS_SIGNAL)
        await self._await_end(child)
        await child.last_words.end()
        self._forget(child)
        log_event(log, "replica drained and ended", replica=child.url)

    async def _await_end(self, child: _Child) -> None:
        """Wait for a process that was told to end, for as long as it drains; one that answers nothing hangs."""
        heard_at = self._pool.clock()
        while child.process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await child.process.wait()
            if child.process.returncode is None and await self._is_heard(child):
                heard_at = self._pool.clock()
            elif child.process.returncode is None and self._pool.clock() - heard_at >= _LOST_SECONDS:
                await self._kill(child)

    async def _is_heard(self, child: _Child) -> bool:
        """Whether it says anything, be it that it takes no connections any more."""
        try:
            async with self._session.get(f"{child.url}/live", timeout=_READY_TIMEOUT):
                return True
        except TimeoutError:
            return False
        except (aiohttp.ClientError, OSError):
            return True

    def _forget(self, child: _Child) -> None:
        self._pool.remove(self._source, child.url, "its process has ended")
        if child.device is not None:
            self._used_devices.discard(child.device)

    def _free_device(self) -> str | None:
        if not self._settings.devices:
            return None
        free = [device for device in self._settings.devices if device not in self._used_devices]
        if not free:
            raise RemoteError(f"all {len(self._settings.devices)} devices are in use")
        return free[0]


def _keep(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    """Hold a task until it is done."""
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _free_port() -> int:
    """Return a port that is free now; should another take it, the replica ends and is replaced."""
    with socket.create_server((_HOST, 0)) as listener:
        return int(listener.getsockname()[1])
