"""Products of half-precision matrices by cuBLASLt, with an algorithm of one's choice.

torch asks the library for one algorithm and takes it; here all that the library would name can be had. Running one is a
call that can be captured. Knows tensors and one library.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Names of the library's interface, by value.
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float32: _FLOAT32}
_TRANSPOSE_LEFT, _TRANSPOSED = 3, 1
_MAX_WORKSPACE_BYTES = 1

_WORKSPACE_BYTES = 32 << 20
_MOST_ALGORITHMS = 8
_ALGORITHM = ctypes.c_uint64 * 8  # the library's own form of one


class _Heuristic(ctypes.Structure):
    """The library's answer: an algorithm and what it needs."""

    _fields_ = (
        ("algorithm", _ALGORITHM),
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

    def __init__(
        self, library: "Library", shape: Shape, descriptors: tuple[ctypes.c_void_p, ...], algorithm: Sequence[int]
    ) -> None:
        self._library = library
        self._shape = shape
        self._descriptors = descriptors
        self._algorithm = _ALGORITHM(*algorithm)

    @property
    def algorithm(self) -> list[int]:
        """Numbers that mean something to this version of the library alone."""
        return list(self._algorithm)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x @ weight.T."""
        shape = self._shape
        assert x.is_contiguous() and weight.is_contiguous()
        out = x.new_empty(shape.rows, shape.width, dtype=shape.out_dtype)
        self._library.run(self._descriptors, self._algorithm, weight, x, out, add=False)
        return out

    def add(self, x: Tensor, weight: Tensor, total: Tensor) -> None:
        """Add x @ weight.T to the total in place."""
        assert x.is_contiguous() and weight.is_contiguous() and total.is_contiguous()
        assert total.dtype == self._shape.out_dtype
        self._library.run(self._descriptors, self._algorithm, weight, x, total, add=True)


class Library:
    """cuBLASLt on one device: one product at a time, in stream order."""

    def __init__(self, device: torch.device) -> None:
        assert torch.version.cuda is not None
        # Raises OSError where torch has not loaded it under this name.
        self._lib = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
        self._handle = ctypes.c_void_p()
        self._check(self._lib.cublasLtCreate(ctypes.byref(self._handle)))
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    @property
    def version(self) -> int:
        self._lib.cublasLtGetVersion.restype = ctypes.c_size_t
        found: int = self._lib.cublasLtGetVersion()
        return found

    def restore(self, shape: Shape, algorithm: Sequence[int]) -> LibraryProduct | None:
        """Return the product of a shape by an algorithm that was found before, or None where it cannot be run."""
        if len(algorithm) != len(_ALGORITHM()):
            return None
        descriptors = self._describe(shape)
        operation, left, right, out = descriptors
        answer = _Heuristic()
        chosen = _ALGORITHM(*algorithm)
        status = self._lib.cublasLtMatmulAlgoCheck(
            self._handle, operation, left, right, out, out, chosen, ctypes.byref(answer)
        )
        if status != 0 or answer.workspace_bytes > _WORKSPACE_BYTES:
            return None
        return LibraryProduct(self, shape, descriptors, algorithm)

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
        found = (_Heuristic * _MOST_ALGORITHMS)()
        count = ctypes.c_int()
        operation, left, right, out = descriptors
        self._check(
            self._lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle, operation, left, right, out, out, preference, _MOST_ALGORITHMS, found, ctypes.byref(count)
            )
        )
        self._check(self._lib.cublasLtMatmulPreferenceDestroy(preference))
        return [
            LibraryProduct(self, shape, descriptors, answer.algorithm)
            for answer in found[: count.value]
            if not answer.state
        ]

    def run(
        self,
        descriptors: tuple[ctypes.c_void_p, ...],
        algorithm: object,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        *,
        add: bool,
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
                ctypes.byref(self._one if add else self._zero),
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
