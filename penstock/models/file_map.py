"""A file's bytes as memory.

Maps a whole file once; pages are read when they are touched. Knows nothing of what the bytes mean.
"""

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError, ModelNotFound

# Where the platform has it: a file larger than memory can be mapped although the mapping is private.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0)
_POINTER = b"version https://git-lfs."


def map_file(path: Path) -> NDArray[np.uint8]:
    """Return the file as bytes without reading it. The file may be replaced meanwhile, but must not be cut.

    The mapping is private and writable, because torch wants writable memory; nothing written would reach the file.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelError("the file is empty; fetch it again", file=str(path))
            refuse_pointer(path)
            mapped = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
    except FileNotFoundError as error:
        raise ModelNotFound("there is no such file", file=str(path)) from error
    except OSError as error:
        raise ModelError(f"the file cannot be read ({error.strerror})", file=str(path)) from error
    return np.frombuffer(mapped, dtype=np.uint8)


def refuse_pointer(path: Path) -> None:
    """Raise ModelError where the file is what Git leaves in place of a large one."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
    except OSError:
        return  # whoever reads all of it says what is wrong
    if start == _POINTER:
        advice = "run `git lfs install` and `git lfs pull` in its folder"
        raise ModelError(f"this is Git's pointer to the file, not the file: {advice}", file=str(path))
