"""Both operands of a product as planes, ready to be multiplied: what was prepared is taken, the rest is split, and
`balance` looks whether the planes will do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.arguments import StoredArray
from gemmserve_kernels.planes import balance, split
from gemmserve_kernels.planes.fallback import Flags
from gemmserve_kernels.planes.split import Side, SplitOperand, Statistics
from gemmserve_kernels.prepared import PreparedOperand, source_of

if TYPE_CHECKING:
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.planes.layout import Scheme
    from gemmserve_kernels.problem import GemmProblem, GemmReduceProblem

_INT: Final = np.dtype(np.int32)
_STATUS_WORDS: Final = 4


@dataclass(frozen=True)
class Prepass:
    """`flags` says what is not to be taken from the planes; they are among `words`, from the numbers `firsts` on: of
    vectors of A, of B, and of the pairs of the batch.
    """

    a: SplitOperand
    b: SplitOperand
    flags: Flags
    words: Any
    firsts: tuple[int, int, int]


@dataclass(frozen=True)
class _Plan:
    """What does not depend on addresses. Offsets count words of what is zero before the launches."""

    a: Side
    b: Side
    pairs: int
    more_a: int
    more_b: int
    statistics_a: int
    statistics_b: int
    words: int


@lru_cache(maxsize=1024)
def _plan(problem: GemmProblem | GemmReduceProblem, a: StoredArray, b: StoredArray) -> _Plan:
    side_a, side_b = split.sides(problem, a, b)
    at = _STATUS_WORDS
    offsets: list[int] = []
    for words in (
        problem.batch,
        side_a.matrices * side_a.rows,
        side_b.matrices * side_b.rows,
        2 * side_a.matrices * side_a.k,
        2 * side_b.matrices * side_b.k,
    ):
        offsets.append(at)
        at += words
    pairs, more_a, more_b, statistics_a, statistics_b = offsets
    return _Plan(side_a, side_b, pairs, more_a, more_b, statistics_a, statistics_b, at)


def run(launcher: Launcher, problem: GemmProblem | GemmReduceProblem, scheme: Scheme, a: Any, b: Any) -> Prepass:
    """Splits and balances the operands, arrays or PreparedOperands, of all of the problem's batch."""
    (stored_a, base_a), (stored_b, base_b) = (StoredArray.of(launcher, source_of(x)) for x in (a, b))
    plan = _plan(problem, stored_a, stored_b)
    words = launcher.zeros((plan.words,), _INT)
    status = launcher.pointer(words)
    ready_a, ready_b = (_ready(x, scheme, side, name) for x, side, name in ((a, plan.a, "a"), (b, plan.b, "b")))
    fresh_a = fresh_b = None
    if ready_a is None:
        fresh_a = split.allocate(launcher, scheme, plan.a, "a", Statistics(words, plan.statistics_a))
    if ready_b is None:
        fresh_b = split.allocate(launcher, scheme, plan.b, "b", Statistics(words, plan.statistics_b))
    split.run(launcher, fresh_a, fresh_b, base_a, base_b, status)
    left, right = ready_a or fresh_a, ready_b or fresh_b
    assert left is not None
    assert right is not None
    more_a, more_b, pairs = (status + _INT.itemsize * at for at in (plan.more_a, plan.more_b, plan.pairs))
    balance.run(
        launcher,
        problem.batch_shape,
        left,
        right,
        base_a,
        base_b,
        more_a=more_a,
        more_b=more_b,
        pairs=pairs,
        status=status,
    )
    flags = Flags(
        (launcher.pointer(left.flags), more_a),
        (launcher.pointer(right.flags), more_b),
        pairs,
        status,
        left.planes.batch_strides,
        right.planes.batch_strides,
    )
    return Prepass(left, right, flags, words, (plan.more_a, plan.more_b, plan.pairs))


def _ready(operand: Any, scheme: Scheme, side: Side, name: str) -> SplitOperand | None:
    """The planes that a prepared operand brings along, if they are these."""
    if not isinstance(operand, PreparedOperand):
        return None
    payload = operand.payload
    if not isinstance(payload, SplitOperand) or (payload.planes.scheme, payload.planes.side) != (scheme, name):
        return None
    mine = payload.side
    alike = (mine.conjugate, mine.rows, mine.k, mine.planar) == (side.conjugate, side.rows, side.k, side.planar)
    if not alike or [n for n in mine.batch_shape if n > 1] != [n for n in side.batch_shape if n > 1]:
        return None
    return replace(payload, side=side, planes=replace(payload.planes, batch_strides=side.batch_strides))
