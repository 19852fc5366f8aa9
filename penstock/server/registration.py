"""Tells gateways that this server is there, again and again before its lease ends, and when it leaves.

The key that a gateway may need is PENSTOCK_API_KEY's: one with admin = true. Knows nothing of the server's processes.
"""

import asyncio
import http.client
import logging
import socket
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

import msgspec

from penstock.errors import ConfigError, RemoteError
from penstock.loopback import ANY_ADDRESS, ANY_IPV4_ADDRESS, is_loopback, local_address
from penstock.telemetry import log_event

_UNIX = "unix:"
_TIMEOUT_SECONDS = 5.0
_RETRY_SECONDS = 1.0
_LEAVE_SECONDS = 2.0
_BEATS_PER_LEASE = 3  # so that one missed time costs nothing
_PATH = "/admin/replicas"
_REASONS = {
    401: "it needs an API key with admin = true in PENSTOCK_API_KEY",
    403: "the key in PENSTOCK_API_KEY is not one with admin = true",
    404: "without API keys its admin routes are on its admin socket only: give --gateway unix:PATH",
}

log = logging.getLogger("penstock.registration")


class _Lease(msgspec.Struct):
    lease_seconds: float


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("gateway", timeout=_TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_SECONDS)
        self.sock.connect(self._path)


def read_gateways(text: str, host: str) -> tuple[str, ...]:
    """Return the gateways that `--gateway` names, for a server that listens on `host`. Raises ConfigError."""
    gateways = tuple(part.strip().rstrip("/") for part in text.split(","))
    for gateway in gateways:
        if gateway.startswith(_UNIX) and len(gateway) > len(_UNIX):
            continue
        right = "give a gateway's URL such as http://10.0.0.1:8080, or unix:PATH of its admin socket"
        try:
            parts = urlsplit(gateway)
            is_usable = parts.scheme in ("http", "https") and not parts.path and parts.port != 0
        except ValueError as error:  # a port or an address that can be none
            raise ConfigError("--gateway", gateway, right) from error
        if not is_usable or not parts.hostname:
            raise ConfigError("--gateway", gateway, right)
        if is_loopback(host) and not is_loopback(parts.hostname):
            raise ConfigError("--gateway", gateway, f"it cannot reach {host}; give --host an address that it can")
    return gateways


class Registration:
    """One server's place at one gateway."""

    def __init__(self, gateway: str, host: str, port: int, key: str | None) -> None:
        self._gateway = gateway
        self._host = host
        self._port = port
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._turn = asyncio.Lock()  # a heartbeat must not arrive behind the farewell
        self._is_known = False  # there
        self._has_left = False

    async def run(self) -> None:
        """Register, and again before each lease ends. A gateway that cannot be reached is tried on and on."""
        said: str | None = None
        while not self._has_left:
            seconds = _RETRY_SECONDS
            try:
                async with self._turn:
                    if self._has_left:
                        return
                    seconds = await asyncio.to_thread(self._register) / _BEATS_PER_LEASE
                    self._is_known = True
                message, level = "registered with the gateway", logging.INFO
            except RemoteError as error:
                message, level = f"not registered: {error}", logging.ERROR
            if message != said:
                log_event(log, message, level=level, gateway=self._gateway)
            said = message
            await asyncio.sleep(seconds)

    async def leave(self) -> None:
        """Have the gateway send nothing more; what it sent goes on."""
        self._has_left = True
        try:
            async with asyncio.timeout(_LEAVE_SECONDS), self._turn:
                if not self._is_known:
                    return
                await asyncio.to_thread(self._send, "DELETE", f"{_PATH}?url={quote(self._url(), safe='')}", b"")
        except (RemoteError, TimeoutError):
            return  # its lease will end

    def _register(self) -> float:
        answer = self._send("POST", _PATH, msgspec.json.encode({"url": self._url(), "kind": "penstock"}))
        try:
            return max(0.1, msgspec.json.decode(answer, type=_Lease).lease_seconds)
        except msgspec.DecodeError as error:
            raise RemoteError("what answers there is no gateway") from error

    def _send(self, method: str, path: str, body: bytes) -> bytes:
        connection = self._connection()
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            answer = response.read(64 * 1024)
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(f"the gateway cannot be reached ({type(error).__name__})") from error
        finally:
            connection.close()
        if response.status != 200:
            raise RemoteError(f"the gateway answers {response.status}; {_REASONS.get(response.status, 'see its log')}")
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        if self._gateway.startswith(_UNIX):
            return _UnixConnection(self._gateway.removeprefix(_UNIX))
        parts = urlsplit(self._gateway)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS)

    def _url(self) -> str:
        """Return where the gateway finds this server."""
        host = self._own_address() if self._host in (ANY_ADDRESS, ANY_IPV4_ADDRESS) else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def _own_address(self) -> str:
        """Return the address of this machine on the way to the gateway."""
        if self._gateway.startswith(_UNIX):
            return local_address(self._host)
        parts = urlsplit(self._gateway)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)
            with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[0][4])  # sends nothing: it only picks the way
                return str(probe.getsockname()[0])
        except OSError as error:
            raise RemoteError("the gateway's name has no address") from error


class Registrations:
    """One server's places at all its gateways."""

    def __init__(self, gateways: Sequence[str], host: str, port: int, key: str | None) -> None:
        self._places = [Registration(gateway, host, port, key) for gateway in gateways]

    async def run(self) -> None:
        await asyncio.gather(*[place.run() for place in self._places])

    async def leave(self) -> None:
        await asyncio.gather(*[place.leave() for place in self._places])
