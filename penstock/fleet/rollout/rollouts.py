"""Rollouts as one part of a gateway: put together here, run and stopped with it."""

from collections.abc import Callable

import aiohttp

from penstock.fleet.replica import ReplicaPool
from penstock.fleet.rollout.book import RolloutBook
from penstock.fleet.rollout.controller import RolloutController, Versions
from penstock.fleet.rollout.shadow import Shadows
from penstock.fleet.rollout.split import VersionSplit
from penstock.fleet.rollout.trials import Trials


class Rollouts:
    def __init__(
        self,
        split: VersionSplit,
        pool: ReplicaPool,
        session: aiohttp.ClientSession,
        book: RolloutBook,
        count_shadow: Callable[[str], None],
    ) -> None:
        self.split = split
        self.shadows = Shadows(session, pool, count_shadow)
        self.trials = Trials(split, self.shadows)
        self.controller = RolloutController(book, split, self.trials, lambda: _versions(pool))

    async def stop(self) -> None:
        """End the copies under way, and leave what was seen to the other gateways."""
        await self.shadows.stop()
        await self.controller.leave()


def _versions(pool: ReplicaPool) -> Versions:
    found: dict[str, set[str]] = {}
    for replica in pool:
        for model in replica.models:
            found.setdefault(model.name, set()).add(replica.version)
    return {model: sorted(found[model]) for model in sorted(found)}
