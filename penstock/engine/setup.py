"""What a supervisor and a new engine process tell each other before there is a socket. No torch.

The setup goes in on standard input; notices, one JSON object a line, come out on standard output.
"""

import msgspec

from penstock.config import Options, Sourced
from penstock.models.store import ModelFiles


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON document."""

    options: Options
    sources: dict[str, str]  # where each given option came from
    files: ModelFiles
    socket_path: str
    log_format: str
    parent_pid: int  # asked for here, because by the time a child could look its parent may be gone
    started: float  # time.monotonic() when the process was asked for

    @property
    def sourced(self) -> Sourced:
        return Sourced(self.options, self.sources)


class Progress(msgspec.Struct, tag=True, frozen=True):
    """How much of the weights has been read."""

    done_bytes: int
    total_bytes: int
    name: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A process cannot start, and trying again would not help: a sentence for the operator."""

    message: str


def encode_notice(notice: Progress | Refused) -> bytes:
    return msgspec.json.encode(notice) + b"\n"


def decode_notice(line: bytes) -> Progress | Refused:
    return msgspec.json.decode(line, type=Progress | Refused)
