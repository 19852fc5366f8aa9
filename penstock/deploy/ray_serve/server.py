"""A real `penstock serve` beside an actor: started on a port of its own, asked how it is, drained.

It ends with the actor's process, whatever ends that (`penstock.leash`). Knows nothing of Ray.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import aiohttp

from penstock.errors import RemoteError
from penstock.fleet.config import HealthSection, ReplicaEntry
from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.router.health import HealthMonitor
from penstock.fleet.router.upstream import new_session
from penstock.loopback import local_address
from penstock.server.listeners import bind
from penstock.stop_signals import OWNERS_SIGNAL

_START_POLL_SECONDS = 0.2
_STOP_SECONDS = 15.0  # behind the drain
# The one server is not to be spared: whoever asks wants to know how it is now.
_HEALTH = HealthSection(first_backoff_seconds=0.0, max_backoff_seconds=0.0)


class LeashedServer:
    """Make it in an event loop, `start` it, and `stop` it there."""

    def __init__(
        self,
        arguments: Sequence[str],
        host: str,
        port: int | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        key_file: str | None = None,
    ) -> None:
        """`port` is any that is free, unless it is given."""
        port = port if port is not None else _free_port(host)
        command = [sys.executable, "-m", "penstock", "serve", *arguments, "--host", host, "--port", str(port)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.leash", *command],
            stdin=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        self.port = port
        pool = ReplicaPool(_HEALTH)
        self.session: aiohttp.ClientSession = new_session(_HEALTH)
        self.replica: Replica = pool.add("own", ReplicaEntry(url=_url(local_address(host), port), key_file=key_file))
        self._monitor = HealthMonitor(pool, self.session, lambda: None)

    async def start(self, seconds: float) -> None:
        """Return when it is ready to serve. Raises RemoteError where it ended instead, or takes too long."""
        try:
            async with asyncio.timeout(seconds):
                while not await self.is_ready():
                    if self._process.poll() is not None:
                        raise RemoteError(f"the server ended with status {self._process.returncode}; its log says why")
                    await asyncio.sleep(_START_POLL_SECONDS)
        except TimeoutError:
            reason = self.replica.breaker.reason
            raise RemoteError(f"the server was not ready within {seconds:g} s: {reason}") from None

    async def is_ready(self) -> bool:
        """Ask it, and note how busy it is."""
        await self._monitor.probe_all()
        return self._process.poll() is None and self.replica.is_up

    async def stop(self, drain_seconds: float) -> None:
        """Let open requests finish for as long as the drain may take, then end it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(OWNERS_SIGNAL)
        try:
            await asyncio.to_thread(self._process.wait, drain_seconds + _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self.session.close()


def reachable_url(host: str, port: int, node_address: str) -> str:
    """Return where other machines find a server that listens on `host`."""
    return _url(node_address if host in ("0.0.0.0", "::") else host, port)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _free_port(host: str) -> int:
    """Return a port that is free now. Should another take it first, the server ends, and its actor is started again."""
    with bind(host, 0) as probe:
        port: int = probe.getsockname()[1]
        return port
