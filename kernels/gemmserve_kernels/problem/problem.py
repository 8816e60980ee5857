"""Problems to be computed: operands, shapes, operations. Pure; no arrays, no device.

`GemmProblem.build` and `GemmReduceProblem.build` are the only gate: whatever they return, every backend can run (on a
device that has the compute mode, which its plan says). The service validates submissions with them before any data
exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np

from gemmserve_kernels.problem.errors import ParameterInvalid
from gemmserve_kernels.problem.operand import Operand, real_dtype
from gemmserve_kernels.problem.validation import (
    check_c,
    check_product,
    check_size,
    choice,
    logical_shape,
    names,
    scalar,
)
from gemmserve_kernels.problem.vocabulary import AXES, ORDERS, PRE_OPS, REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.problem.config import GemmConfig

Trans = Literal["N", "T", "C", "R"]
Order = Literal["C", "F"]
Layout = Literal["interleaved", "planar"]

__all__ = ["GemmProblem", "GemmReduceProblem", "Layout", "Operand", "Order", "Trans", "real_dtype"]

_EMPTY_REDUCTIONS: Final = ("sum", "sumsq")
"""The reductions that have a value for no elements."""


@dataclass(frozen=True)
class _Product:
    """alpha * op(A) op(B): what gemm and gemm_reduce have in common. `op(A)` is m x k, `op(B)` is k x n.

    `dtype` is the arithmetic's: NumPy's result type of the operands, complex where they are planar. `accumulate` is
    the dtype that products are summed in.
    """

    a: Operand
    b: Operand
    alpha: complex
    trans_a: Trans
    trans_b: Trans
    layout: Layout
    compute: str
    config: GemmConfig | None
    m: int
    n: int
    k: int
    batch_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def batch(self) -> int:
        """Number of products."""
        return math.prod(self.batch_shape)

    @property
    def planar(self) -> bool:
        """Whether operands and complex results are real arrays with a leading axis (re, im)."""
        return self.layout == "planar"

    @property
    def accumulate(self) -> np.dtype[Any]:
        """float16 accumulates in float32; compute="fp64" in double width; everything else in its own width."""
        if self.dtype == np.float16:
            return np.dtype(np.float32)
        if self.compute == "fp64":
            return np.dtype(np.complex128 if self.dtype.kind == "c" else np.float64)
        return self.dtype

    def stored(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of a result as it is stored: complex ones take a leading axis of 2 where planar."""
        if self.planar and dtype.kind == "c":
            return (2, *shape), real_dtype(dtype)
        return shape, dtype

    def flops(self) -> int:
        """2 m n k of a real product, 8 m n k of a complex one, times the batch."""
        return (8 if self.dtype.kind == "c" else 2) * self.m * self.n * self.k * self.batch


def default_beta(has_c: bool) -> int:
    """Return beta of a product that names none: 1 where it has a C, else 0."""
    return 1 if has_c else 0


@dataclass(frozen=True)
class GemmProblem(_Product):
    """D = alpha * op(A) op(B) + beta * C."""

    c: Operand | None
    beta: complex
    order: Order

    @classmethod
    def build(
        cls,
        a: Operand,
        b: Operand,
        c: Operand | None = None,
        *,
        alpha: complex = 1,
        beta: complex | None = None,
        trans_a: str = "N",
        trans_b: str = "N",
        order: str = "C",
        layout: str = "interleaved",
        compute: str = "auto",
        config: GemmConfig | None = None,
    ) -> GemmProblem:
        """Checks everything and returns the problem.

        `beta` None is 1 where there is a c, else 0. Raises ShapeMismatch, DtypeUnsupported or ParameterInvalid. `c`
        counts for shape and dtype also where beta is 0, so that neither depends on a value; only its elements are not
        read then.
        """
        operands = {"a": a, "b": b} | ({"c": c} if c is not None else {})
        common = check_product(operands, alpha, trans_a, trans_b, layout, compute, config)
        product = _Product(**common)
        beta = scalar(default_beta(c is not None) if beta is None else beta, "beta", common["dtype"])
        if beta != 0 and c is None:
            raise ParameterInvalid("beta is not 0, but there is no c", "beta")
        shape = (*product.batch_shape, product.m, product.n)
        if c is not None:
            check_c(logical_shape(c, product.planar), shape)
        check_size("the result", *product.stored(shape, product.dtype))
        return cls(**common, c=c, beta=beta, order=cast("Order", choice(order, ORDERS, "order")))

    @cached_property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of D, with a leading 2 where planar."""
        return self.stored((*self.batch_shape, self.m, self.n), self.dtype)[0]

    @cached_property
    def result_dtype(self) -> np.dtype[Any]:
        """The dtype of D as stored: real where planar."""
        return self.stored((), self.dtype)[1]

    @property
    def result(self) -> Operand:
        """D as a fresh array."""
        return Operand.contiguous(self.result_shape, self.result_dtype, self.order)

    def nbytes(self) -> int:
        """Bytes that must move at least: every operand read once (c where beta is not 0), the result written once."""
        return self._nbytes

    @cached_property
    def _nbytes(self) -> int:
        read_c = self.c.nbytes if self.c is not None and self.beta != 0 else 0
        return self.a.nbytes + self.b.nbytes + read_c + self.result.nbytes


@dataclass(frozen=True)
class GemmReduceProblem(_Product):
    """Reductions over the rows ("m") or columns ("n") of alpha * op(A) op(B), with "batch" over the batch too."""

    reductions: tuple[str, ...]
    axis: tuple[str, ...]
    pre_op: str
    return_c: bool
    reproducible: bool
    partial: bool = False
    """Whether the results are parts of a larger reduction's: in the dtypes in which they are accumulated."""

    @classmethod
    def build(
        cls,
        a: Operand,
        b: Operand,
        *,
        reduce: str | Sequence[str] = "sum",
        axis: str | Sequence[str] = "m",
        pre_op: str = "identity",
        alpha: complex = 1,
        trans_a: str = "N",
        trans_b: str = "N",
        layout: str = "interleaved",
        compute: str = "auto",
        config: GemmConfig | None = None,
        return_c: bool = False,
        reproducible: bool = True,
        partial: bool = False,
    ) -> GemmReduceProblem:
        """Checks everything and returns the problem.

        Raises ShapeMismatch, DtypeUnsupported or ParameterInvalid.
        """
        common = check_product({"a": a, "b": b}, alpha, trans_a, trans_b, layout, compute, config)
        problem = cls(
            **common,
            reductions=names(reduce, REDUCTIONS, "reduce"),
            axis=names(axis, AXES, "axis"),
            pre_op=choice(pre_op, PRE_OPS, "pre_op"),
            return_c=bool(return_c),
            reproducible=bool(reproducible),
            partial=bool(partial),
        )
        if problem.partial and "mean" in problem.reductions:
            raise ParameterInvalid('a part of a mean is a "sum"', "reduce")
        if ("m" in problem.axis) == ("n" in problem.axis):
            raise ParameterInvalid('axis must have exactly one of "m" and "n", optionally with "batch"', "axis")
        for name in problem.reductions:
            if name in {"max", "min"} and problem.value_dtype.kind == "c":
                raise ParameterInvalid(
                    f'"{name}" has no meaning for complex values: use "abs{name}", or pre_op="abs"', "reduce"
                )
            if problem.extent == 0 and name not in _EMPTY_REDUCTIONS:
                raise ParameterInvalid(f'"{name}" of nothing has no value: the reduced extent is 0', "reduce")
        for name, (shape, dtype) in problem.results.items():
            check_size(f"the result {name}", shape, dtype)
        return problem

    @property
    def product(self) -> GemmProblem:
        """The product by itself."""
        common = {field.name: getattr(self, field.name) for field in fields(_Product)}
        return GemmProblem(**common, c=None, beta=0, order="C")

    @property
    def over_batch(self) -> bool:
        """Whether the batch is reduced too."""
        return "batch" in self.axis

    @property
    def over_rows(self) -> bool:
        """Whether rows are reduced (axis "m") rather than columns."""
        return "m" in self.axis

    @property
    def extent(self) -> int:
        """Elements that go into each result."""
        return (self.m if self.over_rows else self.n) * (self.batch if self.over_batch else 1)

    @property
    def vanishes(self) -> bool:
        """Whether every result is 0, whatever the operands hold: products are sums of no terms, or there are none to
        reduce. However many they are, no time goes into them.
        """
        return self.k == 0 or self.extent == 0

    @property
    def outputs_shape(self) -> tuple[int, ...]:
        """Shape of one reduction, the planar axis not counted."""
        kept = self.n if self.over_rows else self.m
        return (kept,) if self.over_batch else (*self.batch_shape, kept)

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """The dtype of what is reduced: of the product's elements after pre_op."""
        return real_dtype(self.dtype) if self.pre_op == "abs" else self.dtype

    @property
    def results(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of every result as stored, in order: the reductions, then "c" where it is returned."""
        results = {name: self.stored(self.outputs_shape, self._reduced_dtype(name)) for name in self.reductions}
        if self.return_c:
            results["c"] = self.stored((*self.batch_shape, self.m, self.n), self.dtype)
        return results

    def _reduced_dtype(self, name: str) -> np.dtype[Any]:
        if name in {"argmax", "argmin"}:
            return np.dtype(np.int64)
        value = self.value_dtype
        if self.partial:
            complex_sum = name == "sum" and value.kind == "c"
            wide = np.dtype(np.complex128 if complex_sum else np.float64)
            return wide if name in {"sum", "sumsq"} else real_dtype(self.accumulate)
        if name in {"sum", "mean", "sumsq"} and value == np.float16:
            value = np.dtype(np.float32)
        return value if name in {"sum", "mean", "max", "min"} else real_dtype(value)

    def nbytes(self) -> int:
        """Bytes that must move at least: both operands read once, every result written once."""
        return self.a.nbytes + self.b.nbytes + sum(math.prod(s) * d.itemsize for s, d in self.results.values())
