"""What a replica's cache holds, told to gateways while it changes: a snapshot, then numbered changes.

On the wire each message is its length in four bytes and then MessagePack. Names are short ones (`block_hash`), packed
eight bytes each. Changes that happen in one step of the engine come together; a message without any says that the
connection is alive, and has the number of the one before it. Knows nothing of HTTP.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator

import msgspec

BLOCK_EVENTS_PATH = "/block_events"
_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class BlockSnapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Every block that a prompt can find in the cache now, in whatever tier."""

    number: int  # of the last changes that are in it
    block_tokens: int
    names: bytes
    on_host: bytes = b""  # those of them that must be copied to the device before they can be read


class BlockChanges(msgspec.Struct, frozen=True, tag="changes", omit_defaults=True):
    """What has changed since the message before."""

    number: int
    stored: bytes = b""  # on the device
    removed: bytes = b""
    cleared: bool = False  # everything, before what is stored here
    to_host: bytes = b""  # no longer on the device, but in the host's memory


class KeepAlive(msgspec.Struct, frozen=True, tag="alive"):
    """Nothing has changed for a while."""


BlockMessage = BlockSnapshot | BlockChanges | KeepAlive

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[BlockMessage] = msgspec.msgpack.Decoder(BlockMessage)


class BrokenMessages(Exception):
    """What came is no message."""


def encode(message: BlockMessage) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class MessageReader:
    """Takes messages apart as their bytes arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[BlockMessage]:
        """Take bytes in and give the messages that are complete. Raises BrokenMessages."""
        rest = self._rest
        rest += data
        while len(rest) >= _LENGTH_BYTES:
            stop = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES], "little")
            if stop > _MAX_MESSAGE_BYTES:
                raise BrokenMessages("a message is too large")
            if len(rest) < stop:
                return
            try:
                message = _decoder.decode(bytes(rest[_LENGTH_BYTES:stop]))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise BrokenMessages(str(error)) from None
            del rest[:stop]
            yield message


def pack(names: Iterable[int]) -> bytes:
    """Return short names as bytes, the same on every machine."""
    return _little_endian(array("Q", names)).tobytes()


def unpack(packed: bytes) -> "array[int]":
    """Return short names again; what is left over at the end is no name."""
    return _little_endian(array("Q", packed[: len(packed) // 8 * 8]))


def _little_endian(names: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        names.byteswap()
    return names
