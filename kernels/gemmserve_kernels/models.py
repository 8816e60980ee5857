"""NumPy models of the compute modes: the error that a tensor core's arithmetic makes, on a machine that has none.

A matrix instruction multiplies its inputs exactly and adds the products of its k steps to the accumulator, which is cut
to float32 *towards zero*. That bias, and not the rounding of the inputs, limits the compensated modes, unless partial
sums are promoted: added to a second float32 accumulator, rounding to nearest, every `promote` steps of k. Real parts
and imaginary parts are formed by real products (4M).

Sources: NVIDIA CUTLASS, example 27 and 29 (3xTF32: big and small parts, staged accumulation) and
`cutlass/numeric_conversion.h` (the rounding styles); H. Ootomo, R. Yokota, Recovering single precision accuracy from
Tensor Cores while surpassing the FP32 theoretical peak performance, IJHPCA 36 (2022) (splits, the rounding of the
accumulator).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, Any]
    Pair = tuple[Array, Array]
    Multiply = Callable[[list[Array], list[Array]], Array]

ROUNDINGS: Final = ("nearest", "toward_zero", "half_ulp_truncate", "half_ulp_truncate_flush")
"""How a float32 becomes TF32: to nearest even; truncated; half a unit added, then truncated (ties away from zero); the
same with subnormals truncated. CUTLASS rounds big parts towards zero and small ones by half_ulp_truncate."""

MODES: Final = ("fp32", "1xtf32", "3xtf32", "3xfp16")

_TF32_DROPPED: Final = 13
_EXPONENT: Final = 0x7F800000
_TF32_K: Final = 8
_FP16_K: Final = 16
"""Steps of k in one matrix instruction (PTX ISA: mma m16n8k8 for tf32, wgmma k16 for f16)."""

_SCALED_EXPONENT: Final = 15
"""Rows of A and columns of B are scaled so that their largest magnitude lies in [2**14, 2**15)."""


def product(
    a: Array, b: Array, mode: str, *, big: str = "toward_zero", small: str = "half_ulp_truncate", promote: int = 32
) -> Array:
    """A B of float32 or complex64 matrices (m, k) and (k, n) as `mode` computes it.

    `big` and `small` are the roundings of the parts (`1xtf32` uses `small` alone), `promote` the steps of k between
    promotions. Rows of A and columns of B with elements that are not finite take plain float32's answer.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    with np.errstate(all="ignore"):
        plain = a @ b
        if mode == "fp32":
            return np.asarray(plain)
        if mode == "1xtf32":
            result = _by_parts(a, b, _one_tf32(small))
        elif mode == "3xtf32":
            result = _by_parts(a, b, _compensated(_split_tf32(big, small), _TF32_K, promote))
        else:
            scaled_a, rows = _scale(a, axis=1)
            scaled_b, columns = _scale(b, axis=0)
            result = _by_parts(scaled_a, scaled_b, _compensated(_split_fp16, _FP16_K, promote))
            result = times_powers(result, rows + columns)
        finite = np.isfinite(a).all(axis=1, keepdims=True) & np.isfinite(b).all(axis=0, keepdims=True)
        return np.where(finite, result, plain)


def round_tf32(x: Array, style: str) -> Array:
    """float32 `x` rounded to TF32's 10 explicit bits of significand; infinities and NaN stay."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    half = np.uint32(1 << (_TF32_DROPPED - 1))
    mask = np.uint32(~((1 << _TF32_DROPPED) - 1) & 0xFFFFFFFF)
    if style == "nearest":
        odd = (bits >> np.uint32(_TF32_DROPPED)) & np.uint32(1)
        rounded = bits + (half - np.uint32(1)) + odd
    elif style == "toward_zero":
        rounded = bits
    elif style == "half_ulp_truncate":
        rounded = bits + half
    elif style == "half_ulp_truncate_flush":
        rounded = np.where(bits & np.uint32(_EXPONENT), bits + half, bits)
    else:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, not {style!r}")
    special = (bits & np.uint32(_EXPONENT)) == np.uint32(_EXPONENT)
    return np.where(special, bits, rounded & mask).view(np.float32)


def truncate(x: Array) -> Array:
    """float64 `x` cut to float32 towards zero (normal numbers)."""
    return (x.view(np.uint64) & np.uint64(0xFFFFFFFFE0000000)).view(np.float64)


def _by_parts(a: Array, b: Array, multiply: Multiply) -> Array:
    """The real product, or the complex one from real ones: re = ar br + (-ai) bi, im = ar bi + ai br."""
    if a.dtype.kind != "c":
        return multiply([a], [b])
    result = np.empty((a.shape[0], b.shape[1]), np.complex64)
    result.real = multiply([a.real, -a.imag], [b.real, b.imag])
    result.imag = multiply([a.real, a.imag], [b.imag, b.real])
    return result


def _one_tf32(style: str) -> Multiply:
    def multiply(left: list[Array], right: list[Array]) -> Array:
        terms = [(round_tf32(x, style), round_tf32(y, style)) for x, y in zip(left, right, strict=True)]
        return _accumulate([terms], _TF32_K, None)

    return multiply


def _compensated(split: Callable[[Array], Pair], step: int, promote: int) -> Multiply:
    """Big times big, after the mixed products; small times small is below the last bit.

    The mixed products come first: while the accumulator is small, so is what truncation takes from it.
    """

    def multiply(left: list[Array], right: list[Array]) -> Array:
        mixed, big = [], []
        for x, y in zip(left, right, strict=True):
            (x_big, x_small), (y_big, y_small) = split(x), split(y)
            mixed += [(x_small, y_big), (x_big, y_small)]
            big.append((x_big, y_big))
        return _accumulate([mixed, big], step, promote)

    return multiply


def _split_tf32(big: str, small: str) -> Callable[[Array], Pair]:
    def split(x: Array) -> Pair:
        high = round_tf32(x, big)
        return high, round_tf32(x - high, small)

    return split


def _split_fp16(x: Array) -> Pair:
    high = x.astype(np.float16).astype(np.float32)
    return high, (x - high).astype(np.float16).astype(np.float32)


def _accumulate(groups: list[list[Pair]], step: int, promote: int | None) -> Array:
    """The sum of x y over all pairs by matrix instructions of `step` k each, group after group.

    Partial sums are promoted every `promote` k (None: never).
    """
    wide = [[(x.astype(np.float64), y.astype(np.float64)) for x, y in pairs] for pairs in groups]
    left, right = groups[0][0]
    k = left.shape[1]
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    interval = max(1, promote or k)
    for first in range(0, k, interval):
        last = min(first + interval, k)
        partial = np.zeros(total.shape)
        for pairs, start in itertools.product(wide, range(first, last, step)):
            here = slice(start, min(start + step, last))
            for x, y in pairs:
                partial = truncate(partial + x[:, here] @ y[here])
        total += partial.astype(np.float32)
    return total


def accumulate(groups: list[list[Pair]], promote: int) -> Array:
    """The sum of x y over all pairs of float16 values by matrix instructions, group after group within `promote` k."""
    return _accumulate(groups, _FP16_K, promote)


def _scale(x: Array, axis: int) -> tuple[Array, Array]:
    """`x` times powers of two along `axis`, and the exponents that undo it."""
    magnitude = np.maximum(np.abs(x.real), np.abs(x.imag)).max(axis=axis, keepdims=True, initial=0)
    exponent = np.frexp(magnitude)[1] - _SCALED_EXPONENT
    return times_powers(x, -exponent), exponent


def times_powers(x: Array, exponent: Array) -> Array:
    """`x` times 2**`exponent`."""
    if x.dtype.kind != "c":
        return np.ldexp(x, exponent)
    scaled = np.empty(x.shape, x.dtype)
    scaled.real = np.ldexp(x.real, exponent)
    scaled.imag = np.ldexp(x.imag, exponent)
    return scaled
