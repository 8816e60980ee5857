"""Products through residues, run on any machine with a Launcher, and compared with a higher precision."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gemmserve_kernels.algorithms.ozaki import gemm as ozaki
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand


@dataclass(frozen=True)
class Case:
    """Shapes of the stored operands; `kind` of the data; options of the problem."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    dtype: str = "complex128"
    kind: str = "normal"
    c: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    order: str = "C"
    tile: dict[str, Any] = field(default_factory=dict)

    def arrays(self):
        """A, B and C on the host; planar ones have a leading axis."""
        rng = np.random.default_rng(7)
        planar = self.options.get("layout") == "planar"

        def one(shape):
            if planar:
                return rng.standard_normal((2, *shape)).astype(self.dtype)
            x = rng.standard_normal(shape)
            return (x + 1j * rng.standard_normal(shape) if self.dtype[0] == "c" else x).astype(self.dtype)

        a, b = one(self.a), one(self.b)
        k = self.a[-1]
        if self.kind == "positive":
            a, b = np.abs(a).astype(self.dtype), np.abs(b).astype(self.dtype)
        elif self.kind == "wide":
            a, b = (x * (2.0 ** rng.uniform(-12, 12, x.shape)).astype(x.real.dtype) for x in (a, b))
        elif self.kind == "rows":
            a *= 2.0 ** rng.integers(-300, 300, (*self.a[:-1], 1))
            b *= 2.0 ** rng.integers(-300, 300, (*self.b[:-2], 1, self.b[-1]))
        elif self.kind == "huge":
            a[..., ::2, :] *= 2.0**1015
            a[..., 1::2, :] *= 2.0**-1040
            b *= 2.0**-30
        elif self.kind == "graded":
            a *= 2.0 ** (40 * np.arange(k) / k)
            b *= (2.0 ** (-40 * np.arange(k) / k))[:, None]
        elif self.kind == "integers":
            a, b = (np.rint(4 * x) for x in (a, b))
        elif self.kind == "zeros":
            a[..., 1, :] = 0
            b[..., :, 2] = 0
        elif self.kind == "spiky":
            a[..., 3], b[..., 5, :], a[..., 2, 7] = 1e9, -1e12, 1e200
        elif self.kind == "nonfinite":
            a[..., 3, 5], b[..., 2, 7], a[..., -1, 0] = np.nan, np.inf, -np.inf
        return a, b, None if self.c is None else one(self.c)


@dataclass
class Result:
    """What came out, with what it is measured by."""

    problem: GemmProblem
    arrays: tuple[Any, ...]
    device: tuple[Any, ...]
    stored: np.ndarray

    @property
    def value(self):
        """D, complex where the problem is."""
        return reference.logical(self.problem, self.stored)

    @property
    def exact(self):
        return reference.oracle_gemm(self.problem, *self.arrays)

    @property
    def errors(self):
        return reference.errors(self.value, self.exact)


def run(launcher, case: Case, put, get, *, prepared: str = "", plain: bool = False) -> Result:
    """Runs a case on arrays that `put` makes and `get` brings back; `prepared` names sides."""
    a, b, c = case.arrays()
    problem = GemmProblem.build(
        Operand.of(a), Operand.of(b), None if c is None else Operand.of(c), compute="ozaki", **case.options
    )
    tile = replace(ozaki.resolve(None, problem, launcher.spec), plain=plain, **case.tile)
    device = tuple(None if x is None else put(x) for x in (a, b, c))
    out = put(np.full(problem.result_shape, np.nan, problem.result_dtype, order=case.order))
    sides = [
        ozaki.prepare_operand(
            launcher, x, side, trans, planar=problem.planar, moduli=tile.moduli, outliers=tile.outliers
        )
        if side in prepared
        else x
        for side, x, trans in zip("ab", device[:2], (problem.trans_a, problem.trans_b), strict=True)
    ]
    ozaki.run_gemm(launcher, problem, tile, *sides, device[2], out)
    return Result(problem, (a, b, c), device, get(out))


CASES = {
    "normal": Case((40, 50), (50, 70)),
    "float64": Case((40, 50), (50, 70), "float64"),
    "complex64": Case((40, 50), (50, 70), "complex64"),
    "float32": Case((40, 50), (50, 70), "float32"),
    "positive": Case((33, 130), (130, 20), kind="positive"),
    "wide": Case((33, 130), (130, 20), kind="wide"),
    "scaled rows": Case((20, 60), (60, 17), kind="rows"),
    "huge and subnormal": Case((20, 60), (60, 17), kind="huge"),
    "zeros": Case((20, 60), (60, 17), kind="zeros"),
    "k = 1": Case((7, 1), (1, 5)),
    "a vector": Case((1, 300), (300, 1), "float64"),
    "AT BC": Case((50, 40), (70, 50), options={"trans_a": "T", "trans_b": "C"}),
    "AC BR": Case((50, 40), (50, 70), options={"trans_a": "C", "trans_b": "R"}),
    "scalars and C": Case((40, 50), (50, 70), c=(40, 70), options={"alpha": 2 - 1j, "beta": 0.5j}),
    "C broadcast, Fortran order": Case((40, 50), (50, 70), c=(1, 70), options={"beta": -2}, order="F"),
    "planar": Case((40, 50), (50, 70), "float64", c=(40, 70), options={"layout": "planar", "beta": 1.5}),
    "batch": Case((3, 20, 50), (3, 50, 30), "float64"),
    "broadcast batch": Case((2, 1, 9, 30), (3, 30, 11), "float64"),
    "outliers": Case((40, 300), (300, 70), kind="spiky", tile={"outliers": 16}),
    "outliers, float64, AT BT": Case(
        (300, 40), (70, 300), "float64", "spiky", options={"trans_a": "T", "trans_b": "T"}, tile={"outliers": 16}
    ),
    "panels": Case((2, 300, 20), (20, 520), "float64", tile={"workspace": 1 << 20}),
}
