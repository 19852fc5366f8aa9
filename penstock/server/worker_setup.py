"""What the supervisor tells a new API worker, on its standard input. No torch."""

from pathlib import Path
from typing import Any

import msgspec

from penstock.models.store import ModelFiles
from penstock.server.config import ServerConfig


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON document."""

    config: ServerConfig
    files: ModelFiles  # for the tokenizer and its chat template
    engine_socket: str
    identity: str  # this worker's name for the engine and in the log
    listen_fd: int  # an inherited socket that already listens


def encode_worker_setup(setup: WorkerSetup) -> bytes:
    return msgspec.json.encode(setup, enc_hook=str)


def decode_worker_setup(document: bytes) -> WorkerSetup:
    return msgspec.json.decode(document, type=WorkerSetup, dec_hook=_to_path)


def _to_path(kind: type, value: Any) -> Path:
    assert kind is Path
    return Path(value)
