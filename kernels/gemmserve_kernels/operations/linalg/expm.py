"""Matrix exponential by scaling and squaring with Padé approximants.

N. Higham, The scaling and squaring method for the matrix exponential revisited, SIAM J. Matrix Anal. Appl. 26 (2005):
degrees 3, 5, 7, 9 and 13 with the bounds of table 2.3 in double, 3, 5 and 7 with those of the same paper's rule in
single precision. The approximant's backward error is below the unit roundoff for 1-norms up to the bound; norms beyond
the last are halved until they are below it, and the result is squared as often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.dispatch.gemm import gemm
from gemmserve_kernels.freivalds import Finding
from gemmserve_kernels.operations.linalg.factorization import solved
from gemmserve_kernels.operations.linalg.library import (
    check_square,
    computing,
    operated,
    scratch_of_parts,
    stack_parts,
)
from gemmserve_kernels.operations.operation import Operation, Result
from gemmserve_kernels.problem.operand import Operand, real_dtype
from gemmserve_kernels.problem.problem import GemmProblem
from gemmserve_kernels.problem.validation import choice
from gemmserve_kernels.problem.vocabulary import TRANS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_kernels.problem.problem import GemmReduceProblem

_BOUNDS: Final = {
    8: {
        3: 1.495585217958292e-2,
        5: 2.539398330063230e-1,
        7: 9.504178996162932e-1,
        9: 2.097847961257068e0,
        13: 5.371920351148152e0,
    },
    4: {3: 4.258730016922831e-1, 5: 1.880152677804762e0, 7: 3.925724783138660e0},
}
"""Largest 1-norm for each degree, by the bytes of a real number."""


@dataclass(frozen=True)
class Expm(Operation):
    """exp(op(a)) for every matrix of a stack (..., n, n).

    Each matrix has a degree and a scaling of its own, whatever else is in the stack. One whose 1-norm is not finite
    gives NaN.
    """

    name = "expm"
    a: Operand
    trans_a: str
    dtype: np.dtype[Any]

    @classmethod
    def build(cls, *, a: Operand, trans_a: str = "N") -> Expm:
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
        """See `Operation`. The norms, which decide it, are not known before: six products, four squarings, a system."""
        return math.prod(self.a.shape[:-2]) * self._flops_of_one()

    @property
    def scratch_nbytes(self) -> int:
        """See `Operation`."""
        return scratch_of_parts(math.prod(self.a.shape[:-2]), 0, self._nbytes())

    @property
    def products(self) -> tuple[GemmProblem | GemmReduceProblem, ...]:
        """See `Operation`."""
        n = self.a.shape[-1]
        plain = Operand.contiguous((math.prod(self.a.shape[:-2]), n, n), self.dtype)
        return (GemmProblem.build(plain, plain),)

    def run(self, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """See `Operation`."""
        out, n = results["d"], self.a.shape[-1]
        if not math.prod(out.shape):
            return
        with computing(out) as xp:
            for part in stack_parts(xp, out.shape[:-2], self._flops_of_one(), self._nbytes()):
                some = operated(xp, operands["a"][part], self.trans_a)
                out[part] = _exponentials(xp, some.reshape(-1, n, n)).reshape(some.shape)

    def find(self, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:  # noqa: ARG002
        """See `Operation`. Nothing is known of an exponential without a second one: it is not judged."""
        return Finding(math.nan, math.nan)

    def _flops_of_one(self) -> int:
        return (8 if self.dtype.kind == "c" else 2) * 11 * self.a.shape[-1] ** 3

    def _nbytes(self) -> int:
        return 14 * self.a.shape[-1] ** 2 * self.dtype.itemsize


def _exponentials(xp: Any, a: Any) -> Any:
    """Return exp of a stack (count, n, n)."""
    norms = xp.abs(a).sum(axis=-2).max(axis=-1)
    norms = np.asarray(norms if xp is np else norms.get(), np.float64)
    bounds = _BOUNDS[real_dtype(a.dtype).itemsize]
    made = xp.full(a.shape, xp.nan, a.dtype)
    finite = np.isfinite(norms)
    below = -1.0
    for degree, bound in bounds.items():
        last = degree == max(bounds)
        chosen = np.flatnonzero(finite & (norms > below) & ((norms <= bound) | last))
        below = bound
        if not chosen.size:
            continue
        halvings = np.zeros(chosen.size, int)
        if last:
            halvings = np.maximum(0, np.ceil(np.log2(np.maximum(norms[chosen], bound) / bound))).astype(int)
        # In two steps: 2^-s alone may be no normal number where a norm is near the largest.
        scale = xp.asarray(np.ldexp(1.0, -(halvings // 2)), real_dtype(a.dtype))[:, None, None]
        rest = xp.asarray(np.ldexp(1.0, -(halvings - halvings // 2)), real_dtype(a.dtype))[:, None, None]
        x = _pade(xp, a[xp.asarray(chosen)] * scale * rest, degree)
        for step in range(int(halvings.max(initial=0))):
            checkpoint()
            again = np.flatnonzero(halvings > step)
            if again.size == chosen.size:
                x = gemm(x, x)
            else:
                index = xp.asarray(again)
                some = x[index]
                x[index] = gemm(some, some)
        made[xp.asarray(chosen)] = x
    return made


def _pade(xp: Any, a: Any, degree: int) -> Any:
    """Return the [degree/degree] approximant of exp for every matrix of a stack (Higham 2005, equation 2.10 on)."""
    b = _coefficients(degree)
    identity = xp.eye(a.shape[-1], dtype=a.dtype)
    a2 = gemm(a, a)
    if degree == 13:
        a4 = gemm(a2, a2)
        a6 = gemm(a4, a2)
        u = gemm(a6, b[13] * a6 + b[11] * a4 + b[9] * a2)
        u = gemm(a, u + b[7] * a6 + b[5] * a4 + b[3] * a2 + b[1] * identity)
        v = gemm(a6, b[12] * a6 + b[10] * a4 + b[8] * a2)
        v = v + b[6] * a6 + b[4] * a4 + b[2] * a2 + b[0] * identity
    else:
        power, u, v = a2, b[1] * identity + b[3] * a2, b[0] * identity + b[2] * a2
        for k in range(4, degree, 2):
            power = gemm(power, a2)
            u = u + b[k + 1] * power
            v = v + b[k] * power
        u = gemm(a, u)
    return solved(xp, v - u, v + u, (slice(0, a.shape[0]),), "general")


def _coefficients(degree: int) -> list[float]:
    """Return b_k = binomial(m, k) (2m - k)! / (2m)!, from k = 0: those of the paper, scaled so that b_0 is 1."""
    return [math.comb(degree, k) / math.perm(2 * degree, k) for k in range(degree + 1)]
