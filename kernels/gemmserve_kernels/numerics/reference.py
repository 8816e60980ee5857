"""References of results: an oracle in higher precision, error metrics, an a-priori bound.

NumPy only, and slow where it must be. Sources: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
section 3.5 (inner products) and 3.6 (complex arithmetic); K. Ozaki, T. Ogita, S. Oishi, S. M. Rump, Error-free
transformations of matrix multiplication, Numer. Algorithms 59 (2012).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.problem.arrays import library
from gemmserve_kernels.problem.problem import real_dtype

if TYPE_CHECKING:
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

    Array = np.ndarray[Any, Any]

_MAX_SLICES: Final = 16
"""Slices of an operand at most: of 20 bits each, 320 bits below a row's maximum."""

_INPUT_ROUNDING: Final = {"tf32": 2.0**-10, "1xtf32": 2.0**-10}
"""Relative error of rounding an input where a mode rounds it; TF32 keeps 10 bits, and may truncate."""


@dataclass(frozen=True)
class Errors:
    """Relative errors: of all of D, of its worst row, of its real and its imaginary part each against its own norm.

    All are Frobenius norms of the difference over that of the reference; 0 where both are 0, infinity where only the
    reference is. Real data have `rel_real` = `rel_fro` and `rel_imag` = 0.
    """

    rel_fro: float
    worst_row: float
    rel_real: float
    rel_imag: float


def logical(problem: GemmProblem | GemmReduceProblem, array: Any) -> Array:
    """An operand or a complex result on the host, planar ones joined to complex."""
    host = on_host(array)
    if not problem.planar or host.dtype.kind == "c":
        return host
    joined = np.empty(host.shape[1:], np.result_type(host.dtype, np.complex64))
    joined.real, joined.imag = host
    return joined


def on_host(array: Any) -> Array:
    host: Array = array.get() if library(array) == "cupy" else np.asarray(array)
    return host


def oracle_product(problem: GemmProblem | GemmReduceProblem, a: Any, b: Any) -> Array:
    """The product with alpha: complex128 or float64, for double-precision problems in long double.

    The long double result is exact up to its own rounding, whatever the data's range and the order of summation.
    """
    op_a = _op(logical(problem, a), problem.trans_a)
    op_b = _op(logical(problem, b), problem.trans_b)
    wide = _wide(problem)
    product: Array
    with np.errstate(all="ignore"):
        if is_exact(problem):
            product = _exact_matmul(op_a.astype(wide), op_b.astype(wide))
        else:
            product = op_a.astype(wide) @ op_b.astype(wide)
        alpha = product.dtype.type(problem.alpha if product.dtype.kind == "c" else problem.alpha.real)
        return product if problem.alpha == 1 else np.asarray(alpha * product)


def is_exact(problem: GemmProblem | GemmReduceProblem) -> bool:
    return problem.dtype.itemsize == _wide(problem).itemsize


def oracle_gemm(problem: GemmProblem, a: Any, b: Any, c: Any | None = None) -> Array:
    """D of the logical shape (complex where planar), in the precision of `oracle_product`."""
    product = oracle_product(problem, a, b)
    if c is None or problem.beta == 0:
        return product
    beta = product.dtype.type(problem.beta if product.dtype.kind == "c" else problem.beta.real)
    with np.errstate(all="ignore"):
        return np.asarray(product + beta * logical(problem, c).astype(product.dtype))


def oracle_gemm_reduce(problem: GemmReduceProblem, a: Any, b: Any) -> dict[str, Array]:
    """Every result by name, of the logical shape, in the precision of `oracle_product`."""
    product = oracle_product(problem, a, b)
    values = pre_op(problem.pre_op, product)
    results = {name: reduced(problem, name, values) for name in problem.reductions}
    return results | ({"c": product} if problem.return_c else {})


def pre_op(name: str, product: Array) -> Array:
    """The elements that are reduced."""
    if name == "abs":
        return np.asarray(np.abs(product))
    return np.square(product) if name == "square" else product


def _wide(problem: GemmProblem | GemmReduceProblem) -> np.dtype[Any]:
    return np.dtype(np.complex128 if problem.dtype.kind == "c" else np.float64)


def _op(array: Array, trans: str) -> Array:
    array = array.swapaxes(-1, -2) if trans in {"T", "C"} else array
    return array.conj() if trans in {"C", "R"} else array


def lined_up(problem: GemmReduceProblem, values: Array) -> tuple[Array, int]:
    """`values` with what is reduced on one axis, in index order, and that axis."""
    if not problem.over_batch:
        return values, -2 if problem.over_rows else -1
    if not problem.over_rows:
        values = values.swapaxes(-1, -2)
    return values.reshape(math.prod(values.shape[:-1]), values.shape[-1]), 0


def reduced(problem: GemmReduceProblem, name: str, values: Array) -> Array:
    values, axis = lined_up(problem, values)
    with np.errstate(all="ignore"):
        if name in {"sum", "mean"}:
            return np.asarray(getattr(np, name)(values, axis=axis))
        if name == "sumsq":
            return np.asarray((values.real**2 + values.imag**2).sum(axis=axis))
        magnitude = name.startswith("abs") or values.dtype.kind == "c"
        function = getattr(np, name.removeprefix("abs"))
        return np.asarray(function(np.abs(values) if magnitude else values, axis=axis))


def _exact_matmul(a: Array, b: Array) -> Array:
    """A B of float64 or complex128, rounded once to long double.

    Both are cut into slices of so few bits that the products of two slices add up without rounding, in BLAS; those are
    summed in double-double. Rows and columns that are not finite get plain double-precision products.
    """
    bits = (53 - math.ceil(math.log2(max(2, 2 * a.shape[-1])))) // 2
    finite_a = np.isfinite(a).all(axis=-1, keepdims=True)
    finite_b = np.isfinite(b).all(axis=-2, keepdims=True)
    scale_a, slices_a = _slices(np.where(finite_a, a, 0), bits, axis=-1)
    scale_b, slices_b = _slices(np.where(finite_b, b, 0), bits, axis=-2)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    high, low = np.zeros((2, *shape), a.dtype)
    for slice_a, slice_b in itertools.product(slices_a, slices_b):
        part = slice_a @ slice_b
        total = high + part
        taken = total - high
        low += (high - (total - taken)) + (part - taken)
        high = total
    wide = np.dtype(np.clongdouble if a.dtype.kind == "c" else np.longdouble)
    result = high.astype(wide) + low
    exponent = scale_a + scale_b
    if wide.kind == "c":
        result.real = np.ldexp(result.real, exponent)
        result.imag = np.ldexp(result.imag, exponent)
    else:
        result = np.ldexp(result, exponent)
    plain = ~(finite_a & finite_b)
    return np.where(plain, (a @ b).astype(wide), result) if plain.any() else result


def _slices(x: Array, bits: int, axis: int) -> tuple[Array, list[Array]]:
    """Exponents along `axis`, and slices of at most `bits` bits that add up to x / 2**exponent."""
    parts = np.stack([x.real, x.imag], axis=-1) if x.dtype.kind == "c" else np.array(x[..., None])
    along = (axis - 1, -1)
    exponent = np.frexp(np.abs(parts).max(axis=along, keepdims=True, initial=0))[1]
    parts = np.ldexp(parts, -exponent)
    slices: list[Array] = []
    while parts.any() and len(slices) < _MAX_SLICES:
        top = np.frexp(np.abs(parts).max(axis=along, keepdims=True))[1]
        # Adding and taking away 1.5 * 2**(52 + quantum) rounds to multiples of 2**quantum.
        magic = np.ldexp(1.5, top - bits + 52)
        piece = (parts + magic) - magic
        parts -= piece
        slices.append(np.ascontiguousarray(piece).view(x.dtype)[..., 0])
    return exponent[..., 0], slices


def errors(d: Any, reference: Array) -> Errors:
    """Return how far `d` is from `reference`, arrays of the same logical shape (..., rows, columns)."""
    host = on_host(d)
    if host.shape != reference.shape:
        raise ValueError(f"the result has shape {host.shape}, the reference {reference.shape}")
    difference = host.astype(reference.dtype) - reference
    rel_fro = ratio(_norm(difference), _norm(reference))
    worst = float(np.max(_ratios(_norm(difference, axis=-1), _norm(reference, axis=-1)), initial=0.0))
    if reference.dtype.kind != "c":
        return Errors(rel_fro, worst, rel_fro, 0.0)
    return Errors(
        rel_fro,
        worst,
        ratio(_norm(difference.real), _norm(reference.real)),
        ratio(_norm(difference.imag), _norm(reference.imag)),
    )


def reduction_errors(problem: GemmReduceProblem, a: Any, b: Any, results: dict[str, Any]) -> dict[str, float]:
    """By name, the relative error of each result against the oracle.

    An argument's error is how much worse the element at that index is than the best one, relative to the largest
    magnitude that is compared: rounding may well prefer another of two nearly equal elements.
    """
    return _errors_of_reductions(problem, oracle_product(problem, a, b), results)


def _errors_of_reductions(problem: GemmReduceProblem, product: Array, results: dict[str, Any]) -> dict[str, float]:
    values = pre_op(problem.pre_op, product)
    found = {}
    for name in problem.reductions:
        if name.startswith("arg"):
            found[name] = _argument_error(problem, name, values, on_host(results[name]))
            continue
        reference = reduced(problem, name, values)
        # Real results of planar operands are plain arrays.
        result = logical(problem, results[name]) if reference.dtype.kind == "c" else on_host(results[name])
        found[name] = errors_of_values(result, reference)
    if problem.return_c:
        found["c"] = errors_of_values(logical(problem, results["c"]), product)
    return found


def errors_of_values(values: Array, reference: Array) -> float:
    """Norm of the difference over that of the reference."""
    return ratio(_norm(values.astype(reference.dtype) - reference), _norm(reference))


def _argument_error(problem: GemmReduceProblem, name: str, values: Array, index: Array) -> float:
    values, axis = lined_up(problem, np.abs(values) if values.dtype.kind == "c" else values)
    if not index.size:
        return 0.0
    at_index = np.take_along_axis(values, np.expand_dims(index, axis), axis).squeeze(axis)
    best = (np.max if name == "argmax" else np.min)(values, axis=axis)
    return ratio(float(np.max(np.abs(at_index - best))), float(np.max(np.abs(values))))


def _norm(x: Array, axis: int | None = None) -> Any:
    """Frobenius norm, of all or along an axis; scaled so that squares neither overflow nor vanish."""
    if not x.size:
        return 0.0 if axis is None else np.zeros(x.shape[:-1])
    largest = np.max(np.abs(x))
    if largest == 0 or not np.isfinite(largest):
        norm = np.abs(x).max(axis=axis)
        return float(norm) if axis is None else norm.astype(float)
    scaled = x / largest
    norm = largest * np.sqrt(np.sum(scaled.real**2 + scaled.imag**2, axis=axis))
    return float(norm) if axis is None else norm


def ratio(difference: float, size: float) -> float:
    return float(_ratios(np.asarray(difference), np.asarray(size)))


def _ratios(difference: Array, size: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.where(size == 0, np.where(difference == 0, 0.0, np.inf), difference / np.where(size == 0, 1, size))


def bound(problem: GemmProblem, a: Any, b: Any, c: Any | None = None) -> Array:
    """For each element of D, an upper bound on the error of its real part, and of its imaginary part.

    Holds for every order of summation, with and without fused multiply-add, whether or not subnormals are flushed:
    gamma_n (|alpha| |A| |B| + |beta| |C|) with n = K + 8 roundings (2 K + 8 for complex, whose parts are inner products
    of length 2 K), |z| = |re| + |im|, plus the rounding of the result. Finite data without overflow only.
    """
    complex_data = problem.dtype.kind == "c"
    arithmetic = np.finfo(real_dtype(problem.accumulate))
    stored = np.finfo(real_dtype(problem.dtype))
    roundings = (2 if complex_data else 1) * problem.k + 8
    unit = float(arithmetic.eps) / 2
    gamma = roundings * unit / (1 - roundings * unit)
    rounding = _INPUT_ROUNDING.get(problem.compute, 0.0)
    gamma += 2 * rounding + rounding**2
    major = _one_norm(problem.alpha) * (
        _one_norms(_op(logical(problem, a), problem.trans_a)) @ _one_norms(_op(logical(problem, b), problem.trans_b))
    )
    if c is not None and problem.beta != 0:
        major = major + _one_norm(problem.beta) * _one_norms(logical(problem, c))
    tiny = float(arithmetic.tiny) * roundings * max(1.0, _one_norm(problem.alpha)) + float(stored.tiny)
    return np.asarray((gamma + float(stored.eps) / 2 * (1 + gamma)) * major + tiny)


def _one_norm(z: complex) -> float:
    return abs(z.real) + abs(z.imag)


def _one_norms(x: Array) -> Array:
    return np.asarray(np.abs(x.real.astype(np.float64)) + np.abs(x.imag.astype(np.float64)))
