"""Products of half-precision matrices by cuBLASLt, with the algorithm that was fastest when it was tried.

torch asks the library for one algorithm and takes it. Of the few that the library would name, another is often faster
for some numbers of rows, at times by half. Trying takes milliseconds for each shape and must not happen during a
capture; running an algorithm is one call that can be captured. Knows tensors and one library.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.trial import milliseconds

# Names of the library's interface, by value.
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float32: _FLOAT32}
_TRANSPOSE_LEFT, _TRANSPOSED = 3, 1
_MAX_WORKSPACE_BYTES = 1

_WORKSPACE_BYTES = 32 << 20
_CANDIDATES = 8
_TRIAL, _LAUNCH = 0.2, 0.02  # milliseconds of the device for a trial, and of the host for a launch
_ROUNDS = 3  # of trials between the last that are left
_MANY_ROWS, _FEW_CANDIDATES = 1024, 4  # with so many rows trials take long
_MARGIN = 0.97  # another algorithm must take less than this part of the time of one that the library prefers


class _Heuristic(ctypes.Structure):
    """The library's answer: an algorithm and what it needs."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """Of x @ weight.T. x: [rows, depth]; weight: [width, depth]."""

    rows: int
    width: int
    depth: int
    dtype: torch.dtype
    out_dtype: torch.dtype


class LibraryProduct:
    """One shape's product by one algorithm."""

    def __init__(self, library: "Library", shape: Shape, descriptors: tuple[ctypes.c_void_p, ...], found: _Heuristic):
        self._library = library
        self._shape = shape
        self._descriptors = descriptors
        self._algorithm = found.algorithm

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x @ weight.T."""
        shape = self._shape
        assert x.is_contiguous() and weight.is_contiguous()
        out = x.new_empty(shape.rows, shape.width, dtype=shape.out_dtype)
        self._library.run(self._descriptors, self._algorithm, weight, x, out)
        return out


class Library:
    """cuBLASLt on one device: one product at a time, in stream order."""

    def __init__(self, device: torch.device) -> None:
        assert torch.version.cuda is not None
        self._lib = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")  # torch has loaded it
        self._handle = ctypes.c_void_p()
        self._check(self._lib.cublasLtCreate(ctypes.byref(self._handle)))
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def candidates(self, shape: Shape) -> list[LibraryProduct]:
        """Return products of a shape by the algorithms that the library would name, its favourite first."""
        descriptors = self._describe(shape)
        preference = ctypes.c_void_p()
        self._check(self._lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        room = ctypes.c_uint64(_WORKSPACE_BYTES)
        self._check(
            self._lib.cublasLtMatmulPreferenceSetAttribute(
                preference, _MAX_WORKSPACE_BYTES, ctypes.byref(room), ctypes.sizeof(room)
            )
        )
        found = (_Heuristic * _CANDIDATES)()
        count = ctypes.c_int()
        operation, left, right, out = descriptors
        self._check(
            self._lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle, operation, left, right, out, out, preference, _CANDIDATES, found, ctypes.byref(count)
            )
        )
        self._check(self._lib.cublasLtMatmulPreferenceDestroy(preference))
        return [LibraryProduct(self, shape, descriptors, answer) for answer in found[: count.value] if not answer.state]

    def run(
        self, descriptors: tuple[ctypes.c_void_p, ...], algorithm: object, weight: Tensor, x: Tensor, out: Tensor
    ) -> None:
        operation, left, right, result = descriptors
        where = ctypes.c_void_p(out.data_ptr())
        self._check(
            self._lib.cublasLtMatmul(
                self._handle,
                operation,
                ctypes.byref(self._one),
                ctypes.c_void_p(weight.data_ptr()),
                left,
                ctypes.c_void_p(x.data_ptr()),
                right,
                ctypes.byref(self._zero),
                where,
                result,
                where,
                result,
                algorithm,
                ctypes.c_void_p(self._workspace.data_ptr()),
                ctypes.c_size_t(_WORKSPACE_BYTES),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
        )

    def _describe(self, shape: Shape) -> tuple[ctypes.c_void_p, ...]:
        """Return the operation and its three matrices. The library counts by columns, so it sees all transposed."""
        operation = ctypes.c_void_p()
        self._check(self._lib.cublasLtMatmulDescCreate(ctypes.byref(operation), _COMPUTE_FLOAT32, _FLOAT32))
        transposed = ctypes.c_int32(_TRANSPOSED)
        self._check(
            self._lib.cublasLtMatmulDescSetAttribute(
                operation, _TRANSPOSE_LEFT, ctypes.byref(transposed), ctypes.sizeof(transposed)
            )
        )
        return (
            operation,
            self._matrix(shape.depth, shape.width, shape.dtype),
            self._matrix(shape.depth, shape.rows, shape.dtype),
            self._matrix(shape.width, shape.rows, shape.out_dtype),
        )

    def _matrix(self, rows: int, columns: int, dtype: torch.dtype) -> ctypes.c_void_p:
        matrix = ctypes.c_void_p()
        self._check(
            self._lib.cublasLtMatrixLayoutCreate(
                ctypes.byref(matrix),
                _TYPES[dtype],
                ctypes.c_uint64(rows),
                ctypes.c_uint64(columns),
                ctypes.c_int64(rows),
            )
        )
        return matrix

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"cuBLASLt answered with status {status}")


@cache
def _library(device: torch.device) -> Library | None:
    """The library's handle and workspace, which all products of a device share."""
    if torch.version.cuda is None:
        return None
    try:
        return Library(device)
    except OSError:
        return None  # a build of torch that brings it under another name, or none


def fastest_product(weights: Sequence[Tensor], num_rows: int, out_dtype: torch.dtype) -> LibraryProduct | None:
    """Try the library's algorithms on matrices of one shape and return the fastest, or None where torch's is as good.

    weights: [width, depth] each.
    """
    library = _library(weights[0].device)
    if library is None:
        return None
    width, depth = weights[0].shape
    x = torch.randn(num_rows, depth, dtype=weights[0].dtype, device=weights[0].device)
    products = library.candidates(Shape(num_rows, width, depth, x.dtype, out_dtype))
    if num_rows > _MANY_ROWS:
        products = products[:_FEW_CANDIDATES]
    else:
        trials = _times([product.multiply for product in products], x, weights, rounds=1)
        # Those that are left stay in the library's order.
        products = [product for product, time in zip(products, trials, strict=True) if time <= sorted(trials)[:2][-1]]
    usual = _linear if out_dtype == x.dtype else _wide_linear
    known, *times = _times([usual, *(product.multiply for product in products)], x, weights, rounds=_ROUNDS)
    fastest = min(times, default=known)
    if fastest >= _MARGIN * known:
        return None
    # The library's order decides between equals, so that a restart seldom decides otherwise.
    return next(product for product, time in zip(products, times, strict=True) if _MARGIN * time <= fastest)


def _times(
    runs: Sequence[Callable[[Tensor, Tensor], Tensor]], x: Tensor, weights: Sequence[Tensor], *, rounds: int
) -> list[float]:
    """Return the best time of each. They take turns: a device slows down and recovers within milliseconds."""
    found = [[milliseconds(run, x, weights, trial=_TRIAL, launch=_LAUNCH) for run in runs] for _ in range(rounds)]
    return [min(times) for times in zip(*found, strict=True)]


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight)


def _wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
