"""Replicas that are the ready endpoints of a Kubernetes service, asked of the cluster's API.

Needs the right to list endpointslices of discovery.k8s.io.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from penstock.fleet.cluster_api import ACCOUNT, ClusterApi
from penstock.fleet.config import KubernetesSection, ReplicaEntry
from penstock.fleet.discovery.interface import Discovery


class KubernetesDiscovery(Discovery):
    def __init__(
        self,
        section: KubernetesSection,
        session: aiohttp.ClientSession,
        *,
        account: Path = ACCOUNT,
        api: str | None = None,
    ) -> None:
        self._section = section
        self._api = ClusterApi(session, "discovery.kubernetes", account=account, api=api)
        self._namespace = self._api.namespace(section.namespace)
        self.name = f"kubernetes:{self._namespace}/{section.service}"
        self.refresh_seconds = section.refresh_seconds

    async def find(self) -> list[ReplicaEntry]:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        selector = {"labelSelector": f"kubernetes.io/service-name={self._section.service}"}
        slices = (await self._api.get(path, selector)).get("items")
        return [entry for item in slices or () for entry in self._entries(item)]

    def _entries(self, endpoint_slice: Mapping[str, Any]) -> list[ReplicaEntry]:
        port = self._port(endpoint_slice.get("ports") or ())
        if port is None:
            return []
        hosts = [
            f"[{address}]" if ":" in address else address
            for endpoint in endpoint_slice.get("endpoints") or ()
            # Absent means unknown, which the API says to take as ready.
            if (endpoint.get("conditions") or {}).get("ready") is not False
            for address in endpoint.get("addresses") or ()
        ]
        section = self._section
        return [
            ReplicaEntry(
                url=f"http://{host}:{port}", kind=section.kind, version=section.version, key_file=section.key_file
            )
            for host in hosts
        ]

    def _port(self, ports: Any) -> int | None:
        wanted = self._section.port
        if isinstance(wanted, int):
            return wanted
        return next((item.get("port") for item in ports if item.get("name") == wanted), None)
