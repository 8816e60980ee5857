"""Products on AMD's matrix units: MFMA of gfx90a (MI200), gfx942 (MI300), gfx950 (MI350); WMMA of gfx1100 (RDNA 3).

Two families share one kernel, cuda/mfma/mfma_gemm.cu. `run_gemm` multiplies operands as they are stored (any strides,
interleaved or planar): float32 and complex64 by v_mfma_f32_32x32x2, float64 and complex128 by v_mfma_f64_16x16x4,
float16 by v_mfma_f32_32x32x8_f16 (32x32x16 on gfx950, as float32 on gfx90a), and, where `compute` is "tf32" on gfx942,
float32 rounded to TF32 by v_mfma_f32_32x32x4_xf32. `multiply` multiplies float16 planes (`common.splits`): `3xfp16`,
`1xfp16`. gfx1100 multiplies float16 data and planes alone, by v_wmma_f32_16x16x16_f16 on waves of 32 lanes.

Nothing of this has run on AMD hardware. It is compiled for every architecture, its registers are counted, and it runs
on a CPU emulation of the instructions (docs/kernels.md).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.algorithms.common.matrix_units import reduce_planes, run_planes, run_stored
from gemmserve_kernels.algorithms.mfma.plan import dense_plan, dense_tile, planes_plan
from gemmserve_kernels.algorithms.mfma.tile import (
    ARCHITECTURES,
    SCHEMES,
    MfmaTile,
    check_device,
    dense_arithmetic,
    resolve_tile,
)
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.partials import Partials
    from gemmserve_kernels.algorithms.common.splits import Planes, Scheme
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

__all__ = [
    "MfmaTile",
    "multiply",
    "multiply_reduce",
    "partials_length",
    "resolve",
    "resolve_planes",
    "run_gemm",
    "supports",
    "supports_planes",
]


def supports(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why `run_gemm` cannot compute `problem` on `spec`, or None. Any shape but an empty one, any strides."""
    if reason := check_device(spec):
        return reason
    if dense_arithmetic(problem, spec) is None:
        return f"mfma has no {problem.compute} of {problem.dtype.name} on {spec.arch}"
    stored = real_dtype(problem.dtype) if problem.planar else problem.dtype
    if {problem.a.dtype, problem.b.dtype} != {stored}:
        return f"both operands must be {stored.name}, not {problem.a.dtype.name} and {problem.b.dtype.name}"
    if 0 in {problem.m, problem.n, problem.k, problem.batch}:
        return "an empty product"
    return None


def resolve(config: GemmConfig | None, problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> MfmaTile:
    """The tile: what `config` asks for, the rest chosen. Raises ConfigInfeasible naming the limit."""
    arithmetic = dense_arithmetic(problem, spec)
    if arithmetic is None:
        raise ConfigInfeasible(f"algorithm: mfma has no {problem.compute} of {problem.dtype.name} on {spec.arch}")
    return dense_tile(spec, problem, arithmetic, config, problem.m, problem.n)


def supports_planes(problem: GemmProblem | GemmReduceProblem, scheme: Scheme, spec: DeviceSpec) -> str | None:
    """Return why `multiply` cannot compute `problem` from planes of `scheme` on `spec`, or None."""
    if reason := check_device(spec):
        return reason
    if scheme not in SCHEMES:
        return f"mfma has no {scheme}"
    if scheme not in ARCHITECTURES[spec.arch]:
        return f"{spec.arch} takes subnormal float16 numbers for zero, which low parts have"
    if problem.dtype.name not in {"float32", "complex64"}:
        return f"{scheme} multiplies float32 or complex64, not {problem.dtype.name}"
    return None


def resolve_planes(
    config: GemmConfig | None, problem: GemmProblem | GemmReduceProblem, scheme: Scheme, spec: DeviceSpec
) -> MfmaTile:
    """The tile of `multiply`, as `resolve`; the same for every turn of a batch. Raises ConfigInfeasible."""
    return resolve_tile(config, scheme, (problem.m, problem.n), 1, spec, is_complex=problem.dtype.kind == "c")


def run_gemm(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | MfmaTile | None,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0.

    Raises ConfigInfeasible, CompileError.
    """
    arithmetic = dense_arithmetic(problem, launcher.spec)
    assert arithmetic is not None
    run_stored(launcher, problem, partial(dense_plan, launcher.spec, problem, arithmetic, config), a, b, c, out)


def multiply(
    launcher: Launcher, problem: GemmProblem, tile: MfmaTile, a: Planes, b: Planes, c: Any | None, out: Any
) -> None:
    """See matrix_units.run_planes."""
    plan_of = partial(planes_plan, launcher.spec, problem, tile)
    run_planes(launcher, problem, plan_of, a, b, c, out)


def partials_length(problem: GemmReduceProblem, tile: MfmaTile) -> int:
    """Partials that `multiply_reduce` leaves for each output of one product."""
    return -(-(problem.m if problem.over_rows else problem.n) // tile.block_m)


def multiply_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    tile: MfmaTile,
    a: Planes,
    b: Planes,
    partials: Partials,
    first_matrix: int,
    c: Any | None,
) -> None:
    """See matrix_units.reduce_planes."""
    plan_of = partial(planes_plan, launcher.spec, problem, tile)
    reduce_planes(launcher, plan_of, a, b, partials, first_matrix, c)
