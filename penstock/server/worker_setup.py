"""What the supervisor tells a new API worker, on its standard input. No torch."""

import enum

import msgspec

from penstock.models.store import ModelFiles
from penstock.server.config import ServerConfig


class WorkerNotice(enum.Enum):
    """What a worker says once of its start: one byte, into `notice_fd`."""

    SERVES = b"s"
    PORT_TAKEN = b"t"  # another server began to listen there first


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON document."""

    config: ServerConfig
    files: ModelFiles  # for the tokenizer and its chat template
    engine_socket: str
    identity: str  # this worker's name for the engine and in the log
    parent_pid: int  # asked for here, because by the time a child could look its parent may be gone
    listen_fd: int  # an inherited socket, bound; it listens once a worker can accept
    notice_fd: int  # an inherited pipe
    is_replacement: bool = False  # of a worker that has ended
    admin_fd: int | None = None  # the admin socket, likewise, for the one worker that serves it
