"""Elementwise operations with NumPy's broadcasting: sums with scalars and copies (`Add`), products (`Multiply`).

Each factor is rounded once per operation, in the result type of the operands (float16 in float32), or in that of the
result where it is wider; the result is rounded to its own dtype at the end. What multiplies by 1 or adds 0 is not done,
so that a copy keeps every bit, signs of zeros and NaN included; a real factor scales real and imaginary parts apart, so
that infinities stay what they are.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.freivalds import Finding
from gemmserve_kernels.operations.operation import Operation, Result, module_of
from gemmserve_kernels.problem.errors import DtypeUnsupported, ParameterInvalid, ShapeMismatch
from gemmserve_kernels.problem.operand import DTYPES, Operand, real_dtype
from gemmserve_kernels.problem.validation import check_size, choice, scalar
from gemmserve_kernels.problem.vocabulary import ORDERS, Dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HOST_ELEMENTS: Final = 1 << 15
"""Elements of a block on the host: two of complex128 stay in a second-level cache of 1 MiB."""
_TILE: Final = 256
"""Elements of a tile along the last axis; 64 and 128 were slower."""
_DEVICE_ELEMENTS: Final = 1 << 23
"""Elements of a block on a device: launches are nothing beside them, and two blocks take 256 MiB at most."""
_SAMPLES: Final = 256
"""Elements that a check computes again."""
_INT64: Final = np.dtype(np.int64)


@dataclass(frozen=True)
class Add(Operation):
    """D = alpha * a + beta * b + gamma; without b, D = alpha * a + gamma, which may be a copy in another order."""

    name = "add"
    a: Operand
    b: Operand | None
    alpha: complex
    beta: complex
    gamma: complex
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    result_dtype: np.dtype[Any]
    order: str

    @classmethod
    def build(
        cls,
        *,
        a: Operand,
        b: Operand | None = None,
        alpha: complex = 1,
        beta: complex = 1,
        gamma: complex = 0,
        dtype: str | None = None,
        order: str = "C",
    ) -> Add:
        """Check everything and return the operation.

        `dtype`: of the result, complex where the sum is, and of the arithmetic where it is wider than the operands';
        None: NumPy's result type of a and b, complex where one of the scalars has an imaginary part. Arrays of int64
        are copied, and nothing else is done with them.

        Raises ShapeMismatch, DtypeUnsupported, ParameterInvalid.
        """
        if b is None and beta != 1:
            raise ParameterInvalid("beta is a factor of b, and there is no b", "beta")
        factors = {"alpha": alpha, "beta": beta, "gamma": gamma}
        choice(order, ORDERS, "order")
        if a.dtype == _INT64 and b is None and dtype in {None, "int64"} and (alpha, gamma) == (1, 0):
            check_size("the result", a.shape, a.dtype)
            return cls(a, None, 1, 1, 0, a.shape, a.dtype, a.dtype, order)
        operands = {"a": a} if b is None else {"a": a, "b": b}
        shape, found = _combined(operands, factors.values())
        result = found
        if dtype is not None:
            result = np.dtype(choice(dtype, get_args(Dtype), "dtype"))
            if found.kind == "c" and result.kind != "c":
                raise ParameterInvalid(f"dtype {dtype} is real, and the sum is {found.name}", "dtype")
            found = np.result_type(found, result)
        check_size("the result", shape, result)
        scalars = {name: scalar(value, name, found) for name, value in factors.items()}
        return cls(a, b, **scalars, shape=shape, dtype=found, result_dtype=result, order=order)

    @property
    def operands(self) -> dict[str, Operand]:
        """See `Operation`."""
        return {"a": self.a} if self.b is None else {"a": self.a, "b": self.b}

    @property
    def results(self) -> dict[str, Result]:
        """See `Operation`."""
        return {"d": Result(self.shape, self.result_dtype, self.order)}

    @property
    def copies(self) -> bool:
        """Whether every element of the result is one of a, but for its dtype."""
        return self.b is None and self.alpha == 1 and self.gamma == 0

    def flops(self) -> int:
        """See `Operation`."""
        scaled = (self.alpha != 1) + (self.b is not None and self.beta != 1)
        added = (self.b is not None) + (self.gamma != 0)
        return (scaled * _SCALING[self.dtype.kind] + added * _SUM[self.dtype.kind]) * math.prod(self.shape)

    @property
    def scratch_nbytes(self) -> int:
        """See `Operation`."""
        return 0 if self.copies else 2 * _scratch_nbytes(self.shape, self.dtype)

    def run(self, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """See `Operation`."""
        out = results["d"]
        xp = module_of(out)
        a = xp.broadcast_to(operands["a"], self.shape)
        if self.copies:
            for block in _blocks(xp, self.shape, [out, a]):
                _assign(xp, out, block, a[block])
            return
        b = None if self.b is None else xp.broadcast_to(operands["b"], self.shape)
        arithmetic = _arithmetic(self.dtype)
        with np.errstate(all="ignore"):
            for block in _blocks(xp, self.shape, [out, a] if b is None else [out, a, b]):
                total = _scaled(xp, a[block], self.alpha, arithmetic)
                if b is not None:
                    total += _scaled(xp, b[block], self.beta, arithmetic)
                if self.gamma != 0:
                    total += _number(self.gamma, arithmetic)
                _assign(xp, out, block, total)

    def find(self, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
        """See `Operation`."""
        if self.dtype == _INT64:
            return _found_copies(operands["a"], results["d"], self.shape, seed)
        places = _places(self.shape, seed)
        terms = [self.alpha * _wide(_picked(operands["a"], self.shape, places))]
        if self.b is not None:
            terms.append(self.beta * _wide(_picked(operands["b"], self.shape, places)))
        terms.append(np.full(len(places), self.gamma, np.complex128))
        return _judged(_picked(results["d"], self.shape, places), terms, self.dtype, self.result_dtype)


@dataclass(frozen=True)
class Multiply(Operation):
    """D = alpha * a * b, element by element."""

    name = "multiply"
    a: Operand
    b: Operand
    alpha: complex
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str

    @classmethod
    def build(cls, *, a: Operand, b: Operand, alpha: complex = 1, order: str = "C") -> Multiply:
        """Check everything and return the operation. Raises ShapeMismatch, DtypeUnsupported, ParameterInvalid."""
        shape, dtype = _combined({"a": a, "b": b}, [alpha])
        check_size("the result", shape, dtype)
        return cls(a, b, scalar(alpha, "alpha", dtype), shape, dtype, choice(order, ORDERS, "order"))

    @property
    def operands(self) -> dict[str, Operand]:
        """See `Operation`."""
        return {"a": self.a, "b": self.b}

    @property
    def results(self) -> dict[str, Result]:
        """See `Operation`."""
        return {"d": Result(self.shape, self.dtype, self.order)}

    def flops(self) -> int:
        """See `Operation`."""
        return (_PRODUCT[self.dtype.kind] + (self.alpha != 1) * _SCALING[self.dtype.kind]) * math.prod(self.shape)

    @property
    def scratch_nbytes(self) -> int:
        """See `Operation`."""
        return 2 * _scratch_nbytes(self.shape, self.dtype)

    def run(self, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """See `Operation`."""
        out = results["d"]
        xp = module_of(out)
        a, b = (xp.broadcast_to(operands[name], self.shape) for name in ("a", "b"))
        arithmetic = _arithmetic(self.dtype)
        with np.errstate(all="ignore"):
            for block in _blocks(xp, self.shape, [out, a, b]):
                made = _scaled(xp, a[block], self.alpha, arithmetic)
                made *= b[block]
                _assign(xp, out, block, made)

    def find(self, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
        """See `Operation`."""
        places = _places(self.shape, seed)
        a, b = (_wide(_picked(operands[name], self.shape, places)) for name in ("a", "b"))
        return _judged(_picked(results["d"], self.shape, places), [self.alpha * a * b], self.dtype, self.dtype)


_SUM: Final = {"f": 1, "c": 2, "i": 0}
"""Operations on real numbers of a sum of two elements, by kind of dtype."""
_SCALING: Final = {"f": 1, "c": 6, "i": 0}
"""Operations of a factor; of complex factors, as if all were."""
_PRODUCT: Final = {"f": 1, "c": 6, "i": 0}


def _combined(operands: dict[str, Operand], factors: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of elementwise results. Raises ShapeMismatch, DtypeUnsupported."""
    for name, operand in operands.items():
        if operand.dtype not in DTYPES:
            supported = ", ".join(dtype.name for dtype in DTYPES)
            raise DtypeUnsupported(f"{name} is {operand.dtype.name}; the dtypes are {supported}")
        check_size(name, operand.shape, operand.dtype)
    try:
        shape = np.broadcast_shapes(*(operand.shape for operand in operands.values()))
    except ValueError:
        listed = " and ".join(f"{name} {operand.shape}" for name, operand in operands.items())
        raise ShapeMismatch(f"{listed} do not broadcast") from None
    dtype = np.result_type(*(operand.dtype for operand in operands.values()))
    if dtype.kind != "c" and any(complex(factor).imag for factor in factors):
        dtype = np.result_type(dtype, np.complex64)
    return shape, dtype


def _arithmetic(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _number(value: complex, dtype: np.dtype[Any]) -> Any:
    return dtype.type(value if dtype.kind == "c" else value.real)


def _scaled(xp: Any, part: Any, factor: complex, dtype: np.dtype[Any]) -> Any:
    """`factor` times `part`, in fresh contiguous memory."""
    made = xp.empty(part.shape, dtype)
    xp.copyto(made, part)
    if factor == 1:
        return made
    if dtype.kind == "c" and not factor.imag and made.ndim:
        parts = made.view(real_dtype(dtype))
        parts *= real_dtype(dtype).type(factor.real)
    else:
        made *= _number(factor, dtype)
    return made


def _assign(xp: Any, out: Any, block: tuple[slice, ...], value: Any) -> None:
    xp.copyto(out[block] if block else out, value, casting="same_kind")


def _blocks(xp: Any, shape: tuple[int, ...], arrays: list[Any]) -> Iterator[tuple[slice, ...]]:
    """Blocks of arrays of one shape in C order, each of a bounded number of elements, with a `checkpoint` before each.

    On the host they are tiles where an array runs fastest along another axis than the last: lines of a cache that are
    read for a few of their elements would be gone before the others are wanted. A transposed copy takes half the time.
    """
    if math.prod(shape) == 0:
        return
    last = len(shape) - 1
    fastest = next((axis for axis in map(_fastest_axis, arrays) if axis != last), last) if xp is np else last
    steps = [1] * len(shape)
    left = _HOST_ELEMENTS if xp is np else _DEVICE_ELEMENTS
    for axis in dict.fromkeys([last, fastest, *range(last, -1, -1)] if shape else []):
        most = left if fastest == last or axis != last else min(left, _TILE)
        steps[axis] = max(1, min(shape[axis], most))
        left //= steps[axis]
    for block in itertools.product(
        *(
            [slice(start, start + step) for start in range(0, extent, step)]
            for extent, step in zip(shape, steps, strict=True)
        )
    ):
        checkpoint()
        yield block


def _fastest_axis(array: Any) -> int:
    """Return the axis along which neighbours lie nearest, of those that are more than a broadcast element; the last of
    several.
    """
    axes = [
        (abs(stride), -axis)
        for axis, (extent, stride) in enumerate(zip(array.shape, array.strides, strict=True))
        if extent > 1 and stride
    ]
    return -min(axes)[1] if axes else array.ndim - 1


def _scratch_nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return min(math.prod(shape), _DEVICE_ELEMENTS) * _arithmetic(dtype).itemsize


def _places(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Indices of elements chosen at random, one a row; none of an empty array."""
    count = _SAMPLES if math.prod(shape) else 0
    return np.random.default_rng(seed).integers(0, shape or (), (count, len(shape)))


def _picked(array: Any, shape: tuple[int, ...], places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Elements of an array broadcast to `shape`, on the host."""
    xp = module_of(array)
    whole = xp.broadcast_to(array, shape).reshape(shape or (1,))
    columns = places.T if shape else np.zeros((1, len(places)), np.int64)
    picked = whole[tuple(xp.asarray(column) for column in columns)]
    found: np.ndarray[Any, Any] = picked if xp is np else picked.get()
    return found


def _wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.complex128)


def _judged(
    made: np.ndarray[Any, Any], terms: list[np.ndarray[Any, Any]], dtype: np.dtype[Any], stored: np.dtype[Any]
) -> Finding:
    """Finding of elements beside the terms whose sum each is; those that are not finite, or overflow, do not count."""
    with np.errstate(all="ignore"):
        expected = sum(terms[1:], terms[0])
        size = sum((np.abs(term) for term in terms[1:]), np.abs(terms[0]))
        limit = min(float(np.finfo(real_dtype(each)).max) for each in (_arithmetic(dtype), stored))
        known = np.isfinite(size) & (size < limit / 4)
        error = np.abs(_wide(made) - expected)[known]
    if not known.any():
        return Finding(math.nan, math.nan) if len(made) else Finding(0.0, 0.0)
    if not np.isfinite(error).all():
        return Finding(math.inf, math.inf)
    arithmetic, kept = (np.finfo(real_dtype(each)) for each in (_arithmetic(dtype), stored))
    # Three operations on complex numbers, each within sqrt(5) units (R. Brent, C. Percival, P. Zimmermann, 2007).
    unit = 8 * float(arithmetic.eps) + float(kept.eps)
    tiny = float(kept.smallest_subnormal) + 8 * float(arithmetic.tiny)
    norm = float(np.linalg.norm(np.abs(expected[known])))
    residual = float(np.linalg.norm(error)) / norm if norm else (math.inf if error.any() else 0.0)
    return Finding(residual, float((error / (unit * size[known] + tiny)).max()))


def _found_copies(a: Any, made: Any, shape: tuple[int, ...], seed: int) -> Finding:
    """Finding of a copy of whole numbers, whose elements are equal or wrong."""
    places = _places(shape, seed)
    wrong = bool((_picked(a, shape, places) != _picked(made, shape, places)).any())
    return Finding(math.inf, math.inf) if wrong else Finding(0.0, 0.0)
