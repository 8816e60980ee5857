"""Views of stored arrays: shape, strides and offset in elements, conjugation, real or imaginary part. Pure arithmetic.

The rules are NumPy's (basic indexing, `numpy.reshape` where it is a view, `numpy.transpose`, `numpy.broadcast_to`), on
integers alone: the elements may be terabytes, and are on the server.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve._transfer.arrays import AnyArray

Part = Literal["real", "imag"]
MAX_NDIM: Final = 32
"""Number of dimensions of a view, at most: the service's bound."""


@dataclass(frozen=True)
class Base:
    """A stored array as far as views of it need to know: shape, dtype, and the order in which its elements lie."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str = "C"

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def contiguous(shape: Sequence[int], order: str = "C") -> tuple[int, ...]:
    """Return the strides, in elements, of an array whose elements lie one behind the other."""
    strides = []
    step = 1
    for n in reversed(shape) if order == "C" else shape:
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides) if order == "C" else strides)


@dataclass(frozen=True)
class View:
    """Elements of a base at offset + sum(index * stride), all counted in elements of the base; those of complex bases
    where `part` is given, too.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    conj: bool = False
    part: Part | None = None

    @classmethod
    def whole(cls, base: Base) -> View:
        """Return the view of all of a base, as it lies."""
        return cls(base.shape, contiguous(base.shape, base.order))

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def dtype(self, base: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype of the view of an array of dtype `base`."""
        return base if self.part is None else np.empty(0, base).real.dtype

    # -- NumPy's ways to a view ------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> View:
        """Return what basic indexing by integers, slices, Ellipsis and None selects.

        Raises IndexError as NumPy does, TypeError for arrays, lists and truth values (advanced indexing).
        """
        items = list(key) if isinstance(key, tuple) else [key]
        used = sum(item is not None and item is not Ellipsis for item in items)
        if used > self.ndim:
            raise IndexError(f"too many indices: the array has {self.ndim} dimensions, {used} were indexed")
        dots = [i for i, item in enumerate(items) if item is Ellipsis]
        if len(dots) > 1:
            raise IndexError("an index can have only a single ellipsis ('...')")
        at = dots[0] if dots else len(items)
        items[at : at + 1] = [slice(None)] * (self.ndim - used)
        shape, strides, offset, axis = [], [], self.offset, 0
        for item in items:
            if item is None:
                shape.append(1)
                strides.append(0)
                continue
            n, stride = self.shape[axis], self.strides[axis]
            if isinstance(item, slice):
                chosen = range(*item.indices(n))
                shape.append(len(chosen))
                strides.append(stride * chosen.step)
                offset += chosen.start * stride if chosen else 0
            else:
                i = _integer(item)
                if not -n <= i < n:
                    raise IndexError(f"index {i} is out of bounds for axis {axis} with size {n}")
                offset += (i + n if i < 0 else i) * stride
            axis += 1
        return self._with(shape, strides, offset)

    def transpose(self, axes: Sequence[int] | None = None) -> View:
        """Return the axes in another order; None: reversed. Raises ValueError."""
        order = [*reversed(range(self.ndim))] if axes is None else [_axis(each, self.ndim) for each in axes]
        if sorted(order) != [*range(self.ndim)]:
            raise ValueError(f"axes {axes} do not match the array's {self.ndim} dimensions")
        return self._with([self.shape[i] for i in order], [self.strides[i] for i in order])

    def swapaxes(self, one: int, other: int) -> View:
        """Return two axes exchanged. Raises numpy.exceptions.AxisError."""
        one, other = _axis(one, self.ndim), _axis(other, self.ndim)
        order = [*range(self.ndim)]
        order[one], order[other] = other, one
        return self.transpose(order)

    def moveaxis(self, source: int | Sequence[int], destination: int | Sequence[int]) -> View:
        """Return some axes at other places, as numpy.moveaxis. Raises ValueError, AxisError."""
        came, went = _axes(source, self.ndim), _axes(destination, self.ndim)
        if len(came) != len(went):
            raise ValueError("source and destination must have the same number of elements")
        order = [axis for axis in range(self.ndim) if axis not in came]
        for place, axis in sorted(zip(went, came, strict=True)):
            order.insert(place, axis)
        return self.transpose(order)

    def squeeze(self, axis: int | Sequence[int] | None = None) -> View:
        """Return the view without axes of length 1: all of them, or those given. Raises ValueError, AxisError."""
        gone = [i for i, n in enumerate(self.shape) if n == 1] if axis is None else _axes(axis, self.ndim)
        if any(self.shape[i] != 1 for i in gone):
            raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
        kept = [i for i in range(self.ndim) if i not in gone]
        return self._with([self.shape[i] for i in kept], [self.strides[i] for i in kept])

    def expand_dims(self, axis: int | Sequence[int]) -> View:
        """Return the view with axes of length 1 at these places of the result. Raises ValueError, AxisError."""
        new = _axes(axis, self.ndim + len(_several(axis)))
        shape, strides = [*self.shape], [*self.strides]
        for place in sorted(new):
            shape.insert(place, 1)
            strides.insert(place, 0)
        return self._with(shape, strides)

    def broadcast_to(self, shape: int | Sequence[int]) -> View:
        """Return the view repeated along new axes and those of length 1, as numpy.broadcast_to. Raises ValueError."""
        wanted = _shape(shape)
        new = len(wanted) - self.ndim
        if new < 0 or any(n not in {1, m} for n, m in zip(self.shape, wanted[max(new, 0) :], strict=False)):
            raise ValueError(f"an array of shape {self.shape} cannot be broadcast to {wanted}")
        strides = [s if n == m else 0 for n, m, s in zip(self.shape, wanted[new:], self.strides, strict=True)]
        return self._with(wanted, [*[0] * new, *strides])

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> View:
        """Return the diagonal of two axes as the last one, as numpy.diagonal. Raises ValueError, AxisError."""
        if self.ndim < 2:
            raise ValueError("diag requires an array of at least two dimensions")
        one, other = _axis(axis1, self.ndim), _axis(axis2, self.ndim)
        if one == other:
            raise ValueError("axis1 and axis2 cannot be the same")
        down, right = max(-offset, 0), max(offset, 0)
        n = max(0, min(self.shape[one] - down, self.shape[other] - right))
        start = down * self.strides[one] + right * self.strides[other] if n else 0
        kept = [i for i in range(self.ndim) if i not in {one, other}]
        return self._with(
            [*(self.shape[i] for i in kept), n],
            [*(self.strides[i] for i in kept), self.strides[one] + self.strides[other]],
            self.offset + start,
        )

    def flip(self, axis: int | Sequence[int] | None = None) -> View:
        """Return the elements in reverse along all axes, or those given. Raises ValueError, AxisError."""
        turned = range(self.ndim) if axis is None else _axes(axis, self.ndim)
        return self[tuple(slice(None, None, -1) if i in turned else slice(None) for i in range(self.ndim))]

    def reshape(self, shape: int | Sequence[int], order: Literal["C", "F"] = "C") -> View | None:
        """Return the same elements in another shape, read and placed in `order`; None: only a copy can have it.

        Raises ValueError where the sizes differ.
        """
        wanted = full_shape(shape, self.size)
        if order == "F":
            found = self.transpose().reshape(wanted[::-1])
            return None if found is None else found.transpose()
        strides = contiguous(wanted) if self.size == 0 else _regrouped(self.shape, self.strides, wanted)
        return None if strides is None else self._with(wanted, strides)

    def conjugate(self) -> View:
        """Return the conjugated elements; those of a part are real, and stay."""
        return self if self.part is not None else replace(self, conj=not self.conj)

    def of_part(self, part: Part) -> View:
        """Return the real or the imaginary part of a view of a complex base. Raises TypeError where it is no view."""
        if self.part is not None:
            if part == "real":
                return self
            raise TypeError("the array is real: its imaginary part is zero, and no view of it")
        if self.conj and part == "imag":
            raise TypeError("the imaginary part of a conjugate is no view: -x.imag of the array x itself is it")
        return replace(self, conj=False, part=part)

    def _with(self, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> View:
        if len(shape) > MAX_NDIM:
            raise ValueError(f"views have at most {MAX_NDIM} dimensions, not {len(shape)}")
        return replace(
            self, shape=tuple(shape), strides=tuple(strides), offset=self.offset if offset is None else offset
        )

    # -- what the server and downloads need ------------------------------------------------------------------------

    def same_elements(self, other: View) -> bool:
        """Whether both show the same elements of a base in the same shape, conjugated or not."""
        if self.shape != other.shape or self.part != other.part:
            return False
        if self.size == 0:
            return True
        strides = zip(self.shape, self.strides, other.strides, strict=True)
        return self.offset == other.offset and all(one == two for n, one, two in strides if n > 1)

    def transposition(self, base: Base) -> bool | None:
        """Whether it shows all of the base as it is (False) or with the last two axes swapped (True); None: neither."""
        whole = View.whole(base)
        if self.same_elements(whole):
            return False
        if whole.ndim >= 2 and self.same_elements(whole.swapaxes(-1, -2)):
            return True
        return None

    def span(self) -> tuple[int, int]:
        """The elements of the base from the first that is shown to behind the last: [low, high)."""
        if self.size == 0:
            return 0, 0
        reach = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        return self.offset + sum(x for x in reach if x < 0), self.offset + sum(x for x in reach if x > 0) + 1

    def wire(self, reference: str, base: Base, *, conj: bool | None = None) -> str | dict[str, Any]:
        """Return the operand of a request: the reference itself for all of the base, an object otherwise.

        `conj`: what is asked for in place of the view's own, where a flag of the step conjugates.
        """
        conj = (self.conj if conj is None else conj) and base.dtype.kind == "c"
        if not conj and self.same_elements(View.whole(base)):
            return reference
        place = {"offset": self.offset} if self.size and self.offset else {}
        shown: dict[str, Any] = {"id": reference, **place, "shape": [*self.shape], "strides": [*self.strides]}
        return shown | ({"conj": True} if conj else {}) | ({"part": self.part} if self.part else {})

    def show(self, memory: AnyArray, low: int = 0) -> AnyArray:
        """Return the view's elements: of `memory`, the base's elements in their order from number `low` on, shared
        where nothing is conjugated or repeated.
        """
        step = memory.dtype.itemsize
        start = (self.offset - low) * step if self.size else 0
        shown: AnyArray = np.ndarray(self.shape, memory.dtype, memory, start, [s * step for s in self.strides])
        if self.part is not None:
            shown = shown.real if self.part == "real" else shown.imag
        elif self.conj and memory.dtype.kind == "c":
            return np.conjugate(shown)
        repeated = any(stride == 0 and n > 1 for n, stride in zip(self.shape, self.strides, strict=True))
        return shown.copy() if repeated else shown


def full_shape(shape: int | Sequence[int], size: int) -> tuple[int, ...]:
    """Return a shape of `size` elements, with the length that -1 stands for. Raises ValueError."""
    given = _shape(shape, unknown=True)
    rest = math.prod(n for n in given if n != -1)
    if given.count(-1) > 1:
        raise ValueError("can only specify one unknown dimension")
    if -1 in given and rest and size % rest == 0:
        return tuple(size // rest if n == -1 else n for n in given)
    if -1 in given or rest != size:
        raise ValueError(f"cannot reshape array of size {size} into shape {given}")
    return given


def _regrouped(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of a view in another shape of the same size, which is not 0; None: there are none.

    Axes are taken in groups of the same size on both sides (NumPy's _attempt_nocopy_reshape); those of a group must lie
    in memory as one.
    """
    old = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
    found: list[int] = []
    at = 0
    i = 0
    while i < len(wanted) and at < len(old):
        stop, end = i + 1, at + 1
        new_size, old_size = wanted[i], old[at][0]
        while new_size != old_size:
            if new_size < old_size:
                new_size *= wanted[stop]
                stop += 1
            else:
                old_size *= old[end][0]
                end += 1
        if any(old[k][1] != old[k + 1][0] * old[k + 1][1] for k in range(at, end - 1)):
            return None
        found += [old[end - 1][1] * math.prod(wanted[k + 1 : stop]) for k in range(i, stop)]
        i, at = stop, end
    return (*found, *[found[-1] if found else 1] * (len(wanted) - i))


def _integer(item: Any) -> int:
    try:
        if not isinstance(item, bool | np.bool_):
            return operator.index(item)
    except TypeError:
        pass
    raise TypeError(
        "a remote array is indexed by integers, slices, ... and None; for anything else download it: x.numpy()[...]"
    )


def _axis(axis: int, ndim: int) -> int:
    found = operator.index(axis)
    if not -ndim <= found < ndim:
        raise np.exceptions.AxisError(found, ndim)
    return found % ndim


def _axes(axis: int | Sequence[int], ndim: int) -> list[int]:
    axes = [_axis(each, ndim) for each in _several(axis)]
    if len({*axes}) < len(axes):
        raise ValueError(f"repeated axis in {axis}")
    return axes


def _shape(shape: int | Sequence[int], *, unknown: bool = False) -> tuple[int, ...]:
    given = _several(shape)
    if any(n < (-1 if unknown else 0) for n in given):
        raise ValueError(f"negative dimensions are not allowed: {given}")
    return given


def _several(value: Any) -> tuple[int, ...]:
    """One integer or several, as a tuple."""
    return tuple(map(operator.index, value)) if isinstance(value, tuple | list) else (operator.index(value),)
