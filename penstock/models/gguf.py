"""The header of a GGUF file, and its tensors as bytes.

Trusts nothing: every count, length, offset, dimension and type is checked against the file's size before it is used,
and the tensors must cover the data without gap or overlap. Knows the sizes of quantised blocks but not what they mean,
and nothing of torch, models or tokenizers.
"""

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.models.file_map import map_file

_MAGIC = b"GGUF"
_CUT_SHORT = "the file is truncated or damaged, fetch it again"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_NAME_LENGTH = 65535
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a tensor type packs its values: `block_values` of them in `block_bytes`."""

    name: str
    block_values: int
    block_bytes: int


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}

# Only to tell the user what the file holds.
_OTHER_TYPES: dict[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

# Metadata value types: number -> little-endian numpy type. 8 is a string, 9 an array.
_SCALARS: dict[int, np.dtype[np.generic]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING = 8
_ARRAY = 9

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]  # outermost first, as torch has it: [out, in] for a matrix
    type: BlockType
    offset: int  # from the start of the file
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block_values * self.type.block_bytes


class GgufFile:
    """An open GGUF file. Metadata and the tensor table are read at once, tensors when they are touched."""

    def __init__(
        self, path: Path, metadata: dict[str, object], tensors: dict[str, GgufTensor], content: NDArray[np.uint8]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._content = content

    @classmethod
    def open(cls, path: str | Path) -> "GgufFile":
        """Read and check the header. Raises ModelError naming the file and, where there is one, the tensor."""
        path = Path(path)
        content = map_file(path)
        reader = _Reader(path, content)
        num_tensors, num_entries = reader.read_preamble()
        metadata = reader.read_metadata(num_entries)
        tensors = reader.read_tensor_table(num_tensors, metadata)
        return cls(path, metadata, tensors, content)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes without a copy. [rows, bytes_per_row]"""
        tensor = self.tensors[name]
        return self._content[tensor.offset : tensor.offset + tensor.num_bytes].reshape(-1, tensor.row_bytes)


class _Reader:
    """A cursor over the header that never leaves the file."""

    def __init__(self, path: Path, content: NDArray[np.uint8]) -> None:
        self._path = path
        self._view = content.data
        self._size = len(content)
        self._position = 0

    def read_preamble(self) -> tuple[int, int]:
        """Return the numbers of tensors and of metadata entries."""
        if self._size < 24 or bytes(self._view[:4]) != _MAGIC:
            self._refuse("this is not a GGUF file; its first bytes are not 'GGUF'")
        self._position = 4
        version = self._u32()
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                self._refuse("this is a big-endian GGUF file; convert the model to a little-endian one")
            self._refuse(f"GGUF version {version} is not supported; convert the model to version 3")
        num_tensors, num_entries = self._u64(), self._u64()
        # A tensor takes at least 8 + 1 + 4 + 8 + 4 + 8 bytes of the header, an entry 8 + 1 + 4 + 1.
        if num_tensors * 33 + num_entries * 14 > self._size - self._position:
            self._refuse(
                f"the header promises {num_tensors} tensors and {num_entries} metadata entries, "
                f"more than fit into {self._size} bytes; {_CUT_SHORT}"
            )
        return num_tensors, num_entries

    def read_metadata(self, num_entries: int) -> dict[str, object]:
        metadata: dict[str, object] = {}
        for _ in range(num_entries):
            key = self._name("a metadata key")
            if key in metadata:
                self._refuse(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(key)
        num_parts = metadata.get("split.count", 1)
        if isinstance(num_parts, int) and num_parts > 1:
            self._refuse(f"this is one of {num_parts} parts of a split model; join them with gguf-split --merge")
        return metadata

    def read_tensor_table(self, num_tensors: int, metadata: dict[str, object]) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
            or alignment % 8
        ):
            self._refuse(f"general.alignment is {alignment!r}; it must be a power of two, 8 or more")
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                self._refuse("the name appears twice", entry.name)
            tensors[entry.name] = self._place(entry, data_start, alignment)
        self._require_full_cover(tensors, data_start, alignment)
        return tensors

    def _tensor_entry(self) -> GgufTensor:
        """Read one line of the tensor table. Its offset is still relative to where the data starts."""
        name = self._name("a tensor's name")
        num_dimensions = self._u32()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._refuse(f"it has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible", name)
        # The file lists the innermost dimension first.
        shape = tuple(reversed([self._u64() for _ in range(num_dimensions)]))
        type_number = self._u32()
        block = BLOCK_TYPES.get(type_number)
        if block is None:
            found = _OTHER_TYPES.get(type_number, f"number {type_number}")
            known = ", ".join(item.name for item in BLOCK_TYPES.values())
            self._refuse(f"its type, {found}, is not supported; use a file with {known}", name)
        num_values = math.prod(shape)
        if not 0 < num_values <= self._size * block.block_values:
            self._refuse(f"its shape {list(shape)} does not fit into a file of {self._size} bytes", name)
        if shape[-1] % block.block_values:
            self._refuse(f"its rows of {shape[-1]} values are not whole {block.name} blocks", name)
        return GgufTensor(name, shape, block, self._u64(), num_values // block.block_values * block.block_bytes)

    def _place(self, entry: GgufTensor, data_start: int, alignment: int) -> GgufTensor:
        """Return the tensor with its offset in the file, checked against the file's size."""
        if entry.offset % alignment:
            self._refuse(f"its offset {entry.offset} is not a multiple of the alignment, {alignment}", entry.name)
        start = data_start + entry.offset
        if start + entry.num_bytes > self._size:
            self._refuse(
                f"its data ends at byte {start + entry.num_bytes}, but the file has {self._size} bytes; "
                "the file is truncated, fetch it again",
                entry.name,
            )
        return replace(entry, offset=start)

    def _require_full_cover(self, tensors: dict[str, GgufTensor], data_start: int, alignment: int) -> None:
        """As the format demands: each tensor starts where the one before ends, rounded up to the alignment.

        A wrong type or shape in the table shows here, and often nowhere else.
        """
        end, before = data_start, ""
        for tensor in sorted(tensors.values(), key=lambda item: item.offset):
            if tensor.offset < end:
                self._refuse(f"its data overlaps that of tensor {before}", tensor.name)
            self._refuse_gap(end, tensor.offset, alignment, before or tensor.name)
            end, before = tensor.offset + tensor.num_bytes, tensor.name
        self._refuse_gap(end, self._size, alignment, before or None)

    def _refuse_gap(self, end: int, following: int, alignment: int, tensor: str | None) -> None:
        gap = following - -(-end // alignment) * alignment
        if gap > 0:
            self._refuse(
                f"{gap} bytes beside its data belong to no tensor; its type or shape is wrong, or {_CUT_SHORT}", tensor
            )

    def _value(self, key: str) -> object:
        kind = self._u32()
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        values = self._scalars(kind, 1, key)
        return values[0]

    def _array(self, key: str) -> list[object]:
        kind, count = self._u32(), self._u64()
        if kind == _ARRAY:
            self._refuse(f"metadata {key!r} is an array of arrays, which no known model needs")
        if kind == _STRING:
            return self._strings(count, key)
        return self._scalars(kind, count, key)

    def _scalars(self, kind: int, count: int, key: str) -> list[object]:
        if kind not in _SCALARS:
            self._refuse(f"metadata {key!r} has the unknown value type {kind}")
        dtype = _SCALARS[kind]
        start = self._advance(count * dtype.itemsize, f"the value of {key!r}")
        values: list[object] = np.frombuffer(self._view, dtype, count, start).tolist()
        return values

    def _strings(self, count: int, key: str) -> list[object]:
        """Read an array of strings: a loop kept tight, since vocabularies have hundreds of thousands."""
        if count * 8 > self._size - self._position:
            self._refuse(f"metadata {key!r} promises {count} strings, more than fit into the file; {_CUT_SHORT}")
        view, size, position, unpack = self._view, self._size, self._position, _U64.unpack_from
        strings: list[object] = []
        append = strings.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(view, position)[0]
                if position > size:
                    self._refuse(f"a string of metadata {key!r} ends after the file; {_CUT_SHORT}")
                append(str(view[start:position], "utf-8"))
        except struct.error:
            self._refuse(f"metadata {key!r} ends after the file; {_CUT_SHORT}")
        except UnicodeDecodeError:
            self._refuse(f"a string of metadata {key!r} is not UTF-8")
        self._position = position
        return strings

    def _string(self, what: str) -> str:
        length = self._u64()
        start = self._advance(length, what)
        try:
            return str(self._view[start : start + length], "utf-8")
        except UnicodeDecodeError:
            self._refuse(f"{what} is not UTF-8")

    def _name(self, what: str) -> str:
        name = self._string(what)
        if not 1 <= len(name) <= _MAX_NAME_LENGTH:
            self._refuse(f"{what} has {len(name)} characters; 1 to {_MAX_NAME_LENGTH} are possible")
        return name

    def _u32(self) -> int:
        number: int = _U32.unpack_from(self._view, self._advance(4, "the header"))[0]
        return number

    def _u64(self) -> int:
        number: int = _U64.unpack_from(self._view, self._advance(8, "the header"))[0]
        return number

    def _advance(self, num_bytes: int, what: str) -> int:
        """Step over bytes that must be there and return where they start."""
        start = self._position
        if num_bytes > self._size - start:
            self._refuse(f"{what} ends after the file's {self._size} bytes; {_CUT_SHORT}")
        self._position = start + num_bytes
        return start

    def _refuse(self, message: str, tensor: str | None = None) -> NoReturn:
        raise ModelError(message, file=str(self._path), tensor=tensor)
