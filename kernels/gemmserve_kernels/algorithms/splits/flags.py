"""Flags of rows and columns that tensor cores must not answer, and deficits of groups of them, for kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import Operands, runs_along_rows
from gemmserve_kernels.algorithms.common.verdict import GROUP_WORDS, groups, most_deficit
from gemmserve_kernels.device.struct_params import MatrixView, dense_strides, matrix_view
from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.algorithms.splits.prepass import Prepass
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.struct_params import StoredArray
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

_INT: Final = np.dtype(np.int32)


@device_struct("epilogue/flags.cuh")
class FlagParams(ctypes.Structure):
    """Flags and deficits as kernels see them."""


@dataclass(frozen=True)
class Failing:
    """Deficits by which residues have tiles or not (`ozaki.bound`): words from one product to the next, 0 where an
    operand is shared, and the `most` that two may be together.
    """

    words_a: int
    words_b: int
    most: int

    def define(self, *, swapped: bool) -> dict[str, str]:
        """Return the define of kernels that compute what residues do not; `swapped`: as in `Oriented`."""
        return {"FAILING": "2" if swapped else "1"}


@dataclass(frozen=True)
class Flags:
    """Elements to be computed in plain arithmetic. Addresses, 0 where there is nothing: int32 flags of the rows of
    op(A) and of the columns of op(B); their deficits (`common.verdict`); two words that are both 0 where nothing is
    flagged. `matrices_*`: matrices to step in A's and B's for each axis of the batch. `counters`: what the elements
    that are computed are counted by (`Launcher.counters`), 0: nothing. `widened`: the deficits' tiles have been
    computed the wide way, and are replaced where a row or column is flagged. `failing`: the deficits are those of
    residues, which have the other tiles.
    """

    rows: int
    columns: int
    deficits_a: int
    deficits_b: int
    status: tuple[int, int]
    matrices_a: tuple[int, ...]
    matrices_b: tuple[int, ...]
    counters: int = 0
    widened: bool = False
    failing: Failing | None = None

    @classmethod
    def of(cls, launcher: Launcher, ready: Prepass, wide: Prepass | None, counters: int) -> Flags:
        """Return what the planes of a product do not serve, nor those of the wide way if there is one."""
        steps = ready.a.planes.batch_strides, ready.b.planes.batch_strides
        deficits = (0, 0)
        if ready.a.deficits is not None:
            deficits = ready.a.deficits_at(launcher), ready.b.deficits_at(launcher)
            if wide is None:
                return cls(0, 0, *deficits, deficits, *steps, counters)
        planes = wide or ready
        rows, columns = launcher.pointer(planes.a.flags), launcher.pointer(planes.b.flags)
        status = planes.status, planes.status
        return cls(rows, columns, *deficits, status, *steps, counters, widened=wide is not None)

    @staticmethod
    def views(
        problem: GemmProblem | GemmReduceProblem,
        matrices_a: tuple[int, ...],
        matrices_b: tuple[int, ...],
        failing: Failing | None = None,
    ) -> tuple[MatrixView, MatrixView, MatrixView, MatrixView]:
        """Flags of rows and columns, deficits of both, as matrices of one row; addresses count from the arrays'."""

        def view(length: int, steps: tuple[int, ...]) -> MatrixView:
            return MatrixView(0, 0, _INT, 1, length, 0, 1, steps)

        sides = (problem.m, matrices_a), (problem.n, matrices_b)
        rows, columns = (view(length, tuple(step * length for step in steps)) for length, steps in sides)
        if failing is not None:
            of_a, of_b = (dense_strides(problem.batch_shape, words) for words in (failing.words_a, failing.words_b))
            return rows, columns, view(failing.words_a, of_a), view(failing.words_b, of_b)
        lengths = [groups(length) * GROUP_WORDS for length, _ in sides]
        row_groups, column_groups = (
            view(words, tuple(step * words for step in steps)) for words, (_, steps) in zip(lengths, sides, strict=True)
        )
        return rows, columns, row_groups, column_groups

    @staticmethod
    def swap(
        views: tuple[MatrixView, MatrixView, MatrixView, MatrixView],
    ) -> tuple[MatrixView, MatrixView, MatrixView, MatrixView]:
        """The views where rows are those of op(B)."""
        return views[1], views[0], views[3], views[2]

    @staticmethod
    def params(views: Sequence[MatrixView], k: int, failing: Failing | None = None) -> FlagParams:
        """The arguments, without addresses."""
        names = "rows", "columns", "row_deficits", "column_deficits"
        found = {name: view.params() for name, view in zip(names, views, strict=True)}
        return FlagParams(**found, most_deficit=most_deficit(k) if failing is None else failing.most)

    def place(self, params: FlagParams, *, swapped: bool) -> None:
        """Adds the addresses to views; where `swapped`, rows are those of op(B)."""
        ahead = _INT.itemsize if self.failing is None else 0  # a word that says how many vectors are in doubt
        pairs = (
            (params.rows, params.columns, self.rows, self.columns),
            (
                params.row_deficits,
                params.column_deficits,
                self.deficits_a and self.deficits_a + ahead,
                self.deficits_b and self.deficits_b + ahead,
            ),
        )
        for rows, columns, of_a, of_b in pairs:
            for matrix, address in zip((rows, columns), (of_b, of_a) if swapped else (of_a, of_b), strict=True):
                matrix.re = matrix.re + address if address else 0
        params.status_a, params.status_b = self.status
        params.counters, params.widened = self.counters, self.widened


@dataclass(frozen=True)
class Oriented:
    """A product whose result runs along its rows: as it is, or transposed where `swapped`. Addresses of views count
    from the arrays'.
    """

    operands: Operands
    c: MatrixView
    d: MatrixView
    flags: tuple[MatrixView, MatrixView, MatrixView, MatrixView]
    swapped: bool

    @classmethod
    def of(
        cls,
        problem: GemmProblem,
        stored: tuple[StoredArray, StoredArray, StoredArray, StoredArray],
        matrices_a: tuple[int, ...],
        matrices_b: tuple[int, ...],
        failing: Failing | None = None,
    ) -> Oriented:
        """`stored`: A, B, C and D. `matrices_*`: matrices to step in the flags for each axis of the batch. `failing`:
        as in `Flags`.
        """
        operands = Operands.of(problem, stored[0], stored[1])
        shape = (*problem.batch_shape, problem.m, problem.n)
        c, d = (matrix_view(array, shape, planar=problem.planar) for array in stored[2:])
        flags = Flags.views(problem, matrices_a, matrices_b, failing)
        if not runs_along_rows(d):
            return cls(operands, c, d, flags, swapped=False)
        return cls(operands.transposed(), c.transposed(), d.transposed(), Flags.swap(flags), swapped=True)

    @property
    def views(self) -> list[MatrixView]:
        """A, B, C, D and the flags."""
        return [self.operands.a, self.operands.b, self.c, self.d, *self.flags]
