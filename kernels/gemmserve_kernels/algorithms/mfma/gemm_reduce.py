"""Reductions of products by MFMA: `gemm`'s tiles leave partials, which are combined in order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.algorithms.common.matrix_units import reduce_stored
from gemmserve_kernels.algorithms.common.partials import local_bytes
from gemmserve_kernels.algorithms.mfma import gemm
from gemmserve_kernels.algorithms.mfma.plan import dense_plan
from gemmserve_kernels.algorithms.mfma.tile import MfmaTile, dense_arithmetic, resolve_tile
from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmReduceProblem


def supports(problem: GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why this cannot run `problem` on `spec`, or None."""
    return gemm.supports(problem, spec)


def resolve(config: GemmConfig | None, problem: GemmReduceProblem, spec: DeviceSpec) -> MfmaTile:
    """The tile. Raises ConfigInfeasible."""
    arithmetic = dense_arithmetic(problem, spec)
    if arithmetic is None:
        raise ConfigInfeasible(f"algorithm: mfma has no {problem.compute} of {problem.dtype.name} on {spec.arch}")
    return resolve_tile(
        config,
        arithmetic,
        (problem.m, problem.n),
        problem.batch,
        spec,
        is_complex=problem.dtype.kind == "c",
        local_bytes=local_bytes(problem),
    )


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | MfmaTile | None,
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Writes the reductions of alpha op(a) op(b), and the product as "c" where the problem returns it, into `results`.

    Raises ConfigInfeasible, CompileError.
    """
    arithmetic = dense_arithmetic(problem, launcher.spec)
    assert arithmetic is not None
    plan_of = partial(dense_plan, launcher.spec, problem, arithmetic, config)
    reduce_stored(launcher, problem, plan_of, a, b, results)
