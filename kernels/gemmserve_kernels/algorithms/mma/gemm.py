"""Products on the tensor cores of compute capability 8.0 and later: mma.sync behind a pipeline of cp.async.

Two families share one kernel, mma_gemm.cu. `run_gemm` multiplies float32 and complex64 as TF32, read as they are
stored (any strides, interleaved or planar) and split in registers: `3xtf32` into a big and a small part with three
products, `1xtf32` (and `tf32`) with one. `multiply` multiplies planes (`common.splits.Planes`): of float16 (`3xfp16`,
`1xfp16`) and of bfloat16 (`6xbf16`, `9xbf16`, `3xbf16`), of all tiles or of those that one of them serves.

Source of the split and of staged accumulation: NVIDIA CUTLASS, examples 27 to 29; errors: `numerics.models`.
Elements of a TF32 product that come out infinite or NaN are computed again in plain float32, so that data which are not
finite, or overflow, give what plain float32 gives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.algorithms.common.matrix_units import reduce_planes, run_planes, run_stored
from gemmserve_kernels.algorithms.mma.plan import (
    TF32_MODES,
    MmaPlan,
    planes_plan,
    resolve_tf32,
    tf32_plan,
    warp_columns,
)
from gemmserve_kernels.algorithms.mma.tile import ARITHMETIC, MmaTile, check_device, resolve_tile
from gemmserve_kernels.problem.config import GemmConfig

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.partials import Partials
    from gemmserve_kernels.algorithms.common.splits import Planes, Scheme
    from gemmserve_kernels.algorithms.common.verdict import Judged
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.device.struct_params import StoredArray
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

__all__ = ["MmaTile", "multiply", "resolve", "resolve_planes", "run_gemm", "supports", "supports_planes"]


def supports(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why `run_gemm` cannot compute `problem` on `spec` as TF32, or None. Any shape, strides and C."""
    if reason := check_device(spec):
        return reason
    if problem.compute not in TF32_MODES:
        return f"compute {problem.compute!r} is not TF32"
    wanted = np.float32 if problem.planar else problem.dtype
    if problem.dtype.name not in {"float32", "complex64"} or problem.a.dtype != wanted or problem.b.dtype != wanted:
        return f"TF32 multiplies float32 or complex64, not {problem.a.dtype.name} by {problem.b.dtype.name}"
    return None


def resolve(config: GemmConfig | None, problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> MmaTile:
    """The tile: what `config` asks for, the rest chosen. Raises ConfigInfeasible naming the limit."""
    return resolve_tf32(config, problem, (problem.m, problem.n), spec)


def supports_planes(problem: GemmProblem, scheme: Scheme, spec: DeviceSpec) -> str | None:
    """Return why `multiply` cannot compute `problem` from planes of `scheme` on `spec`, or None."""
    if reason := check_device(spec):
        return reason
    if scheme not in ARITHMETIC:
        return f"mma has no {scheme}"
    if problem.dtype.name not in {"float32", "complex64"}:
        return f"{scheme} multiplies float32 or complex64, not {problem.dtype.name}"
    return None


def resolve_planes(config: GemmConfig | None, problem: GemmProblem, scheme: Scheme, spec: DeviceSpec) -> MmaTile:
    """The tile of `multiply`, as `resolve`. Raises ConfigInfeasible."""
    shape = (problem.m, problem.n, problem.k)
    return resolve_tile(config, scheme, shape, spec, is_complex=problem.dtype.kind == "c")


def run_gemm(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | MmaTile | None,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0.

    `problem.compute` is "3xtf32", "1xtf32" or "tf32". Raises ConfigInfeasible, CompileError.
    """
    run_stored(launcher, problem, partial(tf32_plan, launcher.spec, problem, config), a, b, c, out)


@lru_cache(maxsize=1024)
def wide_tile(problem: GemmProblem, scheme: Scheme, spec: DeviceSpec, alike: MmaTile | None = None) -> MmaTile:
    """The tile of the wide way. k is not split, so that there is no workspace. For reductions it leaves as many
    partials as `alike`, which has the other tiles. Raises ConfigInfeasible.
    """
    config = None if alike is None else GemmConfig(block_n=alike.block_n, warp_n=alike.warp_n)
    return replace(resolve_planes(config, problem, scheme, spec), split_k=1)


def multiply(
    launcher: Launcher,
    problem: GemmProblem,
    tile: MmaTile,
    a: Planes,
    b: Planes,
    c: Any | None,
    out: Any,
    judged: Judged | None = None,
) -> None:
    """See matrix_units.run_planes; or the elements of the tiles that `judged` names."""
    run_planes(launcher, problem, partial(_judged_plan, launcher.spec, problem, tile, judged), a, b, c, out)


def _judged_plan(
    spec: DeviceSpec,
    problem: GemmProblem | GemmReduceProblem,
    tile: MmaTile,
    judged: Judged | None,
    a: Planes,
    b: Planes,
    c: StoredArray | None,
    d: StoredArray | None,
) -> MmaPlan:
    if judged is None:
        return planes_plan(spec, problem, tile, a, b, c, d)
    return replace(
        planes_plan(spec, problem, tile, a, b, c, d, judged.tiles),
        deficits=(judged.deficits_a, judged.deficits_b),
        wanted=judged.wanted,
        counters=judged.counters,
    )


def partials_length(problem: GemmReduceProblem, tile: MmaTile) -> int:
    """Partials that `multiply_reduce` leaves for each output of one product."""
    return warp_columns(tile, problem.m if problem.over_rows else problem.n)


def multiply_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    tile: MmaTile,
    a: Planes,
    b: Planes,
    partials: Partials,
    first_matrix: int,
    c: Any | None,
    judged: Judged | None = None,
) -> None:
    """See matrix_units.reduce_planes; or the partials of the tiles that `judged` names."""
    plan_of = partial(_judged_plan, launcher.spec, problem, tile, judged)
    reduce_planes(launcher, plan_of, a, b, partials, first_matrix, c)
