"""Arrays as they come: of which library, and in a form that every backend reads."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gemmserve_kernels.problem.errors import ParameterInvalid


def library(array: Any) -> str:
    """Return whose array this is: "cupy", "foreign" for one of another library that shares its memory by DLPack or
    `__cuda_array_interface__`, or "numpy" for everything else that NumPy makes an array of.
    """
    kind: Any = type(array)
    return library_of(kind)


def is_foreign(array: Any) -> bool:
    """Whether an array is neither NumPy's nor CuPy's, and shares its memory."""
    return library(array) == "foreign"


@lru_cache(1024)
def library_of(kind: type[object]) -> str:
    """The same of arrays of a type."""
    if kind.__module__.partition(".")[0] == "cupy":
        return "cupy"
    if issubclass(kind, np.ndarray | np.generic):
        return "numpy"
    shares = hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__")
    return "foreign" if shares else "numpy"


def same_library(arrays: dict[str, Any]) -> str:
    """The library of all of them, "foreign" where one is of none of the two; None is nobody's. Raises ParameterInvalid
    where they differ.
    """
    libraries = {name: library(array) for name, array in arrays.items() if array is not None}
    chosen = libraries["a"]
    if "foreign" in libraries.values():
        return "foreign"
    for name, other in libraries.items():
        if other != chosen:
            raise ParameterInvalid(f"a is a {chosen} array and {name} is a {other} array", name)
    return chosen


def is_plain_cupy(a: Any, b: Any, *others: Any) -> bool:
    """Whether all are CuPy's arrays themselves, neither prepared nor of another library; None is nobody's."""
    kind: Any = type(a)
    if library(a) != "cupy" or type(b) is not kind:
        return False
    for other in others:  # noqa: SIM110 (all() of a generator takes three times as long, every call comes through here)
        if other is not None and type(other) is not kind:
            return False
    return True


class ArrayKey(NamedTuple):
    """Key of an array, all that a plan may know of it. Hashing it is much cheaper than building an `Operand` for every
    call.
    """

    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> ArrayKey:
        """Return the key of a NumPy or CuPy array."""
        return cls(array.shape, array.dtype, array.strides)


def native(array: Any) -> Any:
    """A NumPy array in this machine's byte order, aligned, its strides whole elements; a copy only where it is not."""
    array = np.asarray(array)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    item = array.dtype.itemsize
    if not array.flags.aligned or (item and any(stride % item for stride in array.strides)):
        return array.copy()
    return array


def on_elements(array: Any) -> Any:
    """A CuPy array whose elements lie at multiples of their size; a copy only where they do not.

    NumPy's views may begin in the middle of an element, as `x[1:].view("c16")` of float64 does, and so may CuPy's:
    kernels move whole elements at once.
    """
    item = array.dtype.itemsize
    if array.data.ptr % item or any(stride % item for stride in array.strides):
        return array.copy()
    return array


def check_out(name: str, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raises ParameterInvalid unless `out` can hold that result."""
    if tuple(out.shape) != shape or np.dtype(out.dtype) != dtype:
        raise ParameterInvalid(
            f"{name} is {np.dtype(out.dtype).name} {tuple(out.shape)}; the result is {dtype.name} {shape}", name
        )
    if math.prod(out.shape) and any(
        stride == 0 and extent > 1 for stride, extent in zip(out.strides, out.shape, strict=True)
    ):
        raise ParameterInvalid(f"{name} has elements that share memory", name)
    if isinstance(out, np.ndarray) and not (out.flags.writeable and out.flags.aligned):
        raise ParameterInvalid(f"{name} must be writeable and aligned", name)
    if any(stride % dtype.itemsize for stride in out.strides):
        raise ParameterInvalid(f"{name} has strides that are not whole elements", name)


def overlaps(xp: Any, out: Any, *operands: Any) -> bool:
    """Whether `out` may share memory with an operand (by their bounds)."""
    return any(xp.may_share_memory(out, operand) for operand in operands if operand is not None)
