"""Replicas that are the ready endpoints of a Kubernetes service, asked of the cluster's API.

Uses the token and certificate that every pod is given; the token is read each time, because it is replaced while the
pod runs. Needs the right to list endpointslices of discovery.k8s.io.
"""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from penstock.errors import ConfigError, RemoteError
from penstock.fleet.config import KubernetesSection, ReplicaEntry
from penstock.fleet.discovery.interface import Discovery

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_SECONDS = 5.0


class KubernetesDiscovery(Discovery):
    def __init__(
        self,
        section: KubernetesSection,
        session: aiohttp.ClientSession,
        *,
        account: Path = _ACCOUNT,
        api: str | None = None,
    ) -> None:
        self._section = section
        self._session = session
        self._account = account
        self._api = api if api is not None else _cluster_api(os.environ)
        self._namespace = section.namespace or _own_namespace(account)
        self._ssl = ssl.create_default_context(cafile=account / "ca.crt") if self._api.startswith("https") else None
        self.name = f"kubernetes:{self._namespace}/{section.service}"
        self.refresh_seconds = section.refresh_seconds

    async def find(self) -> list[ReplicaEntry]:
        url = f"{self._api}/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        selector = {"labelSelector": f"kubernetes.io/service-name={self._section.service}"}
        try:
            token = (self._account / "token").read_text().strip()
            async with self._session.get(
                url,
                params=selector,
                headers={"Authorization": f"Bearer {token}"},
                ssl=self._ssl if self._ssl is not None else True,
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS),
            ) as response:
                if response.status != 200:
                    raise RemoteError(f"the Kubernetes API answers {response.status} for {self.name}")
                document = msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise RemoteError(f"the Kubernetes API cannot be asked ({type(error).__name__})") from error
        slices = document.get("items") if isinstance(document, Mapping) else None
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


def _cluster_api(environ: Mapping[str, str]) -> str:
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError("--fleet", "discovery.kubernetes", "it works inside a Kubernetes pod only")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _own_namespace(account: Path) -> str:
    try:
        return (account / "namespace").read_text().strip()
    except OSError as error:
        raise ConfigError(
            "--fleet", "discovery.kubernetes", "give a namespace: the pod does not tell its own"
        ) from error
