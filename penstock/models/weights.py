"""Open models as sources of tensors: safetensors folders, GGUF files, and random numbers for benchmarks.

Headers are read and checked at once, tensors when they are asked for. A missing tensor is an error, never a random
one. Knows no architecture: names and shapes are the caller's.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.dequantise import DEQUANTISERS
from penstock.models.download import Progress
from penstock.models.gguf import GgufFile
from penstock.models.safetensors_file import SafetensorsFile
from penstock.models.store import ModelFiles
from penstock.models.stored_tensor import StoredTensor, WeightSource
from penstock.models.weight_files import INDEX, read_index, shard_index, weight_files

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}

_RANDOM = "random weights"  # in place of a file's name

# A prime, so that rows of any length start at different places of the pool.
_POOL_VALUES = 1_048_573


def open_weights(
    files: ModelFiles,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> WeightSource:
    """Open the model's weights. `dtype`, `device` and `seed` are for random ones (`load_format` "dummy") only.

    `progress` is told (done bytes, total bytes, tensor) whenever a tensor is handed out for the first time.
    """
    if files.load_format == "dummy":
        return DummySource(dtype, seed, device=device)
    if files.kind == "gguf":
        return GgufSource(GgufFile.open(files.path), progress)
    return SafetensorsSource(files.path, progress)


class _Meter:
    """Counts the bytes of tensors handed out, each once."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._seen: set[str] = set()
        self._done_bytes = 0

    def count(self, name: str, num_bytes: int) -> None:
        if self._progress is None or name in self._seen:
            return
        self._seen.add(name)
        self._done_bytes += num_bytes
        self._progress(self._done_bytes, self._total_bytes, name)


def _check_shape(file: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ModelError(
            f"its shape is {list(found)}, but the model's settings call for {list(expected)}",
            file=str(file),
            tensor=name,
        )


class SafetensorsSource(WeightSource):
    """A Hugging Face folder: `model.safetensors`, else shards listed by `model.safetensors.index.json`."""

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        self._folder = folder
        self._files = self._open(folder)
        total = sum(file.tensors[name].num_bytes for name, file in self._files.items())
        self._meter = _Meter(total, progress)

    @staticmethod
    def _open(folder: Path) -> dict[str, SafetensorsFile]:
        """Return each tensor's file."""
        opened = {path.name: SafetensorsFile(path) for path in weight_files(folder)}
        index = shard_index(folder)
        if index is None:
            return {name: file for file in opened.values() for name in file.tensors}
        placed = read_index(index)
        for name, shard in placed.items():
            if name not in opened[shard].tensors:
                raise ModelError(
                    f"{INDEX} says that it is here, but it is not", file=str(opened[shard].path), tensor=name
                )
        for shard_file in opened.values():
            for name in shard_file.tensors:
                if name not in placed:
                    raise ModelError(
                        f"it is here, but {INDEX} does not list it; they belong to different models, fetch them again",
                        file=str(shard_file.path),
                        tensor=name,
                    )
        return {name: opened[shard] for name, shard in placed.items()}

    def names(self) -> Iterator[str]:
        return iter(self._files)

    def has(self, name: str) -> bool:
        return name in self._files

    def file_of(self, name: str) -> str:
        return str(self._files[name].path)

    def get(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        file = self._files.get(name)
        if file is None:
            raise ModelError("the model needs it, but no file has it", file=str(self._folder), tensor=name)
        entry = file.tensors[name]
        _check_shape(file.path, name, entry.shape, shape)
        if entry.dtype not in _DTYPES:
            raise ModelError(
                f"its type, {entry.dtype}, is not supported; supported are: {', '.join(_DTYPES)}",
                file=str(file.path),
                tensor=name,
            )
        self._meter.count(name, entry.num_bytes)
        data = _tensor(file.raw(name), _DTYPES[entry.dtype]).reshape(shape)
        return StoredTensor(name, str(file.path), shape, entry.dtype, data)


class GgufSource(WeightSource):
    """A GGUF file."""

    def __init__(self, file: GgufFile, progress: Progress | None = None) -> None:
        self._file = file
        self._meter = _Meter(file.num_bytes, progress)

    def names(self) -> Iterator[str]:
        return iter(self._file.tensors)

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def file_of(self, name: str) -> str:
        return str(self._file.path)

    def get(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        entry = self._file.tensors.get(name)
        if entry is None:
            raise ModelError(
                "the model needs it, but the file does not have it", file=str(self._file.path), tensor=name
            )
        _check_shape(self._file.path, name, entry.shape, shape)
        self._meter.count(name, entry.num_bytes)
        kind, raw = entry.type.name, self._file.raw(name)
        dequantise = DEQUANTISERS.get(kind)
        if dequantise is None:
            data = _tensor(raw.reshape(-1), _DTYPES[kind]).reshape(shape)
        else:
            data = torch.from_numpy(raw).reshape(*shape[:-1], entry.row_bytes)
        return StoredTensor(name, str(self._file.path), shape, kind, data, dequantise)


class DummySource(WeightSource):
    """Random weights of any shape, for benchmarks: the same for the same name and seed, on every device.

    Values repeat: every tensor is a window into one pool of normal numbers, so that billions cost no more than
    writing them. Whatever is asked for exists; `names` lists nothing.
    """

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, seed: int = 0, *, device: torch.device | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(_POOL_VALUES, generator=generator).to(device or torch.device("cpu"))  # [values]
        self._dtype = dtype
        self._seed = seed

    def names(self) -> Iterator[str]:
        return iter(())

    def has(self, name: str) -> bool:
        return True

    def file_of(self, name: str) -> str:
        return _RANDOM

    def get(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        data = torch.empty(shape, dtype=self._dtype, device=self._pool.device)
        self._fill(data, name)
        return StoredTensor(name, _RANDOM, shape, _NAMES[self._dtype], data)

    def _fill(self, data: Tensor, name: str) -> None:
        """Write the pool over and over, from a place that the name decides."""
        if data.ndim == 1:
            pool = 1 + 0.02 * self._pool if name.endswith("norm.weight") else 0.02 * self._pool
        else:
            # Keeps the variance of activations, whatever the width.
            pool = self._pool * data.shape[-1] ** -0.5
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        pool = pool.roll(int.from_bytes(digest) % _POOL_VALUES).to(self._dtype)
        flat = data.view(-1)
        num_whole = len(flat) // _POOL_VALUES
        flat[: num_whole * _POOL_VALUES].view(num_whole, _POOL_VALUES).copy_(pool.expand(num_whole, _POOL_VALUES))
        flat[num_whole * _POOL_VALUES :] = pool[: len(flat) % _POOL_VALUES]


def _tensor(raw: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """View bytes as numbers; copy only where they do not lie on a multiple of their size. [values]"""
    data = torch.from_numpy(raw)
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
