"""What products are held to, element by element, by the tests of tests/gpu and of the CPU: shapes, seeds, checks."""

from __future__ import annotations

import math
import secrets

import numpy as np

from gemmserve_kernels.bench.elementwise import (
    elementwise,
    limit,
    product_and_scale,
    unit,
)
from gemmserve_kernels.bench.grades import vendor_product
from gemmserve_kernels.bench.kinds import most
from gemmserve_kernels.problem.operand import real_dtype

DTYPES = ("float32", "complex64", "float64", "complex128")
LARGE = {
    4: (
        (8192, 8192, 256),
        (4096, 4096, 512),
        (8192, 4096, 64),
        (8192, 4096, 128),
        (4096, 2048, 2048),
        (2048, 2048, 16384),
    ),
    8: ((4096, 4096, 512), (8192, 4096, 64), (2048, 2048, 2048), (1536, 1536, 2048), (1024, 1024, 16384)),
}
"""(m, n, k) by bytes of a real number: many rows make the trap."""
SMALL = ((97, 83, 131), (33, 65, 1000), (64, 64, 8192), (257, 129, 17), (1500, 1111, 16), (640, 512, 4096))
HOSTILE = ("normal", "exp-3n", "exp-6n", "spikes", "cauchy", "sparse-1", "identity", "gate", "pairs", "60-binades")
"""The kinds that smaller questions are asked of."""
REDUCTIONS = {
    "f": ("sum", "mean", "sumsq", "max", "min", "absmax", "absmin", "argmax", "argmin"),
    "c": ("sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin"),
}
TOGETHER = {
    "f": (("sum",), ("sumsq",), ("sum", "sumsq", "absmax"), ("mean", "min", "absmin", "argmin"), ("max", "argmax")),
    "c": (("sum",), ("sumsq",), ("sum", "sumsq", "absmax"), ("mean", "absmin", "argmin"), ("argmax",)),
}
"""All of them in a few calls: each compiles a kernel of its own. Alone, sums have routes of their own."""
THREAD_SUM = 64
"""Elements that one thread adds up in the elements' own precision at most, before sums run in double: a quarter of the
256 columns of the widest tile."""


def fresh_seed():
    """Another one at every run; messages have it."""
    return secrets.randbits(32)


def hold(row, what="moduli"):
    """The row of `bench.grades` is within its limit: its moduli, or its real and its imaginary part each."""
    if what == "moduli":
        assert row.error <= row.limit, f"{row.error:.4g} u where {row.limit:.4g} are allowed: {row}"
        return
    for name, found, vendor in (("real", row.real, row.vendor_real), ("imag", row.imag, row.vendor_imag)):
        allowed = most(row.kind, row.dtype, vendor)
        assert found <= allowed, f"{name} part: {found:.4g} u where {allowed:.4g} are allowed: {row}"


def hold_product(xp, a, b, d, about, *, least=4.0, rival=None):
    """D, (m, n), is within max(`least` u, twice the vendor's) of A B, the classes of all elements as they should be."""
    found = elementwise(xp, a, b, {"ours": d, "vendor": vendor_product(a, b) if rival is None else rival})
    allowed = max(least, 2 * found["vendor"].modulus)
    ours = found["ours"]
    assert ours.modulus <= allowed, f"{ours.modulus:.4g} u at {ours.at} where {allowed:.4g} are allowed: {about}"
    assert math.isfinite(ours.modulus) or not math.isfinite(found["vendor"].modulus), f"another class: {about}"
    return found


def element_bounds(xp, a, b):
    """R of a batch, (batch, m, n), and how far each element of a product may be from it."""
    references, bounds = [], []
    dtype = np.dtype(a.dtype)
    lost = 2 * a.shape[-1] * float(np.finfo(real_dtype(dtype)).smallest_subnormal)
    for one, other in zip(a, b, strict=True):
        vendor = elementwise(xp, one, other, {"vendor": vendor_product(one, other)})["vendor"]
        reference, scale = product_and_scale(xp, one, other)
        references.append(reference)
        bounds.append(limit(vendor.modulus) * unit(dtype) * scale + lost)
    return xp.stack(references), xp.stack(bounds)


def hold_reductions(xp, results, r, e, axis, dtype, about):
    """Every result by name is as near to that of R as the elements are, |D - R| <= E; `axis` as for `gemm_reduce`."""
    line = -2 if "m" in axis else -1
    if "batch" in axis:  # all that is reduced on one axis, in index order
        r, e = (x if line == -2 else x.swapaxes(-1, -2) for x in (r, e))
        r, e = (x.reshape(1, -1, x.shape[-1]) for x in (r, e))
        line = -2
    roundoff = unit(dtype)
    largest, smallest = (float(getattr(np.finfo(real_dtype(np.dtype(dtype))), name)) for name in ("max", "tiny"))
    for name, result in results.items():
        found = result.reshape((1, -1) if "batch" in axis else result.shape)
        if name.startswith("arg"):
            values = abs(r) if np.dtype(dtype).kind == "c" else r
            for matrix in range(len(values)):
                ours = (x[matrix] if line == -2 else x[matrix].T for x in (values, e))
                good = argument_holds(xp, *ours, found[matrix], largest=name == "argmax")
                assert bool(good.all()), f"{name}: {int((~good).sum())} of {good.size}: {about}"
            continue
        expected, allowed = reduction_allowance(xp, name, r, e, line, roundoff)
        counted = abs(expected) < largest / 4  # what may overflow on the way is not judged
        with np.errstate(invalid="ignore"):  # of what has overflown
            near = abs(found.astype(expected.dtype) - expected) <= allowed + smallest * r.shape[line]
        wrong = counted & ~near
        assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} of {wrong.size}: {about}"


def reduction_allowance(xp, name, r, e, axis, roundoff):
    """A reduction of R over `axis`, and how far that of D may be from it where |D - R| <= E element by element.

    `r` is double or complex128, `e` double, of one shape; `roundoff` is the unit roundoff u of elements and results.
    sum: |sum D - sum R| <= sum E. mean: that over the count. sumsq: ||d|**2 - |r|**2| <= 2 |r| E + E**2. Extremes: the
    largest d is at least the largest r - E and at most the largest r + E, likewise of magnitudes and of the smallest.
    On top comes what reducing takes: one rounding of the result, and for sums those of the at most `THREAD_SUM`
    elements that a thread adds up in their own precision (squares are rounded twice, magnitudes a few times).
    """
    if name in {"sum", "mean"}:
        expected, allowed = r.sum(axis=axis), e.sum(axis=axis)
        allowed = allowed + roundoff * (THREAD_SUM * (abs(r) + e).sum(axis=axis) + abs(expected))
        count = e.size // max(1, expected.size)
        return (expected / count, allowed / count) if name == "mean" else (expected, allowed)
    if name == "sumsq":
        size = abs(r)
        expected = (size**2).sum(axis=axis)
        off = 2 * size * e + e**2
        rounding = (THREAD_SUM + 3) * roundoff * (size**2 + off).sum(axis=axis)
        return expected, off.sum(axis=axis) + rounding
    values = abs(r) if name.startswith("abs") else r
    largest = name.endswith("max")
    expected, above, below = (
        x.max(axis=axis) if largest else x.min(axis=axis) for x in (values, values + e, values - e)
    )
    off = xp.maximum(above - expected, expected - below)
    return expected, off + 4 * roundoff * (abs(expected) + off)


def argument_holds(xp, values, e, index, *, largest):
    """Whether `index`, (n,), may be where the largest (smallest) element of each column of `values`, (m, n), is.

    Elements are known to `e`: the one chosen has to reach the best of the others as far as both may be off. Of elements
    that are nearer to each other than that, any may be chosen.
    """
    sign = 1 if largest else -1
    columns = xp.arange(values.shape[1])
    chosen = sign * values[index, columns] + e[index, columns]
    return chosen >= (sign * values - e).max(axis=0)
