"""The launches of a product through residues: panels, operands as lines along k, arguments of the kernels. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, Operands, flag
from gemmserve_kernels.algorithms.common.splits import strip_shape
from gemmserve_kernels.algorithms.dmma import gemm as dmma
from gemmserve_kernels.algorithms.ozaki.bound import limit
from gemmserve_kernels.algorithms.ozaki.lines import (
    PITCH,
    UNIT,
    Deficits,
    Lines,
    OzakiSide,
    Panel,
    Prepared,
    Residues,
    deficits_in,
    line_source,
)
from gemmserve_kernels.algorithms.ozaki.moduli import Moduli
from gemmserve_kernels.algorithms.ozaki.params import (
    CLEARS,
    JUDGES,
    LISTS,
    STATUS_WORDS,
    JudgedParams,
    MultiplyParams,
    RemainderParams,
    combine_constants,
    multiply_constants,
)
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    MatrixView,
    StoredArray,
    launches,
    matrix_view,
    set_factors,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.problem.problem import GemmProblem

WORKSPACE: Final = 7 << 30
"""Bytes of residues at once: 8192 x 8192 x 8192 complex takes one panel."""
TILE_M: Final = 128
TILE_N: Final = 256
_WORD: Final = 4
SHARED: Final = 1024
"""For the alignment of the stages."""


@dataclass(frozen=True)
class Found:
    """Rest that residues leave of a product: addresses of the deficits of the first product's rows and columns, groups
    from one product to the next (0 where an operand is shared), the address of the word that says how many tiles fail,
    behind STATUS_WORDS others that are zero (judging/judged.cuh), and of `Launcher.counters`.
    """

    deficits: tuple[int, int]
    groups: tuple[int, int]
    failing: int
    counters: int

    @property
    def status(self) -> int:
        """The address of the words ahead."""
        return self.failing - _WORD * STATUS_WORDS


@dataclass(frozen=True)
class OzakiTile:
    """Every choice made. `stages` of 48 KiB; `raster`: rows of tiles (of clusters) walked down together; `cluster`:
    blocks that share B by multicast; `outliers`: elements of a line that are multiplied apart at most; `strips`: panels
    at least that a product is cut into; `plain`: no tensor cores.
    """

    moduli: int
    stages: int = 4
    raster: int = 8
    cluster: int = 2
    outliers: int = 0
    strips: int = 1
    workspace: int = WORKSPACE
    plain: bool = False

    @property
    def shared(self) -> int:
        """Dynamic shared memory of the multiplying kernel."""
        return self.stages * (TILE_M + TILE_N) * 128 + SHARED


def panel_bytes(rows: int, columns: int, pitch: int, planes: int) -> int:
    """Bytes of the residues of a panel of one matrix: of both operands, and of the products."""
    down, right = (-(-x // UNIT) * UNIT for x in (rows, columns))
    return planes * ((down + right) * pitch + -(-rows // TILE_M) * TILE_M * right)


def panel_shape(m: int, n: int, pitch: int, planes: int, workspace: int, strips: int = 1) -> tuple[int, int]:
    """Return rows and columns of panels, `strips` of them at least, whose residues take at most `workspace` bytes, if
    the smallest panels do.
    """

    def up(x: int, unit: int) -> int:
        return -(-x // unit) * unit

    rows, columns = (min(extent, most) for extent, most in zip((m, n), strip_shape(m, n, strips), strict=True))
    while panel_bytes(rows, columns, pitch, planes) > workspace and max(rows, columns) > TILE_N:
        if columns >= rows or (columns > 2048 and rows * pitch * planes < workspace // 2):
            columns = up(-(-columns // 2), UNIT)
        else:
            rows = up(-(-rows // 2), UNIT)
    return rows, columns


def panels(m: int, n: int, pitch: int, matrices: int, planes: int, workspace: int, strips: int = 1) -> Iterator[Panel]:
    """Cuts a batch so that residues take at most `workspace` bytes, if the smallest panels do.

    Rows come first: A's residues are made once where all rows fit.
    """
    rows, columns = panel_shape(m, n, pitch, planes, workspace, strips)
    count = max(1, min(matrices, workspace // panel_bytes(rows, columns, pitch, planes)))
    for first in range(0, matrices, count):
        for row in range(0, m, rows):
            for column in range(0, n, columns):
                yield Panel(
                    first, min(count, matrices - first), row, min(rows, m - row), column, min(columns, n - column)
                )


class Run:
    """One product on the launcher's device."""

    def __init__(
        self,
        launcher: Launcher,
        problem: GemmProblem,
        tile: OzakiTile,
        stored: Sequence[StoredArray],
        bases: Sequence[int],
        prepared: tuple[Prepared | None, Prepared | None],
        *,
        keeps: bool = False,
    ) -> None:
        """`keeps`: tiles that fail are left to the caller, who asks for what is `found`; else they are multiplied in
        double.
        """
        self.launcher, self.problem, self.tile, self.prepared = launcher, problem, tile, prepared
        self.complex_ = problem.dtype.kind == "c"
        self.moduli = Moduli.first(tile.moduli, complex_=self.complex_)
        self.planes = self.moduli.planes
        self.counters = launcher.counters(problem.batch * problem.m * problem.n)
        operands = Operands.of(problem, stored[0], stored[1])
        shape = (*problem.batch_shape, problem.m, problem.n)
        views = [operands.a, operands.b, *(matrix_view(each, shape, planar=problem.planar) for each in stored[2:])]
        self.operands = operands
        self.views = [view.shifted_by(base) for view, base in zip(views, bases, strict=True)]
        self.d_dtype = stored[3].dtype
        self.failing = launcher.empty((STATUS_WORDS + 1,), np.dtype(np.int32)) if keeps else None
        self.kept: list[Deficits | None] = [None, None]
        if keeps:
            sides = zip(self.views, prepared, (problem.m, problem.n), strict=False)
            self.kept = [self._kept(view, given, lines) for view, given, lines in sides]
        self._judging = JUDGES | CLEARS

    def _kept(self, view: MatrixView, prepared: Prepared | None, lines: int) -> Deficits:
        """Memory for the deficits of all products, or those that were prepared."""
        if prepared is not None:
            return deficits_in(prepared, lines)
        return Deficits.allocate(self.launcher, 1 if self._is_shared(view) else self.problem.batch, lines)

    def _is_shared(self, view: MatrixView) -> bool:
        """Whether all products have the same matrix of an operand."""
        return not any(
            stride for stride, extent in zip(view.batch_strides, self.problem.batch_shape, strict=True) if extent > 1
        )

    @property
    def found(self) -> Found:
        """Deficits and counts that the tiles that fail are computed by, once all is launched."""
        launcher, (a, b) = self.launcher, self.kept
        assert a is not None
        assert b is not None
        return Found(
            (a.counted(launcher), b.counted(launcher)),
            (a.groups if a.matrices > 1 else 0, b.groups if b.matrices > 1 else 0),
            launcher.pointer(self.failing) + _WORD * STATUS_WORDS,
            self.counters,
        )

    def run(self) -> None:
        """Launches everything."""
        for first, batch_shape, views in launches(self.problem.batch_shape, self.views):
            self._piece(first, batch_shape, views)

    def _piece(self, first: int, batch_shape: tuple[int, ...], views: list[MatrixView]) -> None:
        problem, launcher, tile = self.problem, self.launcher, self.tile
        matrices = int(np.prod(batch_shape, dtype=np.int64))
        views_of = (views[0], views[1].transposed())
        conjugates = (self.operands.conjugate_a, self.operands.conjugate_b)
        sides = [
            OzakiSide(
                Lines(view, self.complex_, problem.planar, conjugate, self.moduli, self.tile.outliers),
                self.prepared[number],
                shared=not any(view.batch_strides) if self.failing is None else self._is_shared(self.views[number]),
                kept=self.kept[number],
            )
            for number, (view, conjugate) in enumerate(zip(views_of, conjugates, strict=True))
        ]
        pitch = sides[0].lines.pitch
        for panel in panels(problem.m, problem.n, pitch, matrices, self.planes, tile.workspace, tile.strips):
            known = [side.scale(launcher, batch_shape, first, panel) for side in sides]
            a = sides[0].residues(launcher, batch_shape, first, panel, panel.row, panel.rows, known[1])
            b = sides[1].residues(launcher, batch_shape, first, panel, panel.column, panel.columns, known[0])
            self._panel(panel, batch_shape, views, a, b)

    def _panel(
        self, panel: Panel, batch_shape: tuple[int, ...], views: list[MatrixView], a: Residues, b: Residues
    ) -> None:
        launcher, problem = self.launcher, self.problem
        tiles_m = -(-panel.rows // TILE_M)
        tiles_n = -(-panel.columns // TILE_N)
        shape = (panel.matrices, self.planes, tiles_m * tiles_n, TILE_M * TILE_N)
        products = launcher.empty(shape, np.dtype(np.uint8))
        failing = self.failing
        if failing is None:
            failing = launcher.empty((STATUS_WORDS + 1 + panel.matrices * tiles_m * tiles_n,), np.dtype(np.int32))
        judged = self._judged(a, b, launcher.pointer(failing) + _WORD * STATUS_WORDS)
        self._multiply(panel, a, b, products, tiles_m, tiles_n, judged)

        params = RemainderParams(
            c=views[2].params(),
            d=views[3].params(),
            first=panel.first,
            matrices=panel.matrices,
            first_row=panel.row,
            first_column=panel.column,
            rows=panel.rows,
            columns=panel.columns,
            m=problem.m,
            n=problem.n,
            tiles_m=tiles_m,
            tiles_n=tiles_n,
            products=launcher.pointer(products),
            a_codes=a.codes,
            b_codes=b.codes,
            a_codes_step=0 if a.shared else problem.m,
            b_codes_step=0 if b.shared else problem.n,
            judged=judged,
            a=views[0].params(),
            b=views[1].params(),
            a_outliers=a.outliers,
            b_outliers=b.outliers,
            conjugate_a=self.operands.conjugate_a,
            conjugate_b=self.operands.conjugate_b,
        )
        params.batch_shape[:] = batch_shape
        set_factors(params, problem)
        combine_constants(params, self.moduli)
        extra = (
            ("MODULI", str(self.tile.moduli)),
            ("TYPE_ACC", TYPES[problem.dtype.name]),
            ("OUTLIERS", flag(self.tile.outliers > 0)),
        )
        source = line_source("ozaki_combine", self.d_dtype.name, problem.planar, self.complex_, True, extra)
        grid = panel.matrices * tiles_m * tiles_n * (TILE_M * TILE_N // 4 // 256)
        launcher.launch(source, "ozaki_combine", grid=grid, block=256, shared=0, params=params)
        if self.failing is not None:
            return
        region = dmma.Region(panel.first, panel.matrices, panel.row, panel.rows, panel.column, panel.columns)
        conjugates = (self.operands.conjugate_a, self.operands.conjugate_b)
        dmma.run_tiles(launcher, problem, views, conjugates, batch_shape, region, judged.failing, self.counters)

    def _judged(self, a: Residues, b: Residues, failing: int) -> JudgedParams:
        """Return the arguments by which the panel's tiles are judged."""
        judging = self._judging
        if self.failing is None:
            judging |= LISTS
        else:
            self._judging = JUDGES  # of all panels together
        return JudgedParams(
            a=a.deficits,
            b=b.deficits,
            doubt_a=a.doubt,
            doubt_b=b.doubt,
            failing=failing,
            a_step=0 if a.shared else a.groups,
            b_step=0 if b.shared else b.groups,
            limit=limit(self.problem.k),
            judged=judging,
        )

    def _multiply(
        self, panel: Panel, a: Residues, b: Residues, products: Any, tiles_m: int, tiles_n: int, judged: JudgedParams
    ) -> None:
        launcher, tile = self.launcher, self.tile
        pitch = -(-self.problem.k // PITCH) * PITCH
        params = MultiplyParams(
            a=a.address,
            b=b.address,
            products=launcher.pointer(products),
            matrices=panel.matrices,
            a_planes=0 if a.shared else self.planes,
            b_planes=0 if b.shared else self.planes,
            a_plane=a.lines * pitch,
            b_plane=b.lines * pitch,
            a_first=a.first_line,
            b_first=b.first_line,
            rows=panel.rows,
            columns=panel.columns,
            tiles_m=tiles_m,
            tiles_n=tiles_n,
            pitch=pitch,
            judged=judged,
        )
        multiply_constants(params, self.moduli)
        defines = (
            ("MODULI", str(tile.moduli)),
            ("PARTS", str(self.moduli.parts)),
            ("STAGES", str(tile.stages)),
            ("RASTER", str(tile.raster)),
            ("CLUSTER", str(tile.cluster)),
            ("SHARED_BYTES", str(tile.shared)),
        )
        if tile.plain:
            grid = panel.matrices * self.planes * tiles_m * tiles_n * (TILE_M * TILE_N // 4 // 256)
            source = KernelSource("ozaki_multiply_plain", defines)
            launcher.launch(source, "ozaki_multiply_plain", grid=grid, block=256, shared=0, params=params)
            return
        clusters = panel.matrices * self.planes * -(-tiles_m // tile.cluster) * tiles_n
        grid = tile.cluster * min(clusters, max(1, launcher.spec.sm_count // tile.cluster))
        source = KernelSource("ozaki_multiply", defines)
        launcher.launch(source, "ozaki_multiply", grid=grid, block=288, shared=tile.shared, params=params)
