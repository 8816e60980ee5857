"""Which algorithm runs a problem on a device. Pure: it depends on the job and the device alone, never on load or luck.

- cpu: "numpy";
- cuda, rocm: "vendor" where the BLAS can express the product, or a copy that makes it so pays;
  "simt", our portable kernels, for everything else and for every gemm_reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.blas import BlasPlan, NotExpressible, lower, pays
from gemmserve_kernels.config import GemmConfig
from gemmserve_kernels.errors import ComputeUnsupported, ConfigInfeasible
from gemmserve_kernels.problem import GemmProblem, compute_modes

if TYPE_CHECKING:
    import numpy as np

    from gemmserve_kernels.config import Algorithm
    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.problem import GemmReduceProblem, Operand

_VENDOR_ONLY: Final = ("tf32",)
"""Compute modes that our own kernels do not have yet."""


@dataclass(frozen=True)
class Plan:
    """What will run. `blas` holds the calls where the algorithm is "vendor"."""

    algorithm: Algorithm
    config: GemmConfig | None = None
    blas: BlasPlan | None = None


def plan(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> Plan:
    """The plan for either kind of problem. Raises ComputeUnsupported, ConfigInfeasible."""
    return plan_gemm(problem, spec) if isinstance(problem, GemmProblem) else plan_gemm_reduce(problem, spec)


def plan_gemm(problem: GemmProblem, spec: DeviceSpec, result: Operand | None = None) -> Plan:
    """How `problem` runs on `spec`, into a `result` stored in its own way (by default a fresh array).

    The algorithm does not depend on `result`. Raises ComputeUnsupported naming the modes there are; ConfigInfeasible.
    """
    _check_compute(problem.compute, available(problem.dtype, spec))
    config = problem.config or GemmConfig()
    config.feasibility(spec, problem.accumulate)
    if spec.kind == "cpu":
        return Plan("numpy", problem.config)
    if config.algorithm == "numpy":
        raise ConfigInfeasible(f"algorithm: numpy runs on the CPU, and the operands are on {spec.name}")
    if config.algorithm == "simt" or (config.algorithm is None and config.tile_fields):
        if problem.compute in _VENDOR_ONLY:
            raise ConfigInfeasible(f"algorithm: simt has no {problem.compute} arithmetic, only the vendor's BLAS has")
        return Plan("simt", problem.config)
    try:
        fresh = lower(problem)
    except NotExpressible as reason:
        if config.algorithm == "vendor":
            raise ConfigInfeasible(f"algorithm: the vendor's BLAS cannot do this: {reason}") from None
        return Plan("simt", problem.config)
    if config.algorithm is None and not _prefers_vendor(problem, fresh):
        return Plan("simt", problem.config)
    return Plan("vendor", problem.config, fresh if result is None else lower(problem, result))


def plan_gemm_reduce(problem: GemmReduceProblem, spec: DeviceSpec) -> Plan:
    """How `problem` runs on `spec`. Raises ComputeUnsupported naming the modes there are; ConfigInfeasible."""
    modes = tuple(mode for mode in available(problem.dtype, spec) if mode not in _VENDOR_ONLY)
    _check_compute(problem.compute, modes)
    config = problem.config or GemmConfig()
    if config.algorithm == "vendor":
        raise ConfigInfeasible("algorithm: a vendor's BLAS has no gemm_reduce")
    config.feasibility(spec, problem.accumulate)
    if spec.kind == "cpu":
        return Plan("numpy", problem.config)
    if config.algorithm == "numpy":
        raise ConfigInfeasible(f"algorithm: numpy runs on the CPU, and the operands are on {spec.name}")
    return Plan("simt", problem.config)


def available(dtype: np.dtype[Any], spec: DeviceSpec) -> tuple[str, ...]:
    """The compute modes that both the arithmetic dtype and the device have."""
    return tuple(mode for mode in compute_modes(dtype) if mode in spec.compute_modes)


def _check_compute(compute: str, modes: tuple[str, ...]) -> None:
    if compute not in modes:
        raise ComputeUnsupported(f"compute {compute!r} is not available here; there are {', '.join(modes)}", modes)


def _prefers_vendor(problem: GemmProblem, calls: BlasPlan) -> bool:
    """Whether the BLAS is at least as fast as our kernels, copies included."""
    if problem.compute in _VENDOR_ONLY:
        return True
    return pays(problem, calls)
