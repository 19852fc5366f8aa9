"""The Kubernetes API as a pod may ask it: with the token and certificate that every pod is given.

The token is read each time, because it is replaced while the pod runs. Knows nothing of what is asked.
"""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from penstock.errors import ConfigError, RemoteError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_SECONDS = 5.0
_MAX_MESSAGE = 300  # characters
_MERGE_PATCH = "application/merge-patch+json"


class ClusterApi:
    """Made inside a pod; raises ConfigError, which names `section`, elsewhere."""

    def __init__(
        self, session: aiohttp.ClientSession, section: str, *, account: Path = ACCOUNT, api: str | None = None
    ) -> None:
        self._session = session
        self._section = section
        self._account = account
        self._api = api if api is not None else self._find(os.environ)
        self._ssl = ssl.create_default_context(cafile=account / "ca.crt") if self._api.startswith("https") else None

    def namespace(self, given: str | None) -> str:
        """Return the namespace that was given, or the pod's own."""
        if given is not None:
            return given
        try:
            return (self._account / "namespace").read_text().strip()
        except OSError as error:
            message = "give a namespace: the pod does not tell its own"
            raise ConfigError("--fleet", self._section, message) from error

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        """Return the document at a path. Raises RemoteError."""
        return await self._ask("GET", path, params=params)

    async def patch(self, path: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merge into the document at a path, and return it. Raises RemoteError."""
        body, headers = msgspec.json.encode(document), {"Content-Type": _MERGE_PATCH}
        return await self._ask("PATCH", path, data=body, headers=headers)

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        try:
            token = (self._account / "token").read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RemoteError(
                f"the Kubernetes API cannot be asked: {self._account / 'token'} holds no token"
            ) from error
        try:
            async with self._session.request(
                method,
                f"{self._api}{path}",
                params=params,
                data=data,
                headers={**(headers or {}), "Authorization": f"Bearer {token}"},
                ssl=self._ssl if self._ssl is not None else True,
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS),
                allow_redirects=False,
            ) as response:
                body = await response.read()
                if response.status != 200:
                    told = f"the Kubernetes API answers {response.status} to {method} {path}"
                    raise RemoteError(f"{told}: {why}" if (why := _message(body)) else told)
                document = msgspec.json.decode(body)
        # ValueError: a token that can stand in no header, or an answer that is no JSON.
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError) as error:
            raise RemoteError(f"the Kubernetes API cannot be asked ({type(error).__name__})") from error
        if not isinstance(document, Mapping):
            raise RemoteError(f"the Kubernetes API answers no object to {method} {path}")
        return document

    def _find(self, environ: Mapping[str, str]) -> str:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError("--fleet", self._section, "it works inside a Kubernetes pod only")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _message(body: bytes) -> str:
    """Return what the API says itself of a failure, which names the right that is missing, say."""
    try:
        document = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return ""
    message = document.get("message") if isinstance(document, Mapping) else None
    return " ".join(message.split())[:_MAX_MESSAGE] if isinstance(message, str) else ""
