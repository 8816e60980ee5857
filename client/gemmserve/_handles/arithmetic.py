"""Operators of handles, `+ - *` with arrays and numbers: each is a step of a program, recorded or run alone.

Arrays broadcast, and results have NumPy's dtypes: Python's numbers never widen an array, NumPy's scalars may. `x / 2`
is `x * (1 / 2)`.
"""

from __future__ import annotations

import cmath
import numbers
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from gemmserve import _errors
from gemmserve._handles.functions import _then, place_of
from gemmserve._handles.handle import ArrayHandle, S, base_of
from gemmserve._handles.view import Base
from gemmserve._transfer.arrays import as_array
from gemmserve.wire import DTYPES, encode_scalar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NUMBERS: Final = (numbers.Number, np.generic)
_ARRAYS: Final = (ArrayHandle, np.ndarray, list, tuple)


class ArithmeticHandle(ArrayHandle[S]):
    """Base of handles with operators. With an AsyncClient, and in its programs, each is awaited: `await (x + y)`."""

    def __add__(self, other: Any) -> Any:
        """Return self + other. Raises ShapeMismatch, DtypeUnsupported, and what `Client.gemm` does."""
        return _linear(self, other, 1, 1)

    def __radd__(self, other: Any) -> Any:
        """Return other + self."""
        return _linear(self, other, 1, 1)

    def __sub__(self, other: Any) -> Any:
        """Return self - other."""
        return _linear(self, other, 1, -1)

    def __rsub__(self, other: Any) -> Any:
        """Return other - self."""
        return _linear(self, other, -1, 1)

    def __mul__(self, other: Any) -> Any:
        """Return self * other, element by element."""
        if isinstance(other, _NUMBERS):
            return _scaled(self, other)
        if not isinstance(other, _ARRAYS):
            return NotImplemented
        if isinstance(other, np.matrix):
            raise TypeError("* of a numpy.matrix is the matrix product: x @ m, or x * numpy.asarray(m)")
        return _step("multiply", {"a": self, "b": _operand(other)}, {})

    def __rmul__(self, other: Any) -> Any:
        """Return other * self."""
        return self.__mul__(other)

    def __truediv__(self, other: Any) -> Any:
        """Return self * (1 / other), for numbers alone. Raises ZeroDivisionError."""
        if not isinstance(other, _NUMBERS):
            return NotImplemented
        return _scaled(self, other, 1 / _number(other))

    def sum(self, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Any:
        """Return sums over axes, all of them by default, in the array's dtype (float16 is summed in float32).

        Raises AxisError, ValueError for an axis named twice, and what `Client.gemm` does.
        """
        known = base_of(self) if self._recorded else Base(self.shape, self.dtype)
        if known is None:
            raise _errors.ProgramError("sums of a result whose shape is not known yet")
        axes = normalize_axis_tuple(range(len(known.shape)) if axis is None else axis, len(known.shape))
        kept = tuple(n for i, n in enumerate(known.shape) if i not in axes)
        made = place_of(self)._step("sum", {"a": self}, {"axes": [*axes]}, Base(kept, known.dtype))
        return _then(made, lambda x: x._viewed(x._seen.expand_dims(axes))) if keepdims else made

    def __neg__(self) -> Any:
        """Return -self."""
        return _scaled(self, -1)

    def __pos__(self) -> Any:
        """Return a copy."""
        return _scaled(self, 1)


def _linear(x: Any, other: Any, alpha: int, beta: int) -> Any:
    """Return alpha x + beta other, alpha and beta being 1 or -1."""
    if isinstance(other, _NUMBERS):
        params = {} if alpha == 1 else {"alpha": alpha}
        return _step("add", {"a": x}, {**params, "gamma": encode_scalar(beta * _number(other))}, other)
    if not isinstance(other, _ARRAYS):
        return NotImplemented
    params = {name: value for name, value in (("alpha", alpha), ("beta", beta)) if value != 1}
    return _step("add", {"a": x, "b": _operand(other)}, params)


def _scaled(x: Any, factor: Any, number: complex | None = None) -> Any:
    """Return x times a number, `factor` itself if no other is given, with the dtype of x * factor."""
    number = _number(factor) if number is None else _number(number)
    return _step("add", {"a": x}, {} if number == 1 else {"alpha": encode_scalar(number)}, factor)


def _operand(x: Any) -> Any:
    return x if isinstance(x, ArrayHandle) else as_array(x, "b")


def _number(value: Any) -> complex:
    """Return a number that the server takes. Raises ParameterInvalid."""
    try:
        number = complex(value)
    except (TypeError, ValueError, OverflowError):
        raise _errors.ParameterInvalid(f"not a number that the server takes: {value!r}") from None
    if not cmath.isfinite(number):
        raise _errors.ParameterInvalid(f"a number beside a remote array must be finite, not {value!r}")
    return number


def _step(op: str, operands: Mapping[str, Any], params: Mapping[str, Any], factor: Any = 1) -> Any:
    """Run or record a step on operands and a number, whose result has NumPy's shape and dtype for them."""
    place = place_of(*operands.values())
    recorded = any(isinstance(x, ArrayHandle) and x._recorded for x in operands.values())
    bases = [base_of(x) if recorded else Base(x.shape, x.dtype) for x in operands.values()]
    known = [base for base in bases if base is not None]
    if len(known) < len(bases):
        return place._step(op, operands, params, None)
    try:
        shape = np.broadcast_shapes(*(base.shape for base in known))
    except ValueError:
        shapes = " and ".join(str(base.shape) for base in known)
        raise _errors.ShapeMismatch(f"operands of shapes {shapes} do not broadcast") from None
    arrays = np.result_type(*(base.dtype.newbyteorder("=") for base in known))
    dtype = np.result_type(arrays, factor)
    if dtype not in DTYPES.values() or dtype.kind not in "fc":
        raise _errors.DtypeUnsupported(f"the result would be {dtype}, which the server has not")
    params = dict(params) | ({"dtype": dtype.name} if dtype != arrays else {})
    return place._step(op, operands, params, Base(shape, dtype))
