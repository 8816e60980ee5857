"""The parameters of a product: from keyword arguments to the JSON that is sent, with what can be checked for free.

Only what would waste an upload is checked here (shapes that cannot fit, scalars that JSON has no word for, letters
that do not exist); the server judges the rest, and always the whole.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, cast

import numpy as np

from gemmserve import _errors
from gemmserve._handles.view import Base
from gemmserve.wire import encode_scalar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

F = TypeVar("F", bound="Callable[..., Any]")

Trans = Literal["N", "T", "C", "R"]
Order = Literal["C", "F"]
Layout = Literal["interleaved", "planar"]
Compute = Literal[
    "auto", "fp32", "fp64", "tf32", "1xtf32", "3xtf32", "3xfp16", "3xfp16-3m", "6xbf16", "9xbf16", "ozaki"
]
Reduction = Literal["sum", "max", "min", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin"]
Axis = Literal["m", "n", "batch"]
PreOp = Literal["identity", "abs", "square"]

_FLAGS: Final[dict[str, tuple[bool, bool]]] = {
    "N": (False, False),
    "T": (True, False),
    "C": (True, True),
    "R": (False, True),
}
_LETTERS: Final = {flags: letter for letter, flags in _FLAGS.items()}

_DEFAULTS: Final[dict[str, Any]] = {
    "alpha": 1.0,
    "beta": None,
    "trans_a": "N",
    "trans_b": "N",
    "order": "C",
    "layout": "interleaved",
    "compute": "auto",
    "config": None,
    "axis": "m",
    "pre_op": "identity",
    "return_c": False,
    "reproducible": True,
    "verify": False,
    "priority": 0,
    "timeout_s": None,
    "ttl_s": None,
}


_CALL_DEFAULTS: Final[dict[str, Any]] = {
    **_DEFAULTS,
    "alpha": 1,
    "reduce": "sum",
    "optimize": True,
    "dtype": None,
    "memory_limit": None,
    "errors": "raise",
    "timeout": None,
    "name": None,
}


class GemmParams(TypedDict, total=False):
    """Parameters by which a gemm is computed."""

    alpha: complex
    beta: complex | None
    trans_a: Trans
    trans_b: Trans
    order: Order
    layout: Layout
    compute: Compute
    config: Any


class _Reduce(TypedDict, total=False):
    axis: Axis | Sequence[Axis]
    pre_op: PreOp
    alpha: complex
    trans_a: Trans
    trans_b: Trans
    layout: Layout
    compute: Compute
    config: Any
    reproducible: bool


class ReduceParams(_Reduce, total=False):
    """Parameters by which a gemm_reduce is computed."""

    reduce: Reduction | Sequence[Reduction]
    return_c: bool


class GemmOptions(GemmParams, total=False):
    """The keyword arguments of `gemm`."""

    timeout: float | None


class ReduceOptions(ReduceParams, total=False):
    """The keyword arguments of `gemm_reduce`."""

    timeout: float | None


class GemmManyOptions(GemmParams, total=False):
    """The keyword arguments of `gemm_many`."""

    errors: Literal["raise", "return"]
    timeout: float | None


class ReduceManyOptions(ReduceParams, total=False):
    """The keyword arguments of `gemm_reduce_many`."""

    errors: Literal["raise", "return"]
    timeout: float | None


class GemmStep(GemmParams, total=False):
    """The keyword arguments of a program's `gemm`."""

    name: str | None


class ReduceStep(ReduceParams, total=False):
    """The keyword arguments of a program's `gemm_reduce`."""

    name: str | None


class _Contraction(TypedDict, total=False):
    dtype: Any
    compute: Compute
    memory_limit: int | None


class _Einsum(_Contraction, total=False):
    optimize: Any


class EinsumOptions(_Einsum, total=False):
    """The keyword arguments of `einsum`."""

    timeout: float | None


class EinsumStep(_Einsum, total=False):
    """The keyword arguments of a program's `einsum`."""

    name: str | None


class TensordotOptions(_Contraction, total=False):
    """The keyword arguments of `tensordot`."""

    timeout: float | None


class TensordotStep(_Contraction, total=False):
    """The keyword arguments of a program's `tensordot`."""

    name: str | None


class OneReduction(_Reduce, total=False):
    """The keyword arguments of a `gemm_reduce` that gives one array."""

    reduce: Reduction
    return_c: Literal[False]
    timeout: float | None


def keywords(kind: type) -> Callable[[F], F]:
    """Show the keys of a TypedDict as the keyword-only arguments of a function that takes them as **options."""

    def shown(function: F) -> F:
        signature = inspect.signature(function)
        positional = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        named = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=_CALL_DEFAULTS[name], annotation=hint.__forward_arg__
            )
            for name, hint in kind.__annotations__.items()
        ]
        cast("Any", function).__signature__ = signature.replace(parameters=[*positional, *named])
        return function

    return shown


def params_of(kind: type, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The product's parameters among a call's options, defaults filled in; and the others (timeout, errors, name).

    Raises TypeError for a keyword that `kind` does not have, as a function's own would.
    """
    known = _defaults_of(kind)
    for name in options:
        if name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}; there are {', '.join(known)}")
    given = {**known, **options}
    others: dict[str, Any] = {name: given.pop(name) for name in ("timeout", "errors", "name") if name in given}
    return given, others


@functools.cache
def _defaults_of(kind: type) -> dict[str, Any]:
    """Every key of a TypedDict of options, and what it is where it is not given."""
    return {name: _CALL_DEFAULTS[name] for name in kind.__annotations__}


def compose(trans: str, *, transposed: bool, conjugated: bool) -> str:
    """The letter for op(x) when x is itself a transposed or conjugated view of what is stored: they cancel in pairs."""
    try:
        flip, conjugate = _FLAGS[trans]
    except (KeyError, TypeError):
        raise _errors.ParameterInvalid(
            f'trans_a and trans_b must be "N", "T", "C" (conjugate transpose) or "R" (conjugate), not {trans!r}'
        ) from None
    return _LETTERS[flip ^ transposed, conjugate ^ conjugated]


def to_json(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as JSON, defaults left out. Raises ParameterInvalid for scalars that are not finite numbers."""
    encoded: dict[str, Any] = {}
    for name, value in params.items():
        if name == "alpha" or (name == "beta" and value is not None):
            value = _scalar(name, value)  # noqa: PLW2901
        elif name == "config" and value is not None:
            value = _config(value)  # noqa: PLW2901
        elif name in {"reduce", "axis"} and not isinstance(value, str):
            value = _names(name, value)  # noqa: PLW2901
        if name not in _DEFAULTS or _DEFAULTS[name] != value:
            encoded[name] = value
    return encoded


def _names(name: str, value: Any) -> list[str]:
    try:
        return [str(item) for item in value]
    except TypeError:
        known = '"m" (over rows), "n" (over columns)' if name == "axis" else '"sum", "absmax"'
        raise _errors.ParameterInvalid(f"{name} is a name, as {known}, or a list of names, not {value!r}") from None


def _scalar(name: str, value: Any) -> float | list[float]:
    try:
        return encode_scalar(math.nan if isinstance(value, str) else complex(value))  # which complex() would read
    except (TypeError, ValueError, OverflowError) as error:
        raise _errors.ParameterInvalid(
            f"{name} must be a finite number, not {reprlib.repr(value)}", problem={"parameter": name}
        ) from error


def _config(config: Any) -> dict[str, Any]:
    """A mapping, or a dataclass such as gemmserve_kernels.GemmConfig, without the fields that are left to dispatch."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if not isinstance(config, Mapping):
        raise _errors.ParameterInvalid(
            f"config must be a mapping or a GemmConfig, not a {type(config).__name__}", problem={"parameter": "config"}
        )
    return {str(name): value for name, value in config.items() if value is not None}


def check_shapes(
    a: Sequence[int], b: Sequence[int], c: Sequence[int] | None = None, *, trans_a: str, trans_b: str, layout: str
) -> None:
    """Raises ShapeMismatch when no product of these shapes exists, before anything is sent."""
    batch_a, m, k = _matrix("a", a, trans_a, layout)
    batch_b, k_b, n = _matrix("b", b, trans_b, layout)
    if k != k_b:
        raise _errors.ShapeMismatch(f"op(a) is {m} x {k} and op(b) is {k_b} x {n}: {k} is not {k_b}")
    try:
        batch = np.broadcast_shapes(batch_a, batch_b)
    except ValueError:
        raise _errors.ShapeMismatch(f"the batches {batch_a} of a and {batch_b} of b do not broadcast") from None
    if c is None:
        return
    inner = tuple(c)[1:] if layout == "planar" else tuple(c)
    try:
        fits = np.broadcast_shapes(inner, (*batch, m, n)) == (*batch, m, n)
    except ValueError:
        fits = False
    if not fits:
        raise _errors.ShapeMismatch(f"c of shape {tuple(c)} does not broadcast to the result's shape {(*batch, m, n)}")


def product_of(
    operands: Mapping[str, Base], trans_a: str, trans_b: str, layout: str
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of op(a) op(b), for operands that `check_shapes` has passed."""
    batch_a, m, _ = _matrix("a", operands["a"].shape, trans_a, layout)
    batch_b, _, n = _matrix("b", operands["b"].shape, trans_b, layout)
    shape = (*(np.broadcast_shapes(batch_a, batch_b) if batch_a or batch_b else ()), m, n)
    return (2, *shape) if layout == "planar" else shape, np.result_type(*(each.dtype for each in operands.values()))


def results_of(op: str, operands: Mapping[str, Base | None], params: Mapping[str, Any]) -> dict[str, Base | None]:
    """The results of a product by name, for operands that `check_shapes` has passed; None where an operand, and so the
    result, is not known, and for reductions of planar arrays.
    """
    known = {name: base for name, base in operands.items() if base is not None}
    layout = str(params.get("layout", "interleaved"))
    product: Base | None = None
    if len(known) == len(operands):
        trans = (str(params.get("trans_a", "N")), str(params.get("trans_b", "N")))
        product = Base(*product_of(known, *trans, layout), str(params.get("order", "C")) if op == "gemm" else "C")
    if op == "gemm":
        return {"d": product}
    reduce, axis = params.get("reduce", "sum"), params.get("axis", "m")
    names = [reduce] if isinstance(reduce, str) else [*map(str, reduce)]
    made: dict[str, Base | None] = dict.fromkeys(names)
    if product is not None and layout != "planar":
        over = {axis} if isinstance(axis, str) else {*axis}
        shape = (*(() if "batch" in over else product.shape[:-2]), product.shape[-1 if "m" in over else -2])
        made = {name: Base(shape, _reduced(name, product.dtype, params.get("pre_op") == "abs")) for name in names}
    return made | ({"c": product} if params.get("return_c") else {})


def _reduced(name: str, dtype: np.dtype[Any], magnitudes: bool) -> np.dtype[Any]:
    """The dtype of a reduction of a product of dtype `dtype`, of its elements' magnitudes or of themselves."""
    if name in {"argmax", "argmin"}:
        return np.dtype(np.int64)
    real = np.empty(0, dtype).real.dtype
    value = real if magnitudes else dtype
    if name in {"sum", "mean", "sumsq"} and value == np.float16:
        value = real = np.dtype(np.float32)
    return value if name in {"sum", "mean", "max", "min"} else real


def gemm_nbytes(params: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> int:
    """Bytes of a gemm's result, for operands and parameters that `check_shapes` has passed."""
    operands = {name: Base(array.shape, array.dtype) for name, array in arrays.items()}
    trans = (params.get("trans_a", "N"), params.get("trans_b", "N"))
    shape, dtype = product_of(operands, *trans, params.get("layout", "interleaved"))
    return math.prod(shape) * dtype.itemsize


def _matrix(name: str, shape: Sequence[int], trans: str, layout: str) -> tuple[tuple[int, ...], int, int]:
    inner = tuple(shape)
    if layout == "planar":
        if len(inner) < 3 or inner[0] != 2:
            raise _errors.ShapeMismatch(
                f"{name} has shape {inner}; a planar operand has a leading axis of 2 and at least three dimensions"
            )
        inner = inner[1:]
    if len(inner) < 2:
        raise _errors.ShapeMismatch(f"{name} has shape {inner}; operands have at least two dimensions")
    rows, columns = inner[-2:]
    return (inner[:-2], columns, rows) if _FLAGS[trans][0] else (inner[:-2], rows, columns)
