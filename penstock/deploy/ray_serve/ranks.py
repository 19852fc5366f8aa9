"""The devices of a replica's ranks: each rank has a bundle of the replica's placement group, all on one node.

Ray gives an actor the devices of its own bundle only, so that of every other rank is held by a small actor, which tells
which devices it was given and ends with the replica. Knows nothing of servers.
"""

import asyncio
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

STRATEGY = "STRICT_PACK"  # ranks share a node's fast links


class RankHolder:
    """Holds one rank's bundle."""

    def devices(self) -> list[str]:
        return own_devices()


def own_devices() -> list[str]:
    """Return the GPUs that Ray gave this actor."""
    return [str(name) for name in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


class RankDevices:
    """The devices of all ranks, for as long as this object is kept."""

    def __init__(self, holders: list[Any], devices: list[str]) -> None:
        self._holders = holders
        self.devices = devices

    @classmethod
    async def claim(cls, bundles: list[dict[str, float]]) -> "RankDevices":
        """Return the devices of a replica's bundles, the first of which is this actor's own."""
        holders = [
            ray.remote(RankHolder)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=get_current_placement_group(), placement_group_bundle_index=index
                ),
            )
            .remote()
            for index, bundle in enumerate(bundles)
            if index > 0
        ]
        told: list[list[str]] = list(await asyncio.gather(*[holder.devices.remote() for holder in holders]))
        return cls(holders, [*own_devices(), *[name for devices in told for name in devices]])
