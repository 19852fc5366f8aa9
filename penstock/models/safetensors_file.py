"""The header of a safetensors file, and its tensors as bytes.

Trusts nothing: the header's length, every type, shape and offset are checked against the file's size, and the tensors
must cover the data without gap or overlap. Knows nothing of torch or models.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeGuard

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.models.file_map import map_file

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 100_000_000
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
            header = json.loads(self._content[8 : 8 + num_bytes].tobytes(), object_pairs_hook=_without_duplicates)
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


def shard_index(folder: Path) -> Path | None:
    """Return the index of a folder's shards; None where there is none or, as in transformers, a single file counts."""
    index = folder / INDEX
    return index if index.exists() and not (folder / _SINGLE).is_file() else None


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights: `model.safetensors`, else the index's shards, else the only file.

    Raises ModelError naming a file that is not there, such as a link to what was removed from a cache.
    """
    index = shard_index(folder)
    if index is not None:
        return [folder / shard for shard in dict.fromkeys(read_index(index).values())]
    single = folder / _SINGLE
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        what = f"{len(found)} *.safetensors files and no {INDEX}" if found else "no *.safetensors file"
        raise ModelError(f"the folder has {what}; fetch the model again", file=str(folder))
    if not found[0].is_file():
        raise ModelError("this is a link to nothing, or no file; fetch the model again", file=str(found[0]))
    return found


def read_index(path: Path) -> dict[str, str]:
    """Return the shard of each tensor out of `model.safetensors.index.json`."""
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ModelError(f"it is larger than {_MAX_INDEX_BYTES} bytes", file=str(path))
        index = json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"it is not valid JSON ({error})", file=str(path)) from error
    except OSError as error:
        raise ModelError(f"it cannot be read ({error.strerror})", file=str(path)) from error
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise ModelError("it has no weight_map from tensors to files", file=str(path))
    for name, shard in placed.items():
        # A shard is a file beside the index, never a path to somewhere else.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(
                f"its weight_map names {shard!r}, which is no .safetensors file name", file=str(path), tensor=name
            )
        if not os.path.isfile(path.parent / shard):  # False also of a name that no file can have
            raise ModelError(f"its weight_map names {shard}, which is not there; fetch it", file=str(path), tensor=name)
    return placed


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return (
        isinstance(values, list)
        and len(values) <= _MAX_DIMENSIONS
        and all(type(value) is int and value >= 0 for value in values)
    )


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result
