"""Brings rollouts forward: shares what was seen, has the gate judge it, and follows what was decided.

Every gateway on a store does so, in a transaction each; whichever comes first decides, and the others follow. Knows
nothing of HTTP.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable

import msgspec

from penstock.errors import RequestError, StoreUnavailable, UnknownModel
from penstock.fleet.rollout import course
from penstock.fleet.rollout.book import RolloutBook
from penstock.fleet.rollout.course import Rollout
from penstock.fleet.rollout.evidence import Evidence, merged
from penstock.fleet.rollout.plan import RolloutSection
from penstock.fleet.rollout.split import VersionSplit
from penstock.fleet.rollout.trials import Trials
from penstock.telemetry import log_event

TICK_SECONDS = 1.0
_ANNOUNCE_SECONDS = 20.0  # between announcements of the same
_HEARD_SECONDS = 60.0  # how long one holds

Versions = dict[str, list[str]]  # by model: those of which there is a replica

log = logging.getLogger("penstock.rollout")


class RolloutController:
    def __init__(self, book: RolloutBook, split: VersionSplit, trials: Trials, served: Callable[[], Versions]) -> None:
        self._book = book
        self._split = split
        self._trials = trials
        self._served = served
        self._announced = ""
        self._announce_at = 0.0
        self._gateway = uuid.uuid4().hex
        self._looking = asyncio.Lock()  # what is followed must never be older than what was
        self._is_failing = False

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await self.look()
            await asyncio.sleep(TICK_SECONDS)

    async def look(self) -> None:
        """Share, judge and follow once. A store that fails leaves everything as it was."""
        async with self._looking:
            await self._look()

    async def _look(self) -> None:
        seen = {
            rollout.model: (rollout.epoch, msgspec.json.encode(self._trials.evidence_of(rollout)).decode())
            for rollout in self._split.rollouts
            if rollout.is_running
        }
        news = self._news()
        try:
            rollouts = await asyncio.to_thread(self._settle, seen, news)
        except StoreUnavailable as error:
            if not self._is_failing:
                log_event(log, f"rollouts stay as they were: {error}", level=logging.ERROR)
            self._is_failing = True
            return
        self._is_failing = False
        if news is not None:
            self._announced, self._announce_at = news, time.monotonic() + _ANNOUNCE_SECONDS
        self._follow(rollouts)

    def _news(self) -> str | None:
        """Return what is served here, where the others do not know it yet or may think that this gateway is gone."""
        document = msgspec.json.encode(self._served()).decode()
        return document if document != self._announced or time.monotonic() >= self._announce_at else None

    async def leave(self) -> None:
        """Leave what was seen to the other gateways, and say that nothing is served here any more."""
        await self.look()
        with contextlib.suppress(StoreUnavailable):  # then it is forgotten before long
            await asyncio.to_thread(self._book.announce, self._gateway, "")

    async def start(self, model: str, candidate: str) -> Rollout:
        """Begin a rollout. Raises RequestError or StoreUnavailable."""
        await self.look()
        section = self._split.section_of(model)
        rollout = await asyncio.to_thread(start_rollout, self._book, model, candidate, section)
        await self.look()
        return rollout

    async def abort(self, model: str) -> Rollout:
        """End a rollout by hand. Raises RequestError or StoreUnavailable."""
        rollout = await asyncio.to_thread(abort_rollout, self._book, model)
        await self.look()
        return rollout

    async def evidence_of(self, rollout: Rollout) -> Evidence:
        """Return what all gateways have seen in a rollout's step, as far as they have shared it."""
        return await asyncio.to_thread(shared_evidence, self._book, rollout)

    def _settle(self, seen: dict[str, tuple[int, str]], news: str | None) -> list[Rollout]:
        if news is not None:
            self._book.announce(self._gateway, news)
        rollouts = read_rollouts(self._book)
        for place, rollout in enumerate(rollouts):
            epoch, evidence = seen.get(rollout.model, (-1, ""))
            if rollout.is_running:
                fresh = evidence if epoch == rollout.epoch else ""
                document = self._book.change(
                    rollout.model, rollout.epoch, _go_on, gateway=self._gateway, evidence=fresh
                )
                rollouts[place] = _read(document) or rollout
        return rollouts

    def _follow(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            before = self._split.rollout_of(rollout.model)
            if before is None or before.epoch != rollout.epoch:
                log_event(
                    log, "rollout", model=rollout.model, stable=rollout.stable, candidate=rollout.candidate,
                    status=rollout.status.value, step=rollout.step, reason=rollout.reason,
                )  # fmt: skip
        self._split.replace(rollouts)


def read_rollouts(book: RolloutBook) -> list[Rollout]:
    found = [_read(document) for document in book.read()]
    return [rollout for rollout in found if rollout is not None]


def shared_evidence(book: RolloutBook, rollout: Rollout) -> Evidence:
    return _merge(book.evidence(rollout.model, rollout.epoch))


def start_rollout(book: RolloutBook, model: str, candidate: str, section: RolloutSection | None) -> Rollout:
    """Begin a rollout that any gateway can follow. Raises RequestError or StoreUnavailable.

    `section` is the fleet's file's; None: nobody knows it, and the stable version is the one of the rollout before.
    """
    served = _check_served(book, model, candidate)

    def begin(document: str | None, evidence: list[str], now: float) -> str:
        before, declared = _read(document), None
        known = section
        if known is None:
            known = RolloutSection() if before is None else RolloutSection(stable=before.stable_now)
            declared = None if before is None else before.declared
        begun = course.start(model, candidate, known, before, now, declared=declared)
        # Everything but the candidate's share goes there: with none that serves it, callers would get nothing.
        if begun.is_running and begun.stable not in served:
            raise RequestError(
                f"no replica serves {begun.stable!r}, the stable version; there are: {', '.join(sorted(served))}. "
                f"Name the stable one in [rollouts.{model}] of the gateway's file, and give the file with --fleet"
            )
        return _write(begun)

    rollout = _read(book.change(model, -1, begin))
    assert rollout is not None
    return rollout


def _check_served(book: RolloutBook, model: str, candidate: str) -> set[str]:
    """Return the versions of a model that are served. Raises RequestError where the candidate is none of them."""
    documents = book.announced(_HEARD_SECONDS)
    if not documents:
        raise RequestError("no gateway runs on this store: start one, or give the store that it has")
    versions: dict[str, set[str]] = {}
    for document in documents:
        for name, found in msgspec.json.decode(document, type=Versions).items():
            versions.setdefault(name, set()).update(found)
    if model not in versions:
        raise UnknownModel(model, sorted(versions))
    if candidate not in versions[model]:
        known = ", ".join(sorted(versions[model]))
        raise RequestError(f"no replica serves this version of the model; there are: {known}", param="candidate")
    return versions[model]


def abort_rollout(book: RolloutBook, model: str) -> Rollout:
    """End a rollout. Raises RequestError or StoreUnavailable."""

    def end(document: str | None, evidence: list[str], now: float) -> str:
        rollout = _read(document)
        if rollout is None:
            raise RequestError("this model has no rollout", param="model")
        return _write(course.abort(rollout, now))

    rollout = _read(book.change(model, -1, end))
    assert rollout is not None
    return rollout


def _go_on(document: str | None, evidence: list[str], now: float) -> str | None:
    rollout = _read(document)
    if rollout is None:
        return None
    following = course.go_on(rollout, _merge(evidence), now)
    return None if following is rollout else _write(following)


def _merge(evidence: list[str]) -> Evidence:
    return merged([msgspec.json.decode(text, type=Evidence) for text in evidence])


def _read(document: str | None) -> Rollout | None:
    try:
        return msgspec.json.decode(document, type=Rollout) if document else None
    except msgspec.DecodeError as error:
        raise StoreUnavailable("the store holds a rollout that this version of Penstock cannot read") from error


def _write(rollout: Rollout) -> str:
    return msgspec.json.encode(rollout).decode()
