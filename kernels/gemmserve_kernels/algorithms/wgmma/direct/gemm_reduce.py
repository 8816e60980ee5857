"""Reductions of products of float16 operands on Hopper's tensor cores: `gemm`'s tiles leave partials in D's place."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.partials import Partials, combine
from gemmserve_kernels.algorithms.wgmma import candidates
from gemmserve_kernels.algorithms.wgmma.direct import gemm
from gemmserve_kernels.algorithms.wgmma.gemm import partials_length
from gemmserve_kernels.algorithms.wgmma.plan import plan
from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
from gemmserve_kernels.device.struct_params import StoredArray
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmReduceProblem

_WIDE: Final = {"sum", "mean", "sumsq"}
"""Reductions of float16 products whose results are float32."""

supports = gemm.supports
copies = gemm.copies


@lru_cache(maxsize=1024)
def resolve(config: GemmConfig | WgmmaTile | None, problem: GemmReduceProblem, spec: DeviceSpec) -> WgmmaTile:
    """The tile, within what the reducing kernel can do. Raises ConfigInfeasible.

    k is split over a cluster at most: partials of sums are none of results.
    """
    if isinstance(config, WgmmaTile):
        return candidates.resolve(config, problem.product, spec, "fp16")
    given = config or GemmConfig()
    # Rows of what is computed are what remains; a tile need not be square.
    product = replace(problem.product, m=problem.n, n=problem.m) if problem.over_rows else problem.product
    wide = not _WIDE.isdisjoint(problem.reductions)
    tile = candidates.resolve(given, product, spec, "fp16", wide=wide)
    if tile.parts > 1:
        if given.split_k is not None:
            raise ConfigInfeasible(f"split_k: gemm_reduce splits k over a cluster, into 2 or 4, not {given.split_k}")
        tile = candidates.resolve(replace(given, split_k=tile.split), product, spec, "fp16", wide=wide)
    return tile


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | WgmmaTile | None,
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Writes the reductions of alpha op(a) op(b), and the product as "c" where the problem returns it, into `results`.

    Raises ConfigInfeasible, CompileError, DeviceError.
    """
    tile = resolve(config, problem, launcher.spec)
    left, right = gemm.sources_of(launcher, problem, a, b)
    c, base = StoredArray.of(launcher, results["c"]) if problem.return_c else (None, 0)
    made = plan(launcher.spec.sm_count, problem, tile, left.side, right.side, c, c)
    partials = Partials.allocate(
        launcher, problem, partials_length(problem, tile) * (problem.batch if problem.over_batch else 1)
    )
    made.run(launcher, left, right, [base, base] if c is not None else [], partials=partials)
    combine(launcher, problem, partials, results)
