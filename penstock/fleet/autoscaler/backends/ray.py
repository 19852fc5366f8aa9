"""Replicas on a Ray cluster, as `penstock deploy ray` starts them: Ray Serve is told how many there should be.

Asks the REST API of the cluster's dashboard, so that the gateway needs no Ray. Which replica goes is Ray's choice; it
drains. Knows nothing of where replicas are: that is discovery's, section `ray`.
"""

from collections.abc import Collection
from typing import Any

import aiohttp
import msgspec

from penstock.errors import RemoteError
from penstock.fleet.autoscaler.backends.interface import BackendContext, ScaleBackend

_DEPLOYMENT = "replica"  # within the application
_TIMEOUT_SECONDS = 10.0


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dashboard: str = "http://127.0.0.1:8265"
    application: str = "penstock"


class _Deployment(msgspec.Struct):
    target_num_replicas: int = 0


class _Application(msgspec.Struct):
    deployments: dict[str, _Deployment] = {}


class _Applications(msgspec.Struct):
    applications: dict[str, _Application] = {}


class RayScale(ScaleBackend):
    Settings = RaySettings

    def __init__(self, settings: RaySettings, context: BackendContext) -> None:
        self._settings = settings
        self._session = context.session
        self.version = context.version

    async def count(self) -> int:
        body = await self._ask("GET", "/api/serve/applications/")
        try:
            applications = msgspec.json.decode(body, type=_Applications).applications
            return applications[self._settings.application].deployments[_DEPLOYMENT].target_num_replicas
        except (KeyError, msgspec.DecodeError) as error:
            raise RemoteError(f"Ray Serve runs no application {self._settings.application!r}") from error

    async def scale_to(self, count: int, leave_first: Collection[str] = ()) -> None:
        path = f"/api/v1/applications/{self._settings.application}/deployments/{_DEPLOYMENT}/scale"
        await self._ask("POST", path, {"target_num_replicas": count})

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        url = self._settings.dashboard.rstrip("/") + path
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise RemoteError(f"Ray's dashboard answers {response.status} for {path}")
                return await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RemoteError(f"Ray's dashboard cannot be asked ({type(error).__name__})") from error
