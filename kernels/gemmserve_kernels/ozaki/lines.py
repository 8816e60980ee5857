"""Operands of the residue scheme as lines along k: their scales and residues, made or found prepared. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.compiler import KernelSource
from gemmserve_kernels.ozaki.params import (
    ConvertParams,
    LineParams,
    ScaleParams,
    convert_constants,
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
    """Residues (matrices, planes, lines, pitch) and codes (matrices, lines) of a whole operand."""

    residues: Any
    codes: Any


@dataclass(frozen=True)
class Panel:
    """Rows and columns of the product that are computed together, of `matrices` matrices from `first` on."""

    first: int
    matrices: int
    row: int
    rows: int
    column: int
    columns: int


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

    def _source(self, name: str, **extra: str) -> KernelSource:
        return line_source(name, self.view.dtype.name, self.planar, self.complex_, self.along_k, tuple(extra.items()))

    def _params(self, launcher: Launcher, batch_shape: tuple[int, ...], first: int, codes: Any) -> LineParams:
        params = LineParams(
            x=self.view.params(), first=first, lines=self.view.rows, k=self.view.columns, codes=launcher.pointer(codes)
        )
        params.batch_shape[:] = batch_shape
        return params

    def scale(self, launcher: Launcher, batch_shape: tuple[int, ...], first: int, codes: Any, matrices: int) -> None:
        """The codes of `matrices` matrices from number `first` on."""
        line = self._params(launcher, batch_shape, first, codes)
        params = ScaleParams(line=line, target=self.moduli.target(self.view.columns))
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
    ) -> None:
        """The residues of `panel` lines from `first_line` on, of as many matrices as `residues` holds."""
        params = ConvertParams(
            line=self._params(launcher, batch_shape, first, codes),
            first_line=first_line,
            panel=panel,
            pitch=self.pitch,
            plane=residues.shape[2] * self.pitch,
            residues=launcher.pointer(residues),
            conjugate=self.conjugate,
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

    `address`, `codes`: of the panel's first matrix. `kept`: what keeps the memory.
    """

    address: int
    codes: int
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
        self._codes: tuple[int, Any] | None = None
        self._last: tuple[tuple[int, int, int], Residues] | None = None

    def residues(
        self, launcher: Launcher, batch_shape: tuple[int, ...], piece: int, panel: Panel, line: int, count: int
    ) -> Residues:
        """Those of `count` lines from `line` on; `piece` is the number of the launch's first matrix in the product."""
        first = 0 if self.shared else panel.first
        matrices = 1 if self.shared else panel.matrices
        if self.prepared is not None:
            start = 0 if self.shared else piece + first
            return self._found(launcher, self.prepared.residues, self.prepared.codes, line, matrices, start)
        if self._last is not None and self._last[0] == (first, line, count):
            return self._last[1]
        if self._codes is None or self._codes[0] != first:
            codes = launcher.empty((matrices, self.lines.view.rows), np.dtype(np.int32))
            self.lines.scale(launcher, batch_shape, first, codes, matrices)
            self._codes = first, codes
        self._last = None  # its memory may serve again
        codes = self._codes[1]
        residues = self.lines.empty(launcher, matrices, count)
        self.lines.convert(launcher, batch_shape, first, codes, residues, line, count)
        found = self._found(launcher, residues, codes, 0, matrices)
        self._last = (first, line, count), found
        return found

    def _found(
        self, launcher: Launcher, residues: Any, codes: Any, line: int, matrices: int, start: int = 0
    ) -> Residues:
        lines = residues.shape[2]
        return Residues(
            launcher.pointer(residues) + start * self.lines.planes * lines * self.lines.pitch,
            launcher.pointer(codes) + start * self.lines.view.rows * 4,
            lines,
            line,
            matrices,
            self.shared,
            (residues, codes),
        )
