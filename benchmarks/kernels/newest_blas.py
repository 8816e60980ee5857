"""A newer cuBLAS than CuPy's, for what the vendor has learned since: products in plain arithmetic, and in double those
that it emulates on the tensor cores.

`GEMMSERVE_RIVAL_CUBLAS` is the path of the library (`librivals.so.13` of benchmarks/device/cut_rival.py, its
libcublasLt beside it): under a name of its own it lives in one process with CuPy's. Without the variable there is no
such rival. Numbers are those of cublas_api.h (13.10) and of library_types.h (CUDA 13.0). Run as a script it says which
version that is, for which no device is needed.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache

import numpy as np

from gemmserve_kernels import DeviceError

VARIABLE = "GEMMSERVE_RIVAL_CUBLAS"
NAME = "newest cuBLAS"
TYPES = {"float16": 2, "float32": 0, "float64": 1, "complex64": 4, "complex128": 5}
"""cudaDataType."""
COMPUTE_32F, COMPUTE_32F_FAST_TF32, COMPUTE_64F, COMPUTE_64F_EMULATED = 68, 77, 70, 79
"""cublasComputeType_t."""
OPERATIONS = {"N": 0, "T": 1, "C": 2}
"""cublasOperation_t."""
EAGER = 2
"""cublasEmulationStrategy_t: wherever possible. What is the default declines on compute capability 9.0."""
DYNAMIC, FIXED = 0, 1
"""cudaEmulationMantissaControl."""
ALGORITHM_DEFAULT = -1
"""cublasGemmAlgo_t."""
WORKSPACE = 64 << 20
EMULATED_BYTES = 64
"""Workspace of an emulated product for every complex element of operands and result: it took 44 of them at most."""

Handle, Pointer, Long, Int = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_BEFORE = (Handle, Int, Int, Long, Long, Long, Pointer)
SIGNATURES = {
    "cublasGetProperty": (Int, Pointer),
    "cublasCreate_v2": (Pointer,),
    "cublasSetStream_v2": (Handle, Pointer),
    "cublasSetWorkspace_v2": (Handle, Pointer, ctypes.c_size_t),
    "cublasSetEmulationStrategy": (Handle, Int),
    "cublasSetFixedPointEmulationMantissaControl": (Handle, Int),
    "cublasSetFixedPointEmulationMaxMantissaBitCount": (Handle, Int),
    "cublasSetFixedPointEmulationMantissaBitCountPointer": (Handle, Pointer),
    "cublasGemmEx_64": (
        *_BEFORE, Pointer, Int, Long, Pointer, Int, Long, Pointer, Pointer, Int, Long, Int, Int,
    ),
    "cublasGemmStridedBatchedEx_64": (
        *_BEFORE, Pointer, Int, Long, Long, Pointer, Int, Long, Long, Pointer, Pointer, Int, Long, Long, Long, Int, Int,
    ),
}  # fmt: skip
"""Arguments; all of these return a cublasStatus_t."""


@dataclass(frozen=True)
class Mode:
    """How it multiplies: in plain arithmetic, or emulated with `bits` of the mantissa, where 0 leaves them to it."""

    name: str = NAME
    bits: int | None = None

    @property
    def emulated(self):
        """Whether the product is one of integers."""
        return self.bits is not None


PLAIN = Mode()
EMULATED = (Mode(f"{NAME} 55 bits", 55), Mode(f"{NAME} 47 bits", 47), Mode(f"{NAME} dynamic", 0))


def modes(dtype, compute="auto"):
    """Those that compete in a case: emulated ones beside what we choose ourselves from data in double."""
    return (PLAIN, *EMULATED) if dtype in {"float64", "complex128"} and compute in {"auto", "ozaki"} else (PLAIN,)


def supports(case):
    """Whether a product of this case is one call."""
    plain = case.layout == "interleaved" and case.order == "C" and (case.alpha, case.beta) == (1, 0)
    return plain and case.dtype in TYPES and {case.trans_a, case.trans_b} <= set(OPERATIONS)


def compute_type(case, mode):
    """The number of the arithmetic."""
    if case.dtype in {"float64", "complex128"}:
        return COMPUTE_64F_EMULATED if mode.emulated else COMPUTE_64F
    return COMPUTE_32F_FAST_TF32 if case.compute in {"tf32", "1xtf32"} else COMPUTE_32F


def workspace_bytes(case, mode):
    """Room that a product is given."""
    if not mode.emulated:
        return WORKSPACE
    elements = case.batch * (case.m * case.k + case.k * case.n + case.m * case.n)
    return WORKSPACE + elements * EMULATED_BYTES // (1 if case.dtype == "complex128" else 2)


def available():
    """Whether a newer library has been named."""
    return bool(os.environ.get(VARIABLE))


@cache
def library():
    """The library, with its signatures. Raises DeviceError."""
    path = os.environ[VARIABLE]
    try:
        found = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise DeviceError(f"{VARIABLE}: {error}") from None
    functions = {name: getattr(found, name) for name in SIGNATURES}
    for name, arguments in SIGNATURES.items():
        functions[name].argtypes, functions[name].restype = arguments, Int
    return functions


def call(name, *arguments):
    """Call a function of the library. Raises DeviceError where it does not succeed."""
    if status := library()[name](*arguments):
        raise DeviceError(f"{name} of {NAME}: status {status}")


def version():
    """Return the version, "13.10.0"."""
    parts = []
    for which in range(3):
        value = ctypes.c_int()
        call("cublasGetProperty", which, ctypes.byref(value))
        parts.append(str(value.value))
    return ".".join(parts)


class Session:
    """A handle for one mode."""

    def __init__(self, mode):
        import cupy

        self._cupy, self._handle, self._bound = cupy, ctypes.c_void_p(), None
        call("cublasCreate_v2", ctypes.byref(self._handle))
        # Memory of the host that the device sees: whichever of them writes.
        self._pinned = cupy.cuda.alloc_pinned_memory(4)
        self._kept = np.frombuffer(self._pinned, np.int32, 1)
        self._kept[0] = 0
        if mode.emulated:
            call("cublasSetEmulationStrategy", self._handle, EAGER)
            call("cublasSetFixedPointEmulationMantissaControl", self._handle, FIXED if mode.bits else DYNAMIC)
            if mode.bits:
                call("cublasSetFixedPointEmulationMaxMantissaBitCount", self._handle, mode.bits)
            call("cublasSetFixedPointEmulationMantissaBitCountPointer", self._handle, self._kept.ctypes.data)

    def bits(self):
        """Bits of the mantissa that the last product kept, when it is done; -1 or -2: it was not emulated."""
        self._cupy.cuda.runtime.deviceSynchronize()
        return int(self._kept[0])

    def bind(self, workspace):
        """Enqueue on CuPy's stream from now on, with this room: a stream takes it away again."""
        stream = self._cupy.cuda.get_current_stream().ptr
        if self._bound != (stream, workspace.data.ptr):
            call("cublasSetStream_v2", self._handle, stream)
            call("cublasSetWorkspace_v2", self._handle, workspace.data.ptr, workspace.nbytes)
            self._bound = (stream, workspace.data.ptr)

    def product(self, case, compute, a, b, workspace):
        """op(a) op(b) in C order: column by column the result is op(b)^T op(a)^T."""
        self.bind(workspace)
        outer = (case.batch,) if case.batch > 1 else ()
        d = self._cupy.empty((*outer, case.m, case.n), case.dtype)
        code = TYPES[case.dtype]
        left = [b.data.ptr, code, b.shape[-1]]
        right = [a.data.ptr, code, a.shape[-1]]
        result = [d.data.ptr, code, case.n]
        before = (
            self._handle, OPERATIONS[case.trans_b], OPERATIONS[case.trans_a], case.n, case.m, case.k, one(case.dtype),
        )  # fmt: skip
        after = (compute, ALGORITHM_DEFAULT)
        if case.batch == 1:
            call("cublasGemmEx_64", *before, *left, *right, zero(case.dtype), *result, *after)
            return d
        left.append(case.k * case.n)
        right.append(case.m * case.k)
        result += [case.m * case.n, case.batch]
        call("cublasGemmStridedBatchedEx_64", *before, *left, *right, zero(case.dtype), *result, *after)
        return d


@cache
def session(mode):
    """The handle of a mode, for the life of the process."""
    return Session(mode)


@cache
def factors(dtype):
    """1 and 0 as the product's scale type has them, for as long as anybody points at them."""
    return np.array([1, 0], np.float32 if dtype == "float16" else dtype)


def one(dtype):
    """The address of alpha."""
    return factors(dtype).ctypes.data


def zero(dtype):
    """The address of beta."""
    return one(dtype) + factors(dtype).itemsize


def rivals(case, sets):
    """(mode, run, bits) of all that can compute a case; they share one workspace. `run(i)` multiplies the i-th set and
    returns D, or raises DeviceError; `bits()` are those that the last one kept.
    """
    import cupy

    if not available() or not supports(case):
        return []
    every = modes(case.dtype, case.compute)
    workspace = cupy.empty(max(workspace_bytes(case, mode) for mode in every), cupy.uint8)
    return [(mode, _runner(case, sets, mode, workspace), _bits(mode)) for mode in every]


def _runner(case, sets, mode, workspace):
    compute = compute_type(case, mode)

    def run(i):
        arrays = sets[i % len(sets)]
        return session(mode).product(case, compute, arrays["a"], arrays["b"], workspace)

    return run


def _bits(mode):
    return lambda: session(mode).bits()


if __name__ == "__main__":
    print(NAME, version())
