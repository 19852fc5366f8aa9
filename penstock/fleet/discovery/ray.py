"""Replicas that run on a Ray cluster, as `penstock deploy ray` starts them.

Asks through a process of its own (`ray_listing`), so that the gateway neither loads Ray nor ends with its cluster.
"""

import asyncio
import contextlib
import importlib.util
import sys
from typing import Any

import msgspec

from penstock.errors import ConfigError, RemoteError
from penstock.fleet.config import RaySection, ReplicaEntry
from penstock.fleet.discovery.interface import Discovery

_LISTING = "penstock.fleet.discovery.ray_listing"
_FIRST_ANSWER_SECONDS = 60.0  # joining a cluster takes seconds
_ANSWER_SECONDS = 15.0
_MAX_ANSWER_BYTES = 8 * 1024 * 1024
_PAUSE_SECONDS = 5.0  # between attempts to join a cluster


class RayDiscovery(Discovery):
    def __init__(self, section: RaySection, *, module: str = _LISTING) -> None:
        """`module` is what is run to ask: given address and application, it answers each line with a list of URLs."""
        if module == _LISTING and importlib.util.find_spec("ray") is None:
            raise ConfigError("--fleet", "discovery.ray", "it needs Ray: pip install 'penstock[ray]'")
        self.name = f"ray:{section.address}/{section.application}"
        self.refresh_seconds = section.refresh_seconds
        self._section = section
        self._module = module
        self._listing: asyncio.subprocess.Process | None = None
        self._answers = False  # whether it has answered before
        self._start_after = 0.0
        self._complaint = f"the Ray cluster at {section.address} cannot be asked; is it there?"

    async def find(self) -> list[ReplicaEntry]:
        listing = await self._running()
        assert listing.stdin is not None and listing.stdout is not None
        try:
            async with asyncio.timeout(_ANSWER_SECONDS if self._answers else _FIRST_ANSWER_SECONDS):
                listing.stdin.write(b"\n")
                await listing.stdin.drain()
                line = await listing.stdout.readline()
            urls = msgspec.json.decode(line, type=list[Any])
        except (TimeoutError, OSError, ValueError, msgspec.DecodeError) as error:
            await self.close()
            self._start_after = asyncio.get_running_loop().time() + _PAUSE_SECONDS
            raise RemoteError(self._complaint) from error
        self._answers = True
        section = self._section
        return [ReplicaEntry(url=str(url), version=section.version, key_file=section.key_file) for url in urls]

    def why_lost(self, url: str) -> str:
        return "it drains, or has not announced itself to its application in time"

    def why_none(self) -> str:
        return f"the application {self._section.application} runs none, or nothing of that name is deployed"

    async def close(self) -> None:
        listing, self._listing, self._answers = self._listing, None, False
        if listing is not None:
            with contextlib.suppress(ProcessLookupError):
                listing.kill()
            await listing.communicate()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._listing is None:
            if asyncio.get_running_loop().time() < self._start_after:
                raise RemoteError(self._complaint)
            self._listing = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                self._section.address,
                self._section.application,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is the gateway's alone
                limit=_MAX_ANSWER_BYTES,
            )
        return self._listing
