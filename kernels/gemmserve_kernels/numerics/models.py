"""NumPy models of the compute modes: the error that a tensor core's arithmetic makes, on a machine that has none.

A matrix instruction takes a few steps of k at once. It multiplies exactly, aligns the products and the accumulator to
the largest of them, cuts each *towards zero* a few bits below float32's last one, adds up what is left exactly, and
cuts the sum to float32, towards zero again (`MatrixUnit`, `step`). The inputs' rounding is not what limits the
compensated modes, but this bias is, unless partial sums are promoted: added to a second float32 accumulator, rounding
to nearest, every `promote` steps of k. Where products of both signs meet in one partial sum, what the alignment takes
and what the last cut takes work against each other; a model without the alignment is wrong several times over there
(the real part of a product of positive complex data). So the models follow the kernels product by product.

The models reproduce what was measured on an H200 (relative errors of 3xFP16 in units of 1e-7, nothing given back):
complex64 normal data at k = 512 / 4096 / 8192 through wgmma, promoted every 32: 1.5 / 2.4 / 3.2 (model), 1.5 / 2.5 /
3.2 (device); same-sign data at k = 512: imaginary part 2.1 and 2.1, float32 through mma.sync 1.1 and 0.9.

Sources: F. A. Khattak, M. Mikaitis, Accurate models of NVIDIA tensor cores, arXiv 2512.07004; P. Xie et al., MMA-Sim,
arXiv 2511.10909 (widths and bits of each generation); M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, Numerical
behavior of NVIDIA tensor cores, PeerJ Computer Science 7 (2021); H. Ootomo, R. Yokota, Recovering single precision
accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance, IJHPCA 36 (2022) (splits, promotion);
NVIDIA CUTLASS, examples 27 and 29 (3xTF32: big and small parts, staged accumulation) and
`cutlass/numeric_conversion.h` (the rounding styles).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.problem.vocabulary import ROUNDINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Array = np.ndarray[Any, Any]
    Pair = tuple[Array, Array]
    Promotion = tuple[int, Sequence[Sequence[Pair]]]
    Turn = Sequence[Promotion]

MODES: Final = ("fp32", "1xtf32", "3xtf32", "3xfp16")


@dataclass(frozen=True)
class MatrixUnit:
    """Arithmetic of one generation of tensor cores.

    `fp16`, `tf32`: steps of k that are aligned and added together. `bits`: what an addend keeps below the binary point
    of the largest one, whose significand product lies in [1, 4).
    """

    fp16: int
    tf32: int
    bits: int


HOPPER: Final = MatrixUnit(16, 8, 25)
AMPERE: Final = MatrixUnit(8, 4, 24)
"""Ampere's, and Ada's: an instruction of 16 steps is two of 8."""

_TF32_DROPPED: Final = 13
_EXPONENT: Final = 0x7F800000
_FP16_K: Final = 16
"""Steps of k in one matrix instruction of float16 (PTX ISA: mma m16n8k16, wgmma k16)."""
_TOGETHER: Final = 1 << 22
"""Products that are held at once."""
_NOTHING: Final = -2000
"""Stands for the exponent of zero."""

_SCALED_EXPONENT: Final = 15
"""Rows of A and columns of B are scaled so that their largest magnitude lies in [2**14, 2**15)."""


def product(
    a: Array,
    b: Array,
    mode: str,
    *,
    big: str = "toward_zero",
    small: str = "half_ulp_truncate",
    promote: int = 32,
    unit: MatrixUnit = HOPPER,
) -> Array:
    """A B of float32 or complex64 matrices (m, k) and (k, n) as `mode` computes it through mma.sync.

    `big` and `small` are the roundings of the parts (`1xtf32` uses `small` alone), `promote` the steps of k between
    promotions. Rows of A and columns of B with elements that are not finite take plain float32's answer.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    with np.errstate(all="ignore"):
        plain = a @ b
        if mode == "fp32":
            return np.asarray(plain)
        if mode == "3xfp16":
            scaled_a, rows = _scale(a, axis=1)
            scaled_b, columns = _scale(b, axis=0)
            result = separately(scaled_a, scaled_b, split_fp16, promote, unit.fp16, unit)
            result = times_powers(restored(result, accumulations(promote)), rows + columns)
        else:
            split = _split_tf32(big, small) if mode == "3xtf32" else _only_tf32(small)
            result = separately(a, b, split, promote, unit.tf32, unit)
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
    return (np.ascontiguousarray(x).view(np.uint64) & np.uint64(0xFFFFFFFFE0000000)).view(np.float64)


# ---- splits


def split_fp16(x: Array) -> Sequence[Array]:
    """High and low part in float16, as float32."""
    high = x.astype(np.float16).astype(np.float32)
    return high, (x - high).astype(np.float16).astype(np.float32)


def _split_tf32(big: str, small: str) -> Callable[[Array], Sequence[Array]]:
    def split(x: Array) -> Sequence[Array]:
        high = round_tf32(x, big)
        return high, round_tf32(x - high, small)

    return split


def _only_tf32(style: str) -> Callable[[Array], Sequence[Array]]:
    return lambda x: (round_tf32(x, style),)


# ---- sums


def step(accumulator: Array, x: Array, y: Array, unit: MatrixUnit) -> Array:
    """The accumulator (..., m, n) plus x y as one matrix instruction has it: `x` (..., m, few), `y` (..., few, n).

    The accumulator is float64 that holds float32; `x` and `y` have 11 significant bits at most. Numbers far from
    subnormal.
    """
    right = np.ascontiguousarray(np.swapaxes(y, -1, -2))
    of_x, of_y = (np.where(part == 0, _NOTHING, np.frexp(part)[1]) for part in (x, right))
    # frexp counts from 1/2: significands of products are in [1, 4) two powers below the sum of its exponents.
    largest = (of_x[..., :, None, :] + of_y[..., None, :, :]).max(axis=-1) - 2
    largest = np.maximum(largest, np.where(accumulator == 0, _NOTHING, np.frexp(accumulator)[1] - 1))
    scale = np.ldexp(1.0, np.where(largest > _NOTHING // 2, unit.bits - largest, 0))
    products = x[..., :, None, :].astype(np.float64) * right[..., None, :, :]
    products *= scale[..., None]
    total = np.trunc(products, out=products).sum(axis=-1) + np.trunc(accumulator * scale)
    return truncate(total / scale)


def chain(terms: Sequence[Pair], width: int, unit: MatrixUnit, start: Array | None = None) -> Array:
    """The sum of x y over `terms`, (..., m, k) and (..., k, n), one after the other, `width` steps of k at once."""
    left, right = terms[0]
    total = np.zeros((*left.shape[:-1], right.shape[-1])) if start is None else start
    for x, y in terms:
        for first in range(0, x.shape[-1], width):
            total = step(total, x[..., first : first + width], y[..., first : first + width, :], unit)
    return total


def promoted(turns: Sequence[Turn], k: int, promote: int, width: int, unit: MatrixUnit) -> Array:
    """float32 sums of partial sums over `promote` steps of k each.

    The i-th of them promotes what `turns[i % len(turns)]` says: signs, and the terms of the partial sums that are added
    to each other, rounding to nearest, before they are promoted.
    """
    found = [_partial_sums(turn, k, promote, number, len(turns), width, unit) for number, turn in enumerate(turns)]
    total = np.zeros(found[0][0].shape[1:], np.float32)
    for number in range(-(-k // promote)):
        turn = number % len(turns)
        for (sign, _), values in zip(turns[turn], found[turn], strict=True):
            total = (total + sign * values[number // len(turns)]).astype(np.float32)
    return total


def _partial_sums(
    turn: Turn, k: int, promote: int, first: int, every: int, width: int, unit: MatrixUnit
) -> list[Array]:
    """Return the sums that are promoted, (numbers, m, n), in the turns `first`, `first` + `every` ..."""
    count = -(-k // promote)

    def cut(x: Array, numbers: slice) -> Array:
        padded = np.zeros((x.shape[0], count * promote), np.float32)
        padded[:, :k] = x
        return np.ascontiguousarray(padded.reshape(-1, count, promote).swapaxes(0, 1)[numbers])

    results = []
    for _, partials in turn:
        left, right = partials[0][0]
        elements = left.shape[0] * right.shape[1]
        together = max(1, _TOGETHER // (elements * width)) * every
        pieces = []
        for begin in range(first, count, together):
            numbers = slice(begin, min(begin + together, count), every)
            sums = [
                chain([(cut(x, numbers), cut(y.T, numbers).swapaxes(1, 2)) for x, y in terms], width, unit)
                for terms in partials
            ]
            together_sum = sums[0]
            for each in sums[1:]:
                together_sum = (together_sum + each).astype(np.float32).astype(np.float64)
            pieces.append(together_sum)
        results.append(np.concatenate(pieces) if pieces else np.zeros((0, left.shape[0], right.shape[1])))
    return results


def separately(
    a: Array, b: Array, split: Callable[[Array], Sequence[Array]], promote: int, width: int, unit: MatrixUnit
) -> Array:
    """A B as mma.sync has it: every real product of complex data has a partial sum of its own.

    Of two parts each: small times big, big times small, big times big, so that the accumulator is small while small
    things are added; small times small is below the last bit.
    """

    def terms(x: Array, y: Array, sign: int = 1) -> list[Pair]:
        left, right = split(np.ascontiguousarray(x, np.float32)), split(np.ascontiguousarray(y, np.float32))
        pairs = [(1, 0), (0, 1), (0, 0)] if len(left) == 2 else [(0, 0)]
        return [(np.float32(sign) * left[i], right[j]) for i, j in pairs]

    k = a.shape[1]
    if a.dtype.kind != "c":
        only = [(1, [terms(a, b)])]
        return promoted([only], k, promote, width, unit)
    re = [(1, [terms(a.real, b.real), terms(a.imag, b.imag, -1)])]
    im = [(1, [terms(a.imag, b.real), terms(a.real, b.imag)])]
    result = np.empty((a.shape[0], b.shape[1]), np.complex64)
    result.real = promoted([re], k, promote, width, unit)
    result.imag = promoted([im], k, promote, width, unit)
    return result


def accumulations(promote: int, products: int = 1) -> int:
    """Instructions that add products of high parts to one partial sum."""
    return max(1, promote // _FP16_K) * products


def restored(x: Array, count: int) -> Array:
    """float32 or complex64 sums with what truncation takes on average given back (cuda/common/numbers/truncation.cuh).

    `count` as in `accumulations`. Numbers whose last three bits are 0 are taken for exact: small integers stay so.
    """
    if x.dtype.kind == "c":
        result = np.empty_like(x)
        result.real, result.imag = restored(x.real, count), restored(x.imag, count)
        return result
    x = np.ascontiguousarray(x, np.float32)
    more = (x.astype(np.float64) * (1 + (1 if count <= 4 else count // 2) * 2.0**-24)).astype(np.float32)
    return np.where(x.view(np.uint32) & np.uint32(7), more, x)


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
