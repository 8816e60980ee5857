"""What is to be computed: operands, shapes, operations, and every check of them. Pure; no arrays, no device.

`GemmProblem.build` and `GemmReduceProblem.build` are the only gate: whatever they return, every backend can run (on a
device that has the compute mode). The service validates submissions with them before any data exists.
"""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np

from gemmserve_kernels.errors import ComputeUnsupported, DtypeUnsupported, ParameterInvalid, ShapeMismatch

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gemmserve_kernels.config import GemmConfig

Trans = Literal["N", "T", "C", "R"]
Order = Literal["C", "F"]
Layout = Literal["interleaved", "planar"]

DTYPES: Final = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "complex64", "complex128"))
TRANS: Final = ("N", "T", "C", "R")
ORDERS: Final = ("C", "F")
LAYOUTS: Final = ("interleaved", "planar")
COMPUTE_MODES: Final = ("auto", "fp32", "fp64", "tf32", "1xtf32", "3xtf32", "3xfp16", "3xfp16-3m", "ozaki")
REDUCTIONS: Final = ("sum", "max", "min", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin")
PRE_OPS: Final = ("identity", "abs", "square")
AXES: Final = ("m", "n", "batch")

_MAX_NBYTES: Final = 1 << 62
"""No array is larger: byte offsets stay within signed 64 bits whatever a kernel adds to them."""

_EMPTY_REDUCTIONS: Final = ("sum", "sumsq")
"""The reductions that have a value for no elements."""


@dataclass(frozen=True)
class Operand:
    """Shape, dtype and strides of an array; strides count elements and may be negative or 0."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> Operand:
        """The operand that a NumPy or CuPy array is.

        Raises ParameterInvalid where a stride is no multiple of the element (a field of a structured array): `gemm`
        copies such arrays first.
        """
        dtype = np.dtype(array.dtype)
        if dtype.itemsize == 0 or any(stride % dtype.itemsize for stride in array.strides):
            raise ParameterInvalid("strides must be whole elements: pass a contiguous copy", "strides")
        return cls(tuple(array.shape), dtype, tuple(stride // dtype.itemsize for stride in array.strides))

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: Any, order: str = "C") -> Operand:
        """A fresh array of that shape in C or Fortran order."""
        extents = list(shape) if order == "F" else list(reversed(shape))
        strides, step = [], 1
        for extent in extents:
            strides.append(step)
            step *= max(extent, 1)
        return cls(tuple(shape), np.dtype(dtype), tuple(strides if order == "F" else reversed(strides)))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, broadcast ones counted as often as they appear."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class _Product:
    """alpha * op(A) op(B): what gemm and gemm_reduce have in common. `op(A)` is m x k, `op(B)` is k x n.

    `dtype` is the arithmetic's: NumPy's result type of the operands, complex where they are planar. `accumulate` is
    the dtype that products are summed in.
    """

    a: Operand
    b: Operand
    alpha: complex
    trans_a: Trans
    trans_b: Trans
    layout: Layout
    compute: str
    config: GemmConfig | None
    m: int
    n: int
    k: int
    batch_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def batch(self) -> int:
        """Number of products."""
        return math.prod(self.batch_shape)

    @property
    def planar(self) -> bool:
        """Whether operands and complex results are real arrays with a leading axis (re, im)."""
        return self.layout == "planar"

    @property
    def accumulate(self) -> np.dtype[Any]:
        """float16 accumulates in float32; compute="fp64" in double width; everything else in its own width."""
        if self.dtype == np.float16:
            return np.dtype(np.float32)
        if self.compute == "fp64":
            return np.dtype(np.complex128 if self.dtype.kind == "c" else np.float64)
        return self.dtype

    def stored(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of a result as it is stored: complex ones take a leading axis of 2 where planar."""
        if self.planar and dtype.kind == "c":
            return (2, *shape), real_dtype(dtype)
        return shape, dtype

    def flops(self) -> int:
        """2 m n k of a real product, 8 m n k of a complex one, times the batch."""
        return (8 if self.dtype.kind == "c" else 2) * self.m * self.n * self.k * self.batch


@dataclass(frozen=True)
class GemmProblem(_Product):
    """D = alpha * op(A) op(B) + beta * C."""

    c: Operand | None
    beta: complex
    order: Order

    @classmethod
    def build(
        cls,
        a: Operand,
        b: Operand,
        c: Operand | None = None,
        *,
        alpha: complex = 1,
        beta: complex = 0,
        trans_a: str = "N",
        trans_b: str = "N",
        order: str = "C",
        layout: str = "interleaved",
        compute: str = "auto",
        config: GemmConfig | None = None,
    ) -> GemmProblem:
        """Checks everything and returns the problem.

        Raises ShapeMismatch, DtypeUnsupported, ComputeUnsupported or ParameterInvalid. `c` counts for shape and dtype
        also where beta is 0, so that neither depends on a value; only its elements are not read then.
        """
        operands = {"a": a, "b": b} | ({"c": c} if c is not None else {})
        common = _common(operands, alpha, trans_a, trans_b, layout, compute, config)
        product = _Product(**common)
        beta = _scalar(beta, "beta", common["dtype"])
        if beta != 0 and c is None:
            raise ParameterInvalid("beta is not 0, but there is no c", "beta")
        shape = (*product.batch_shape, product.m, product.n)
        if c is not None:
            _check_c(_logical(c, product.planar), shape)
        _check_size("the result", *product.stored(shape, product.dtype))
        return cls(**common, c=c, beta=beta, order=cast("Order", _choice(order, ORDERS, "order")))

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of D, with a leading 2 where planar."""
        return self.stored((*self.batch_shape, self.m, self.n), self.dtype)[0]

    @property
    def result_dtype(self) -> np.dtype[Any]:
        """The dtype of D as stored: real where planar."""
        return self.stored((), self.dtype)[1]

    @property
    def result(self) -> Operand:
        """D as a fresh array."""
        return Operand.contiguous(self.result_shape, self.result_dtype, self.order)

    def nbytes(self) -> int:
        """Bytes that must move at least: every operand read once (c where beta is not 0), the result written once."""
        read_c = self.c.nbytes if self.c is not None and self.beta != 0 else 0
        return self.a.nbytes + self.b.nbytes + read_c + self.result.nbytes


@dataclass(frozen=True)
class GemmReduceProblem(_Product):
    """Reductions over the rows ("m") or columns ("n") of alpha * op(A) op(B), with "batch" over the batch too."""

    reductions: tuple[str, ...]
    axis: tuple[str, ...]
    pre_op: str
    return_c: bool
    reproducible: bool

    @classmethod
    def build(
        cls,
        a: Operand,
        b: Operand,
        *,
        reduce: str | Sequence[str] = "sum",
        axis: str | Sequence[str] = "m",
        pre_op: str = "identity",
        alpha: complex = 1,
        trans_a: str = "N",
        trans_b: str = "N",
        layout: str = "interleaved",
        compute: str = "auto",
        config: GemmConfig | None = None,
        return_c: bool = False,
        reproducible: bool = True,
    ) -> GemmReduceProblem:
        """Checks everything and returns the problem.

        Raises ShapeMismatch, DtypeUnsupported, ComputeUnsupported or ParameterInvalid.
        """
        common = _common({"a": a, "b": b}, alpha, trans_a, trans_b, layout, compute, config)
        problem = cls(
            **common,
            reductions=_names(reduce, REDUCTIONS, "reduce"),
            axis=_names(axis, AXES, "axis"),
            pre_op=_choice(pre_op, PRE_OPS, "pre_op"),
            return_c=bool(return_c),
            reproducible=bool(reproducible),
        )
        if ("m" in problem.axis) == ("n" in problem.axis):
            raise ParameterInvalid('axis must have exactly one of "m" and "n", optionally with "batch"', "axis")
        for name in problem.reductions:
            if name in {"max", "min"} and problem.value_dtype.kind == "c":
                raise ParameterInvalid(
                    f'"{name}" has no meaning for complex values: use "abs{name}", or pre_op="abs"', "reduce"
                )
            if problem.extent == 0 and name not in _EMPTY_REDUCTIONS:
                raise ParameterInvalid(f'"{name}" of nothing has no value: the reduced extent is 0', "reduce")
        for name, (shape, dtype) in problem.results.items():
            _check_size(f"the result {name}", shape, dtype)
        return problem

    @property
    def over_batch(self) -> bool:
        """Whether the batch is reduced too."""
        return "batch" in self.axis

    @property
    def over_rows(self) -> bool:
        """Whether rows are reduced (axis "m") rather than columns."""
        return "m" in self.axis

    @property
    def extent(self) -> int:
        """Elements that go into each result."""
        return (self.m if self.over_rows else self.n) * (self.batch if self.over_batch else 1)

    @property
    def outputs_shape(self) -> tuple[int, ...]:
        """Shape of one reduction, the planar axis not counted."""
        kept = self.n if self.over_rows else self.m
        return (kept,) if self.over_batch else (*self.batch_shape, kept)

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """The dtype of what is reduced: of the product's elements after pre_op."""
        return real_dtype(self.dtype) if self.pre_op == "abs" else self.dtype

    @property
    def results(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of every result as stored, in order: the reductions, then "c" where it is returned."""
        results = {name: self.stored(self.outputs_shape, self._reduced_dtype(name)) for name in self.reductions}
        if self.return_c:
            results["c"] = self.stored((*self.batch_shape, self.m, self.n), self.dtype)
        return results

    def _reduced_dtype(self, name: str) -> np.dtype[Any]:
        if name in {"argmax", "argmin"}:
            return np.dtype(np.int64)
        value = self.value_dtype
        if name in {"sum", "mean", "sumsq"} and value == np.float16:
            value = np.dtype(np.float32)
        return value if name in {"sum", "mean", "max", "min"} else real_dtype(value)

    def nbytes(self) -> int:
        """Bytes that must move at least: both operands read once, every result written once."""
        return self.a.nbytes + self.b.nbytes + sum(math.prod(s) * d.itemsize for s, d in self.results.values())


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The real dtype of the same precision."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


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


def _common(
    operands: dict[str, Operand],
    alpha: complex,
    trans_a: str,
    trans_b: str,
    layout: str,
    compute: str,
    config: GemmConfig | None,
) -> dict[str, Any]:
    """The checked fields of `_Product`."""
    _choice(trans_a, TRANS, "trans_a")
    _choice(trans_b, TRANS, "trans_b")
    planar = _choice(layout, LAYOUTS, "layout") == "planar"
    for name, operand in operands.items():
        _check_operand(name, operand, planar)
    dtype = np.result_type(*(operand.dtype for operand in operands.values()))
    if planar:
        dtype = np.dtype(np.complex64 if dtype == np.float32 else np.complex128)
    _check_compute(compute, dtype)
    a, b = (_logical(operands[name], planar) for name in ("a", "b"))
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
        "alpha": _scalar(alpha, "alpha", dtype),
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
    _check_size(name, operand.shape, operand.dtype)
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


def _check_size(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    # Empty arrays count too: kernels compute strides from their other extents.
    if math.prod(max(extent, 1) for extent in shape) * dtype.itemsize > _MAX_NBYTES:
        raise ShapeMismatch(f"{name} {shape} would exceed 2**62 bytes")


def _check_compute(compute: str, dtype: np.dtype[Any]) -> None:
    if compute not in COMPUTE_MODES:
        raise ComputeUnsupported(
            f"unknown compute mode {compute!r}; there are {', '.join(COMPUTE_MODES)}", COMPUTE_MODES
        )
    modes = compute_modes(dtype)
    if compute not in modes:
        raise ComputeUnsupported(
            f"compute {compute!r} does not apply to {dtype.name}; it has {', '.join(modes)}", modes
        )


def _check_c(c: tuple[int, ...], shape: tuple[int, ...]) -> None:
    try:
        fits = np.broadcast_shapes(c, shape) == shape
    except ValueError:
        fits = False
    if not fits or len(c) < 2:
        raise ShapeMismatch(f"c {c} does not broadcast to the result {shape}")


def _logical(operand: Operand, planar: bool) -> tuple[int, ...]:
    """The shape without the planar axis."""
    return operand.shape[1:] if planar else operand.shape


def _choice(value: object, allowed: Collection[str], parameter: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ParameterInvalid(f"{parameter} must be one of {', '.join(allowed)}, not {value!r}", parameter)
    return value


def _names(value: str | Sequence[str], allowed: Collection[str], parameter: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names:
        raise ParameterInvalid(f"{parameter} is empty; it takes one or more of {', '.join(allowed)}", parameter)
    for name in names:
        _choice(name, allowed, parameter)
    if len(set(names)) < len(names):
        raise ParameterInvalid(f"{parameter} names one twice: {', '.join(names)}", parameter)
    return names


def _scalar(value: object, parameter: str, dtype: np.dtype[Any]) -> complex:
    """`value` as a complex number that the arithmetic dtype can hold. Raises ParameterInvalid."""
    try:
        number: complex = complex(value)  # type: ignore[call-overload]
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
