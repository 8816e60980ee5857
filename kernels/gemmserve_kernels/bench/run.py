"""Runs cases on a target: warm up, time, check; one row for each contender."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.bench.cases import Row
from gemmserve_kernels.bench.verify import gemm_errors, reduce_errors
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from gemmserve_kernels.bench.cases import Case
    from gemmserve_kernels.bench.targets import Contender, Target
    from gemmserve_kernels.problem.problem import GemmReduceProblem


def measure(
    case: Case, target: Target, *, warmup: int = 3, iterations: int = 10, verify: bool = True, rival: bool = True
) -> list[Row]:
    """Ours, then the rival, on the same data. `iterations` 0 measures no time. Raises KernelError, DeviceError."""
    problem = case.problem()
    operands = case.operands()
    try:
        rows = [
            _measure(case, problem, operands, target, contender, warmup, iterations, verify=verify)
            for contender in target.contenders(case, operands, rival=rival)
        ]
    finally:
        target.release()
    ours = rows[0].seconds
    return [replace(row, ratio=row.seconds / ours if ours and row.seconds else None) for row in rows]


def _measure(
    case: Case,
    problem: GemmProblem | GemmReduceProblem,
    operands: Mapping[str, np.ndarray[Any, Any]],
    target: Target,
    contender: Contender,
    warmup: int,
    iterations: int,
    *,
    verify: bool,
) -> Row:
    # The first call compiles or loads what it needs; its result is the one that is checked.
    results = target.fetch(contender.run(0))
    times: list[float] = []
    if iterations:
        if warmup:
            target.seconds(contender, warmup)
        times = target.seconds(contender, iterations)
    row = Row(
        case=case.label,
        op=case.op,
        dtype=case.dtype,
        compute=case.compute,
        who=contender.who,
        algorithm=contender.algorithm,
        batch=case.batch,
        m=case.m,
        n=case.n,
        k=case.k,
        seconds=statistics.median(times) if times else None,
        fastest=min(times, default=None),
        flops=problem.flops(),
        nbytes=problem.nbytes(),
    )
    return _with_errors(row, problem, operands, results) if verify else row


def _with_errors(
    row: Row,
    problem: GemmProblem | GemmReduceProblem,
    operands: Mapping[str, np.ndarray[Any, Any]],
    results: dict[str, np.ndarray[Any, Any]],
) -> Row:
    if isinstance(problem, GemmProblem):
        found, checked = gemm_errors(problem, operands, results["d"])
        return replace(
            row,
            rel_fro=found.rel_fro,
            worst_row=found.worst_row,
            rel_real=found.rel_real,
            rel_imag=found.rel_imag,
            checked=checked,
        )
    by_name, checked = reduce_errors(problem, operands, results)
    return replace(row, rel_fro=max(by_name.values()), checked=checked, notes={"errors": by_name})
