"""Asks every replica, again and again: who are you? ready? which models? how busy?

Tells the breakers what it finds; one that is ejected is asked again when its wait is over, or with every probe while
too few others are up. Knows nothing of requests.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import aiohttp
from yarl import URL

from penstock.errors import EngineStalled
from penstock.fleet.adapters.registry import ADAPTERS
from penstock.fleet.config import ReplicaEntry
from penstock.fleet.introduction import Introductions
from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.router.upstream import (
    UPSTREAM_ERRORS,
    error_code,
    is_unheard,
    note_failure,
    own_headers,
    read_beginning,
    target,
)
from penstock.fleet.supervision import attempt
from penstock.protocol.identity import IDENTITY_HEADER, Identity, decode_identity

_MODELS_EVERY = 10  # probes
_MAX_BYTES = 1024 * 1024  # of what a replica tells of itself
_REFUSED_US = (401, 403)
# The gateway's own event loop has stood still where a pause between two beats took so much longer than it should.
_BEAT_SECONDS = 0.2
_LATE_SECONDS = 0.5


class _TooLarge(aiohttp.ClientPayloadError):
    """A replica tells more of itself than anybody wants to know."""


class _Answer(NamedTuple):
    status: int
    body: bytes
    identity: Identity | None


class Lines(Protocol):
    """The connections on which replicas have requests."""

    def give_up_silent(self, url: str, seconds: float) -> None:
        """Give up every answer of a replica of which nothing has come for so long."""

    def give_up_unanswered(self, url: str) -> None:
        """Give up every answer of a replica of which not even the head has come."""

    def is_heard(self, url: str, seconds: float) -> bool:
        """Whether anything came from a replica within the last so many seconds."""


class HealthMonitor:
    def __init__(
        self,
        pool: ReplicaPool,
        session: aiohttp.ClientSession,
        on_probe: Callable[[], None],
        introductions: Introductions | None = None,
        lines: Lines | None = None,
    ) -> None:
        """`on_probe` is called behind each probe: somebody may be served now.

        `lines` is where what a replica has is given up when probes do not hear it, or its engine stands still.
        """
        self._pool = pool
        self._session = session
        self._on_probe = on_probe
        self._lines = lines
        self._introductions = introductions if introductions is not None else Introductions()
        self._timeout = aiohttp.ClientTimeout(total=pool.health.probe_timeout_seconds)
        self._num_probes: dict[str, int] = {}
        self._missed: dict[tuple[str, str], str] = {}  # URLs and paths that tell us nothing, and why
        self._under_way: set[str] = set()  # URLs
        self._beat_at = -math.inf  # when this gateway's own event loop last came round
        self._stood_still_at = -math.inf

    async def run(self) -> None:
        """Probe for ever; at once when replicas were added. One that hangs delays nobody else's probe."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            while True:
                self._pool.added.clear()
                replicas = self._known()
                for replica in replicas:
                    if replica.url not in self._under_way:
                        group.create_task(self._probe_once(replica))
                try:
                    async with asyncio.timeout(self._pool.health.probe_seconds):
                        await self._pool.added.wait()
                except TimeoutError:
                    continue

    async def probe_all(self) -> None:
        """Probe every replica once."""
        await asyncio.gather(*[self._probe_once(replica) for replica in self._known()])

    async def refusal(self, entry: ReplicaEntry) -> str | None:
        """Ask what is at a URL, and return why it can be no replica. One that does not answer may come yet."""
        path = ADAPTERS.load(entry.kind).ready_path
        try:
            answer = await self._get(URL(entry.url.rstrip("/") + path, encoded=True))
        except UPSTREAM_ERRORS:
            return None
        return self._introductions.refusal(answer.identity)

    def _known(self) -> list[Replica]:
        # Also those that leave while they have requests: one that stands still then is found out like any other.
        replicas = [*self._pool, *self._pool.leaving]
        self._num_probes = {replica.url: self._num_probes.get(replica.url, 0) for replica in replicas}
        self._missed = {place: why for place, why in self._missed.items() if place[0] in self._num_probes}
        return replicas

    async def _probe_once(self, replica: Replica) -> None:
        is_needed = self._pool.is_needed(replica)
        if replica.breaker.seconds_until_try and not is_needed:
            return
        self._under_way.add(replica.url)
        try:
            await attempt(f"the probe of {replica.name}", self._probe(replica, is_needed))
        finally:
            self._under_way.discard(replica.url)
        self._on_probe()

    async def _probe(self, replica: Replica, is_needed: bool) -> None:
        try:
            answer = await self._ask(replica, replica.adapter.ready_path)
        except UPSTREAM_ERRORS as error:
            if isinstance(error, asyncio.TimeoutError) and self._is_mute(replica):
                self._eject_mute(replica)
            else:
                note_failure(replica, error)
            if is_unheard(error) and replica.breaker.seconds_until_try is not None:
                self._give_up_silent(replica)
            return
        lack = await self._lack(replica, answer)
        if error_code(answer.body) == EngineStalled.code:
            self._give_up_silent(replica)
        if lack is None:
            await self._read_load(replica)
        is_idle = replica.num_in_flight == 0
        replica.breaker.on_probe(lack is None, lack or "", is_idle=is_idle, is_needed=is_needed)

    def _give_up_silent(self, replica: Replica) -> None:
        """Say that nothing will come of what a replica has and is silent about."""
        # Streams of ours can move; those of others could only be cut, and perhaps they are no more than busy.
        if replica.adapter.can_frame and self._lines is not None:
            health = self._pool.health
            self._lines.give_up_silent(replica.url, health.failures_to_eject * health.probe_timeout_seconds)

    def _is_mute(self, replica: Replica) -> bool:
        """Whether a replica that let a probe run out stands still: it says nothing at all, and others can do its work.

        A Penstock server answers probes however busy its engine is, and one whose answers flow is only slow.
        """
        if self._lines is None or not replica.adapter.can_frame or not self._pool.has_substitute(replica):
            return False
        seconds = self._pool.health.probe_timeout_seconds
        now = asyncio.get_running_loop().time()
        # What came while this gateway stood still it has not read yet.
        was_awake = now - self._beat_at < _BEAT_SECONDS + _LATE_SECONDS and now - self._stood_still_at > seconds
        return was_awake and not self._lines.is_heard(replica.url, seconds)

    def _eject_mute(self, replica: Replica) -> None:
        """Have whoever waits for a first byte of it ask another, without waiting for more probes to run out."""
        assert self._lines is not None
        seconds = self._pool.health.probe_timeout_seconds
        replica.breaker.on_failure(f"nothing at all was heard of it for {seconds:.3g} s", is_fatal=True)
        self._lines.give_up_unanswered(replica.url)

    async def _beat(self) -> None:
        """Note when this gateway's own event loop stood still: it took nothing in, whoever spoke."""
        clock = asyncio.get_running_loop().time
        while True:
            self._beat_at = before = clock()
            await asyncio.sleep(_BEAT_SECONDS)
            if clock() - before > _BEAT_SECONDS + _LATE_SECONDS:
                self._stood_still_at = clock()

    async def _lack(self, replica: Replica, answer: _Answer) -> str | None:
        """Return why a replica that answers so is not ready."""
        refusal = self._introductions.refusal(answer.identity)
        if refusal is not None:
            return refusal
        path = replica.adapter.ready_path
        if answer.status in _REFUSED_US:
            return _key_advice(replica, path, answer.status)
        if answer.status not in replica.adapter.ready_statuses:
            return f"{path} answers {answer.status} {error_code(answer.body)}".rstrip()
        self._introductions.take(replica, answer.identity)
        count = self._num_probes.get(replica.url, 0)
        # One that was away may have come back with others.
        is_due = count % _MODELS_EVERY == 0 or not replica.is_up or replica.denies_models
        may_ask = replica.adapter.tells_models_at_work or not (replica.models and replica.num_in_flight)
        lack = await self._read_models(replica) if is_due and may_ask else None
        self._num_probes[replica.url] = count + 1
        return None if replica.models else lack or "it tells no models"

    async def _read_models(self, replica: Replica) -> str | None:
        """Learn the models; return why there is nothing to learn. What was known stays."""
        path = replica.adapter.models_path
        try:
            answer = await self._ask(replica, path)
            if answer.status == 200:
                replica.models = replica.adapter.models(answer.body)
                return None
        except (*UPSTREAM_ERRORS, ValueError):
            return f"{path} gives no list of models"
        if answer.status not in _REFUSED_US:
            return f"{path} answers {answer.status} {error_code(answer.body)}".rstrip()
        advice = _key_advice(replica, path, answer.status)
        if replica.models:
            self._note_missed(replica, path, advice)
        return advice

    async def _read_load(self, replica: Replica) -> None:
        path = replica.adapter.metrics_path
        try:
            answer = await self._ask(replica, path)
            if answer.status == 200:
                text = answer.body.decode("utf-8", "replace")
                replica.note_load(await asyncio.to_thread(replica.adapter.load, text))  # it can take long
        except (ValueError, _TooLarge):
            replica.note_load(None)
            self._note_missed(replica, path, f"{path} gives no load that can be read")
            return
        except UPSTREAM_ERRORS:
            return  # requests in flight are known all the same
        if answer.status in _REFUSED_US:
            self._note_missed(replica, path, _key_advice(replica, path, answer.status))
        else:
            self._missed.pop((replica.url, path), None)

    def _note_missed(self, replica: Replica, path: str, why: str) -> None:
        """Say, once, that a replica which serves does not answer the gateway's own questions."""
        if self._missed.get((replica.url, path)) != why:
            self._missed[replica.url, path] = why
            message = f"a replica does not tell this gateway what it asks: {why}"
            replica.log.write(message, level=logging.WARNING, replica=replica.name)

    async def _ask(self, replica: Replica, path: str) -> _Answer:
        return await self._get(target(replica, path), own_headers(replica))

    async def _get(self, url: URL, headers: dict[str, str] | None = None) -> _Answer:
        async with self._session.get(url, headers=headers, timeout=self._timeout, allow_redirects=False) as response:
            identity = decode_identity(response.headers.get(IDENTITY_HEADER, ""))
            body = await read_beginning(response, _MAX_BYTES + 1)
            if len(body) > _MAX_BYTES:
                raise _TooLarge
            return _Answer(response.status, body, identity)


def _key_advice(replica: Replica, path: str, status: int) -> str:
    """Say what to do about a replica that does not let this gateway in."""
    if replica.key_file is None:
        return f"{path} answers {status}: give key_file, a file with a key that it takes"
    if not own_headers(replica):
        return f"{path} answers {status}, and the key_file {replica.key_file} cannot be read: give one that can"
    right = "a key with admin = true" if status == 403 else "a key that it knows"
    return f"{path} answers {status} to the key in {replica.key_file}: give key_file {right}"
