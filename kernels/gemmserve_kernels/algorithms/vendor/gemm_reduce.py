"""Reductions of the vendor's products: made panel by panel in the dtype that they are summed in, and a pass over each.

The vendor's BLAS reads most operands as they lie. What it cannot read (planes, other dtypes, gaps, a conjugation alone)
is copied once, before anything is multiplied: panels are then of the copies.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.algorithms.common.panels import (
    Panels,
    lying_sides,
    panels_of,
    reduce_panels,
    turned,
    whole_product,
)
from gemmserve_kernels.algorithms.vendor.blas import BlasPlan, NotExpressible, copied_bytes, lower
from gemmserve_kernels.algorithms.vendor.gemm import BlasRoutine, operand
from gemmserve_kernels.problem.operand import Operand

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.panels import Side
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem


def supports(problem: GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why this cannot run `problem` on `spec`, or None."""
    del spec
    return _unfit(problem)


@lru_cache(maxsize=1024)
def _unfit(problem: GemmReduceProblem) -> str | None:
    if problem.return_c and problem.accumulate != problem.dtype:
        return f"products are summed in {problem.accumulate.name}, and returned in {problem.dtype.name}"
    panels = Panels.of(problem, problem.accumulate.itemsize)
    if not problem.return_c and panels.unfit is not None:
        return panels.unfit
    try:
        _, plan = whole_calls(problem)
        if plan.dtype == np.float16:  # other panels are no harder to express than all of them together
            readable = as_readable(problem)
            for panel in panels_of(readable, *lying_sides(readable), problem.accumulate.itemsize):
                _calls(panel.product)
    except NotExpressible as error:
        return str(error)
    return None


def resolve(config: GemmConfig | None, problem: GemmReduceProblem, spec: DeviceSpec) -> None:
    """Nothing: the vendor's BLAS chooses its tiles."""


@lru_cache(maxsize=1024)
def _calls(product: GemmProblem) -> BlasPlan:
    """The calls for a panel, or for all of them together, into a fresh array. Raises NotExpressible."""
    shape = (*product.batch_shape, product.m, product.n)
    return lower(product, Operand.contiguous(shape, product.accumulate))


@lru_cache(maxsize=1024)
def whole_calls(problem: GemmReduceProblem) -> tuple[GemmProblem, BlasPlan]:
    """The product that is made, of all panels together, and what its calls copy. Raises NotExpressible."""
    product = whole_product(problem)
    return product, _calls(product)


def copies(problem: GemmReduceProblem) -> tuple[int, int]:
    """Return bytes that are read and written to copy operands, and how many are copied."""
    product, plan = whole_calls(problem)
    operands_alone = replace(plan, d=replace(plan.d, copied=False))
    return copied_bytes(product, operands_alone), plan.a.copied + plan.b.copied


def call_count(problem: GemmReduceProblem) -> int:
    """Return calls of the BLAS that the product takes where it is one panel."""
    return len(list(whole_calls(problem)[1].offsets()))


def as_readable(problem: GemmReduceProblem) -> GemmReduceProblem:
    """The problem of operands as the BLAS reads them: some of them copies of op(operand), interleaved. Raises
    NotExpressible.
    """
    copied_a, copied_b = _copied(problem)
    planar, dtype = problem.planar, whole_calls(problem)[1].dtype
    found: dict[str, Any] = {"layout": "interleaved"}
    for side, copied, shape in (("a", copied_a, (problem.m, problem.k)), ("b", copied_b, (problem.k, problem.n))):
        own = getattr(problem, side)
        if copied:
            batch = own.shape[int(planar) : -2]
            found |= {side: Operand.contiguous((*batch, *shape), dtype), f"trans_{side}": "N"}
    return replace(problem, **found)


def readable_arrays(problem: GemmReduceProblem, a: Any, b: Any) -> tuple[Any, Any]:
    """CuPy arrays of `as_readable`'s operands; float16 numbers at multiples of 16 bytes."""
    product, plan = whole_calls(problem)
    copied_a, copied_b = _copied(problem)
    return (
        operand(a, problem.trans_a, product, plan, copied=copied_a),
        operand(b, problem.trans_b, product, plan, copied=copied_b),
    )


def _copied(problem: GemmReduceProblem) -> tuple[bool, bool]:
    """Whether A and whether B is copied."""
    plan = whole_calls(problem)[1]
    return (plan.b.copied, plan.a.copied) if turned(problem) else (plan.a.copied, plan.b.copied)


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | None,
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Writes the reductions of alpha op(a) op(b) into `results`, and the product as "c" where the problem returns it.
    Operands are as in `as_readable`. Raises NotExpressible.
    """
    del config

    def multiply(product: GemmProblem, left: Side, right: Side, out: Any) -> None:
        plan = _calls(product)
        if plan.a.copied or plan.b.copied:
            raise NotExpressible("operands that would be copied")
        launcher.call(BlasRoutine(product, plan), (left.address, right.address, launcher.pointer(out)))

    reduce_panels(launcher, problem, a, b, results, problem.accumulate, multiply)
