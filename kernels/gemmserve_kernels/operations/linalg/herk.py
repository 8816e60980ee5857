"""herk: D = alpha op(A) op(A)^H + beta C, Hermitian by construction, with about half of the products of a gemm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.operations.linalg.hermitian import DEVICE_LEAF, herk
from gemmserve_kernels.operations.linalg.library import adjoint, operated
from gemmserve_kernels.operations.linalg.residual import find_residual, hermitian_times, times
from gemmserve_kernels.operations.operation import Operation, Result, module_of
from gemmserve_kernels.problem.errors import ParameterInvalid
from gemmserve_kernels.problem.problem import GemmProblem
from gemmserve_kernels.problem.validation import choice
from gemmserve_kernels.problem.vocabulary import FILLS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from gemmserve_kernels.freivalds import Finding
    from gemmserve_kernels.problem.operand import Operand
    from gemmserve_kernels.problem.problem import GemmReduceProblem

_ADJOINT: Final = {"N": "C", "T": "R", "C": "N", "R": "T"}


@dataclass(frozen=True)
class Herk(Operation):
    """D = alpha op(a) op(a)^H + beta c.

    `fill` "both": D is Hermitian to the last bit; "lower", "upper": the other triangle is zero. The diagonal is real. c
    is taken to be Hermitian: only its lower triangle is read, its upper one where `fill` is "upper", and the real part
    of its diagonal.
    """

    name = "herk"
    a: Operand
    c: Operand | None
    product: GemmProblem
    """The gemm that it is a part of."""
    fill: str
    dtype: np.dtype[Any]

    @classmethod
    def build(
        cls,
        *,
        a: Operand,
        c: Operand | None = None,
        alpha: float = 1,
        beta: float | None = None,
        trans_a: str = "N",
        fill: str = "both",
        compute: str = "auto",
    ) -> Herk:
        """Check everything and return the operation. op(a) is (..., n, k); dtypes, `compute` and what `beta` is by
        default (None) are those of gemm.

        Raises ShapeMismatch, DtypeUnsupported, ParameterInvalid.
        """
        trans_b = _ADJOINT.get(trans_a, trans_a)
        product = GemmProblem.build(
            a, a, c, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b, compute=compute
        )  # fmt: skip
        for name, value in (("alpha", product.alpha), ("beta", product.beta)):
            if value.imag:
                raise ParameterInvalid(f"{name} of herk must be real, not {value}: the result is Hermitian", name)
        return cls(a, c, product, choice(fill, FILLS, "fill"), product.dtype)

    @property
    def operands(self) -> dict[str, Operand]:
        """See `Operation`."""
        return {"a": self.a} | ({} if self.c is None else {"c": self.c})

    @property
    def results(self) -> dict[str, Result]:
        """See `Operation`."""
        return {"d": Result(self.product.result_shape, self.product.result_dtype)}

    def flops(self) -> int:
        """See `Operation`. One triangle and the diagonal: (n + 1) / 2n of a gemm."""
        return self.product.flops() * (self.product.n + 1) // (2 * max(self.product.n, 1))

    @property
    def scratch_nbytes(self) -> int:
        """See `Operation`. Blocks of the diagonal, and what gemm makes of an addend that it overwrites."""
        block = min(self.product.n, DEVICE_LEAF) ** 2 * self.dtype.itemsize
        return 4 * block * self.product.batch

    @property
    def products(self) -> tuple[GemmProblem | GemmReduceProblem, ...]:
        """See `Operation`."""
        return (self.product,)

    def run(self, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """See `Operation`."""
        herk(operands["a"], operands.get("c"), results["d"], self.product, self.fill)

    def find(self, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
        """See `Operation`: alpha op(a) (op(a)^H x) + beta c x - d x."""
        d, p = results["d"], self.product
        xp = module_of(d)
        lower = self.fill != "upper"
        a = xp.broadcast_to(operated(xp, operands["a"], p.trans_a), (*d.shape[:-2], p.n, p.k))
        stacks = [d, a, *([self._read(xp, operands["c"])] if p.beta != 0 else [])]

        def residual(some: Sequence[Any], x: Any) -> Any:
            d, a, *c = some
            left = p.alpha.real * times(xp, a, times(xp, adjoint(xp, a), x)) - hermitian_times(xp, d, x, lower=lower)
            return left + p.beta.real * hermitian_times(xp, c[0], x, lower=lower) if c else left

        def size(norms: Sequence[Any]) -> Any:
            return abs(p.alpha.real) * norms[1] ** 2 + (abs(p.beta.real) * norms[2] if len(norms) > 2 else 0)

        return find_residual(xp, stacks, p.n, residual, size, (p.dtype, p.accumulate, p.k), seed)

    def _read(self, xp: Any, c: Any) -> Any:
        """Return the triangle of c that is read, for every product."""
        triangle = xp.triu(c) if self.fill == "upper" else xp.tril(c)
        return xp.broadcast_to(triangle, self.product.result_shape)
