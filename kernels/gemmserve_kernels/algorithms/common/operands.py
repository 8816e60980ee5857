"""Operands of a launch: views turned the right way, and their types as the device code has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.device.struct_params import MatrixView, StoredArray, matrix_view

if TYPE_CHECKING:
    import numpy as np

    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

TYPES: Final = {
    "float16": "Half",
    "float32": "float",
    "float64": "double",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}
"""Device types by dtype name, from cuda/common/platform.cuh and types.cuh."""


@dataclass(frozen=True)
class Operands:
    """op(A) as m x k, op(B) as k x n, and how they are multiplied."""

    a: MatrixView
    b: MatrixView
    conjugate_a: bool
    conjugate_b: bool
    accumulate: np.dtype[Any]
    planar: bool

    @classmethod
    def of(cls, problem: GemmProblem | GemmReduceProblem, a: StoredArray, b: StoredArray) -> Operands:
        """The views that `trans_a` and `trans_b` ask for."""

        def view(array: StoredArray, trans: str) -> MatrixView:
            shape = (*problem.batch_shape, *array.shape[-2:])
            stored = matrix_view(array, shape, planar=problem.planar)
            return stored.transposed() if trans in {"T", "C"} else stored

        return cls(
            view(a, problem.trans_a),
            view(b, problem.trans_b),
            problem.trans_a in {"C", "R"},
            problem.trans_b in {"C", "R"},
            problem.accumulate,
            problem.planar,
        )

    @property
    def m(self) -> int:
        """Rows of the product."""
        return self.a.rows

    @property
    def n(self) -> int:
        """Columns of the product."""
        return self.b.columns

    @property
    def k(self) -> int:
        """Length of the sums."""
        return self.a.columns

    def transposed(self) -> Operands:
        """(op(A) op(B))^T = op(B)^T op(A)^T."""
        return Operands(
            self.b.transposed(),
            self.a.transposed(),
            self.conjugate_b,
            self.conjugate_a,
            self.accumulate,
            self.planar,
        )


def runs_along_rows(d: MatrixView) -> bool:
    """Whether neighbours in memory are neighbours in a column of D: then the transposed product is computed."""
    if d.rows == 1 or d.columns == 1:
        return d.columns == 1 and d.rows > 1
    return abs(d.row_stride) < abs(d.column_stride)


def flag(value: bool) -> str:
    """A bool as the preprocessor has it."""
    return str(int(value))
