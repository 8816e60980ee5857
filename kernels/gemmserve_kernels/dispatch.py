"""Which algorithm runs a problem on a device. Pure: it depends on the job and the device alone, never on load or luck.

- cpu: "numpy";
- cuda, rocm: "vendor" where the BLAS can express the product, or a copy that makes it so pays;
  "simt", our portable kernels, for everything else and for every gemm_reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.blas import BlasPlan, NotExpressible, copied_bytes, lower
from gemmserve_kernels.checks import compute_modes
from gemmserve_kernels.errors import ComputeUnsupported, ConfigInfeasible
from gemmserve_kernels.problem import GemmProblem

if TYPE_CHECKING:
    import numpy as np

    from gemmserve_kernels.config import Algorithm, GemmConfig
    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.problem import GemmReduceProblem, Operand

_VENDOR_ONLY: Final = ("tf32",)
"""Compute modes that our own kernels do not have yet."""

_MEASURED_SMS: Final = 132
_RATES: Final = {
    "float16": (4.5e14, 4.0e13),
    "float32": (5.0e13, 3.5e13),
    "float64": (5.9e13, 2.0e13),
    "complex64": (5.4e13, 4.7e13),
    "complex128": (5.9e13, 1.95e13),
}
"""Operations a second of the BLAS and of our kernels on an H200 (docs/benchmarks); a device with more or fewer
multiprocessors is taken to be as much faster or slower."""
_BANDWIDTH: Final = 3.5e12
"""Bytes a second of a strided copy there."""
_LAUNCH_S: Final = 1e-5
"""Seconds of one more kernel and its allocation."""
_BLOCK: Final = 64
"""Rows and columns of our kernels' usual tile."""


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
    wish = _wish(problem, spec)
    if spec.kind == "cpu":
        return Plan("numpy", problem.config)
    if wish == "simt":
        if problem.compute in _VENDOR_ONLY:
            raise ConfigInfeasible(f"algorithm: simt has no {problem.compute} arithmetic, only the vendor's BLAS has")
        return Plan("simt", problem.config)
    try:
        fresh = lower(problem)
    except NotExpressible as reason:
        if wish == "vendor":
            raise ConfigInfeasible(f"algorithm: the vendor's BLAS cannot do this: {reason}") from None
        return Plan("simt", problem.config)
    if wish is None and problem.compute not in _VENDOR_ONLY and not vendor_is_faster(problem, fresh, spec):
        return Plan("simt", problem.config)
    return Plan("vendor", problem.config, fresh if result is None else lower(problem, result))


def plan_gemm_reduce(problem: GemmReduceProblem, spec: DeviceSpec) -> Plan:
    """How `problem` runs on `spec`. Raises ComputeUnsupported naming the modes there are; ConfigInfeasible."""
    modes = tuple(mode for mode in available(problem.dtype, spec) if mode not in _VENDOR_ONLY)
    _check_compute(problem.compute, modes)
    if _wish(problem, spec) == "vendor":
        raise ConfigInfeasible("algorithm: a vendor's BLAS has no gemm_reduce")
    return Plan("numpy" if spec.kind == "cpu" else "simt", problem.config)


def _wish(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> Algorithm | None:
    """The algorithm that the problem's configuration asks for, by name or by its tile. Raises ConfigInfeasible."""
    config = problem.config
    if config is None:
        return None
    config.feasibility(spec, problem.accumulate)
    if config.algorithm == "numpy" and spec.kind != "cpu":
        raise ConfigInfeasible(f"algorithm: numpy runs on the CPU, and the operands are on {spec.name}")
    return "simt" if config.algorithm is None and config.tile_fields else config.algorithm


def available(dtype: np.dtype[Any], spec: DeviceSpec) -> tuple[str, ...]:
    """The compute modes that both the arithmetic dtype and the device have."""
    return tuple(mode for mode in compute_modes(dtype) if mode in spec.compute_modes)


def _check_compute(compute: str, modes: tuple[str, ...]) -> None:
    if compute not in modes:
        raise ComputeUnsupported(f"compute {compute!r} is not available here; there are {', '.join(modes)}", modes)


def vendor_is_faster(problem: GemmProblem, calls: BlasPlan, spec: DeviceSpec) -> bool:
    """Whether the BLAS with its copies takes no longer than our kernels, by what both reached on an H200."""
    copied = copied_bytes(problem, calls)
    if not copied:
        return True
    scale = spec.sm_count / _MEASURED_SMS
    vendor_rate, simt_rate = _RATES[problem.accumulate.name if problem.compute == "fp64" else problem.dtype.name]
    blocks = math.ceil(problem.m / _BLOCK) * math.ceil(problem.n / _BLOCK) * problem.batch
    busy = min(1.0, blocks / spec.sm_count)
    copies = sum((calls.a.copied, calls.b.copied, calls.d.copied))
    vendor_s = problem.flops() / (vendor_rate * scale) + copied / (_BANDWIDTH * scale) + copies * _LAUNCH_S
    return vendor_s <= problem.flops() / (simt_rate * scale * busy)
