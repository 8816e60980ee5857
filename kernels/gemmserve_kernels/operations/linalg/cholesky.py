"""Cholesky factorization: lower L of op(A) = L L^H."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.operations.linalg.factorization import cholesky_flops, factor
from gemmserve_kernels.operations.linalg.library import (
    adjoint,
    check_square,
    computing,
    operated,
    scratch_of_parts,
    stack_parts,
)
from gemmserve_kernels.operations.linalg.residual import find_residual, hermitian_times, times
from gemmserve_kernels.operations.operation import Operation, Result, module_of
from gemmserve_kernels.problem.validation import choice
from gemmserve_kernels.problem.vocabulary import TRANS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from gemmserve_kernels.freivalds import Finding
    from gemmserve_kernels.problem.operand import Operand


@dataclass(frozen=True)
class Cholesky(Operation):
    """Lower L of op(a) = L L^H for every matrix of a stack (..., n, n), zero above its diagonal.

    Only the lower triangle of op(a) is read, and the real part of its diagonal. A pivot that is not positive (NaN is
    not) is NotPositiveDefinite.
    """

    name = "cholesky"
    a: Operand
    trans_a: str
    dtype: np.dtype[Any]

    @classmethod
    def build(cls, *, a: Operand, trans_a: str = "N") -> Cholesky:
        """Check everything and return the operation. Raises ShapeMismatch, DtypeUnsupported, ParameterInvalid."""
        check_square("a", a, cls.name)
        return cls(a, choice(trans_a, TRANS, "trans_a"), a.dtype)

    @property
    def operands(self) -> dict[str, Operand]:
        """See `Operation`."""
        return {"a": self.a}

    @property
    def results(self) -> dict[str, Result]:
        """See `Operation`."""
        return {"d": Result(self.a.shape, self.dtype)}

    def flops(self) -> int:
        """See `Operation`: n^3 / 3, four times that of complex numbers."""
        return math.prod(self.a.shape[:-2]) * cholesky_flops(self.a.shape[-1], self.dtype)

    @property
    def scratch_nbytes(self) -> int:
        """See `Operation`."""
        return scratch_of_parts(math.prod(self.a.shape[:-2]), 0, _nbytes(self.a))

    def run(self, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """See `Operation`."""
        out, n = results["d"], self.a.shape[-1]
        if not math.prod(out.shape):
            return
        with computing(out) as xp:
            for part in stack_parts(xp, out.shape[:-2], cholesky_flops(n, self.dtype), _nbytes(self.a)):
                out[part] = factor(xp, operands["a"], part, self.trans_a, self.dtype)

    def find(self, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
        """See `Operation`: L (L^H x) - op(a) x."""
        d = results["d"]
        xp = module_of(d)

        def residual(some: Sequence[Any], x: Any) -> Any:
            lower, a = some
            return times(xp, lower, times(xp, adjoint(xp, lower), x)) - hermitian_times(xp, a, x, lower=True)

        stacks = (d, operated(xp, operands["a"], self.trans_a))
        n = self.a.shape[-1]
        return find_residual(xp, stacks, n, residual, lambda norms: norms[0] ** 2, (self.dtype, self.dtype, n), seed)


def _nbytes(a: Operand) -> int:
    """Bytes that one matrix takes while it is factored: copies before and after the library's own."""
    return 4 * a.shape[-1] ** 2 * a.dtype.itemsize
