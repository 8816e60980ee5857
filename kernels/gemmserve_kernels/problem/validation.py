"""Checks of a product's arguments. Pure; raises the errors of `errors`."""

from __future__ import annotations

import cmath
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.problem.errors import DtypeUnsupported, ParameterInvalid, ShapeMismatch
from gemmserve_kernels.problem.operand import DTYPES, Operand, real_dtype
from gemmserve_kernels.problem.vocabulary import COMPUTE_MODES, LAYOUTS, TRANS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gemmserve_kernels.problem.config import GemmConfig

_MAX_NBYTES: Final = 1 << 62
"""No array is larger: byte offsets stay within signed 64 bits whatever a kernel adds to them."""


def broadcast_batch(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy's broadcast of leading dimensions. Raises ShapeMismatch."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = " and ".join(str(shape) for shape in shapes)
        raise ShapeMismatch(f"the leading dimensions {listed} do not broadcast") from None


def compute_modes(dtype: np.dtype[Any]) -> tuple[str, ...]:
    """The compute modes that make sense for an arithmetic dtype, whatever the device."""
    if dtype == np.float16:
        return ("auto", "fp32")
    if dtype in {np.dtype(np.float64), np.dtype(np.complex128)}:
        return ("auto", "fp64", "ozaki")
    return COMPUTE_MODES


def check_product(
    operands: dict[str, Operand],
    alpha: complex,
    trans_a: str,
    trans_b: str,
    layout: str,
    compute: str,
    config: GemmConfig | None,
) -> dict[str, Any]:
    """Checks what every product has, and returns it with what follows from it: fields of a problem, by name.

    Whether there is such a compute mode is for the plan to say, which knows the device.
    """
    choice(trans_a, TRANS, "trans_a")
    choice(trans_b, TRANS, "trans_b")
    planar = choice(layout, LAYOUTS, "layout") == "planar"
    for name, operand in operands.items():
        _check_operand(name, operand, planar)
    dtype = np.result_type(*(operand.dtype for operand in operands.values()))
    if planar:
        dtype = np.dtype(np.complex64 if dtype == np.float32 else np.complex128)
    a, b = (logical_shape(operands[name], planar) for name in ("a", "b"))
    m, k = a[-2:] if trans_a in {"N", "R"} else a[:-3:-1]
    k_of_b, n = b[-2:] if trans_b in {"N", "R"} else b[:-3:-1]
    if k != k_of_b:
        raise ShapeMismatch(
            f"op(a) is {m} x {k} and op(b) is {k_of_b} x {n}: the inner dimensions differ "
            f"(a {operands['a'].shape} {trans_a}, b {operands['b'].shape} {trans_b})"
        )
    return {
        "a": operands["a"],
        "b": operands["b"],
        "alpha": scalar(alpha, "alpha", dtype),
        "trans_a": trans_a,
        "trans_b": trans_b,
        "layout": layout,
        "compute": compute,
        "config": config,
        "m": m,
        "n": n,
        "k": k,
        "batch_shape": broadcast_batch(a[:-2], b[:-2]),
        "dtype": dtype,
    }


def _check_operand(name: str, operand: Operand, planar: bool) -> None:
    if operand.dtype not in DTYPES:
        supported = ", ".join(dtype.name for dtype in DTYPES)
        raise DtypeUnsupported(f"{name} is {operand.dtype.name}; the dtypes are {supported}")
    if any(extent < 0 for extent in operand.shape):
        raise ShapeMismatch(f"{name} {operand.shape} has a negative dimension")
    check_size(name, operand.shape, operand.dtype)
    if not planar:
        if operand.ndim < 2:
            raise ShapeMismatch(f"{name} {operand.shape} has {operand.ndim} dimensions; a matrix has at least 2")
        return
    if operand.dtype not in {np.dtype(np.float32), np.dtype(np.float64)}:
        raise DtypeUnsupported(f"planar {name} must be float32 or float64, not {operand.dtype.name}")
    if operand.ndim < 3 or operand.shape[0] != 2:
        raise ShapeMismatch(
            f"planar {name} {operand.shape} must be (2, ..., rows, columns): real parts, imaginary parts"
        )


def check_size(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    # Empty arrays count too: kernels compute strides from their other extents.
    if math.prod(max(extent, 1) for extent in shape) * dtype.itemsize > _MAX_NBYTES:
        raise ShapeMismatch(f"{name} {shape} would exceed 2**62 bytes")


def check_c(c: tuple[int, ...], shape: tuple[int, ...]) -> None:
    try:
        fits = np.broadcast_shapes(c, shape) == shape
    except ValueError:
        fits = False
    if not fits or len(c) < 2:
        raise ShapeMismatch(f"c {c} does not broadcast to the result {shape}")


def logical_shape(operand: Operand, planar: bool) -> tuple[int, ...]:
    """The shape without the planar axis."""
    return operand.shape[1:] if planar else operand.shape


def choice(value: object, allowed: Collection[str], parameter: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ParameterInvalid(f"{parameter} must be one of {', '.join(allowed)}, not {value!r}", parameter)
    return value


def names(value: str | Sequence[str], allowed: Collection[str], parameter: str) -> tuple[str, ...]:
    chosen = (value,) if isinstance(value, str) else tuple(value)
    if not chosen:
        raise ParameterInvalid(f"{parameter} is empty; it takes one or more of {', '.join(allowed)}", parameter)
    for name in chosen:
        choice(name, allowed, parameter)
    if len(set(chosen)) < len(chosen):
        raise ParameterInvalid(f"{parameter} names one twice: {', '.join(chosen)}", parameter)
    return chosen


def scalar(value: object, parameter: str, dtype: np.dtype[Any]) -> complex:
    """Return `value` as a complex number that the arithmetic dtype can hold. Raises ParameterInvalid.

    Zeros lose their sign: problems that are equal share their plans, and must give the same bits.
    """
    try:
        number: complex = complex(value) + 0j  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        raise ParameterInvalid(f"{parameter} must be a number, not {value!r}", parameter) from None
    if isinstance(value, str) or not cmath.isfinite(number):
        raise ParameterInvalid(f"{parameter} must be a finite number, not {value!r}", parameter)
    if number.imag and dtype.kind != "c":
        raise ParameterInvalid(f"{parameter} is complex ({number}), but the data are {dtype.name}", parameter)
    # float16 products are formed, scaled and summed in float32.
    limit = float(np.finfo(np.float32 if dtype == np.float16 else real_dtype(dtype)).max)
    if max(abs(number.real), abs(number.imag)) > limit:
        raise ParameterInvalid(f"{parameter}={value!r} overflows {dtype.name}", parameter)
    return number
