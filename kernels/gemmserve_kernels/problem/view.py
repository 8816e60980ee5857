"""Views of contiguous arrays by offset, shape and strides: their bounds, what a plan sees of them, and the arrays.

Offsets and strides count elements of the viewed array's memory, which begins with its first element in C or in Fortran
order. They are Python's integers here, so nothing overflows before it has been checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from gemmserve_kernels.problem.errors import ParameterInvalid
from gemmserve_kernels.problem.operand import Operand, real_dtype
from gemmserve_kernels.problem.validation import check_size

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_NDIM: Final = 32
"""Dimensions of a view: as many as CuPy's arrays have, and NumPy's before its version 2."""
MAX_REACH: Final = 1 << 62
"""Bound of offsets and strides, in elements: no array has as many."""


class View(Protocol):
    """Fields of a view."""

    @property
    def offset(self) -> int:
        """Elements before the first one of the view, at least 0."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Extents; None, with strides: the whole array as it lies."""

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Elements from one to the next along each axis; negative ones and 0 are allowed."""

    @property
    def part(self) -> Literal["real", "imag"] | None:
        """Part of complex elements that is viewed, as a real array; None: the elements."""


def operand_of_view(base: Operand, view: View) -> Operand:
    """Return shape, dtype and strides of a view of a contiguous array.

    Strides of axes of extent 1 or less, which nothing depends on, are those of a C-contiguous array: views of the same
    elements are equal. Raises ParameterInvalid, which names the field, for a view that is none or reaches beyond the
    array, ShapeMismatch for one of more than 2**62 bytes.
    """
    if view.part is not None and base.dtype.kind != "c":
        raise ParameterInvalid(f"part is of complex arrays, not of {base.dtype.name}", "part")
    shape, strides = view.shape, view.strides
    if shape is None or strides is None:
        if shape is not None or strides is not None:
            raise ParameterInvalid("shape and strides are given together or not at all", "strides")
        if view.offset:
            raise ParameterInvalid("an offset needs a shape and strides", "offset")
        shape, strides = base.shape, base.strides
    else:
        _check_bounds(base, view.offset, shape, strides)
    dtype, step = base.dtype, 1
    if view.part is not None:
        dtype, step = real_dtype(base.dtype), 2
    check_size("the view", shape, dtype)
    return Operand(shape, dtype, tuple(stride * step for stride in _canonical(shape, strides)))


def array_of_view(array: Any, view: View) -> Any:
    """Return a view of a contiguous array of NumPy or CuPy, in its memory. Raises what `operand_of_view` raises."""
    strides = tuple(stride // array.dtype.itemsize for stride in array.strides)
    seen = operand_of_view(Operand(array.shape, np.dtype(array.dtype), strides), view)
    start = view.offset * array.dtype.itemsize + (seen.dtype.itemsize if view.part == "imag" else 0)
    steps = tuple(stride * seen.dtype.itemsize for stride in seen.strides)
    if isinstance(array, np.ndarray):
        if not seen.size:
            return np.empty(seen.shape, seen.dtype)
        made: np.ndarray[Any, Any] = np.ndarray(seen.shape, seen.dtype, array.ravel(order="K"), start, steps)
        return made
    import cupy

    return cupy.ndarray(seen.shape, seen.dtype, array.data + start if seen.size else array.data, steps)


def _check_bounds(base: Operand, offset: int, shape: Sequence[int], strides: Sequence[int]) -> None:
    if len(shape) != len(strides):
        raise ParameterInvalid(f"{len(shape)} extents and {len(strides)} strides", "strides")
    if len(shape) > MAX_NDIM:
        raise ParameterInvalid(f"{len(shape)} dimensions; a view has {MAX_NDIM} at most", "shape")
    if any(extent < 0 for extent in shape):
        raise ParameterInvalid(f"shape {tuple(shape)} has a negative extent", "shape")
    if 0 in shape:
        return  # it has no elements, wherever it begins
    if not 0 <= offset < base.size:
        raise ParameterInvalid(f"offset {offset} is outside of an array of {base.size} elements", "offset")
    spans = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    first, last = (offset + sum(span for span in spans if span * sign > 0) for sign in (-1, 1))
    if first < 0 or last >= base.size:
        raise ParameterInvalid(
            f"the view reaches from element {first} to {last} of an array of {base.size} elements", "strides"
        )


def _canonical(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    if 0 in shape:
        return Operand.contiguous(shape, np.uint8).strides
    found: list[int] = []
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        found.append(stride if extent > 1 else step)
        step = extent * found[-1]
    return tuple(reversed(found))
