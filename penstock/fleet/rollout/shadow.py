"""Has a version answer copies of requests: nobody waits for them, nobody pays for them, nobody sees their answers.

A copy is sent some time within a window after the caller's own answer has ended, so that copies do not come in the
wake of a burst, all at once; with the gateway's key instead of the caller's, and marked, so that no tenant is charged.
At most so many are under way, and so many bytes; beyond that copies are not made. Failures
and copies that tell nothing are told to whoever compares, and not held against the replica. Knows nothing of what is
compared.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.rollout.course import Rollout
from penstock.fleet.rollout.evidence import Loss
from penstock.fleet.rollout.trial import MAX_KEPT_BYTES, Trial
from penstock.fleet.router.foreign_failure import FailureWatch
from penstock.fleet.router.upstream import UPSTREAM_ERRORS, own_headers, read_beginning, target
from penstock.protocol.frames import FRAMES_HEADER, BrokenFrames, FrameReader
from penstock.telemetry import log_event
from penstock.tenants import SHADOW_HEADER

_MAX_BYTES = 32 * 1024 * 1024  # of the copies under way, together
_HELD_BYTES = 4096  # for each of them, beside its body
_LEAST_SECONDS = 30.0
_MOST_RATIO = 10.0  # of the caller's own answer's time, before a copy is given up
_SCORED_TOKENS = 64  # of an answer that is made for its log-probabilities
_LIKELY_TOKENS = 5  # in the place of each
_REFUSED_US = (401, 403)

log = logging.getLogger("penstock.rollout")

OnAnswer = Callable[[Trial], None]
OnLoss = Callable[[Loss], None]


@dataclass(frozen=True, slots=True)
class _Ends:
    """Whom to tell how a copy ended."""

    on_answer: OnAnswer
    on_loss: OnLoss


class _Sampling(msgspec.Struct):
    temperature: Any = None  # foreign servers take texts too


@dataclass(frozen=True, slots=True)
class ShadowCopy:
    """A request as it can be sent again."""

    path: str
    body: bytes
    streams: bool
    seed: int  # with which a stream in frames was drawn
    seconds: float  # that the caller's own answer took

    @property
    def num_bytes(self) -> int:
        """What it takes while it is held."""
        return len(self.body) + _HELD_BYTES

    def is_repeatable(self, stable: Trial, shadow: Trial) -> bool:
        """Whether equal models give equal answers: they are greedy, or both drawn with one seed."""
        if stable.token_ids is not None and shadow.token_ids is not None:
            return True
        return bool(msgspec.json.decode(self.body, type=_Sampling).temperature == 0)

    def asking_for_logprobs(self) -> "ShadowCopy":
        """Return a copy that asks for the beginning of a greedy answer, and what its model thinks of each token."""
        body = msgspec.json.decode(self.body)
        length = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        most = body.get(length)
        body[length] = min(most, _SCORED_TOKENS) if isinstance(most, int) else _SCORED_TOKENS
        is_chat = self.path.endswith("/chat/completions")
        body |= {"logprobs": True, "top_logprobs": _LIKELY_TOKENS} if is_chat else {"logprobs": _LIKELY_TOKENS}
        body |= {"temperature": 0, "n": 1, "stream": False}
        body.pop("stream_options", None)
        body.pop("best_of", None)
        return replace(self, body=msgspec.json.encode(body), streams=False)


class Shadows:
    def __init__(
        self, session: aiohttp.ClientSession, pool: ReplicaPool, count: Callable[[str], None] = lambda outcome: None
    ) -> None:
        self._session = session
        self._pool = pool
        self._count = count  # is told what became of each: answered, failed, refused or dropped
        self._num_bytes = 0
        self._closed: set[str] = set()  # URLs of replicas that did not take the gateway's key
        self._tasks: set[asyncio.Task[None]] = set()  # those that wait to be sent included
        self._num_sent = 0  # that have not been answered

    def send(
        self,
        copy: ShadowCopy,
        rollout: Rollout,
        on_answer: OnAnswer,
        on_loss: OnLoss,
        *,
        version: str | None = None,
        has_scores: bool = False,
    ) -> None:
        """Have a version, by default the candidate, answer a copy, unless that would be one too many.

        One of the two is called once, `on_loss` where nothing is learnt of the version. `has_scores` says that the
        copy asks for log-probabilities. Returns at once.
        """
        if self._num_bytes + copy.num_bytes > _MAX_BYTES:
            self._count("dropped")
            on_loss(Loss.CROWD)
            return
        self._num_bytes += copy.num_bytes
        ends = _Ends(on_answer, on_loss)
        task = asyncio.create_task(self._send(copy, rollout, version or rollout.candidate, has_scores, ends))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._forget(done, copy))

    async def stop(self) -> None:
        """End those that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _choose(self, model: str, version: str) -> Replica | None:
        able = [
            replica
            for replica in self._pool.serving(model)
            if replica.version == version and replica.is_usable and not replica.is_full
        ]
        return min(able, key=lambda replica: replica.busyness, default=None)

    def _forget(self, task: asyncio.Task[None], copy: ShadowCopy) -> None:
        self._tasks.discard(task)
        self._num_bytes -= copy.num_bytes

    async def _send(self, copy: ShadowCopy, rollout: Rollout, version: str, has_scores: bool, ends: "_Ends") -> None:
        await asyncio.sleep(random.uniform(0.0, rollout.gate.window_seconds))
        replica = self._choose(rollout.model, version)
        if replica is None or self._num_sent >= rollout.max_shadows:
            self._count("dropped")
            ends.on_loss(Loss.NO_REPLICA if replica is None else Loss.CROWD)
            return
        self._num_sent += 1
        try:
            await self._run(copy, replica, Trial(replica.version, has_scores=has_scores), ends)
        finally:
            self._num_sent -= 1

    async def _run(self, copy: ShadowCopy, replica: Replica, trial: Trial, ends: "_Ends") -> None:
        try:
            async with asyncio.timeout(max(_LEAST_SECONDS, _MOST_RATIO * copy.seconds)):
                status = await self._answer(copy, replica, trial)
        except (*UPSTREAM_ERRORS, BrokenFrames):
            status = None
            trial.fail()
        if status == 429 or status in _REFUSED_US:
            # It is full, or takes no copies from this gateway: nothing is learnt of its answers.
            self._count("refused")
            ends.on_loss(Loss.FULL if status == 429 else Loss.KEY)
            if status in _REFUSED_US and replica.url not in self._closed:
                self._closed.add(replica.url)
                message = "a replica takes no copies: its key_file must hold a key with admin = true"
                log_event(log, message, level=logging.WARNING, replica=replica.name)
            return
        self._count("failed" if trial.has_failed else "answered")
        ends.on_answer(trial)

    async def _answer(self, copy: ShadowCopy, replica: Replica, trial: Trial) -> int:
        headers = {"content-type": "application/json", SHADOW_HEADER: "1", **own_headers(replica)}
        if copy.streams and replica.adapter.can_frame:
            headers[FRAMES_HEADER] = str(copy.seed)
        url = target(replica, copy.path)
        async with self._session.post(url, data=copy.body, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                trial.fail()
            elif response.content_type != "text/event-stream":
                trial.take_whole(await read_beginning(response, MAX_KEPT_BYTES))
            elif response.headers.get(FRAMES_HEADER) is not None:
                await _read_frames(response, trial)
            else:
                await _read_events(response, trial)
            return response.status


async def _read_events(response: aiohttp.ClientResponse, trial: Trial) -> None:
    watch = FailureWatch()
    while data := await response.content.readany():
        trial.feed(data)
        watch.feed(data)
    if watch.status() is None:
        trial.end()
    else:
        trial.fail()


async def _read_frames(response: aiohttp.ClientResponse, trial: Trial) -> None:
    reader = FrameReader()
    first_at: float | None = None
    while not reader.finished and (data := await response.content.readany()):
        if first_at is None:
            first_at = time.monotonic()
        trial.keep(reader.feed(data))
    if reader.finished:
        trial.end(reader.token_ids, first_at, reader.last_events)
    else:
        trial.fail()
