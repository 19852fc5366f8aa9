"""What the supervisor tells a new API worker, on its standard input, and what that says of its start. No torch."""

import enum
import select

import msgspec

from penstock.engine.setup import Refused
from penstock.models.store import ModelFiles
from penstock.server.config import ServerConfig


class WorkerNotice(enum.Enum):
    """What a worker says once of its start: one byte, into `notice_fd`."""

    SERVES = b"s"
    PORT_TAKEN = b"t"  # another server began to listen there first


_REFUSED = b"r"  # instead of these; the sentence follows


def encode_worker_notice(notice: WorkerNotice | Refused) -> bytes:
    """Return no more than a pipe takes and gives in one piece: a sentence that is longer is cut."""
    if isinstance(notice, WorkerNotice):
        return notice.value
    return (_REFUSED + notice.message.encode("utf-8", "backslashreplace"))[: select.PIPE_BUF]


def decode_worker_notice(said: bytes) -> WorkerNotice | Refused:
    if said.startswith(_REFUSED):
        return Refused(said.removeprefix(_REFUSED).decode("utf-8", "ignore"))
    return WorkerNotice(said)


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
