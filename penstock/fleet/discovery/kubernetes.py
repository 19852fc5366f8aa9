"""Replicas that are the ready endpoints of a Kubernetes service, asked of the cluster's API.

Needs the right to list endpointslices of discovery.k8s.io.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from penstock.errors import RemoteError
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
        self.name = f"kubernetes:{self._namespace}/{section.service}:{section.port}"
        self.refresh_seconds = section.refresh_seconds
        self._unready: dict[str, str] = {}  # URLs of endpoints that are told of, and why they are no replicas
        self._slices: list[Mapping[str, Any]] = []  # as they were last told

    async def find(self) -> list[ReplicaEntry]:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        selector = {"labelSelector": f"kubernetes.io/service-name={self._section.service}"}
        document = await self._api.get(path, selector)
        if "items" not in document:
            raise RemoteError(f"the Kubernetes API answers no list to GET {path}")
        slices = sorted(_objects(document.get("items")), key=_family)
        self._unready = {}
        self._slices = slices
        families: dict[str, str] = {}  # of the addresses at which a pod is asked, by its identity
        return [entry for item in slices for entry in self._entries(item, families)]

    def why_lost(self, url: str) -> str:
        return self._unready.get(url, f"{self._section.service} has no endpoint at this address any more")

    def why_none(self) -> str:
        where = f"the service {self._section.service} of namespace {self._namespace}"
        if not self._slices:
            return f"{where} has no endpoint slices; is that its name?"
        if all(self._port(item) is None for item in self._slices):
            ports = {str(port.get("name")) for item in self._slices for port in _objects(item.get("ports"))}
            return f"{where} has no port of the name {self._section.port!r}, but: {', '.join(sorted(ports)) or 'none'}"
        return f"{where} has no endpoint that is ready ({len(self._unready)} that are not)"

    def _entries(self, endpoint_slice: Mapping[str, Any], families: dict[str, str]) -> list[ReplicaEntry]:
        port, family = self._port(endpoint_slice), _family(endpoint_slice)
        if port is None:
            return []
        section, found = self._section, []
        for endpoint in _objects(endpoint_slice.get("endpoints")):
            lack = _lack(endpoint)
            for host in _hosts(endpoint):
                url = f"http://{host}:{port}"
                if lack is not None:
                    self._unready[url] = lack
                # A service with addresses of both families has slices of both, and every pod in each.
                elif families.setdefault(_pod(endpoint) or host, family) == family:
                    found.append(
                        ReplicaEntry(url=url, kind=section.kind, version=section.version, key_file=section.key_file)
                    )
        return found

    def _port(self, endpoint_slice: Mapping[str, Any]) -> Any:
        wanted = self._section.port
        if isinstance(wanted, int):
            return wanted
        ports = _objects(endpoint_slice.get("ports"))
        return next((item.get("port") for item in ports if item.get("name") == wanted), None)


def _family(endpoint_slice: Mapping[str, Any]) -> str:
    """Return the kind of a slice's addresses, IPv4 or IPv6, which is also their order where a pod has both."""
    return str(endpoint_slice.get("addressType", ""))


def _pod(endpoint: Mapping[str, Any]) -> str | None:
    """Return the identity of what an endpoint leads to, where it tells."""
    target = endpoint.get("targetRef")
    uid = target.get("uid") if isinstance(target, Mapping) else None
    return uid if isinstance(uid, str) else None


def _lack(endpoint: Mapping[str, Any]) -> str | None:
    """Return why an endpoint gets no requests, where it should not."""
    conditions = endpoint.get("conditions")
    # Absent means unknown, which the API says to take as ready.
    if not isinstance(conditions, Mapping) or conditions.get("ready") is not False:
        return None
    return "its pod is being ended" if conditions.get("terminating") is True else "its pod is not ready"


def _hosts(endpoint: Mapping[str, Any]) -> list[str]:
    """Return what an endpoint gives for its addresses, as they would stand in a URL."""
    addresses = endpoint.get("addresses")
    told = [str(address) for address in addresses] if isinstance(addresses, list) else []
    return [f"[{address}]" if ":" in address else address for address in told]


def _objects(items: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list, whatever else is in it, or none where it is no list."""
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping):
            yield item
