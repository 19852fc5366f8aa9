"""Which safetensors files hold a folder's weights. Looks at names and at the index; opens none of them. No numpy."""

import json
import os
from pathlib import Path

from penstock.errors import ModelError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_INDEX_BYTES = 100_000_000


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
        index = json.loads(path.read_bytes(), object_pairs_hook=without_duplicates)
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


def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object's pairs as a dict. Raises ValueError where a name appears twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result
