"""Products op(A) op(A)^H of stacks, by halves: only one triangle is computed, the other is its mirror."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.dispatch.gemm import gemm
from gemmserve_kernels.operations.linalg.library import adjoint, computing, stack_parts

if TYPE_CHECKING:
    from gemmserve_kernels.problem.problem import GemmProblem

_HOST_LEAF: Final = 256
"""Rows and columns of the diagonal blocks that are formed whole, on the host."""
DEVICE_LEAF: Final = 2048
"""The same on a device, where smaller products would not fill it."""


def herk(a: Any, c: Any, out: Any, product: GemmProblem, fill: str) -> None:
    """Write D of `product`, whose b is a, into `out`; c is not read where its beta is 0."""
    if not math.prod(out.shape):
        return
    with computing(out) as xp:
        c = xp.broadcast_to(c, out.shape) if product.beta != 0 else None
        a = xp.broadcast_to(a, (*out.shape[:-2], *a.shape[-2:]))
        leaf = _HOST_LEAF if xp is np else DEVICE_LEAF
        nbytes = a.shape[-1] * a.shape[-2] * a.itemsize + out.shape[-1] ** 2 * out.itemsize
        for part in stack_parts(xp, out.shape[:-2], product.flops() / product.batch, nbytes):
            _Blocks(xp, product, fill, leaf).make(a[part], None if c is None else c[part], out[part])


@dataclass(frozen=True)
class _Blocks:
    xp: Any
    product: GemmProblem
    fill: str
    leaf: int

    def make(self, a: Any, c: Any, d: Any) -> None:
        """Halves of the diagonal by recursion and one block beside it: nearly all of the work is large products."""
        n = d.shape[-1]
        if n <= self.leaf:
            self._diagonal(a, c, d)
            return
        half = -(-n // (2 * self.leaf)) * self.leaf  # a multiple of the leaf, so that products end where tiles do
        halves = slice(half), slice(half, n)
        blocks = [a[..., :, each] if self.product.trans_a in {"T", "C"} else a[..., each, :] for each in halves]
        for each, block in zip(halves, blocks, strict=True):
            self.make(block, None if c is None else c[..., each, each], d[..., each, each])
        first, second = (0, 1) if self.fill == "upper" else (1, 0)
        rows, columns = halves[first], halves[second]
        made = d[..., rows, columns]
        self._gemm(blocks[first], blocks[second], None if c is None else c[..., rows, columns], made)
        d[..., columns, rows] = adjoint(self.xp, made) if self.fill == "both" else 0

    def _diagonal(self, a: Any, c: Any, d: Any) -> None:
        xp = self.xp
        made = self._gemm(a, a, c, None)
        beside = xp.triu(made, 1) if self.fill == "upper" else xp.tril(made, -1)
        if self.fill == "both":
            beside = beside + adjoint(xp, beside)
        d[...] = xp.where(xp.eye(d.shape[-1], dtype=bool), made.real, beside)

    def _gemm(self, a: Any, b: Any, c: Any, out: Any) -> Any:
        p = self.product
        return gemm(
            a, b, c, alpha=p.alpha, beta=0 if c is None else p.beta, trans_a=p.trans_a, trans_b=p.trans_b,
            compute=p.compute, out=out,
        )  # fmt: skip
