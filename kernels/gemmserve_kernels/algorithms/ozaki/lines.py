"""Operands of the residue scheme as lines along k: their scales and residues, made or found prepared. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, flag
from gemmserve_kernels.algorithms.ozaki.bound import LINES, MOST_OUTLIERS, QUARTERS, WORDS
from gemmserve_kernels.algorithms.ozaki.params import (
    ConvertParams,
    LineParams,
    ScaleParams,
    TallyParams,
    convert_constants,
    tally_constants,
)
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.ozaki.moduli import Moduli
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.struct_params import MatrixView

UNIT: Final = 256
"""Lines of a plane, and rows and columns of a panel, are multiples of this."""
PITCH: Final = 128
OUTLIER_WORDS: Final = 4 + MOST_OUTLIERS
"""Words of what is kept of a line's outliers: above which size they are, how many, where."""


@dataclass(frozen=True)
class Prepared:
    """A whole operand: residues (matrices, planes, lines, pitch), codes (matrices, lines), `Deficits.array`,
    `Tally.outliers`.
    """

    residues: Any
    codes: Any
    deficits: Any
    outliers: Any


@dataclass(frozen=True)
class Panel:
    """Rows and columns of the product that are computed together, of `matrices` matrices from `first` on."""

    first: int
    matrices: int
    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True)
class Deficits:
    """Deficits of groups of lines, in an array of uint32: for each of `groups` of each of `matrices` matrices QUARTERS
    words that are known before lines are counted (`Least` in judging/judged.cuh), then WORDS for each (`Deficits`
    there), then one word: DOUBTED where any is large, APART where a line has outliers.
    """

    array: Any
    matrices: int
    groups: int

    @classmethod
    def allocate(cls, launcher: Launcher, matrices: int, lines: int) -> Deficits:
        """Memory."""
        groups = groups_of(lines)
        size = matrices * groups * (QUARTERS + WORDS) + 1
        return cls(launcher.empty((size,), np.dtype(np.uint32)), matrices, groups)

    def least(self, launcher: Launcher, matrix: int = 0) -> int:
        """The address of the first words, of a matrix."""
        return launcher.pointer(self.array) + 4 * QUARTERS * matrix * self.groups

    def counted(self, launcher: Launcher, matrix: int = 0, line: int = 0) -> int:
        """The address of what has been counted of a matrix, from the group of `line` on."""
        ahead = QUARTERS * self.matrices * self.groups
        return launcher.pointer(self.array) + 4 * (ahead + WORDS * (matrix * self.groups + line // LINES))

    def doubt(self, launcher: Launcher) -> int:
        """The address of the last word."""
        return launcher.pointer(self.array) + 4 * self.matrices * self.groups * (QUARTERS + WORDS)


def deficits_in(prepared: Prepared, lines: int) -> Deficits:
    """Return the deficits of an operand of so many lines that was prepared."""
    return Deficits(prepared.deficits, prepared.codes.shape[0], groups_of(lines))


@dataclass(frozen=True)
class Tally:
    """Counts of an operand's lines. `sums`, `arrivals`: of use until all lines are converted. `outliers`: int32
    (matrices, lines, OUTLIER_WORDS), `Outliers` in cuda/ozaki/params.cuh; None where none are multiplied apart.
    `deficits` may be of more matrices, `ahead` of them before these.
    """

    deficits: Deficits
    sums: Any
    arrivals: Any
    outliers: Any | None
    ahead: int = 0

    @classmethod
    def allocate(
        cls,
        launcher: Launcher,
        matrices: int,
        lines: int,
        *,
        outliers: bool,
        deficits: Deficits | None = None,
        ahead: int = 0,
    ) -> Tally:
        """Memory, but for `deficits` that are there; `Lines.scale` clears it."""
        deficits = deficits or Deficits.allocate(launcher, matrices, lines)
        sums = launcher.empty((matrices, lines), np.dtype(np.uint64))
        arrivals = launcher.empty((matrices * deficits.groups,), np.dtype(np.uint32))
        apart = launcher.empty((matrices, lines, OUTLIER_WORDS), np.dtype(np.int32)) if outliers else None
        return cls(deficits, sums, arrivals, apart, ahead)


@dataclass(frozen=True)
class Partner:
    """Knowledge of the other operand's groups before anything is counted: `least` words from an address on, groups
    from one matrix to the next and in each.
    """

    least: int = 0
    step: int = 0
    groups: int = 0


_NO_PARTNER: Final = Partner()


def groups_of(lines: int) -> int:
    """Groups of lines that are judged together: those of lines rounded up."""
    return -(-lines // UNIT) * (UNIT // LINES)


@dataclass(frozen=True)
class Lines:
    """An operand as lines along k: the rows of `view`."""

    view: MatrixView
    complex_: bool
    planar: bool
    conjugate: bool
    moduli: Moduli
    outliers: int
    """Most elements of a line that are multiplied apart."""

    @property
    def planes(self) -> int:
        return self.moduli.planes

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

    def tally(self, launcher: Launcher, matrices: int, deficits: Deficits | None = None, ahead: int = 0) -> Tally:
        """Memory for the counts of so many matrices; `deficits`, `ahead` as in `Tally`."""
        return Tally.allocate(
            launcher, matrices, self.view.rows, outliers=self.outliers > 0, deficits=deficits, ahead=ahead
        )

    def outliers_of(self, launcher: Launcher, outliers: Any, matrix: int) -> int:
        """The address of a matrix's outliers."""
        return launcher.pointer(outliers) + 4 * OUTLIER_WORDS * matrix * self.view.rows

    def _tally(self, launcher: Launcher, tally: Tally, first: int, *, counts: bool) -> TallyParams:
        deficits = tally.deficits
        params = TallyParams(
            sums=launcher.pointer(tally.sums) + first * self.view.rows * 8,
            arrivals=launcher.pointer(tally.arrivals) + first * deficits.groups * 4,
            deficits=deficits.counted(launcher, tally.ahead + first),
            least=deficits.least(launcher, tally.ahead + first),
            doubt=deficits.doubt(launcher),
            outliers=0 if tally.outliers is None else self.outliers_of(launcher, tally.outliers, first),
            groups=deficits.groups,
            counts=counts,
            most_outliers=self.outliers,
        )
        tally_constants(params, self.moduli, self.view.columns, complex_=self.complex_)
        return params

    def _source(self, name: str, **extra: str) -> KernelSource:
        extra = {**extra, "OUTLIERS": flag(self.outliers > 0)}
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
        tally: Tally,
        before: int = 0,
    ) -> None:
        """The codes of `matrices` matrices from number `first` on; clears the tally, in which `before` matrices are
        ahead of them.
        """
        line = self._params(launcher, batch_shape, first, codes)
        params = ScaleParams(
            line=line,
            target=self.moduli.target(self.view.columns),
            tally=self._tally(launcher, tally, before, counts=tally.ahead + before == 0),
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
        tally: Tally,
        before: int = 0,
        *,
        counts: bool = True,
        partner: Partner = _NO_PARTNER,
    ) -> None:
        """The residues of `panel` lines from `first_line` on, of as many matrices as `residues` holds. The lines
        are counted, if `counts`; groups that pass with none of the partner's are neither counted nor converted.
        """
        params = ConvertParams(
            line=self._params(launcher, batch_shape, first, codes),
            first_line=first_line,
            panel=panel,
            pitch=self.pitch,
            plane=residues.shape[2] * self.pitch,
            residues=launcher.pointer(residues),
            conjugate=self.conjugate,
            tally=self._tally(launcher, tally, before, counts=counts),
            partner=partner.least,
            partner_step=partner.step,
            partner_groups=partner.groups,
        )
        convert_constants(params, self.moduli)
        grid = residues.shape[2] // (8 if self.along_k else 16) * (self.pitch // 128) * residues.shape[0]
        single = real_dtype(self.view.dtype).itemsize == 4
        short = flag(single and self.moduli.short)
        source = self._source("ozaki_convert", MODULI=str(self.moduli.count), SHORT=short)
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

    `address`, `codes`, `deficits`, `outliers`: of the panel's first matrix. `kept`: what keeps the memory.
    """

    address: int
    codes: int
    deficits: int
    doubt: int
    outliers: int
    groups: int
    lines: int
    first_line: int
    matrices: int
    shared: bool
    kept: Prepared


class OzakiSide:
    """One operand of a launch: makes the residues of a panel, or finds them prepared; keeps the last ones.

    `piece`, in its methods, is the number of the launch's first matrix in the product. `kept`: deficits of all of the
    product's matrices, for who asks for them when all is launched; None: of a panel's alone.
    """

    def __init__(self, lines: Lines, prepared: Prepared | None, *, shared: bool, kept: Deficits | None = None) -> None:
        self.lines, self.prepared, self.kept = lines, prepared, kept
        self.shared = prepared.codes.shape[0] == 1 if prepared else shared
        self._codes: tuple[int, Any, Tally] | None = None
        self._counted: set[int] = set()
        self._last: tuple[tuple[int, int, int], Residues] | None = None

    def _matrices(self, panel: Panel) -> tuple[int, int]:
        """The first matrix of the launch, and how many."""
        return (0, 1) if self.shared else (panel.first, panel.matrices)

    def scale(self, launcher: Launcher, batch_shape: tuple[int, ...], piece: int, panel: Panel) -> Partner:
        """Makes the scales of the panel's matrices. What is known of them to the other side."""
        first, matrices = self._matrices(panel)
        if self.prepared is not None:
            deficits, start = deficits_in(self.prepared, self.lines.view.rows), 0 if self.shared else piece + first
        else:
            if self._codes is None or self._codes[0] != first:
                lines = self.lines.view.rows
                codes = launcher.empty((matrices, lines), np.dtype(np.int32))
                ahead = 0 if self.shared or self.kept is None else piece + first
                tally = self.lines.tally(launcher, matrices, self.kept, ahead)
                self.lines.scale(launcher, batch_shape, first, codes, matrices, tally)
                self._codes = first, codes, tally
                self._counted.clear()
            deficits, start = self._codes[2].deficits, self._codes[2].ahead
        return Partner(
            deficits.least(launcher, start), 0 if self.shared else deficits.groups, -(-self.lines.view.rows // LINES)
        )

    def residues(
        self,
        launcher: Launcher,
        batch_shape: tuple[int, ...],
        piece: int,
        panel: Panel,
        line: int,
        count: int,
        partner: Partner,
    ) -> Residues:
        """Return the residues of `count` lines from `line` on, where `scale` has made the panel's scales."""
        first, matrices = self._matrices(panel)
        if self.prepared is not None:
            start = 0 if self.shared else piece + first
            prepared = self.prepared
            deficits = deficits_in(prepared, self.lines.view.rows)
            return self._found(launcher, prepared, deficits, line, line, matrices, start, ahead=start)
        if self._last is not None and self._last[0] == (first, line, count):
            return self._last[1]
        self._last = None  # its memory may serve again
        if self._codes is None:
            raise RuntimeError("no scales")
        _, codes, tally = self._codes
        residues = self.lines.empty(launcher, matrices, count)
        if self.shared and partner.step:
            partner = _NO_PARTNER  # of many matrices
        counts = line not in self._counted
        self._counted.add(line)
        self.lines.convert(
            launcher, batch_shape, first, codes, residues, line, count, tally, counts=counts, partner=partner
        )
        made = Prepared(residues, codes, tally.deficits.array, tally.outliers)
        found = self._found(launcher, made, tally.deficits, line, 0, matrices, ahead=tally.ahead)
        self._last = (first, line, count), found
        return found

    def _found(
        self,
        launcher: Launcher,
        made: Prepared,
        deficits: Deficits,
        line: int,
        first_line: int,
        matrices: int,
        start: int = 0,
        *,
        ahead: int,
    ) -> Residues:
        """`line`: the panel's first; `first_line`: that of them in the residues. `start`, `ahead`: matrices before the
        panel's first, in what was made and in the deficits.
        """
        lines = made.residues.shape[2]
        return Residues(
            launcher.pointer(made.residues) + start * self.lines.planes * lines * self.lines.pitch,
            launcher.pointer(made.codes) + start * self.lines.view.rows * 4,
            deficits.counted(launcher, ahead, line),
            deficits.doubt(launcher),
            0 if made.outliers is None else self.lines.outliers_of(launcher, made.outliers, start),
            groups_of(self.lines.view.rows),
            lines,
            first_line,
            matrices,
            self.shared,
            made,
        )
