"""Products of float16 planes on Hopper's tensor cores: host side of cuda/wgmma/wgmma_gemm.cu.

`resolve` chooses a tile, `multiply` launches it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.wgmma.candidates import resolve, supports
from gemmserve_kernels.algorithms.wgmma.plan import Source, plan
from gemmserve_kernels.device.struct_params import StoredArray
from gemmserve_kernels.problem.config import GemmConfig

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.partials import Partials
    from gemmserve_kernels.algorithms.common.splits import Planes, Scheme
    from gemmserve_kernels.algorithms.common.verdict import Judged
    from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

_JUDGED_ROWS: Final = 128
"""Rows of a tile that residues serve or not; JUDGED_M in cuda/common/judging/judged.cuh."""


def _sources(launcher: Launcher, a: Planes, b: Planes, judged: Judged | None) -> tuple[Source, Source]:
    deficits = ((0, 0), (0, 0))
    if judged is not None:
        deficits = (judged.deficits_a, judged.words_a), (judged.deficits_b, judged.words_b)
    left, right = (
        Source(planes.layout(), launcher.pointer(planes.data), launcher.pointer(planes.exponents), *found)
        for planes, found in zip((a, b), deficits, strict=True)
    )
    return left, right


def supports_planes(problem: GemmProblem, scheme: Scheme, spec: DeviceSpec) -> str | None:
    """Return why `multiply` cannot compute `problem` on `spec`, or None; it knows every scheme."""
    del scheme
    return supports(problem, spec)


def resolve_planes(config: GemmConfig | None, problem: GemmProblem, scheme: Scheme, spec: DeviceSpec) -> WgmmaTile:
    """The tile of `multiply`. Raises ConfigInfeasible naming the limit."""
    return resolve(config, problem, spec, scheme)


def wide_tile(problem: GemmProblem, scheme: Scheme, spec: DeviceSpec, alike: WgmmaTile | None = None) -> WgmmaTile:
    """The tile of the wide way. k is split over a cluster at most, so that there is no workspace. For reductions it
    leaves as many partials as `alike`, which has the other tiles. Raises ConfigInfeasible.
    """
    # Partials lie tile by tile: as many columns, and as many shares of k.
    config = GemmConfig() if alike is None else GemmConfig(block_n=alike.block_n, split_k=alike.split)
    tile = resolve(config, problem, spec, scheme)
    return tile if tile.parts == 1 else resolve(replace(config, split_k=tile.split), problem, spec, scheme)


def failing_tile(problem: GemmProblem, scheme: Scheme, spec: DeviceSpec) -> WgmmaTile:
    """The tile of `wide_tile` for what residues do not serve: 128 rows of the product, whichever way it is written,
    hold whole blocks. A batch has that of one of its products, whose bits it has. Raises ConfigInfeasible.
    """
    one = replace(problem, batch_shape=())
    tile = wide_tile(one, scheme, spec)
    if tile.block_n <= _JUDGED_ROWS:
        return tile
    return resolve(GemmConfig(block_n=_JUDGED_ROWS, split_k=tile.split), one, spec, scheme)


def multiply(
    launcher: Launcher,
    problem: GemmProblem,
    tile: WgmmaTile,
    a: Planes,
    b: Planes,
    c: Any | None,
    out: Any,
    judged: Judged | None = None,
) -> None:
    """Writes alpha (sum over k) 2^(exponents) + beta c into every element of `out`, for all of the problem's batch, or
    into those of the tiles that `judged` names.

    `a` and `b` are the planes of the problem's operands; `c` is not read where beta is 0. Raises CompileError,
    DeviceError.
    """
    found = [StoredArray.of(launcher, array) for array in (out if c is None or problem.beta == 0 else c, out)]
    left, right = _sources(launcher, a, b, judged)
    stored = [each for each, _ in found]
    made = plan(launcher.spec.sm_count, problem, tile, left.side, right.side, *stored, judged and judged.tiles)
    made.run(launcher, left, right, [base for _, base in found], judged=judged)


def partials_length(problem: GemmReduceProblem, tile: WgmmaTile) -> int:
    """Partials that `multiply_reduce` leaves for each output of one product."""
    return -(-(problem.m if problem.over_rows else problem.n) // tile.block_n) * tile.split


def multiply_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    tile: WgmmaTile,
    a: Planes,
    b: Planes,
    partials: Partials,
    first_matrix: int,
    c: Any | None,
    judged: Judged | None = None,
) -> None:
    """`multiply`, leaving partials of the problem's batch from number `first_matrix` on; the product in `c` if any.

    `tile.parts` is 1.
    """
    stored, base = (None, 0) if c is None else StoredArray.of(launcher, c)
    left, right = _sources(launcher, a, b, judged)
    tiles = judged and judged.tiles
    made = plan(launcher.spec.sm_count, problem, tile, left.side, right.side, stored, stored, tiles)
    bases = [base, base] if c is not None else []
    made.run(launcher, left, right, bases, partials=partials, first_matrix=first_matrix, judged=judged)
