"""Operands of a launch: views turned the right way, and their types as the device code has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.device.struct_params import MatrixView, StoredArray, matrix_view

if TYPE_CHECKING:
    import numpy as np

    from gemmserve_kernels.device.struct_params import Access
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
            self.b.transposed(), self.a.transposed(), self.conjugate_b, self.conjugate_a, self.accumulate, self.planar
        )


def runs_along_rows(d: MatrixView) -> bool:
    """Whether neighbours in memory are neighbours in a column of D: then the transposed product is computed."""
    if d.rows == 1 or d.columns == 1:
        return d.columns == 1 and d.rows > 1
    return abs(d.row_stride) < abs(d.column_stride)


def stored_dtype(problem: GemmProblem | GemmReduceProblem) -> np.dtype[Any]:
    """Return the dtype of the product as it is stored: real where it is planar."""
    return problem.stored((), problem.dtype)[1]


def written(problem: GemmProblem | GemmReduceProblem, c: StoredArray | None, d: StoredArray | None) -> list[MatrixView]:
    """Views of C and D; of what there is none, one that is never looked at."""
    shape = (*problem.batch_shape, problem.m, problem.n)
    nowhere = MatrixView(0, 0, stored_dtype(problem), problem.m, problem.n, 0, 0, (0,) * len(problem.batch_shape))
    return [nowhere if array is None else matrix_view(array, shape, planar=problem.planar) for array in (c, d)]


def access_defines(a: Access, b: Access) -> dict[str, str]:
    """Return the defines of how A and B are read."""
    return {
        "A_ALONG_K": flag(a.along_k),
        "VECTOR_A": str(a.vector),
        "B_ALONG_K": flag(b.along_k),
        "VECTOR_B": str(b.vector),
    }


def index_type(operands: Operands, block: tuple[int, int, int]) -> str:
    """Return the type of offsets inside one tile, of that extent along m, n and k: 32 bits unless the strides ask for
    more. Tiles and matrices are always found in 64.
    """
    (a, b), (m, n, k) = (operands.a, operands.b), block
    reach = max(abs(a.row_stride) * m + abs(a.column_stride) * k, abs(b.column_stride) * n + abs(b.row_stride) * k)
    return "int" if reach < 2**31 else "long long"


def flag(value: bool) -> str:
    """A bool as the preprocessor has it."""
    return str(int(value))
