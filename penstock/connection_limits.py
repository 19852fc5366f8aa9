"""What connections of clients may hold, and all connections of one process together.

The server and the gateway keep these limits each with its own HTTP library. Knows nothing of HTTP.
"""

import enum
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# Files that a process needs besides connections: other processes' sockets and pipes, replicas, metrics, logs.
_RESERVED_FILES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection may take. docs/security.md tells operators the same numbers."""

    # Longer than clients keep idle connections: whoever closes first must be the one that knows of the next request.
    idle_seconds: float = 75.0
    head_seconds: float = 10.0
    max_head_bytes: int = 64 * 1024
    body_seconds: float = 30.0  # and a second more for each `body_bytes_per_second` that arrived
    body_bytes_per_second: int = 16 * 1024
    # Of a body whose request is answered: a connection closed over unread bytes is reset, and the answer lost.
    discard_seconds: float = 1.0
    max_discarded_bytes: int = 32 * 1024 * 1024
    reader_seconds: float = 30.0  # how long a reader may stay more than `unread_bytes` behind
    unread_bytes: int = 64 * 1024
    socket_bytes: int = 128 * 1024  # the kernel's own buffer, which it counts double
    max_pipelined: int = 16
    max_connections: int = 16_384


class Cut(enum.StrEnum):
    """Why a connection was ended by us."""

    HEAD = "head"  # too slow or too large
    BODY = "body"  # too slow
    READER = "reader"  # did not read its response
    PIPELINE = "pipeline"  # sent too many requests ahead
    CROWD = "crowd"  # idle, or new, while there were too many


class Connection(Protocol):
    """What may be closed while it is idle."""

    def leave(self) -> None: ...


class Crowd:
    """All connections of one process. Idle ones are known in the order in which they became so."""

    def __init__(self, limits: ConnectionLimits, on_cut: Callable[[str], None]) -> None:
        self.limits = limits
        self.on_cut = on_cut
        self._num_open = 0
        self._idle: dict[Connection, None] = {}

    def enter(self, connection: Connection) -> bool:
        """Count a new connection; False if there is no room, not even by closing an idle one."""
        self._num_open += 1
        if self._num_open > self.limits.max_connections:
            oldest = next(iter(self._idle), None)
            self.on_cut(Cut.CROWD)
            if oldest is None:
                return False
            del self._idle[oldest]
            oldest.leave()
        self.note_idle(connection)
        return True

    def exit(self, connection: Connection) -> None:
        self._num_open -= 1
        self._idle.pop(connection, None)

    def note_idle(self, connection: Connection) -> None:
        self._idle[connection] = None

    def note_busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)


def raise_file_limit(limits: ConnectionLimits) -> int:
    """Allow this process as many files as `max_connections` needs; return how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + _RESERVED_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, wanted - _RESERVED_FILES)
