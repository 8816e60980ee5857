"""Products on the tensor cores of compute capability 8.0 and later: mma.sync behind a pipeline of cp.async.

Two families share one kernel, cuda/mma_gemm.cu. `run_gemm` multiplies float32 and complex64 as TF32, read as they are
stored (any strides, interleaved or planar) and split in registers: `3xtf32` into a big and a small part with three
products, `1xtf32` (and `tf32`) with one. `multiply` multiplies float16 planes (`planes.Planes`): `3xfp16`, `1xfp16`.

Source of the split and of staged accumulation: NVIDIA CUTLASS, examples 27 to 29; errors are modelled in `models`.
Elements of a TF32 product that come out infinite or NaN are computed again in plain float32, so that data which are not
finite, or overflow, give what plain float32 gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.arguments import StoredArray
from gemmserve_kernels.mma.plan import TF32_MODES, Layout, planes_plan, resolve_tf32, tf32_plan, warp_columns
from gemmserve_kernels.mma.tiles import ARITHMETIC, MmaTile, check_device, resolve_tile

if TYPE_CHECKING:
    from gemmserve_kernels.config import GemmConfig
    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.planes.layout import Planes, Scheme
    from gemmserve_kernels.problem import GemmProblem, GemmReduceProblem
    from gemmserve_kernels.reduction import Partials

__all__ = ["MmaTile", "multiply", "resolve", "resolve_planes", "run_gemm", "supports", "supports_planes"]


def supports(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Why `run_gemm` cannot compute `problem` on `spec` as TF32, or None. Any shape, strides and C."""
    if reason := check_device(spec):
        return reason
    if problem.compute not in TF32_MODES:
        return f"compute {problem.compute!r} is not TF32"
    wanted = np.float32 if problem.planar else problem.dtype
    if problem.dtype.name not in {"float32", "complex64"} or problem.a.dtype != wanted or problem.b.dtype != wanted:
        return f"TF32 multiplies float32 or complex64, not {problem.a.dtype.name} by {problem.b.dtype.name}"
    return None


def resolve(config: GemmConfig | None, problem: GemmProblem, spec: DeviceSpec) -> MmaTile:
    """The tile of `run_gemm`: what `config` asks for, the rest chosen. Raises ConfigInfeasible naming the limit."""
    return resolve_tf32(config, problem, (problem.m, problem.n), spec)


def supports_planes(problem: GemmProblem, scheme: Scheme, spec: DeviceSpec) -> str | None:
    """Why `multiply` cannot compute `problem` from planes of `scheme` on `spec`, or None."""
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
    arrays = [a, b, out if c is None or problem.beta == 0 else c, out]
    found = [StoredArray.of(launcher, array) for array in arrays]
    plan = tf32_plan(launcher.spec, problem, config, *(stored for stored, _ in found))
    bases = [base for _, base in found]
    if plan.swapped:
        bases[:2] = bases[1::-1]
    plan.launch(launcher, bases)


def multiply(
    launcher: Launcher, problem: GemmProblem, tile: MmaTile, a: Planes, b: Planes, c: Any | None, out: Any
) -> None:
    """Writes alpha (planes of a times planes of b) 2^(exponents) + beta c into `out`, for the whole batch.

    Every element is written; where a row or column does not fit the planes, with whatever comes out.
    """
    c_array = out if c is None or problem.beta == 0 else c
    (c_stored, c_base), (d_stored, d_base) = (StoredArray.of(launcher, array) for array in (c_array, out))
    plan = planes_plan(launcher.spec, problem, tile, Layout.of(a), Layout.of(b), c_stored, d_stored)
    sides = [b, a] if plan.swapped else [a, b]
    bases = [launcher.pointer(side.data) for side in sides] + [c_base, d_base]
    plan.launch(launcher, bases, [launcher.pointer(side.exponents) for side in sides])


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
) -> None:
    """`multiply`, leaving partials of the problem's batch from number `first_matrix` on; the product in `c` if any."""
    stored, base = (None, 0) if c is None else StoredArray.of(launcher, c)
    plan = planes_plan(launcher.spec, problem, tile, Layout.of(a), Layout.of(b), stored, stored)
    sides = [b, a] if plan.swapped else [a, b]
    bases = [launcher.pointer(side.data) for side in sides] + ([base, base] if c is not None else [])
    exponents = [launcher.pointer(side.exponents) for side in sides]
    plan.launch(launcher, bases, exponents, partials=partials, first_matrix=first_matrix)
