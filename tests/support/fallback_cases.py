"""What planes must not answer, computed anew by a kernel of ours: which elements are flagged, what must come out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import dmma_cases
import numpy as np
from dmma_cases import Case, strided

from gemmserve_kernels.algorithms.common.verdict import GROUP, GROUP_WORDS, UNFIT, groups
from gemmserve_kernels.algorithms.dmma.tile import SINGLE_TILES
from gemmserve_kernels.algorithms.splits import dmma_fallback, fallback
from gemmserve_kernels.algorithms.splits.flags import Flags
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand

SINGLE = {"float64": "float32", "complex128": "complex64"}
CASES = {
    name.replace("float64", "float32").replace("complex128", "complex64"): replace(case, dtype=SINGLE[case.dtype])
    for name, case in dmma_cases.CASES.items()
    if not case.planar
}
ALIGNED = {
    f"{dtype}{' planar' * planar} {trans}": Case(
        (132, 52) if trans[0] in "NR" else (52, 132),
        (52, 76) if trans[1] in "NR" else (76, 52),
        dtype,
        options={"trans_a": trans[0], "trans_b": trans[1], **({"layout": "planar"} if planar else {})},
    )
    for dtype, planar, every in (
        ("float32", False, ["NN", "TN", "NT", "TT"]),
        ("complex64", False, ["NN", "TC", "CT", "RR", "CN"]),
        ("float32", True, ["NN", "CT", "RC"]),
    )
    for trans in every
} | {
    "batch, aligned": Case((3, 20, 48), (3, 48, 36), "complex64"),
    "broadcast batch, planar": Case((2, 1, 12, 36), (3, 36, 16), "float32", options={"layout": "planar"}),
    "order F, C": Case((44, 52), (52, 72), "complex64", c=(44, 72), options={"alpha": 2 - 1j, "beta": 0.5j}, order="F"),
}
"""Whose rows are multiples of 16 bytes apart: the copy engine fetches them."""
UNTOUCHED = 77.0


def tiles(case):
    """All tiles of the case's kind, from the largest to the smallest."""
    return SINGLE_TILES["planar float32" if case.planar else case.dtype]


@dataclass(frozen=True)
class Marks:
    """What is flagged: flags of the rows and columns of every matrix, (*batch, m) and (*batch, n); which groups of rows
    by which of columns float16 planes do not serve, (groups of rows, groups of columns), or None.
    """

    rows: Any
    columns: Any
    groups: Any = None
    widened: bool = True

    @classmethod
    def none(cls, problem, **options):
        shape = problem.batch_shape
        return cls(np.zeros((*shape, problem.m), np.int32), np.zeros((*shape, problem.n), np.int32), **options)

    @classmethod
    def random(cls, problem, seed=5):
        """Flags of every kind, most of them none."""
        rng = np.random.default_rng(seed)
        rows, columns = (
            rng.choice([0, 1, 2, 3], (*problem.batch_shape, extent), p=[0.7, 0.15, 0.1, 0.05]).astype(np.int32)
            for extent in (problem.m, problem.n)
        )
        return cls(rows, columns)

    @classmethod
    def every(cls, problem):
        """All rows are deep and sparse."""
        return replace(cls.none(problem), rows=np.full((*problem.batch_shape, problem.m), UNFIT, np.int32))

    @property
    def rest(self):
        """Elements of groups that are not served, (m, n)."""
        m, n = self.rows.shape[-1], self.columns.shape[-1]
        if self.groups is None:
            return np.zeros((m, n), bool)
        return np.repeat(np.repeat(self.groups, GROUP, 0)[:m], GROUP, 1)[:, :n]

    @property
    def unfit(self):
        """Elements that are computed anew, (*batch, m, n)."""
        flagged = (self.rows[..., :, None] | self.columns[..., None, :]) & UNFIT == UNFIT
        return flagged if self.widened else flagged | self.rest

    def on(self, launcher, put, problem):
        """As the kernels are told; and what must not be freed before they have run."""
        batch, steps, matrices = problem.batch_shape, [], 1
        for extent in reversed(batch):
            steps.insert(0, matrices if extent > 1 else 0)
            matrices *= extent
        held = [put(np.ascontiguousarray(x)) for x in (self.rows, self.columns)]
        deficits = [0, 0]
        if self.groups is not None:
            # A group's counts exceed k together with those of the other side's alone.
            for i, bad in enumerate((self.groups.any(1), self.groups.any(0))):
                words = np.zeros((matrices, groups(len(bad) * GROUP), GROUP_WORDS), np.int32)
                words[..., :2], words[..., 3] = (bad * problem.k // 2 + bad)[None, :, None], 3
                held.append(put(np.concatenate([[1], words.ravel()]).astype(np.int32)))
                deficits[i] = launcher.pointer(held[-1])
        anything = self.rows.any() or self.columns.any() or self.groups is not None
        held.append(put(np.array([anything], np.int32)))
        status = launcher.pointer(held[-1])
        rows, columns = (launcher.pointer(x) for x in held[:2])
        counters = launcher.counters(self.unfit.size)
        found = Flags(
            rows, columns, *deficits, (status, status), tuple(steps), tuple(steps), counters, widened=self.widened
        )
        return found, held


def odd(x):
    """`x` in rows whose distance is no multiple of 16 bytes: threads copy them."""
    whole = np.full((*x.shape[:-1], 2 * x.shape[-1] + 1), np.nan, x.dtype)
    view = whole[..., 1 : x.shape[-1] + 1]
    view[...] = x
    return view


def build(case, arrays):
    operands = [None if x is None else Operand.of(x) for x in arrays]
    return GemmProblem.build(*operands, **case.options)


def run(launcher, case, put, get, *, marks=None, tile=None, arrays=None, plain=False, copied=False):
    """The problem, its arrays, what was flagged, and D, whose other elements are UNTOUCHED. `copied`: threads copy."""
    arrays = arrays or case.arrays()
    problem = build(case, arrays)
    marks = marks(problem) if callable(marks) else marks or Marks.random(problem)
    lying = [odd(x) if copied and x is not None else x for x in arrays]
    device = [None if x is None else strided(put, x) if case.strided else put(x) for x in lying]
    out = put(np.full(problem.result_shape, UNTOUCHED, problem.result_dtype, order=case.order))
    flags, _held = marks.on(launcher, put, problem)
    if plain:
        fallback.run(launcher, problem, *device, out, flags, plain=True)
    else:
        assert dmma_fallback.run(launcher, problem, *device, out, flags, tile)
    return problem, arrays, marks, get(out)


def check(problem, arrays, marks, stored):
    """Flagged elements are the exact ones rounded once, half a unit in the last place off at most; others untouched."""
    found = reference.logical(problem, stored)
    unfit, untouched = marks.unfit, UNTOUCHED * (1 + 1j) if problem.planar else UNTOUCHED
    np.testing.assert_array_equal(found[~unfit], np.full_like(found[~unfit], untouched))
    exact = reference.oracle_gemm(problem, *arrays)
    doubt = reference.bound(problem, *arrays) * 2.0**-28  # of sums in double
    for ours, theirs in ((found.real, exact.real), (found.imag, exact.imag)):
        ulp = np.spacing(np.abs(theirs).astype(np.float32)).astype(np.float64)
        assert (np.abs(ours.astype(np.float64) - theirs)[unfit] <= (ulp / 2 + doubt)[unfit]).all()


HALF_WIDE = Case((300, 40), (40, 530), "complex64", c=(300, 530), options={"beta": 0.5})
"""Two groups of rows by three of columns."""
SOME_GROUPS = np.array([[False, True, True], [False, True, True]])
