"""Conversion of what people have (lists, views, memory maps, big-endian files) to what travels; no copy if possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve import _errors
from gemmserve.wire import DTYPES, PIECE, format_npy_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    AnyArray = np.ndarray[Any, np.dtype[Any]]
    LocalArray = AnyArray | Sequence[Any]
    """Array as the signatures name it; at run time anything that `numpy.asarray` takes will do."""


def as_array(value: Any, name: str = "array") -> AnyArray:
    """`value` as a NumPy array of a dtype that the service has, any strides and byte order; never copies an array.

    Raises DtypeUnsupported, with a hint, for everything else: nothing is converted silently.
    """
    # An array stays itself; a subclass (a memory map, a matrix) becomes a plain view of the same memory.
    array = np.asarray(value)
    if array.dtype.newbyteorder("=") not in DTYPES.values():
        raise _errors.DtypeUnsupported(
            f"{name} has dtype {array.dtype}; the dtypes are {', '.join(DTYPES)}. {_hint(array.dtype)}"
        )
    return array


def _hint(dtype: np.dtype) -> str:
    if dtype.kind in "biu":
        return "Convert it first, for example with .astype(np.float32)."
    if dtype.kind in "fc":
        return f"Convert it first, for example with .astype(np.{'complex128' if dtype.kind == 'c' else 'float64'})."
    return "Only numbers are multiplied."


def is_fortran(array: AnyArray) -> bool:
    """Whether its bytes travel in Fortran order: laid out that way, and not also in C order."""
    return bool(array.flags.f_contiguous and not array.flags.c_contiguous)


def npy_header(array: AnyArray) -> bytes:
    """The .npy header of the bytes that `pieces` yields."""
    return format_npy_header(array.dtype, array.shape, fortran_order=is_fortran(array))


def pieces(array: AnyArray) -> Iterator[memoryview]:
    """The array's elements, little-endian, in pieces of at most `PIECE` bytes.

    Slices of the array's own memory where it is contiguous (C or Fortran) and little-endian; else each piece is a
    copy, so that memory never holds a second whole array.
    """
    if not array.nbytes:
        return
    wanted = array.dtype.newbyteorder("<")
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    if contiguous and array.dtype == wanted:
        flat = array.reshape(-1, order="A").view(np.uint8).data
        for start in range(0, len(flat), PIECE):
            yield flat[start : start + PIECE]
        return
    chunks = np.nditer(
        array,
        flags=["external_loop", "buffered"],
        op_flags=["readonly"],
        op_dtypes=wanted,
        casting="equiv",
        order="F" if is_fortran(array) else "C",
        buffersize=PIECE // array.itemsize,
    )
    for chunk in chunks:
        yield memoryview(np.asarray(chunk).tobytes())
