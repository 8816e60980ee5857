"""Conversion of what people have (lists, views, memory maps, big-endian files) to what travels; no copy if possible."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve import _errors
from gemmserve.wire import DTYPES, PIECE, format_npy_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    AnyArray = np.ndarray[Any, np.dtype[Any]]
    LocalArray = AnyArray | Sequence[Any]
    """Array as the signatures name it; at run time anything that `numpy.asarray` takes will do."""

_SAMPLED: Final = 4096
"""Elements of a sample, about, at most."""


def as_array(value: Any, name: str = "array") -> AnyArray:
    """`value` as a NumPy array of a dtype that the service has, any strides and byte order; never copies an array.

    Raises DtypeUnsupported, with a hint, for everything else: nothing is converted silently, integers neither, for the
    result would be of another dtype than NumPy's.
    """
    if isinstance(value, str | os.PathLike):
        raise _errors.DtypeUnsupported(_of_text(name, os.fspath(value)))
    masked = sys.modules.get("numpy.ma")  # whose import takes time, and which made the array if it is masked
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise _errors.DtypeUnsupported(
            f"{name} is a masked array, and masks are not sent: {name}.filled(0), or {name}.data for what is under them"
        )
    # An array stays itself; a subclass (a memory map, a matrix) becomes a plain view of the same memory.
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        hint = " Tensors in bfloat16: .float() loses nothing." if "bfloat16" in str(error).lower() else ""
        raise _errors.DtypeUnsupported(f"{name} is no array that NumPy can read: {error}.{hint}") from error
    if array.dtype.newbyteorder("=") not in DTYPES.values():
        raise _errors.DtypeUnsupported(
            f"{name} has dtype {array.dtype}; the dtypes are {', '.join(DTYPES)}. {_hint(array)}"
        )
    return array


def _of_text(name: str, text: str | bytes) -> str:
    """Message on a text in the place of an array: an id that there is a handle of, or the name of a file."""
    kind, _, rest = text.partition("_") if isinstance(text, str) else ("", "", "")
    if kind == "arr" and rest.replace("_", "").isalnum():
        return f"{name} is the id of an array, {text!r}: client.array({text!r}) is its handle"
    if kind == "job" and rest.replace("_", "").isalnum():
        return f"{name} is the id of a job, {text!r}: client.job({text!r}).result() is the handle of its result"
    return f"{name} is a file's name, {text!r}, and no array: numpy.load({text!r}) reads one"


def _hint(array: AnyArray) -> str:
    """The conversion that loses nothing, where there is one."""
    dtype = array.dtype
    if dtype.name == "bfloat16":
        return "Convert it first: .astype(np.float32) loses nothing."
    if dtype.kind in "biu":
        wanted = "float32" if dtype.itemsize <= 2 else "float64"  # significands of 24 and 53 bits
        if dtype.itemsize < 8 or not array.size or max(-int(array.min()), int(array.max())) <= 1 << 53:
            return f"Convert it first: .astype(np.{wanted}) loses nothing."
        return "It holds integers above 2**53, which float64 rounds: .astype(np.float64), if that will do."
    if dtype.kind in "fc":
        return f"Convert it first, for example with .astype(np.{'complex128' if dtype.kind == 'c' else 'float64'})."
    return "Only numbers are multiplied."


def sample(array: AnyArray) -> bytes:
    """The bytes of some elements, spread over all axes, of small arrays all: those of another filling differ."""
    most = max(int(_SAMPLED ** (1 / max(array.ndim, 1))), 1)
    return array[tuple(slice(None, None, -(-n // most) or 1) for n in array.shape)].tobytes()


def filled_again(name: str) -> _errors.ParameterInvalid:
    """The error of an array that an iterator gave and has changed before all that goes together was sent."""
    return _errors.ParameterInvalid(
        f"{name} has been filled again before it was sent: give a copy of it, x.copy()",
        problem={"parameter": name},
    )


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
