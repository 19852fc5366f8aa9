"""Replicas that are the addresses of a name, such as a headless service's."""

import asyncio
import socket

from penstock.errors import RemoteError
from penstock.fleet.config import DnsSection, ReplicaEntry
from penstock.fleet.discovery.interface import Discovery


class DnsDiscovery(Discovery):
    def __init__(self, section: DnsSection) -> None:
        self.name = f"dns:{section.name}:{section.port}"
        self.refresh_seconds = section.refresh_seconds
        self._section = section

    async def find(self) -> list[ReplicaEntry]:
        name, port = self._section.name, self._section.port
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise RemoteError(f"{name} has no address ({error.strerror or error})") from error
        except UnicodeError as error:
            raise RemoteError(f"{name} can be no host's name") from error
        addresses = sorted({str(address[0]) for *_, address in found})
        hosts = [f"[{address}]" if ":" in address else address for address in addresses]
        section = self._section
        return [
            ReplicaEntry(
                url=f"http://{host}:{port}", kind=section.kind, version=section.version, key_file=section.key_file
            )
            for host in hosts
        ]

    def why_lost(self, url: str) -> str:
        return f"{self._section.name} has this address no more"
