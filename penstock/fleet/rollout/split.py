"""Which version of a model answers a request: what the caller or its tenant names, or its session's share.

The same for one conversation in every gateway, and a share that grows only adds conversations. Knows nothing of
replicas or of why shares change.
"""

import hashlib
from collections.abc import Iterable, Mapping

from penstock.fleet.rollout.course import Rollout, Status, stable_of
from penstock.fleet.rollout.plan import WHOLE, RolloutSection
from penstock.fleet.router.query import RouteQuery

_SPACE = 2**64
_UNNAMED = RolloutSection()
_ONLY_VERSION = (_UNNAMED.stable,)


class VersionSplit:
    """The versions of all models, as the fleet's file and the rollouts say at the moment."""

    def __init__(self, sections: Mapping[str, RolloutSection]) -> None:
        self._sections = sections
        self._rollouts: dict[str, Rollout] = {}

    @property
    def rollouts(self) -> list[Rollout]:
        return list(self._rollouts.values())

    def section_of(self, model: str) -> RolloutSection:
        return self._sections.get(model, _UNNAMED)

    def rollout_of(self, model: str) -> Rollout | None:
        return self._rollouts.get(model)

    def replace(self, rollouts: Iterable[Rollout]) -> None:
        """Take these rollouts for the ones before."""
        self._rollouts = {rollout.model: rollout for rollout in rollouts}

    def versions_for(self, query: RouteQuery) -> tuple[str, ...]:
        """Return the versions that may answer, the wanted one first; where it has no place, the next is as good."""
        if not (self._sections or self._rollouts or query.version):
            return _ONLY_VERSION
        rollout = self._rollouts.get(query.model)
        stable = stable_of(self.section_of(query.model), rollout)
        wanted = self._pinned(query, rollout) or self._drawn(query, rollout) or stable
        return (stable,) if wanted == stable else (wanted, stable)

    def is_drawn(self, query: RouteQuery) -> bool:
        """Whether chance alone decides on its version: only such requests can be compared."""
        return self._pinned(query, self._rollouts.get(query.model)) is None

    def _pinned(self, query: RouteQuery, rollout: Rollout | None) -> str | None:
        if query.version:
            return query.version
        named = self.section_of(query.model).tenants.get(query.tenant)
        return None if named is None or _is_out(named, rollout) else named

    def _drawn(self, query: RouteQuery, rollout: Rollout | None) -> str | None:
        if rollout is not None and rollout.is_running:
            percent = rollout.candidate_percent
            return rollout.candidate if percent and is_within(query, rollout.candidate, percent) else None
        split = self.section_of(query.model).split
        place = _place(query, "") if split else 0.0
        for version, percent in split.items():
            if place < percent:
                return None if _is_out(version, rollout) else version
            place -= percent
        return None


def _is_out(version: str, rollout: Rollout | None) -> bool:
    """Whether a version was found wanting: then only a caller who names it gets it."""
    return rollout is not None and rollout.candidate == version and rollout.status in (
        Status.ROLLED_BACK, Status.ABORTED,
    )  # fmt: skip


def is_within(query: RouteQuery, salt: str, percent: float) -> bool:
    """Whether a request's session is one of this part of all. What is within a part is within any larger one."""
    return _place(query, salt) < percent


def _place(query: RouteQuery, salt: str) -> float:
    """Return a session's place between 0 and 100, elsewhere for every salt."""
    name = "\0".join((salt, query.model, query.tenant, query.session)).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") * WHOLE / _SPACE
