"""What fell back to plain FP32, for benchmarks and tests."""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.planes.split import SplitOperand
    from gemmserve_kernels.problem import GemmProblem


@dataclass(frozen=True)
class _Product:
    """`words`: int32 that hold further flags of A, of B and of the pairs of the batch, from the numbers `firsts` on."""

    problem: GemmProblem
    a: SplitOperand
    b: SplitOperand
    words: Any
    firsts: tuple[int, int, int]

    def flagged(self) -> int:
        """Elements of the result that plain FP32 computed. Waits for the device."""
        words, batch = _host(self.words), self.problem.batch_shape
        more_a, more_b, pairs = self.firsts

        def flags(operand: SplitOperand, first: int) -> Any:
            side = operand.side
            extra = words[first : first + side.matrices * side.rows].reshape(side.matrices, side.rows)
            found = (_host(operand.flags) | extra) != 0
            steps = operand.planes.batch_strides
            index = sum((np.indices(batch)[axis] * step for axis, step in enumerate(steps)), np.zeros(batch, int))
            return found[index.reshape(-1)].mean(axis=1)

        rows, columns = flags(self.a, more_a), flags(self.b, more_b)
        whole = words[pairs : pairs + self.problem.batch] != 0
        share = np.where(whole, 1.0, 1 - (1 - rows) * (1 - columns))
        return round(float(share.sum()) * self.problem.m * self.problem.n)


@dataclass
class Watch:
    """The products that ran while it was watching."""

    products: list[_Product] = field(default_factory=list)

    def fallback_share(self) -> float:
        """The share of the results' elements that plain FP32 computed, 0 to 1. Waits for the device."""
        elements = sum(math.prod((*x.problem.batch_shape, x.problem.m, x.problem.n)) for x in self.products)
        return sum(x.flagged() for x in self.products) / elements if elements else 0.0


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


def note(problem: GemmProblem, a: SplitOperand, b: SplitOperand, words: Any, firsts: tuple[int, int, int]) -> None:
    """Called by a product with what it leaves behind."""
    watched = _watched.get()
    if watched is not None:
        watched.products.append(_Product(problem, a, b, words, firsts))


def _host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()
