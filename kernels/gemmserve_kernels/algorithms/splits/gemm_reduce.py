"""Reductions of FP32-accurate products from float16 planes: the pre-pass of `gemm`, tiles that leave partials in the
place of the product, those of the wide way beside them, partials of what is flagged replaced, and all of them combined.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.partials import Partials, combine
from gemmserve_kernels.algorithms.common.prepared_operand import source_of
from gemmserve_kernels.algorithms.common.splits import SCHEMES, WIDE
from gemmserve_kernels.algorithms.splits import fallback, prepass, reduce_fallback
from gemmserve_kernels.algorithms.splits import gemm as product
from gemmserve_kernels.algorithms.splits.flags import Flags
from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmReduceProblem

_MAX_COLUMNS: Final = 128
"""Columns of a tile of the wgmma kernel, at most."""


def supports(problem: GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why this cannot run `problem` on `spec`, or None."""
    return product.supports(problem.product, spec)


@lru_cache(maxsize=1024)
def resolve(config: GemmConfig | None, problem: GemmReduceProblem, spec: DeviceSpec) -> Any:
    """The tile of the multiplying kernel, within what the reducing one can do. Raises ConfigInfeasible.

    k is split over a cluster at most: partials of sums are none of results. Tiles of 256 columns are not faster with a
    reduction (one H200, float32 64 x 1024 x 1024 x 256).
    """
    given = config or GemmConfig()
    if product.strips_of(config) > 1:
        raise ConfigInfeasible("strips: reductions have none")
    tile = product.resolve(config, problem.product, spec)
    if not isinstance(tile, WgmmaTile):
        if widening := product.widening_module(problem, config, spec):
            widening.wide_tile(problem.product, WIDE[SCHEMES[problem.compute]], spec, tile)
        return tile
    if tile.block_n > _MAX_COLUMNS:
        if given.block_n is not None:
            raise ConfigInfeasible(f"block_n: gemm_reduce has {_MAX_COLUMNS} at most, not {given.block_n}")
        given = replace(given, block_n=_MAX_COLUMNS)
        tile = product.resolve(given, problem.product, spec)
    if tile.parts > 1:
        if given.split_k is not None:
            raise ConfigInfeasible(f"split_k: gemm_reduce splits k over a cluster, into 2 or 4, not {given.split_k}")
        tile = product.resolve(replace(given, split_k=tile.split), problem.product, spec)
    return tile


def run_gemm_reduce(
    launcher: Launcher, problem: GemmReduceProblem, config: GemmConfig | None, a: Any, b: Any, results: dict[str, Any]
) -> None:
    """Writes the reductions of alpha op(a) op(b), and the product as "c" where the problem returns it, into `results`.

    `a` and `b` are arrays or PreparedOperands. Planes take 384 MiB at most beside what one pair of matrices takes.
    Raises ConfigInfeasible, CompileError.
    """
    # Sums that atomics have added up could not be replaced.
    problem = replace(problem, reproducible=True)
    module = product.module_of(config, launcher.spec)
    tile = resolve(config, problem, launcher.spec)
    parts = module.partials_length(problem, tile)
    partials = Partials.allocate(launcher, problem, parts * (problem.batch if problem.over_batch else 1))
    widening = product.widening_module(problem, config, launcher.spec)
    widens = widening is not None
    scheme = SCHEMES[problem.compute]
    first = 0
    for part, a_part, b_part, _, c in product.parts_of(problem.product, a, b, None, results.get("c"), widens=widens):
        reduced = replace(problem, a=part.a, b=part.b, batch_shape=part.batch_shape)
        ready = prepass.run(launcher, part, scheme, a_part, b_part, widens=widens)
        counters = launcher.counters(part.batch * part.m * part.n)
        planes = ready.a.planes, ready.b.planes
        wide = None
        if widening is not None:
            judged = prepass.judged(launcher, ready, counters)
            widening.multiply_reduce(launcher, reduced, tile, *planes, partials, first, c, judged)
            wide = prepass.widen(launcher, ready)
            of_wide, rest = widening.wide_tile(part, WIDE[scheme], launcher.spec, tile), judged._replace(tiles="rest")
            widening.multiply_reduce(launcher, reduced, of_wide, wide.a.planes, wide.b.planes, partials, first, c, rest)
        else:
            module.multiply_reduce(launcher, reduced, tile, *planes, partials, first, c)
        sources = source_of(a_part), source_of(b_part)
        flags = Flags.of(launcher, ready, wide, counters)
        reduce_fallback.run(launcher, reduced, *sources, flags, partials, parts, first)
        if c is not None:
            # The reduction has counted them, and has these bits.
            fallback.run(launcher, part, *sources, None, c, replace(flags, counters=0), plain=True)
        first += part.batch
    combine(launcher, problem, partials, results)
