"""Launching kernels, or only having them compiled: many at once, before the first of them runs.

Compiled one by one as they are first launched, a model's kernels take most of a first start. A step that is rehearsed
within `compiling_ahead` asks for all of them and launches none. Knows nothing of what the kernels do.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

# The compiler lets other threads run for two thirds of its time, and the longest kernel takes a fourth of all: more
# threads than these gain nothing.
_MOST_THREADS = 8

_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)


def launcher(kernel: Any, grid: Sequence[int]) -> Callable[..., Any]:
    """Return what launches a kernel over a grid, or, within `compiling_ahead`, has it compiled for the same arguments.

    Then nothing is written: whatever another kernel or torch finds its way by must be launched directly.
    """
    if _only_compiles.get():
        return functools.partial(kernel.warmup, grid=grid)
    return kernel[grid]  # type: ignore[no-any-return]


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Have kernels compiled by other threads instead of launched; at the end all of them are.

    One that cannot be compiled raises when it is first launched, as it would have without this.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS), "penstock-compile") as threads:
        token = _only_compiles.set(True)
        try:
            with triton.AsyncCompileMode(threads, ignore_errors=True):
                yield
        finally:
            _only_compiles.reset(token)
