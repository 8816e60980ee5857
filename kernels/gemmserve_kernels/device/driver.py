"""The few calls of the CUDA driver that CuPy does not offer or that are cheaper without it, through ctypes.

Every function works on the current context of the thread. Errors are DeviceError. (CUDA driver API, sections 6.14, 6.22
and 6.31; structures of cuda.h.)
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

from gemmserve_kernels.problem.errors import DeviceError

_LIBRARIES: Final = ("libcuda.so.1", "nvcuda.dll")
_EARLY_START: Final = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; of the union its first word."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )

    @classmethod
    def of(cls, grid: int, block: int, shared: int, *, dependent: bool = False) -> LaunchConfig:
        """`grid` blocks of `block` threads. `dependent`: the kernel may start before the one ahead of it has ended, and
        waits for that itself (programmatic dependent launch, CUDA C++ programming guide 4.5).
        """
        config = cls((grid, 1, 1), (block, 1, 1), shared)
        if dependent:
            config.attributes = ctypes.pointer(_Attribute(_EARLY_START, b"", 1))
            config.attribute_count = 1
        return config


@cache
def _function(name: str) -> Any:
    for library in _LIBRARIES:
        try:
            return getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
    raise DeviceError(f"the CUDA driver has no {name}")


def check(code: int, what: str) -> None:
    """Raises DeviceError unless the driver's answer to `what` is success."""
    if not code:
        return
    text = ctypes.c_char_p()
    _function("cuGetErrorString")(code, ctypes.byref(text))
    raise DeviceError(f"{what}: error {code} of the CUDA driver ({(text.value or b'unknown').decode()})")


@cache
def launcher() -> Any:
    """cuLaunchKernelEx(config*, function, parameters**, extra**): an int, 0 for success."""
    function = _function("cuLaunchKernelEx")
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return function


@cache
def filler() -> Any:
    """cuMemsetD8Async(address, value, bytes, stream): an int, 0 for success."""
    function = _function("cuMemsetD8Async")
    function.argtypes = (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
    return function


@cache
def map_encoder() -> Any:
    """CuTensorMapEncodeTiled."""
    return _function("cuTensorMapEncodeTiled")
