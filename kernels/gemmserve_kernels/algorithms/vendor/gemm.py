"""The vendor's BLAS (cuBLAS, hipBLAS) behind the same contract, called through CuPy's thin wrappers.

`blas.lower` decides the calls; here are only pointers, types and the copies it asked for.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.problem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.algorithms.vendor.blas import BlasPlan
    from gemmserve_kernels.problem.problem import GemmProblem

_ALIGNMENT: Final = 16


def run_gemm(problem: GemmProblem, plan: BlasPlan, a: Any, b: Any, c: Any | None, out: Any) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`; CuPy arrays on the current device.

    Raises DeviceError for a status of the BLAS; CuPy's own errors are the caller's to translate.
    """
    with _blas_errors():
        operands = (
            _operand(a, problem.trans_a, problem, plan, copied=plan.a.copied),
            _operand(b, problem.trans_b, problem, plan, copied=plan.b.copied),
        )
        shape = (*problem.batch_shape, problem.m, problem.n)
        result = _empty(shape, plan.dtype) if plan.d.copied else out
        beta = problem.beta if c is not None else 0j
        if beta != 0:
            result[...] = _joined(c) if problem.planar else c
        _call(problem, plan, *operands, result, beta)
        if plan.d.copied:
            _store(result, out, planar=problem.planar)


def _operand(array: Any, trans: str, problem: GemmProblem, plan: BlasPlan, *, copied: bool) -> Any:
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


def _call(problem: GemmProblem, plan: BlasPlan, a: Any, b: Any, d: Any, beta: complex) -> None:
    from cupy.cuda import cublas, device, runtime

    flags = {"N": cublas.CUBLAS_OP_N, "T": cublas.CUBLAS_OP_T, "C": cublas.CUBLAS_OP_C}
    dtype = getattr(runtime, _DATA_TYPES[plan.dtype.name])
    compute, algorithm = _compute_type(plan, problem.compute)
    alpha_scalar, beta_scalar = _scalar(problem.alpha, plan.dtype), _scalar(beta, plan.dtype)
    item = plan.dtype.itemsize
    handle = device.get_cublas_handle()
    with _host_scalars(handle):
        for offset_a, offset_b, offset_d in plan.offsets():
            left = (plan.a, a.data.ptr + offset_a * item, plan.m)
            right = (plan.b, b.data.ptr + offset_b * item, plan.n)
            if plan.swapped:
                left, right = right, left
            (x, x_pointer, rows), (y, y_pointer, columns) = left, right
            cublas.gemmStridedBatchedEx(
                handle, flags[x.trans], flags[y.trans], rows, columns, plan.k,
                alpha_scalar.data, x_pointer, dtype, x.leading, x.batch_stride,
                y_pointer, dtype, y.leading, y.batch_stride,
                beta_scalar.data, d.data.ptr + offset_d * item, dtype, plan.d.leading, plan.d.batch_stride,
                plan.batch, compute, algorithm,
            )  # fmt: skip


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


@contextmanager
def _blas_errors() -> Iterator[None]:
    """A status of the BLAS as DeviceError."""
    from cupy.cuda import cublas

    try:
        yield
    except cublas.CUBLASError as error:
        raise DeviceError(f"the vendor's BLAS: {error}") from error


@contextmanager
def _host_scalars(handle: int) -> Iterator[None]:
    """The scalars are read from host memory meanwhile, whatever the caller's own use of CuPy's handle is."""
    from cupy.cuda import cublas

    mode = cublas.getPointerMode(handle)
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
    try:
        yield
    finally:
        cublas.setPointerMode(handle, mode)
