"""solve and inv: systems of linear equations and inverses, of stacks of matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.operations.linalg.elimination import substitute
from gemmserve_kernels.operations.linalg.factorization import factor, factor_flops, solved
from gemmserve_kernels.operations.linalg.hermitian import herk
from gemmserve_kernels.operations.linalg.library import (
    check_matrix,
    check_square,
    computing,
    operated,
    scratch_of_parts,
    stack_parts,
)
from gemmserve_kernels.operations.linalg.residual import find_residual, hermitian_times, times
from gemmserve_kernels.operations.operation import Operation, Result, module_of
from gemmserve_kernels.problem.errors import ShapeMismatch
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem
from gemmserve_kernels.problem.validation import broadcast_batch, check_size, choice
from gemmserve_kernels.problem.vocabulary import ASSUMPTIONS, TRANS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gemmserve_kernels.freivalds import Finding


@dataclass(frozen=True)
class Solve(Operation):
    """X of op(a) X = b for stacks of matrices a (..., n, n) and b (..., n, k), whose leading axes broadcast.

    `assume` says of op(a): "general" (LU with partial pivoting), "positive" (Hermitian positive definite: Cholesky, its
    lower triangle is read), "lower", "upper" (triangular: the other triangle is not read). A pivot, or an element of a
    triangle's diagonal, that is exactly zero is SingularMatrix; NaN in op(a) make NaN in X, unless it is "positive".
    """

    name = "solve"
    a: Operand
    b: Operand
    assume: str
    trans_a: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def build(cls, *, a: Operand, b: Operand, assume: str = "general", trans_a: str = "N") -> Solve:
        """Check everything and return the operation. Raises ShapeMismatch, DtypeUnsupported, ParameterInvalid."""
        check_square("a", a, cls.name)
        check_matrix("b", b, cls.name)
        if a.shape[-1] != b.shape[-2]:
            raise ShapeMismatch(f"a {a.shape} and b {b.shape}: b must have as many rows as a")
        shape = (*broadcast_batch(a.shape[:-2], b.shape[:-2]), *b.shape[-2:])
        dtype = np.result_type(a.dtype, b.dtype)
        check_size("the result", shape, dtype)
        return cls(a, b, choice(assume, ASSUMPTIONS, "assume"), choice(trans_a, TRANS, "trans_a"), shape, dtype)

    @property
    def operands(self) -> dict[str, Operand]:
        """See `Operation`."""
        return {"a": self.a, "b": self.b}

    @property
    def results(self) -> dict[str, Result]:
        """See `Operation`."""
        return {"d": Result(self.shape, self.dtype)}

    @property
    def shared(self) -> bool:
        """Whether all right sides are of one matrix, which is factored once."""
        return math.prod(self.a.shape[:-2]) == 1

    def flops(self) -> int:
        """See `Operation`: of the factorization, and of 2 n^2 for every column (n^2 of a triangle)."""
        matrices = math.prod(self.a.shape[:-2])
        return matrices * self._factor_flops() + math.prod(self.shape[:-2]) * self._column_flops()

    @property
    def scratch_nbytes(self) -> int:
        """See `Operation`."""
        if self.shared:
            return self._nbytes(math.prod(self.shape[:-2]) * self.shape[-1])
        return scratch_of_parts(math.prod(self.shape[:-2]), 0, self._nbytes(self.shape[-1]))

    def run(self, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """See `Operation`."""
        out, (n, k) = results["d"], self.shape[-2:]
        if not math.prod(out.shape):
            return
        with computing(out) as xp:
            a, trans = operands["a"], self.trans_a
            b = xp.broadcast_to(operands["b"].astype(self.dtype, copy=False), self.shape)
            if self.shared:  # the right sides are columns of one system
                wide = xp.moveaxis(b, -2, 0).reshape(n, -1)
                x = solved(xp, a.reshape(n, n), wide, (), self.assume, trans)
                out[...] = xp.moveaxis(x.reshape(n, *self.shape[:-2], k), 0, -2)
                return
            a = xp.broadcast_to(a, (*self.shape[:-2], n, n))
            flops = self._factor_flops() + self._column_flops()
            for part in stack_parts(xp, self.shape[:-2], flops, self._nbytes(k)):
                out[part] = solved(xp, a, b, part, self.assume, trans)

    def find(self, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
        """See `Operation`: op(a) (X x) - b x."""
        x, n = results["d"], self.a.shape[-1]
        xp = module_of(x)
        # What is copied of a is copied before it is broadcast: to every right side there is one.
        a = xp.broadcast_to(_read(xp, operands["a"], self.trans_a, self.assume), (*self.shape[:-2], n, n))
        return find_solution(xp, (a, x, xp.broadcast_to(operands["b"], self.shape)), self.assume, self.dtype, seed)

    def _factor_flops(self) -> int:
        return factor_flops(self.assume, self.a.shape[-1], self.dtype)

    def _column_flops(self) -> int:
        triangles = 1 if self.assume in {"lower", "upper"} else 2
        return (4 if self.dtype.kind == "c" else 1) * triangles * self.shape[-2] ** 2 * self.shape[-1]

    def _nbytes(self, columns: int) -> int:
        """Bytes that one matrix and its right sides take while they are worked on."""
        return 4 * (self.shape[-2] ** 2 + self.shape[-2] * columns) * self.dtype.itemsize


@dataclass(frozen=True)
class Inv(Operation):
    """Inverse of op(a) for every matrix of a stack (..., n, n); `assume` and errors are those of `Solve`.

    With "positive" the result is Hermitian to the last bit.
    """

    name = "inv"
    a: Operand
    assume: str
    trans_a: str
    dtype: np.dtype[Any]

    @classmethod
    def build(cls, *, a: Operand, assume: str = "general", trans_a: str = "N") -> Inv:
        """Check everything and return the operation. Raises ShapeMismatch, DtypeUnsupported, ParameterInvalid."""
        check_square("a", a, cls.name)
        return cls(a, choice(assume, ASSUMPTIONS, "assume"), choice(trans_a, TRANS, "trans_a"), a.dtype)

    @property
    def operands(self) -> dict[str, Operand]:
        """See `Operation`."""
        return {"a": self.a}

    @property
    def results(self) -> dict[str, Result]:
        """See `Operation`."""
        return {"d": Result(self.a.shape, self.dtype)}

    def flops(self) -> int:
        """See `Operation`: of a factorization and n right sides."""
        return math.prod(self.a.shape[:-2]) * self._flops_of_one()

    @property
    def scratch_nbytes(self) -> int:
        """See `Operation`."""
        return scratch_of_parts(math.prod(self.a.shape[:-2]), 0, self._nbytes())

    def run(self, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """See `Operation`."""
        out, n = results["d"], self.a.shape[-1]
        if not math.prod(out.shape):
            return
        with computing(out) as xp:
            a, trans = operands["a"], self.trans_a
            identity = xp.broadcast_to(xp.eye(n, dtype=self.dtype), a.shape)
            for part in stack_parts(xp, a.shape[:-2], self._flops_of_one(), self._nbytes()):
                if self.assume != "positive":
                    out[part] = solved(xp, a, identity, part, self.assume, trans)
                    continue
                half = substitute(xp, factor(xp, a, part, trans, self.dtype), identity[part], lower=True)
                operand = Operand.of(half)
                made = xp.empty(half.shape, half.dtype)
                herk(half, None, made, GemmProblem.build(operand, operand, trans_a="C"), "both")  # L^-H L^-1
                out[part] = made

    def find(self, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
        """See `Operation`: op(a) (X x) - x."""
        x = results["d"]
        xp = module_of(x)
        identity = xp.broadcast_to(xp.eye(self.a.shape[-1]), self.a.shape)
        stacks = _read(xp, operands["a"], self.trans_a, self.assume), x, identity
        return find_solution(xp, stacks, self.assume, self.dtype, seed)

    def _flops_of_one(self) -> int:
        n = self.a.shape[-1]
        return factor_flops(self.assume, n, self.dtype) + (8 if self.dtype.kind == "c" else 2) * n**3

    def _nbytes(self) -> int:
        return 8 * self.a.shape[-1] ** 2 * self.dtype.itemsize


def find_solution(xp: Any, stacks: tuple[Any, Any, Any], assume: str, dtype: np.dtype[Any], seed: int) -> Finding:
    """Return the finding of X in stacks `_read` of A, X and B of equal leading axes."""

    def residual(some: Sequence[Any], v: Any) -> Any:
        a, x, b = some
        y = times(xp, x, v)
        return _product(xp, a, y, assume) - times(xp, b, v)

    def size(norms: Sequence[Any]) -> Any:
        return norms[0] * norms[1] + norms[2]

    a, x, _ = stacks
    return find_residual(xp, stacks, x.shape[-1], residual, size, (dtype, dtype, a.shape[-1]), seed)


def _read(xp: Any, a: Any, trans: str, assume: str) -> Any:
    """Return what is read of op(A), and zeros: the norm that a check divides by is that of it, too."""
    a = operated(xp, a, trans)
    if assume == "general":
        return a
    return xp.triu(a) if assume == "upper" else xp.tril(a)


def _product(xp: Any, a: Any, y: Any, assume: str) -> Any:
    return hermitian_times(xp, a, y, lower=True) if assume == "positive" else times(xp, a, y)
