"""The accuracy table: FP64, FP32, 1xTF32, 3xTF32 and 3xFP16 beside each other, against one reference.

A mode is run by the kernel where the device has it, else by its NumPy model (`numerics.models`), and the row
says which. The reference is the exact product of the same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.bench.cases import draw
from gemmserve_kernels.numerics import models
from gemmserve_kernels.numerics.reference import Errors, errors, oracle_gemm
from gemmserve_kernels.problem.errors import ComputeUnsupported
from gemmserve_kernels.problem.problem import GemmProblem, Operand

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Array = np.ndarray[Any, Any]

MODES: Final = ("fp64", "fp32", "1xtf32", "3xtf32", "3xfp16")

_KERNELS: Final = {"fp64": ("fp64",), "fp32": ("fp32",), "1xtf32": ("1xtf32", "tf32")}
"""The compute modes, in order of preference, whose kernel stands for a row that is not named as the mode."""


@dataclass(frozen=True)
class AccuracyRow:
    """Errors of one mode at one size: means over the seeds, and the worst row of all."""

    m: int
    n: int
    k: int
    dtype: str
    init: str
    mode: str
    source: str
    seeds: int
    rel_fro: float
    worst_row: float
    rel_real: float
    rel_imag: float


def accuracy(
    multiply: Callable[..., Any],
    *,
    m: int,
    n: int,
    k: int,
    dtype: str = "complex64",
    init: str = "normal",
    seeds: Sequence[int] = (0,),
    modes: Sequence[str] = MODES,
    big: str = "toward_zero",
    small: str = "half_ulp_truncate",
    promote: int = 32,
) -> list[AccuracyRow]:
    """One row for each mode. `multiply(a, b, compute=...)` takes NumPy arrays, returns one, and raises
    ComputeUnsupported for a mode that it lacks; `big`, `small` and `promote` are those of the models.
    """
    found: dict[str, list[Errors]] = {mode: [] for mode in modes}
    sources: dict[str, str] = {}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        a, b = draw(rng, (m, k), np.dtype(dtype), init), draw(rng, (k, n), np.dtype(dtype), init)
        wide = np.result_type(dtype, np.float64)
        wide_a, wide_b = a.astype(wide), b.astype(wide)
        reference = oracle_gemm(GemmProblem.build(Operand.of(wide_a), Operand.of(wide_b)), wide_a, wide_b)
        for mode in modes:
            operands = (wide_a, wide_b) if mode == "fp64" else (a, b)
            d, sources[mode] = _product(multiply, operands, mode, big=big, small=small, promote=promote)
            found[mode].append(errors(d, reference))
    return [
        AccuracyRow(
            m,
            n,
            k,
            dtype,
            init,
            mode,
            sources[mode],
            len(seeds),
            rel_fro=float(np.mean([e.rel_fro for e in found[mode]])),
            worst_row=max(e.worst_row for e in found[mode]),
            rel_real=float(np.mean([e.rel_real for e in found[mode]])),
            rel_imag=float(np.mean([e.rel_imag for e in found[mode]])),
        )
        for mode in modes
    ]


def _product(
    multiply: Callable[..., Any], operands: tuple[Array, Array], mode: str, *, big: str, small: str, promote: int
) -> tuple[Array, str]:
    for compute in _KERNELS.get(mode, (mode,)):
        try:
            return multiply(*operands, compute=compute), "kernel"
        except ComputeUnsupported:
            continue
    return models.product(*operands, mode, big=big, small=small, promote=promote), "model"
