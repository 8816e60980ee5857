"""Operands of the residue scheme as lines along k: their scales and residues, made or found prepared. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.compiler import KernelSource
from gemmserve_kernels.ozaki.bound import LINES, WORDS
from gemmserve_kernels.ozaki.params import (
    ConvertParams,
    LineParams,
    ScaleParams,
    TallyParams,
    convert_constants,
    tally_constants,
)
from gemmserve_kernels.tiling import TYPES, flag

if TYPE_CHECKING:
    from gemmserve_kernels.arguments import MatrixView
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.ozaki.moduli import Moduli

UNIT: Final = 256
"""Lines of a plane, and rows and columns of a panel, are multiples of this."""
PITCH: Final = 128


@dataclass(frozen=True)
class Prepared:
    """Of a whole operand: residues (matrices, planes, lines, pitch), codes (matrices, lines), deficits (see Tally)."""

    residues: Any
    codes: Any
    deficits: Any


@dataclass(frozen=True)
class Panel:
    """Rows and columns of the product that are computed together, of `matrices` matrices from `first` on."""

    first: int
    matrices: int
    row: int
    rows: int
    column: int
    columns: int


JUDGED: Final = ("float64", "complex128")
"""dtypes whose lines are counted; of the others the result says whether it can be trusted (cuda/ozaki_combine.cu)."""


@dataclass(frozen=True)
class Tally:
    """What is counted of an operand's lines. `deficits`: uint32, WORDS (cuda/common/judged.cuh) for each of `groups` of
    each matrix, then one that is not 0 where any is large. `sums`, `arrivals`: of use until all lines are converted.
    """

    deficits: Any
    sums: Any
    arrivals: Any
    groups: int

    @classmethod
    def allocate(cls, launcher: Launcher, matrices: int, lines: int) -> Tally:
        """Memory; `Lines.scale` clears it."""
        groups, word = groups_of(lines), np.dtype(np.uint32)
        deficits = launcher.empty((matrices * groups * WORDS + 1,), word)
        sums = launcher.empty((matrices, lines), np.dtype(np.uint64))
        return cls(deficits, sums, launcher.empty((matrices * groups,), word), groups)


def groups_of(lines: int) -> int:
    """Groups of lines that are judged together: those of lines rounded up."""
    return -(-lines // UNIT) * (UNIT // LINES)


def at(view: MatrixView, base: int) -> MatrixView:
    return replace(view, re=view.re + base, im=view.im + base)


@dataclass(frozen=True)
class Lines:
    """An operand as lines along k: the rows of `view`."""

    view: MatrixView
    complex_: bool
    planar: bool
    conjugate: bool
    moduli: Moduli

    @property
    def planes(self) -> int:
        return self.moduli.count * (3 if self.complex_ else 1)

    @property
    def pitch(self) -> int:
        return -(-self.view.columns // PITCH) * PITCH

    @property
    def along_k(self) -> bool:
        view = self.view
        return view.rows == 1 or (view.columns > 1 and abs(view.column_stride) <= abs(view.row_stride))

    def empty(self, launcher: Launcher, matrices: int, lines: int) -> Any:
        """Memory for the residues of `lines` lines, (matrices, planes, lines rounded up, pitch)."""
        shape = (matrices, self.planes, -(-lines // UNIT) * UNIT, self.pitch)
        return launcher.empty(shape, np.dtype(np.uint8))

    @property
    def judged(self) -> bool:
        """Whether lines are counted."""
        return self.view.dtype.name in JUDGED

    def _tally(self, launcher: Launcher, tally: Tally | None, first: int, *, counts: bool) -> TallyParams:
        if tally is None:
            return TallyParams()
        deficits = launcher.pointer(tally.deficits)
        params = TallyParams(
            sums=launcher.pointer(tally.sums) + first * self.view.rows * 8,
            arrivals=launcher.pointer(tally.arrivals) + first * tally.groups * 4,
            deficits=deficits + first * tally.groups * WORDS * 4,
            doubt=deficits + 4 * (tally.deficits.size - 1),
            groups=tally.groups,
            counts=counts,
        )
        tally_constants(params, self.moduli, self.view.columns, complex_=self.complex_)
        return params

    def _source(self, name: str, **extra: str) -> KernelSource:
        extra = {**extra, "TALLY": flag(self.judged)}
        return line_source(name, self.view.dtype.name, self.planar, self.complex_, self.along_k, tuple(extra.items()))

    def _params(self, launcher: Launcher, batch_shape: tuple[int, ...], first: int, codes: Any) -> LineParams:
        params = LineParams(
            x=self.view.params(), first=first, lines=self.view.rows, k=self.view.columns, codes=launcher.pointer(codes)
        )
        params.batch_shape[:] = batch_shape
        return params

    def scale(
        self,
        launcher: Launcher,
        batch_shape: tuple[int, ...],
        first: int,
        codes: Any,
        matrices: int,
        tally: Tally | None,
        before: int = 0,
    ) -> None:
        """The codes of `matrices` matrices from number `first` on; clears the tally, in which `before` matrices are
        ahead of them.
        """
        line = self._params(launcher, batch_shape, first, codes)
        params = ScaleParams(
            line=line,
            target=self.moduli.target(self.view.columns),
            tally=self._tally(launcher, tally, before, counts=before == 0),
        )
        grid = -(-self.view.rows // 32) * matrices
        launcher.launch(self._source("ozaki_scale"), "ozaki_scale", grid=grid, block=1024, shared=0, params=params)

    def convert(
        self,
        launcher: Launcher,
        batch_shape: tuple[int, ...],
        first: int,
        codes: Any,
        residues: Any,
        first_line: int,
        panel: int,
        tally: Tally | None,
        before: int = 0,
    ) -> None:
        """The residues of `panel` lines from `first_line` on, of as many matrices as `residues` holds. Where there is a
        tally, the lines are counted: once.
        """
        params = ConvertParams(
            line=self._params(launcher, batch_shape, first, codes),
            first_line=first_line,
            panel=panel,
            pitch=self.pitch,
            plane=residues.shape[2] * self.pitch,
            residues=launcher.pointer(residues),
            conjugate=self.conjugate,
            tally=self._tally(launcher, tally, before, counts=tally is not None),
        )
        convert_constants(params, self.moduli)
        grid = residues.shape[2] // (8 if self.along_k else 16) * (self.pitch // 128) * residues.shape[0]
        source = self._source("ozaki_convert", MODULI=str(self.moduli.count))
        launcher.launch(source, "ozaki_convert", grid=grid, block=256, shared=0, params=params)


@lru_cache(maxsize=256)
def line_source(
    name: str, dtype: str, planar: bool, complex_: bool, along_k: bool, extra: tuple[tuple[str, str], ...]
) -> KernelSource:
    defines = {"TYPE": TYPES[dtype], "PLANAR": flag(planar), "COMPLEX": flag(complex_), "ALONG_K": flag(along_k)}
    return KernelSource(name, (*defines.items(), *extra))


@dataclass(frozen=True)
class Residues:
    """Residues as the multiplying kernel finds them: `lines` in each plane, the panel's from `first_line` on.

    `address`, `codes`, `deficits`: of the panel's first matrix. `kept`: what keeps the memory.
    """

    address: int
    codes: int
    deficits: int
    doubt: int
    groups: int
    lines: int
    first_line: int
    matrices: int
    shared: bool
    kept: tuple[Any, ...]


class Side:
    """One operand of a launch: makes the residues of a panel, or finds them prepared; keeps the last ones."""

    def __init__(self, lines: Lines, prepared: Prepared | None, *, shared: bool) -> None:
        self.lines, self.prepared = lines, prepared
        self.shared = prepared.codes.shape[0] == 1 if prepared else shared
        self._codes: tuple[int, Any, Tally | None] | None = None
        self._counted: set[int] = set()
        self._last: tuple[tuple[int, int, int], Residues] | None = None

    def residues(
        self, launcher: Launcher, batch_shape: tuple[int, ...], piece: int, panel: Panel, line: int, count: int
    ) -> Residues:
        """Those of `count` lines from `line` on; `piece` is the number of the launch's first matrix in the product."""
        first = 0 if self.shared else panel.first
        matrices = 1 if self.shared else panel.matrices
        if self.prepared is not None:
            start = 0 if self.shared else piece + first
            prepared = self.prepared
            return self._found(launcher, prepared.residues, prepared.codes, prepared.deficits, line, matrices, start)
        if self._last is not None and self._last[0] == (first, line, count):
            return self._last[1]
        if self._codes is None or self._codes[0] != first:
            lines = self.lines.view.rows
            codes = launcher.empty((matrices, lines), np.dtype(np.int32))
            tally = Tally.allocate(launcher, matrices, lines) if self.lines.judged else None
            self.lines.scale(launcher, batch_shape, first, codes, matrices, tally)
            self._codes = first, codes, tally
            self._counted.clear()
        self._last = None  # its memory may serve again
        _, codes, tally = self._codes
        residues = self.lines.empty(launcher, matrices, count)
        counting = None if line in self._counted else tally
        self._counted.add(line)
        self.lines.convert(launcher, batch_shape, first, codes, residues, line, count, counting)
        found = self._found(launcher, residues, codes, None if tally is None else tally.deficits, 0, matrices)
        found = replace(found, deficits=found.deficits + line // LINES * WORDS * 4) if tally else found
        self._last = (first, line, count), found
        return found

    def _found(
        self, launcher: Launcher, residues: Any, codes: Any, deficits: Any, line: int, matrices: int, start: int = 0
    ) -> Residues:
        lines, groups = residues.shape[2], groups_of(self.lines.view.rows)
        judged = 0 if deficits is None else launcher.pointer(deficits)
        return Residues(
            launcher.pointer(residues) + start * self.lines.planes * lines * self.lines.pitch,
            launcher.pointer(codes) + start * self.lines.view.rows * 4,
            judged + (start * groups + line // LINES) * WORDS * 4,
            judged + (0 if deficits is None else 4 * (deficits.size - 1)),
            groups,
            lines,
            line,
            matrices,
            self.shared,
            (residues, codes, deficits),
        )
