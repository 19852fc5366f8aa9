"""The header of a safetensors file, and its tensors as bytes.

Trusts nothing: the header's length, every type, shape and offset are checked against the file's size, and the tensors
must cover the data without gap or overlap. Knows nothing of torch or models.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeGuard

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.models.file_map import map_file
from penstock.models.weight_files import without_duplicates

_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 8

_BITS: dict[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Where a tensor lies in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    num_bytes: int


class SafetensorsFile:
    """An open safetensors file. The header is read at once, tensors when they are touched."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises ModelError naming the file and, where there is one, the tensor."""
        self.path = path
        self._content = map_file(path)
        header, data_start = self._read_header()
        self.tensors: dict[str, SafetensorsEntry] = {
            name: self._entry(name, fields, data_start) for name, fields in header.items() if name != "__metadata__"
        }
        self._require_full_cover(data_start)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes without a copy. [bytes]"""
        entry = self.tensors[name]
        return self._content[entry.offset : entry.offset + entry.num_bytes]

    def _read_header(self) -> tuple[dict[str, object], int]:
        size = len(self._content)
        if size < 8:
            self._refuse("this is not a safetensors file; it is too short")
        num_bytes = int.from_bytes(self._content[:8].tobytes(), "little")
        if num_bytes > min(size - 8, _MAX_HEADER_BYTES):
            self._refuse(
                f"its header should have {num_bytes} bytes, but the file has {size}; "
                "it is truncated or not a safetensors file"
            )
        try:
            header = json.loads(self._content[8 : 8 + num_bytes].tobytes(), object_pairs_hook=without_duplicates)
        except (ValueError, RecursionError) as error:
            self._refuse(f"its header is not valid JSON ({error})")
        if not isinstance(header, dict):
            self._refuse("its header is not a JSON object")
        return header, 8 + num_bytes

    def _entry(self, name: str, fields: object, data_start: int) -> SafetensorsEntry:
        if not isinstance(fields, dict):
            self._refuse("its header entry is not an object", name)
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _BITS:
            self._refuse(f"its type is {str(dtype)[:80]}; known are: {', '.join(_BITS)}", name)
        if not _are_counts(shape):
            self._refuse(
                f"its shape is {str(shape)[:80]}; it must be a list of at most {_MAX_DIMENSIONS} integers from 0 on",
                name,
            )
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._refuse(f"its data_offsets are {str(offsets)[:80]}; they must be [start, end]", name)
        start, end = offsets
        if data_start + end > len(self._content):
            self._refuse(
                f"its data ends at byte {data_start + end}, but the file has {len(self._content)} bytes; "
                "the file is truncated, fetch it again",
                name,
            )
        if math.prod(shape) * _BITS[dtype] != (end - start) * 8:
            self._refuse(f"its {end - start} bytes are not those of {dtype} values of shape {shape}", name)
        return SafetensorsEntry(dtype, tuple(shape), data_start + start, end - start)

    def _require_full_cover(self, data_start: int) -> None:
        """As the format demands: nothing hides between, under or behind the tensors."""
        end = data_start
        for name, entry in sorted(self.tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if entry.offset != end:
                relation = "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
                self._refuse(f"its data {relation}", name)
            end = entry.offset + entry.num_bytes
        if end != len(self._content):
            self._refuse(f"{len(self._content) - end} bytes after the last tensor belong to none")

    def _refuse(self, message: str, tensor: str | None = None) -> NoReturn:
        raise ModelError(message, file=str(self.path), tensor=tensor)


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return (
        isinstance(values, list)
        and len(values) <= _MAX_DIMENSIONS
        and all(type(value) is int and value >= 0 for value in values)
    )
