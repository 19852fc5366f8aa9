"""Replicas that somebody else starts and ends, such as KEDA: it asks the gateway how many there should be."""

from collections.abc import Collection

import msgspec

from penstock.fleet.autoscaler.backends.interface import BackendContext, ScaleBackend


class ExternalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None."""


class ExternalScale(ScaleBackend):
    Settings = ExternalSettings

    def __init__(self, settings: ExternalSettings, context: BackendContext) -> None:
        self._model = context.model
        self._pool = context.pool
        self.version = context.version

    async def count(self) -> int:
        return sum(self.owns(replica) for replica in self._pool.serving(self._model))

    async def scale_to(self, count: int, leave_first: Collection[str] = ()) -> None:
        """Do nothing: whoever scales reads the number from /admin/autoscaler/MODEL."""
        return
