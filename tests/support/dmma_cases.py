"""Products in double precision on tensor cores, run on any machine with a Launcher, held to an elementwise bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmserve_kernels.algorithms.dmma import gemm as dmma
from gemmserve_kernels.algorithms.dmma.tile import TILES
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand


@dataclass(frozen=True)
class Case:
    """Shapes of the stored operands, how they lie in memory, options of the problem."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    dtype: str = "float64"
    c: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    order: str = "C"
    strided: bool = False

    @property
    def planar(self):
        return self.options.get("layout") == "planar"

    def arrays(self, seed=1):
        """A, B and C on the host; planar ones have a leading axis."""
        rng = np.random.default_rng(seed)

        def one(shape):
            if self.planar:
                shape = (2, *shape)
            x = rng.standard_normal(shape)
            return (x + 1j * rng.standard_normal(shape) if self.dtype[0] == "c" else x).astype(self.dtype)

        return one(self.a), one(self.b), None if self.c is None else one(self.c)

    @property
    def kind(self):
        return "planar" if self.planar else self.dtype

    def tiles(self):
        """All tiles, by their place in the list: "large", "small" and, if any, "middle"."""
        large, *middle, small = TILES[self.kind]
        return {
            "large": large,
            **dict.fromkeys(["middle"] * len(middle), middle[0] if middle else None),
            "small": small,
        }


def strided(put, x):
    """`x` on the device as every third column of a larger array, backwards."""
    whole = put(np.full((*x.shape[:-1], 3 * x.shape[-1]), np.nan, x.dtype))
    view = whole[..., ::-3]
    view[...] = put(x)
    return view


def run(launcher, case, tile, put, get, arrays=None):
    """The problem, its arrays, and D."""
    a, b, c = arrays or case.arrays()
    operands = [None if x is None else Operand.of(x) for x in (a, b, c)]
    problem = GemmProblem.build(*operands, compute="fp64", **case.options)
    device = [None if x is None else strided(put, x) if case.strided else put(x) for x in (a, b, c)]
    out = put(np.full(problem.result_shape, np.nan, problem.result_dtype, order=case.order))
    dmma.run_gemm(launcher, problem, tile, *device, out)
    return problem, (a, b, c), get(out)


def excess(problem, arrays, stored):
    """The worst |D - R| over what the sum of products and C, element by element, may be off by (reference.bound)."""
    exact = reference.oracle_gemm(problem, *arrays)
    return float((np.abs(reference.logical(problem, stored) - exact) / reference.bound(problem, *arrays)).max())


CASES = {
    "float64": Case((130, 50), (50, 70)),
    "float64 TT": Case((50, 130), (70, 50), options={"trans_a": "T", "trans_b": "T"}),
    "float64 TN, odd": Case((51, 65), (51, 71), options={"trans_a": "T"}),
    "float64 NT, odd": Case((65, 33), (71, 33), options={"trans_b": "T"}),
    "float64, strided": Case((33, 20), (20, 40), strided=True),
    "float64, C": Case((40, 50), (50, 71), c=(40, 71), options={"alpha": 2, "beta": -0.5}, order="F"),
    "float64, one step": Case((5, 1), (1, 7)),
    "float64, runs": Case((9, 700), (700, 10)),
    "float64, no steps": Case((5, 0), (0, 7), c=(5, 7), options={"beta": 2}),
    "batch": Case((3, 20, 50), (3, 50, 30)),
    "broadcast batch": Case((2, 1, 9, 30), (3, 30, 11)),
    "complex128": Case((140, 50), (50, 70), "complex128"),
    "complex128 AC BR": Case((50, 40), (50, 70), "complex128", options={"trans_a": "C", "trans_b": "R"}),
    "complex128 AT BC": Case((50, 40), (71, 50), "complex128", options={"trans_a": "T", "trans_b": "C"}),
    "complex128 AR": Case((41, 33), (33, 17), "complex128", options={"trans_a": "R"}),
    "complex128, strided": Case((33, 20), (20, 40), "complex128", strided=True),
    "complex128, C": Case(
        (40, 50), (50, 71), "complex128", c=(1, 71), options={"alpha": 2 - 1j, "beta": 0.5j}, order="F"
    ),
    "complex128, runs": Case((9, 530), (530, 10), "complex128"),
    "planar": Case((40, 50), (50, 70), c=(40, 70), options={"layout": "planar", "beta": 1.5}),
    "planar AC BT": Case((50, 41), (71, 50), options={"layout": "planar", "trans_a": "C", "trans_b": "T"}),
    "planar, runs": Case((9, 530), (530, 10), options={"layout": "planar"}),
    "planar, odd": Case((33, 35), (35, 37), options={"layout": "planar", "trans_b": "R"}),
}
