"""Errors of a measured result: of all of it, or of as many rows as the oracle can compute in reasonable time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.freivalds.sampled_reductions import sampled_reduction_errors
from gemmserve_kernels.numerics.reference import Errors, errors, logical, oracle_gemm, reduction_errors
from gemmserve_kernels.problem.problem import GemmProblem, Operand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_kernels.problem.problem import GemmReduceProblem

    Array = np.ndarray[Any, Any]

_BUDGET: Final = 4e10
"""Operations of the oracle for one check: a few seconds of a few cores."""
_MIN_ROWS: Final = 16


def gemm_errors(problem: GemmProblem, operands: Mapping[str, Array], d: Any) -> tuple[Errors, str]:
    """Errors of D and what was checked: "all", or "64 rows" (evenly spread; of the first products of a batch).

    Operands and D are on the host, with one batch axis at most.
    """
    a, b, c = (
        None if array is None else logical(problem, array)
        for array in (operands["a"], operands["b"], operands.get("c"))
    )
    d = logical(problem, d)
    assert a is not None
    assert b is not None
    total = problem.m * problem.batch
    rows = total if problem.flops() <= _BUDGET else max(_MIN_ROWS, int(total * _BUDGET / problem.flops()))
    if rows >= total:
        return _of(problem, a, b, c, d), "all"
    if problem.batch_shape:
        matrices = min(problem.batch, max(1, rows // problem.m))
        a, b, d = a[:matrices], b[:matrices], d[:matrices]
        c = None if c is None else c[:matrices]
        rows = max(1, rows // matrices)
    chosen = np.linspace(0, problem.m - 1, min(rows, problem.m)).astype(int)
    a = a[..., chosen, :] if problem.trans_a in {"N", "R"} else a[..., chosen]
    c = None if c is None else c[..., chosen, :]
    d = d[..., chosen, :]
    return _of(problem, a, b, c, d), f"{d.size // problem.n} rows"


def _of(problem: GemmProblem, a: Array, b: Array, c: Array | None, d: Array) -> Errors:
    part = GemmProblem.build(
        Operand.of(a),
        Operand.of(b),
        Operand.of(c) if c is not None else None,
        alpha=problem.alpha,
        beta=problem.beta,
        trans_a=problem.trans_a,
        trans_b=problem.trans_b,
        compute=problem.compute,
    )
    return errors(d, oracle_gemm(part, a, b, c))


def reduce_errors(
    problem: GemmReduceProblem, operands: Mapping[str, Array], results: dict[str, Any]
) -> tuple[dict[str, float], str]:
    """Errors by name and what was checked: "all", or "16 outputs"."""
    a, b = operands["a"], operands["b"]
    if problem.flops() <= _BUDGET:
        return reduction_errors(problem, a, b, results), "all"
    kept = problem.n if problem.over_rows else problem.m
    outputs = max(1, int(kept * _BUDGET / problem.flops()))
    found = sampled_reduction_errors(problem, a, b, results, np.random.default_rng(0), outputs)
    return found, f"{min(outputs, kept)} outputs"
