"""Host code common to the kernels for matrix units: `mma` (mma.sync on NVIDIA's) and `mfma` (AMD's).

Both multiply operands as they are stored, or float16 planes; a plan has their launches, in pieces of a batch, with
addresses that count from the arrays' bases. Here is the way from arrays to such a plan, and into its arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from gemmserve_kernels.algorithms.common.operands import TYPES, stored_dtype
from gemmserve_kernels.algorithms.common.partials import Partials, combine
from gemmserve_kernels.device.struct_params import (
    GemmParams,
    MatrixView,
    StoredArray,
    gemm_params,
    launches,
    place_all,
    stored_operands,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gemmserve_kernels.algorithms.common.splits import Planes
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

    Problem = GemmProblem | GemmReduceProblem


class MatrixUnitPlan(Protocol):
    """The launches of one product."""

    @property
    def swapped(self) -> bool:
        """Whether it is the transposed product, so that A and B change places."""

    @property
    def length(self) -> int:
        """Partials of one product for each output."""

    def launch(
        self,
        launcher: Launcher,
        bases: Sequence[int],
        exponents: Sequence[int] = (0, 0),
        *,
        partials: Partials | None = None,
        first_matrix: int = 0,
    ) -> None:
        """Enqueues everything; `bases` in the order a, b, c, d, where A and B have changed places if `swapped`."""


class Tile(Protocol):
    """Tile of either kernel: `raster` rows of blocks are walked together; a warp's part of a block."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def warp_m(self) -> int: ...
    @property
    def warp_n(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def raster(self) -> int: ...


# ---- what a plan is made of


def defines(problem: Problem, tile: Tile, c: StoredArray | None, d: StoredArray | None) -> dict[str, str]:
    """The types of C and D, and the tile, in the kernels' words."""
    return {
        "TYPE_C": TYPES[(c.dtype if c else stored_dtype(problem)).name],
        "TYPE_D": TYPES[(d.dtype if d else stored_dtype(problem)).name],
        "BLOCK_M": str(tile.block_m),
        "BLOCK_N": str(tile.block_n),
        "BLOCK_K": str(tile.block_k),
        "WARP_M": str(tile.warp_m),
        "WARP_N": str(tile.warp_n),
        "STAGES": str(tile.stages),
        "GROUP": str(tile.raster),
    }


def pieces(
    problem: Problem, tile: Tile, views: Sequence[MatrixView], conjugates: tuple[bool, bool]
) -> Iterator[tuple[GemmParams, int, int, Sequence[MatrixView]]]:
    """The pieces of a batch: arguments, tiles, number of the first matrix, and what `views` has after A, B, C, D."""
    shape, block = (views[0].rows, views[1].columns), (tile.block_m, tile.block_n)
    for first_matrix, inner, cut in launches(problem.batch_shape, views):
        yield *gemm_params(problem, cut[:4], shape, block, inner, conjugates), first_matrix, cut[4:]


def set_exponents(params: Any, exponents: Sequence[MatrixView]) -> None:
    """Puts those of A's rows and B's columns, none where there are no planes, into a structure that has them."""
    for side, view in enumerate(exponents):
        matrix = view.params()
        params.exponents[side] = matrix.re
        params.exponent_stride[side][:] = matrix.batch_stride[:]


def rebase(gemm: Any, params: Any, bases: Sequence[int], exponents: Sequence[int]) -> None:
    """Turns what counts from the arrays' bases into addresses; `gemm` is a part of `params`."""
    place_all(gemm, bases)
    for side in range(2):
        params.exponents[side] += exponents[side]


# ---- from arrays to launches


def run_stored(
    launcher: Launcher,
    problem: GemmProblem,
    plan_of: Callable[[StoredArray, StoredArray, StoredArray, StoredArray], MatrixUnitPlan],
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0."""
    stored, bases = stored_operands(launcher, problem, a, b, c, out)
    plan = plan_of(*stored)
    if plan.swapped:
        bases[:2] = bases[1::-1]
    plan.launch(launcher, bases)


def reduce_stored(
    launcher: Launcher,
    problem: GemmReduceProblem,
    plan_of: Callable[[StoredArray, StoredArray, StoredArray | None, StoredArray | None], MatrixUnitPlan],
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Writes the reductions of alpha op(a) op(b) into `results`; the product as "c" where the problem returns it."""
    (stored_a, base_a), (stored_b, base_b) = (StoredArray.of(launcher, array) for array in (a, b))
    stored, base = StoredArray.of(launcher, results["c"]) if problem.return_c else (None, 0)
    plan = plan_of(stored_a, stored_b, stored, stored)
    bases = [base_b, base_a] if plan.swapped else [base_a, base_b]
    partials = Partials.allocate(launcher, problem, plan.length)
    plan.launch(launcher, [*bases, base, base], partials=partials)
    combine(launcher, problem, partials, results)


def run_planes(
    launcher: Launcher,
    problem: GemmProblem,
    plan_of: Callable[[Planes, Planes, StoredArray | None, StoredArray | None], MatrixUnitPlan],
    a: Planes,
    b: Planes,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha (planes of a times planes of b) 2^(exponents) + beta c into `out`, for the whole batch.

    Every element is written; where a row or column does not fit the planes, with whatever comes out.
    """
    c_array = out if c is None or problem.beta == 0 else c
    (c_stored, c_base), (d_stored, d_base) = (StoredArray.of(launcher, array) for array in (c_array, out))
    plan = plan_of(a.layout(), b.layout(), c_stored, d_stored)
    _launch_planes(launcher, plan, a, b, [c_base, d_base])


def reduce_planes(
    launcher: Launcher,
    plan_of: Callable[[Planes, Planes, StoredArray | None, StoredArray | None], MatrixUnitPlan],
    a: Planes,
    b: Planes,
    partials: Partials,
    first_matrix: int,
    c: Any | None,
) -> None:
    """`run_planes`, leaving partials of the problem's batch from `first_matrix` on; the product in `c` if any."""
    stored, base = (None, 0) if c is None else StoredArray.of(launcher, c)
    plan = plan_of(a.layout(), b.layout(), stored, stored)
    _launch_planes(launcher, plan, a, b, [base, base], partials=partials, first_matrix=first_matrix)


def _launch_planes(
    launcher: Launcher, plan: MatrixUnitPlan, a: Planes, b: Planes, bases: list[int], **options: Any
) -> None:
    sides = [b, a] if plan.swapped else [a, b]
    bases = [launcher.pointer(side.data) for side in sides] + bases
    plan.launch(launcher, bases, [launcher.pointer(side.exponents) for side in sides], **options)
