"""The engine process: one loop between a socket and the engine.

`python -m penstock.engine.process` with an `EngineSetup` as JSON on standard input; told so (`ahead`), it imports what
drives real devices before it reads that. Never parses HTTP, never sees text, never waits for a client. Ends when told
to, or when its parent is gone.
"""

import gc
import logging
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable

import msgspec
import zmq

from penstock import telemetry
from penstock.child_setup import decode_setup
from penstock.engine.ahead import WITH_TORCH
from penstock.engine.block_feed import BlockFeed
from penstock.engine.builder import BuiltEngine, build_engine
from penstock.engine.canary import Canary
from penstock.engine.device import DEVICES
from penstock.engine.messages import (
    STATS_SECONDS,
    Abort,
    EngineInfo,
    EngineStats,
    Events,
    ExportedPrefix,
    ExportPrefix,
    Goodbye,
    Hello,
    ImportedPrefix,
    ImportPrefix,
    LeaveBlocks,
    Shutdown,
    Submit,
    TokenEvent,
    WatchBlocks,
    decode_to_engine,
    encode,
)
from penstock.engine.pulse import Pulse, pulse_path
from penstock.engine.scheduler.scheduler import Addressed
from penstock.engine.setup import EngineSetup, Progress, Refused, encode_notice
from penstock.engine.timeline import Timeline
from penstock.errors import PenstockError
from penstock.protocol.block_events import BlockChanges
from penstock.stop_signals import OWNERS_SIGNAL, leave_to_owner

log = logging.getLogger("penstock.engine")

Build = Callable[..., BuiltEngine]

# Having nothing to do is told sooner than the rest: whoever sends work, drains or scales down waits for it.
_IDLE_STATS_SECONDS = 0.05
# On a CPU torch keeps compiled products, one for each shape of a matrix and number of tokens: 1,024 where it is told
# nothing, tens of megabytes that prompts of all lengths fill over hours. So many are enough for batches that decode;
# those of prompts are made anew, which takes no time beside the product.
_PRODUCT_CACHE_VARIABLE, _PRODUCT_CACHE_SIZE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256"
# A step that is due waits for so many refusals at most: there is no bound to how many come.
_MOST_REFUSALS = 16
# A step that should still be under way is looked at so often at least, where it does not run on the cores that look.
_LOOK_MILLISECONDS = 5
# A moment is idle once nobody has come for so long: a caller who asks one thing after another must not wait for chores.
_QUIET_SECONDS = 0.25


class EngineProcess:
    """Owns the socket and turns frames into calls, events into frames."""

    def __init__(self, built: BuiltEngine, socket_path: str, timeline: Timeline, *, parent_pid: int) -> None:
        self._engine = built.engine
        self._built = built
        self._timeline = timeline
        self._epoch = uuid.uuid4().hex
        self._parent = parent_pid
        self._clients: set[bytes] = set()
        self._blocks = BlockFeed(built.engine.scheduler.cache)
        self._canary = Canary(built.engine, seconds) if (seconds := built.config.canary_seconds) else None
        self._pulse = Pulse(pulse_path(socket_path))
        self._stats_due = self._stats_at = 0.0
        self._busy_at = 0.0
        self._looks = built.config.device_kind != "cpu"
        self._has_chores = True  # what the runner would use idle moments for
        self._stopping = False
        self._num_refused = 0  # of the frames that are being taken in
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # Events must never be dropped: a slow worker's queue grows, and the worker bounds its own clients.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{socket_path}")

    def run(self) -> None:
        """Serve until told to stop."""
        while not self._stopping:
            self._receive(wait_seconds=self._seconds_to_wait())
            if self._canary is not None:
                self._canary.tick()
            if self._engine.has_work:
                events = self._engine.step()
                self._send(events if self._canary is None else self._canary.sift(events))
                if not self._engine.has_work:
                    self._stats_due = min(self._stats_due, self._stats_at + _IDLE_STATS_SECONDS)
            self._tell_blocks(self._blocks.take())
            self._send_stats()
        self._pulse.close()
        self._engine.runner.close()
        self._context.destroy(linger=0)

    def stop(self) -> None:
        """End after the current step."""
        self._stopping = True

    def _seconds_to_wait(self) -> float:
        """How long the next frame may take: until stats are due, where there is nothing else to do."""
        now = time.monotonic()
        if self._engine.has_work:
            self._busy_at = now
            return 0.0
        if self._has_chores and now >= self._busy_at + _QUIET_SECONDS:
            self._has_chores = self._engine.runner.use_idle_moment()
            if not self._has_chores:
                self._stats_due = now
            return 0.0
        due = min(self._stats_due, self._busy_at + _QUIET_SECONDS) if self._has_chores else self._stats_due
        return max(0.001, due - now)

    def _receive(self, *, wait_seconds: float) -> None:
        """Take in every frame that is there or, where there may be time, the first that comes.

        While the device is busy, also those that come until the next step is due: they are in it.
        """
        if wait_seconds and not self._socket.poll(math.ceil(wait_seconds * 1000)):
            self._stopping = self._stopping or os.getppid() != self._parent
            return
        self._take_frames()
        # Rounded down: a step that is launched too late leaves the device idle. So does one that ends sooner than was
        # foreseen: it is looked at, the more often the nearer its end should be.
        while (milliseconds := int((self._engine.launch_due - time.monotonic()) * 1000)) > 0 and not self._stopping:
            if self._socket.poll(min(max(1, milliseconds // 4), _LOOK_MILLISECONDS) if self._looks else milliseconds):
                self._take_frames()
            elif self._engine.is_step_done:
                return

    def _take_frames(self) -> None:
        """Take in what is there, and leave it to the next turn where many are refused: those that run go on first."""
        self._num_refused = 0
        while self._num_refused < _MOST_REFUSALS:
            try:
                client, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(client, frame)

    def _handle(self, client: bytes, frame: bytes) -> None:
        message = decode_to_engine(frame)
        if client not in self._clients and not isinstance(message, Hello):
            return  # it is gone: clients are heard in turn, so that what it had sent may come behind the word of that
        match message:
            case Submit():
                refusals = self._engine.submit(message, client)
                self._num_refused += len(refusals)
                self._send(refusals)
            case Abort(request_ids, reason):
                self._send(self._engine.abort(client, request_ids, reason))
            case Hello():
                self._clients.add(client)
                # The figures first: whoever knows the engine has them too, though the next step be long.
                self._socket.send_multipart([client, encode(self._stats())])
                self._socket.send_multipart([client, encode(self._info())])
            case Goodbye(identity):
                self._clients.discard(identity)
                self._blocks.leave(identity)
                self._engine.drop_client(identity)
            case WatchBlocks():
                changes, snapshot = self._blocks.join(client)
                self._tell_blocks(changes)
                self._socket.send_multipart([client, encode(snapshot)])
            case LeaveBlocks():
                self._blocks.leave(client)
            case ExportPrefix():
                blocks = self._engine.export_prefix(
                    message.tokens,
                    tenant=message.tenant,
                    adapter=message.adapter,
                    num_public_tokens=message.num_public_tokens,
                )
                self._socket.send_multipart([client, encode(ExportedPrefix(message.request_id, blocks))])
            case ImportPrefix():
                found = self._engine.import_prefix(
                    message.tokens,
                    message.blocks,
                    tenant=message.tenant,
                    adapter=message.adapter,
                    num_public_tokens=message.num_public_tokens,
                )
                self._socket.send_multipart([client, encode(ImportedPrefix(message.request_id, found))])
            case Shutdown():
                self._stopping = True

    def _send(self, events: list[Addressed]) -> None:
        """One frame per client: tokens that wait together leave together."""
        by_client: dict[bytes, list[TokenEvent]] = {}
        for client, event in events:
            by_client.setdefault(client, []).append(event)
        for client, group in by_client.items():
            self._socket.send_multipart([client, encode(Events(group))])

    def _tell_blocks(self, changes: BlockChanges | None) -> None:
        if changes is None:
            return
        frame = encode(changes)
        for listener in self._blocks.listeners:
            self._socket.send_multipart([listener, frame])

    def _send_stats(self) -> None:
        now = time.monotonic()
        if now < self._stats_due:
            return
        self._stats_at, self._stats_due = now, now + STATS_SECONDS
        self._stopping = self._stopping or os.getppid() != self._parent
        frame = encode(self._stats())
        for client in self._clients:
            self._socket.send_multipart([client, frame])

    def _stats(self) -> EngineStats:
        stats = msgspec.structs.replace(self._engine.stats(), settled=not self._has_chores)
        if self._canary is None:
            return stats
        return msgspec.structs.replace(stats, num_canary_failures=self._canary.num_failures, fault=self._canary.fault)

    def _info(self) -> EngineInfo:
        config, spec = self._built.config, self._built.spec
        return EngineInfo(
            epoch=self._epoch,
            max_context_tokens=config.max_context_tokens,
            max_open_requests=config.max_running + config.max_waiting,
            vocab_size=spec.vocab_size,
            eos_token_ids=list(spec.eos_token_ids),
            num_blocks=config.num_blocks - 1,
            block_tokens=config.block_tokens,
            device=config.device,
            timeline=self._timeline.phases,
            settings=[(item.option, item.value, item.why) for item in self._built.settings],
        )


def main(build: Build = build_engine) -> int:
    """Serve what `build` puts together from the setup on standard input; return the exit status."""
    leave_to_owner()
    os.environ.setdefault(_PRODUCT_CACHE_VARIABLE, _PRODUCT_CACHE_SIZE)
    if WITH_TORCH in sys.argv[1:]:
        DEVICES.load("torch")
    document = sys.stdin.buffer.read()
    if not document:
        return 0  # whoever began this process had no use for it
    setup = decode_setup(document, EngineSetup)
    telemetry.configure_logging("json" if setup.log_format == "json" else "text", process="engine")
    timeline = Timeline(setup.started)
    try:
        built = build(setup.sourced, setup.files, timeline, progress=_report_progress)
    except PenstockError as error:
        _notify(Refused(str(error)))
        return 2
    gc.freeze()  # what was loaded stays: a full collection need not look through it, which would hold up every stream
    process = EngineProcess(built, setup.socket_path, timeline, parent_pid=setup.parent_pid)
    signal.signal(OWNERS_SIGNAL, lambda *_: process.stop())
    process.run()
    return 0


def _report_progress(done_bytes: int, total_bytes: int, name: str) -> None:
    _notify(Progress(done_bytes, total_bytes, name))


def _notify(notice: Progress | Refused) -> None:
    sys.stdout.buffer.write(encode_notice(notice))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
