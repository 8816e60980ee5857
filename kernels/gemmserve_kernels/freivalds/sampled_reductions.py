"""Errors of a few sampled outputs of a reduction, computed again in double precision where its arrays are."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.dispatch.gemm import gemm
from gemmserve_kernels.numerics.reference import (
    errors_of_values,
    is_exact,
    lined_up,
    logical,
    on_host,
    oracle_product,
    pre_op,
    ratio,
    reduced,
)
from gemmserve_kernels.problem.arrays import library
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmReduceProblem, Operand

if TYPE_CHECKING:
    from collections.abc import Iterator

    Array = np.ndarray[Any, Any]

_SAMPLED: Final = 1 << 20
"""Elements of an operand, or of a product with it, between two moments at which the check of a reduction can be
interrupted: some hundredths of a second, however long the axis is that is reduced."""
_SAMPLED_EXACTLY: Final = 1 << 18
"""Elements likewise, where the product is exact: a tenth."""
_BEFORE: Final = {"max": -math.inf, "min": math.inf}
_JOIN: Final = {"max": np.maximum, "min": np.minimum}


def sampled_reduction_errors(
    problem: GemmReduceProblem, a: Any, b: Any, results: dict[str, Any], rng: np.random.Generator, outputs: int = 16
) -> dict[str, float]:
    """`reduction_errors` of some outputs only, for which that many columns (or rows) of the product are computed.

    NumPy or CuPy arrays, all of the same library: of CuPy's those columns are computed on their device, by the portable
    kernel in double precision, and the large operand stays there. Between parts of the axis that is reduced there is a
    `checkpoint`.
    """
    if library(a) == "cupy":
        import cupy as xp
    else:
        xp = np
    kept = problem.n if problem.over_rows else problem.m
    chosen = xp.asarray(np.sort(rng.choice(kept, size=min(outputs, kept), replace=False)))
    if problem.over_rows:
        b = b.take(chosen, axis=-1 if problem.trans_b in {"N", "R"} else -2)
    else:
        a = a.take(chosen, axis=-2 if problem.trans_a in {"N", "R"} else -1)
    part = _reduced(problem, a, b)
    found = {name: results[name].take(chosen, axis=-1) for name in part.reductions}
    totals = {name: _Total(part, name, found[name]) for name in part.reductions}
    for block in _blocks((*part.batch_shape, part.m if part.over_rows else part.n), _most_at_once(part)):
        checkpoint()
        some_a, some_b = _within(part, "a", a, block), _within(part, "b", b, block)
        some = _reduced(part, some_a, some_b)
        product = oracle_product(some, some_a, some_b) if xp is np else _double_product(some, some_a, some_b)
        values = pre_op(part.pre_op, product)
        for total in totals.values():
            total.add(some, values, block)
    return {name: total.error() for name, total in totals.items()}


class _Total:
    """One reduction of the sampled outputs, of which blocks come one after the other."""

    def __init__(self, problem: GemmReduceProblem, name: str, result: Any) -> None:
        self._problem = problem
        self._name = name
        self._result = result
        kept = () if problem.over_batch else problem.batch_shape
        self._shape = (*kept, problem.n if problem.over_rows else problem.m)
        self._so_far: Array | None = None
        self._largest = 0.0
        self._index = on_host(result).astype(np.int64) if name.startswith("arg") else None
        self._at_index: Array | None = None

    def add(self, some: GemmReduceProblem, values: Array, block: tuple[slice, ...]) -> None:
        """Takes a block of the product in, whose problem is `some`."""
        kept = () if self._problem.over_batch else block[:-1]
        if self._index is not None:
            along, axis = lined_up(some, np.abs(values) if values.dtype.kind == "c" else values)
            self._largest = float(np.maximum(self._largest, np.max(np.abs(along))))
            self._look_up(along, axis, block, kept)
        name = {"mean": "sum"}.get(self._name, self._name.removeprefix("arg"))
        found = reduced(some, name, values)
        if self._so_far is None:
            self._so_far = np.full(self._shape, _BEFORE.get(name.removeprefix("abs"), 0.0), found.dtype)
        into = self._so_far[kept]
        with np.errstate(all="ignore"):
            _JOIN.get(name.removeprefix("abs"), np.add)(into, found, out=into)

    def _look_up(self, values: Array, axis: int, block: tuple[slice, ...], kept: tuple[slice, ...]) -> None:
        """Notes the elements at those indices that lie in the block."""
        assert self._index is not None
        if self._at_index is None:
            self._at_index = np.full(self._shape, np.nan, values.dtype)
        index = self._index[kept]
        extents = (*self._problem.batch_shape, self._problem.m if self._problem.over_rows else self._problem.n)
        axes = range(len(extents)) if self._problem.over_batch else range(len(extents) - 1, len(extents))
        sizes = [extents[i] for i in axes]
        inside = (index >= 0) & (index < math.prod(sizes))  # what points nowhere is no number
        places = np.unravel_index(np.where(inside, index, 0), sizes)
        lengths = [block[i].stop - block[i].start for i in axes]
        local = [place - block[i].start for place, i in zip(places, axes, strict=True)]
        inside = np.logical_and.reduce([inside, *((x >= 0) & (x < n) for x, n in zip(local, lengths, strict=True))])
        flat = np.ravel_multi_index([np.clip(x, 0, n - 1) for x, n in zip(local, lengths, strict=True)], lengths)
        there = np.take_along_axis(values, np.expand_dims(flat, axis), axis).squeeze(axis)
        np.copyto(self._at_index[kept], there, where=inside)

    def error(self) -> float:
        """As `reduction_errors` has it, of the sampled outputs."""
        reference = self._so_far
        assert reference is not None
        if self._at_index is not None:
            if not reference.size:
                return 0.0
            return ratio(float(np.max(np.abs(self._at_index - reference))), self._largest)
        if self._name == "mean":
            with np.errstate(all="ignore"):
                reference = reference / self._problem.extent
        result = self._result
        return errors_of_values(
            logical(self._problem, result) if reference.dtype.kind == "c" else on_host(result), reference
        )


def _reduced(problem: GemmReduceProblem, a: Any, b: Any) -> GemmReduceProblem:
    """The same reductions of other operands."""
    return GemmReduceProblem.build(
        Operand.of(a),
        Operand.of(b),
        reduce=problem.reductions,
        axis=problem.axis,
        pre_op=problem.pre_op,
        alpha=problem.alpha,
        trans_a=problem.trans_a,
        trans_b=problem.trans_b,
        layout=problem.layout,
        compute=problem.compute,
    )


def _most_at_once(problem: GemmReduceProblem) -> int:
    """Rows (or columns) of all matrices together whose product with the few others takes a tenth of a second."""
    few = problem.n if problem.over_rows else problem.m
    most = _SAMPLED_EXACTLY if is_exact(problem) else _SAMPLED
    return max(1, most // max(problem.k, few, 1))


def _blocks(extents: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Boxes that together are all of `extents`, of at most `most` places each unless that is none."""
    lengths = list(extents)
    while math.prod(lengths) > max(most, 1):
        axis = next(i for i, length in enumerate(lengths) if length > 1)
        lengths[axis] = -(-lengths[axis] // 2)
    cuts = [
        [slice(low, min(low + length, extent)) for low in range(0, extent, max(length, 1))] or [slice(0, 0)]
        for length, extent in zip(lengths, extents, strict=True)
    ]
    return itertools.product(*cuts)


def _within(problem: GemmReduceProblem, name: str, array: Any, block: tuple[slice, ...]) -> Any:
    """The part of an operand that a block of the product needs: views."""
    turned = (problem.trans_a if name == "a" else problem.trans_b) in {"T", "C"}
    index = [slice(None)] * array.ndim
    if name == ("a" if problem.over_rows else "b"):
        index[-1 if turned == problem.over_rows else -2] = block[-1]
    for back, piece in enumerate(reversed(block[:-1]), 3):
        if array.ndim - problem.planar >= back and array.shape[-back] > 1:
            index[-back] = piece
    return array[tuple(index)]


def _double_product(problem: GemmReduceProblem, a: Any, b: Any) -> Array:
    """`oracle_product` of CuPy arrays, computed on their device in double precision, on the host."""

    def widened(x: Any) -> Any:
        return x.astype(np.result_type(x.dtype, np.float64))

    # The kernel widens the large operand as it reads it.
    a, b = (a, widened(b)) if problem.over_rows else (widened(a), b)
    d = gemm(
        a, b, alpha=problem.alpha, trans_a=problem.trans_a, trans_b=problem.trans_b, layout=problem.layout,
        compute="fp64", config=GemmConfig(algorithm="simt"),
    )  # fmt: skip
    return logical(problem, d)
