"""The vendor's BLAS (cuBLAS, hipBLAS) behind the same contract, called through CuPy's thin wrappers.

`blas.lower` decides the calls; here are only pointers, types and the copies it asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.problem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.algorithms.vendor.blas import BlasPlan
    from gemmserve_kernels.problem.problem import GemmProblem

_ALIGNMENT: Final = 16


def run_gemm(problem: GemmProblem, plan: BlasPlan, a: Any, b: Any, c: Any | None, out: Any) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`; CuPy arrays on the current device.

    Raises DeviceError for a status of the BLAS; CuPy's own errors are the caller's to translate.
    """
    BlasCall(problem, plan).run(a, b, c, out)


class BlasCall:
    """A product by the vendor's BLAS, its arguments but for addresses worked out once."""

    def __init__(self, problem: GemmProblem, plan: BlasPlan) -> None:
        from cupy.cuda import cublas, device, runtime

        self._problem = problem
        self._plan = plan
        self._blas = cublas
        self._handle = device.get_cublas_handle
        flags = {"N": cublas.CUBLAS_OP_N, "T": cublas.CUBLAS_OP_T, "C": cublas.CUBLAS_OP_C}
        dtype, d_dtype = (getattr(runtime, _DATA_TYPES[x.name]) for x in (plan.dtype, plan.d_dtype))
        x, y, rows, columns = (plan.a, plan.b, plan.m, plan.n)
        if plan.swapped:
            x, y, rows, columns = y, x, columns, rows
        self._shape = (flags[x.trans], flags[y.trans], rows, columns, plan.k)
        self._x, self._y = ((dtype, z.leading, z.batch_stride) for z in (x, y))
        self._d = (d_dtype, plan.d.leading, plan.d.batch_stride)
        self._kind = (plan.batch, *_compute_type(plan, problem.compute))
        item, d_item = plan.dtype.itemsize, plan.d_dtype.itemsize
        self._offsets = [(a * item, b * item, d * d_item) for a, b, d in plan.offsets()]
        self._alpha, self._beta, self._zero = (_scalar(x, plan.dtype) for x in (problem.alpha, problem.beta, 0j))
        self._copies = plan.a.copied or plan.b.copied or plan.d.copied

    def run(self, a: Any, b: Any, c: Any | None, out: Any) -> None:
        """Enqueues it on the current stream of the current device, see run_gemm."""
        if c is None and (enqueue := self.enqueue) is not None:
            enqueue((a.data.ptr, b.data.ptr, out.data.ptr))
            return
        problem, plan = self._problem, self._plan
        x = operand(a, problem.trans_a, problem, plan, copied=plan.a.copied)
        y = operand(b, problem.trans_b, problem, plan, copied=plan.b.copied)
        shape = (*problem.batch_shape, problem.m, problem.n)
        result = _empty(shape, plan.d_dtype) if plan.d.copied else out
        beta = self._zero if c is None else self._beta
        if c is not None and problem.beta != 0:
            result[...] = _joined(c) if problem.planar else c
        self._call(x.data.ptr, y.data.ptr, result.data.ptr, beta)
        if plan.d.copied:
            _store(result, out, planar=problem.planar)

    @property
    def enqueue(self) -> Callable[[tuple[int, ...]], None] | None:
        """The call without C, for the addresses of A, B and the result; None where arrays may have to be copied."""
        return None if self._copies or self._plan.dtype == np.float16 else self.enqueue_at

    def enqueue_at(self, addresses: tuple[int, ...]) -> None:
        """The call without C, for the addresses of A, B and the result, which lie as the plan says and are not copied;
        those of float16 at multiples of 16.
        """
        a, b, d = addresses
        self._call(a, b, d, self._zero)

    def _call(self, a: int, b: int, d: int, beta: _HostScalar) -> None:
        blas, swapped = self._blas, self._plan.swapped
        multiply, on_host = blas.gemmStridedBatchedEx, blas.CUBLAS_POINTER_MODE_HOST
        try:
            handle = self._handle()
            # The scalars are read from host memory meanwhile, whatever the caller's own use of CuPy's handle is.
            mode = blas.getPointerMode(handle)
            if mode != on_host:
                blas.setPointerMode(handle, on_host)
            try:
                for offset_a, offset_b, offset_d in self._offsets:
                    x, y = a + offset_a, b + offset_b
                    if swapped:
                        x, y = y, x
                    multiply(
                        handle, *self._shape, self._alpha.data, x, *self._x, y, *self._y,
                        beta.data, d + offset_d, *self._d, *self._kind,
                    )  # fmt: skip
            finally:
                if mode != on_host:
                    blas.setPointerMode(handle, mode)
        except blas.CUBLASError as error:
            raise DeviceError(f"the vendor's BLAS: {error}") from error


@dataclass(frozen=True)
class BlasRoutine:
    """A product by the vendor's BLAS among the launches of a program (device.replay.Routine): without C, of operands
    that the plan does not copy.
    """

    problem: GemmProblem
    plan: BlasPlan

    def enqueue(self, addresses: tuple[int, ...]) -> None:
        """Enqueues it on the current stream, for the addresses of A, B and the result. Raises DeviceError."""
        self._call.enqueue_at(addresses)

    @cached_property
    def _call(self) -> BlasCall:
        return BlasCall(self.problem, self.plan)


def operand(array: Any, trans: str, problem: GemmProblem, plan: BlasPlan, *, copied: bool) -> Any:
    """The array that the plan describes: `array` itself, or op(array) copied in C order."""
    if not copied:
        # cuBLAS assumes what the first matrix's strides promise (see blas.py); a view may still begin anywhere.
        unaligned = plan.dtype == np.float16 and array.data.ptr % _ALIGNMENT
        return _same_strides(array) if unaligned else array
    matrix = _joined(array) if problem.planar else array
    matrix = matrix.swapaxes(-1, -2) if trans in {"T", "C"} else matrix
    copy = _empty(matrix.shape, plan.dtype)
    copy[...] = matrix
    if trans in {"C", "R"} and matrix.dtype.kind == "c":
        import cupy

        cupy.conjugate(copy, out=copy)
    return copy


def _same_strides(array: Any) -> Any:
    """A copy at an aligned address with the strides of `array`."""
    import cupy

    low = sum(min(0, stride * (extent - 1)) for stride, extent in zip(array.strides, array.shape, strict=True))
    high = sum(max(0, stride * (extent - 1)) for stride, extent in zip(array.strides, array.shape, strict=True))
    memory = cupy.cuda.alloc(high - low + array.dtype.itemsize + _ALIGNMENT)
    start = -low % _ALIGNMENT - low
    copy = cupy.ndarray(array.shape, array.dtype, memory + start, array.strides)
    copy[...] = array
    return copy


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    import cupy

    return cupy.empty(shape, dtype)


def _joined(planes: Any) -> Any:
    """A complex array from (re, im)."""
    joined = _empty(planes.shape[1:], np.result_type(planes.dtype, np.complex64))
    joined.real = planes[0]
    joined.imag = planes[1]
    return joined


def _store(result: Any, out: Any, *, planar: bool) -> None:
    if planar:
        out[0] = result.real
        out[1] = result.imag
    else:
        out[...] = result


@dataclass(frozen=True)
class _HostScalar:
    """A factor in host memory and its address."""

    array: np.ndarray[Any, Any]
    data: int


@lru_cache(1024)
def _scalar(value: complex, dtype: np.dtype[Any]) -> _HostScalar:
    """A factor in the type that the BLAS computes in."""
    scale = np.dtype(np.float32) if dtype == np.float16 else dtype
    array = np.array(value if scale.kind == "c" else complex(value).real, scale)
    return _HostScalar(array, array.ctypes.data)


_DATA_TYPES: Final = {
    "float16": "CUDA_R_16F",
    "float32": "CUDA_R_32F",
    "float64": "CUDA_R_64F",
    "complex64": "CUDA_C_32F",
    "complex128": "CUDA_C_64F",
}


def _compute_type(plan: BlasPlan, compute: str) -> tuple[int, int]:
    """Return the type that the BLAS computes in, and its algorithm number: the compute types of CUDA 11, the data types
    of hipBLAS.
    """
    from cupy.cuda import cublas, runtime

    double = plan.dtype.name in {"float64", "complex128"}
    if runtime.is_hip:
        name = "CUDA_R_32F" if plan.dtype == np.float16 else _DATA_TYPES[plan.dtype.name]
        return getattr(runtime, name), cublas.CUBLAS_GEMM_DEFAULT
    if compute == "tf32":
        return cublas.CUBLAS_COMPUTE_32F_FAST_TF32, cublas.CUBLAS_GEMM_DEFAULT
    return cublas.CUBLAS_COMPUTE_64F if double else cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT
