"""Which way a product of matrices runs fastest on a device: found by trying, and kept in a file.

Of the algorithms that the library would name for a shape, the first is not always the best, and for some numbers of
rows another takes two thirds of its time. Trying takes tens of milliseconds for each number of rows and must not happen
during a capture; what was found is read back when the next process starts. Knows tensors and one file.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.library_product import Library, LibraryProduct, Shape
from penstock.kernels.trial import milliseconds

log = logging.getLogger(__name__)

Product = Callable[[Tensor, Tensor], Tensor]

# Milliseconds of the device for a trial, and of the host for a launch.
_TRIAL, _LAUNCH = 0.2, 0.02
_MOST_RUNS = 12  # of a trial
_ROUNDS = 2  # of trials
_CANDIDATES = 4  # of the library's algorithms; those it names later were never the best by much
_MARGIN = 0.97  # another way must take less than this part of the usual one's time


class ProductTuner:
    """What is known of one device's products."""

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        """`folder` holds what was found before, and what will be; None: nothing is kept."""
        self._library = _open_library(device)
        version = 0 if self._library is None else self._library.version
        made_for = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cuBLASLt {version}"
        digest = hashlib.blake2s(made_for.encode(), digest_size=8).hexdigest()
        self._file = None if folder is None else folder / f"products-{digest}.json"
        self._made_for = made_for
        self._found: dict[str, Any] = {} if self._file is None else _read(self._file)
        self.is_new = not self._found  # nothing is known yet
        self._is_saved = True
        self._end = 0.0  # of trials
        self.num_skipped = 0  # products that were asked for since, and not tried
        self.num_better = 0  # those tried since, of which another way than the usual is faster

    def allow(self, seconds: float) -> None:
        """From now on try for so long what is not known. What is asked later is skipped, to be asked again."""
        self._end = time.monotonic() + seconds
        self.num_skipped = self.num_better = 0

    def product(self, weights: Sequence[Tensor], num_rows: int, out_dtype: torch.dtype) -> LibraryProduct | None:
        """Return the fastest product of a shape, or None where torch's own is as good. weights: [width, depth] each."""
        if self._library is None:
            return None
        width, depth = weights[0].shape
        shape = Shape(num_rows, width, depth, weights[0].dtype, out_dtype)
        name = f"{num_rows} x {width} x {depth}, {shape.dtype} to {out_dtype}"
        if name in self._found:
            known = self._found[name]
            restored = None if known is None else self._library.restore(shape, known)
            if known is None or restored is not None:
                return restored
        if time.monotonic() >= self._end:
            self.num_skipped += 1
            return None
        try:
            found = _fastest(self._library, shape, weights)
        except torch.cuda.OutOfMemoryError:
            return None  # trials take what is left beside the KV cache
        self._found[name] = None if found is None else found.algorithm
        self.num_better += found is not None
        self._is_saved = False
        return found

    def save(self) -> None:
        """Keep what was found since the last time."""
        if self._is_saved or self._file is None:
            return
        self._is_saved = True
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Processes that start together write whole files, each from a part of its own.
            part = self._file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"made for": self._made_for, "found": self._found}))
            part.replace(self._file)
        except OSError as error:
            log.warning("what was found of products cannot be kept, and is found again at the next start: %s", error)


def _open_library(device: torch.device) -> Library | None:
    if torch.version.cuda is None:
        return None
    try:
        return Library(device)
    except OSError:
        return None  # a build of torch that brings it under another name, or none


def _read(file: Path) -> dict[str, Any]:
    """Return what a file says; nothing where there is none or it makes no sense."""
    try:
        found = json.loads(file.read_text())["found"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if _is_choice(value)}


def _is_choice(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(number, int) and 0 <= number < 1 << 64 for number in value)
    return value is None


def _fastest(library: Library, shape: Shape, weights: Sequence[Tensor]) -> LibraryProduct | None:
    """Try the library's algorithms on matrices of one shape."""
    x = torch.randn(shape.rows, shape.depth, dtype=shape.dtype, device=weights[0].device)
    products = library.candidates(shape)[:_CANDIDATES]
    usual = functional.linear if shape.out_dtype == shape.dtype else _wide_linear
    known, *times = _times([usual, *(product.multiply for product in products)], x, weights)
    fastest = min(times, default=known)
    if fastest >= _MARGIN * known:
        return None
    # The library's order decides between equals.
    return next(product for product, took in zip(products, times, strict=True) if _MARGIN * took <= fastest)


def _wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _times(runs: Sequence[Product], x: Tensor, weights: Sequence[Tensor]) -> list[float]:
    """Return the best time of each. They take turns: a device slows down and recovers within milliseconds."""
    for run in runs:
        run(x, weights[0])  # which loads what it launches
    once = milliseconds(runs[0], x, weights, count=1, launch=_LAUNCH)
    count = min(max(round(_TRIAL / once), 1), _MOST_RUNS)
    found = [[milliseconds(run, x, weights, count=count, launch=_LAUNCH) for run in runs] for _ in range(_ROUNDS)]
    return [min(times) for times in zip(*found, strict=True)]
