"""Whether a head that is saved beside the embedding it is said to be tied to is one of its own.

Then it counts, for the logits and for the memory that the model takes. Knows safetensors; GGUF ties a head by leaving
it out. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.parameters import WeightLayout, head_tensor, locate
from penstock.models.safetensors_file import SafetensorsFile
from penstock.models.spec import ModelSpec

# Values compared together: bounds the memory that it takes.
_CHUNK_VALUES = 1 << 20

_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


def with_its_head(spec: ModelSpec, layout: WeightLayout, paths: Sequence[Path]) -> ModelSpec:
    """Return the spec untied where the files hold a head that differs from the embedding. Raises ModelError."""
    if not spec.tie_embeddings:
        return spec
    files = {name: file for file in map(SafetensorsFile, paths) for name in file.tensors}
    untied = replace(spec, tie_embeddings=False)
    head = head_tensor(layout, files.__contains__)
    embedding = locate(untied, layout, files.__contains__)["embedding"].tensor
    if head not in files or embedding not in files:
        return spec
    return spec if _are_equal(files[embedding], embedding, files[head], head) else untied


def _are_equal(file: SafetensorsFile, name: str, other_file: SafetensorsFile, other: str) -> bool:
    first, second = file.tensors[name], other_file.tensors[other]
    if first.shape != second.shape or not {first.dtype, second.dtype} <= _TYPES.keys():
        return False
    pairs = zip(_values(file, name), _values(other_file, other), strict=True)
    return all(np.array_equal(left, right) for left, right in pairs)


def _values(file: SafetensorsFile, name: str) -> Iterator[NDArray[Any]]:
    """Give a tensor's numbers, a chunk at a time."""
    kind = file.tensors[name].dtype
    stored = file.raw(name).view(_TYPES[kind])
    for start in range(0, len(stored), _CHUNK_VALUES):
        chunk = stored[start : start + _CHUNK_VALUES]
        # A bfloat16 is the upper half of a float32.
        yield (chunk.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else chunk
