"""What float16 planes did not serve, for the service's metrics, benchmarks and tests."""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.planes.verdict import GROUP, GROUP_WORDS, UNFIT, groups, is_served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.planes.prepass import Prepass
    from gemmserve_kernels.planes.split import SplitOperand
    from gemmserve_kernels.problem import GemmProblem


@dataclass(frozen=True)
class _Product:
    """`ready`: float16 planes, or bfloat16 ones where a product has no others; `wide`: those of the wide way if any."""

    problem: GemmProblem
    ready: Prepass
    wide: Prepass | None

    def shares(self) -> tuple[float, float]:
        """Shares of the result's elements that the wide way took, and that plain FP32 did. Waits for the device."""
        none = np.zeros((self.problem.batch, self.problem.m, self.problem.n), bool)
        rest, flagged = none, none
        if self.ready.a.deficits is not None:
            a, b = self._of_batch(self.ready, _deficits)
            rest = ~is_served(a[:, :, None], b[:, None, :], self.problem.k)
        planes = self.wide or self.ready
        if planes.a.flags is not None and _host(planes.words)[_FLAGGED[self.wide is not None]]:
            a, b = self._of_batch(planes, _flags)
            flagged = (a[:, :, None] | b[:, None, :]) == UNFIT
        if self.wide is None:
            return 0.0, float((rest | flagged).mean())
        return float((rest & ~flagged).mean()), float((rest & flagged).mean())

    def _of_batch(self, planes: Prepass, of: Any) -> tuple[Any, Any]:
        """What `of` says of the vectors of each matrix of the batch."""
        found = []
        for operand in (planes.a, planes.b):
            steps = operand.planes.batch_strides
            shape = self.problem.batch_shape
            index = sum((np.indices(shape)[axis] * step for axis, step in enumerate(steps)), np.zeros(shape, int))
            found.append(of(operand)[index.reshape(-1)])
        return found[0], found[1]


_FLAGGED = {False: 0, True: 4}
"""The word that says whether a vector is flagged, of the first and of the second pre-pass (`planes.prepass`)."""


def _deficits(operand: SplitOperand) -> Any:
    """(matrices, rows, GROUP_WORDS), each the largest ones of its group."""
    side, found = operand.side, operand.deficits
    assert found is not None
    count = side.matrices * groups(side.rows) * GROUP_WORDS
    words = _host(found.words)[found.first + 1 :][:count].astype(np.int64).reshape(side.matrices, -1, GROUP_WORDS)
    return np.repeat(words, GROUP, axis=1)[:, : side.rows]


def _flags(operand: SplitOperand) -> Any:
    return _host(operand.flags)


@dataclass
class Watch:
    """The products that ran while it was watching."""

    products: list[_Product] = field(default_factory=list)

    def wide_share(self) -> float:
        """The share of the results' elements that the wide way took, 0 to 1. Waits for the device."""
        return self._share(0)

    def fallback_share(self) -> float:
        """The share of the results' elements that plain FP32 computed, 0 to 1. Waits for the device."""
        return self._share(1)

    def _share(self, which: int) -> float:
        sizes = [math.prod((*x.problem.batch_shape, x.problem.m, x.problem.n)) for x in self.products]
        total = sum(sizes)
        return (
            sum(x.shares()[which] * size for x, size in zip(self.products, sizes, strict=True)) / total
            if total
            else 0.0
        )


_watched: ContextVar[Watch | None] = ContextVar("watched", default=None)


@contextmanager
def watch() -> Iterator[Watch]:
    """Keeps what the products inside leave behind, for `Watch.fallback_share`."""
    watched = Watch()
    token = _watched.set(watched)
    try:
        yield watched
    finally:
        _watched.reset(token)


def watching() -> bool:
    """Whether products are to leave something behind: the memory that others share is then kept."""
    return _watched.get() is not None


def note(problem: GemmProblem, ready: Prepass, wide: Prepass | None) -> None:
    """Called by a product with what it leaves behind."""
    watched = _watched.get()
    if watched is not None:
        watched.products.append(_Product(problem, ready, wide))


def _host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()
