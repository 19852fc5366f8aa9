"""Replicas that are the pods of a Kubernetes deployment: the number of them is written to its scale.

Which pod goes is the cluster's choice; its drain hook and grace period let it finish what it has. Needs the rights to
get and patch deployments/scale of apps.
"""

from collections.abc import Collection
from pathlib import Path

import msgspec

from penstock.errors import RemoteError
from penstock.fleet.autoscaler.backends.interface import BackendContext, ScaleBackend
from penstock.fleet.cluster_api import ACCOUNT, ClusterApi


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    deployment: str
    namespace: str | None = None  # None: the gateway's own


class KubernetesScale(ScaleBackend):
    Settings = KubernetesSettings

    def __init__(
        self,
        settings: KubernetesSettings,
        context: BackendContext,
        *,
        account: Path = ACCOUNT,
        api: str | None = None,
    ) -> None:
        self._api = ClusterApi(context.session, "autoscaler.backend", account=account, api=api)
        self.version = context.version
        namespace = self._api.namespace(settings.namespace)
        self._path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{settings.deployment}/scale"

    async def count(self) -> int:
        spec = (await self._api.get(self._path)).get("spec") or {}
        replicas = spec.get("replicas", 0)  # 0 is left out of the answer
        if not isinstance(replicas, int):
            raise RemoteError(f"the Kubernetes API tells no number of replicas at {self._path}")
        return replicas

    async def scale_to(self, count: int, leave_first: Collection[str] = ()) -> None:
        # Somebody else may write it too: what it is now decides, not what it was left at.
        if await self.count() != count:
            await self._api.patch(self._path, {"spec": {"replicas": count}})
