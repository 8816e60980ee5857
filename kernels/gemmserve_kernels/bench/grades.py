"""The elementwise grade of every compute mode beside the vendor's plain arithmetic, on the same data.

A mode is of Grade A on some data where, for every element, |D - R| <= max(4 u, 2 e) |A| |B|, e being the worst such
error of the vendor's BLAS in plain arithmetic; u is the unit roundoff of the data's dtype. What `auto` promises, but of
kinds of data that have a bound of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.bench.elementwise import elementwise, limit, unit
from gemmserve_kernels.bench.kinds import most, operands
from gemmserve_kernels.dispatch.gemm import gemm
from gemmserve_kernels.numerics import models
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ComputeUnsupported, ConfigInfeasible
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SINGLE: Final = ("auto", "3xfp16", "6xbf16", "9xbf16", "tf32", "3xtf32", "fp32")
_DOUBLE: Final = ("auto", "ozaki", "fp64")
MODES: Final = {
    "float32": _SINGLE,
    "complex64": ("auto", "3xfp16", "3xfp16-3m", *_SINGLE[2:]),
    "float64": _DOUBLE,
    "complex128": _DOUBLE,
}
"""Modes that are graded, by dtype; a mode that neither the device nor `models` has is passed over."""


@dataclass(frozen=True)
class GradeRow:
    """Worst errors of one mode on one set of data, in units of u, and the vendor's own: of moduli and of the parts.

    `limit` is what `auto` may be off by. `grade`: "A" where the error of the moduli is within max(4 u, 2 e), "B" within
    the kind's own bound; `parts`: whether those of the real and the imaginary part are within it, each beside the
    vendor's. `source` is "kernel" or "model". `at`: row and column of the worst.
    """

    dtype: str
    kind: str
    m: int
    n: int
    k: int
    seed: int
    mode: str
    source: str
    unit: float
    error: float
    real: float
    imag: float
    vendor: float
    vendor_real: float
    vendor_imag: float
    limit: float
    grade: str
    parts: bool
    odd: int
    at: tuple[int, int]


def vendor_product(a: Any, b: Any) -> Any:
    """A B in plain arithmetic by the vendor's BLAS, of NumPy or CuPy arrays."""
    if isinstance(a, np.ndarray):
        with np.errstate(all="ignore"):
            return np.matmul(a, b)
    try:
        return gemm(a, b, config=GemmConfig(algorithm="vendor"))
    except ConfigInfeasible:  # what a BLAS call cannot express: CuPy copies
        return a @ b


def grades(
    xp: Any,
    kind: str,
    *,
    m: int,
    n: int,
    k: int,
    dtype: str,
    seed: int,
    modes: Sequence[str],
    multiply: Callable[..., Any] = gemm,
    model: bool = True,
) -> tuple[list[GradeRow], dict[str, str]]:
    """A row for every mode that is there, and why others are not.

    `multiply(a, b, compute=...)` takes arrays of `xp` and raises ComputeUnsupported or ConfigInfeasible for a mode that
    it lacks. `model`: NumPy data take the models of such modes.
    """
    a, b = operands(xp, kind, m, n, k, dtype, seed)
    results, sources, skipped = {"": vendor_product(a, b)}, {}, {}
    for mode in modes:
        try:
            with np.errstate(all="ignore"):
                results[mode], sources[mode] = multiply(a, b, compute=mode), "kernel"
        except (ComputeUnsupported, ConfigInfeasible) as reason:
            if model and xp is np and mode in models.MODES and real_dtype(np.dtype(dtype)).itemsize == 4:
                results[mode], sources[mode] = models.product(a, b, mode), "model"
            else:
                skipped[mode] = str(reason)
    found = elementwise(xp, a, b, results)
    vendor, rows = found[""], []
    for mode, source in sources.items():
        own = found[mode]
        allowed = [most(kind, dtype, each) for each in (vendor.modulus, vendor.real, vendor.imag)]
        rows.append(
            GradeRow(
                dtype,
                kind,
                m,
                n,
                k,
                seed,
                mode,
                source,
                unit(dtype),
                error=own.modulus,
                real=own.real,
                imag=own.imag,
                vendor=vendor.modulus,
                vendor_real=vendor.real,
                vendor_imag=vendor.imag,
                limit=allowed[0],
                grade="A" if own.modulus <= limit(vendor.modulus) else "B" if own.modulus <= allowed[0] else "-",
                parts=own.real <= allowed[1] and own.imag <= allowed[2],
                odd=own.odd,
                at=own.at,
            )
        )
    return rows, skipped


def worst_of(rows: Sequence[GradeRow]) -> list[GradeRow]:
    """Rows of several seeds reduced to the worst against its limit for each size, kind and mode."""
    worst: dict[tuple[Any, ...], GradeRow] = {}
    for row in rows:
        key = (row.dtype, row.kind, row.m, row.n, row.k, row.mode)
        kept = worst.get(key)
        if kept is None or row.error * kept.limit > kept.error * row.limit:
            worst[key] = row
    return list(worst.values())
