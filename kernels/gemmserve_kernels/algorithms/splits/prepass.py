"""Both operands of a product as planes, ready to be multiplied: what was prepared is taken, the rest is split.

For tiles that float16 planes do not serve (`common.verdict`) the wide way splits the operands once more, into bfloat16
planes in the same memory, behind the product of the first ones. Its kernels are launched for every product, and over at
once where no tile asks for them: the host never waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from gemmserve_kernels.algorithms.common import verdict
from gemmserve_kernels.algorithms.common.prepared_operand import PreparedOperand, source_of
from gemmserve_kernels.algorithms.common.splits import PLANES, WIDE, is_wide
from gemmserve_kernels.algorithms.common.verdict import Deficits, Judged
from gemmserve_kernels.algorithms.splits import split
from gemmserve_kernels.algorithms.splits.split import SplitOperand, SplitSide
from gemmserve_kernels.device.struct_params import BATCH_DIMS, StoredArray, coalesce

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.splits import Scheme
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

_INT: Final = np.dtype(np.int32)
_HALF: Final = np.dtype(np.float16)
_STATUS_WORDS: Final = 4
_WANTED_WORD: Final = 3
"""Word of the first pre-pass's status, set by its product where a tile is left to the wide way."""


@dataclass(frozen=True)
class Prepass:
    """Both operands. `status`: the address of a word that is not 0 where bfloat16 planes flag a vector.

    `blocks`: the memory that planes of either scheme take, None for an operand that was prepared. `base_*`: what the
    views' addresses count from.
    """

    a: SplitOperand
    b: SplitOperand
    status: int
    words: Any
    blocks: tuple[Any, Any]
    base_a: int
    base_b: int


@dataclass(frozen=True)
class _PrepassPlan:
    """Plan of a pre-pass: all that does not depend on addresses. Offsets count words of what is zero before the
    launches.
    """

    a: SplitSide
    b: SplitSide
    deficits_a: int
    deficits_b: int
    words: int


@lru_cache(maxsize=1024)
def _plan(problem: GemmProblem | GemmReduceProblem, a: StoredArray, b: StoredArray) -> _PrepassPlan:
    side_a, side_b = split.sides(problem, a, b)
    deficits_a = 2 * _STATUS_WORDS
    deficits_b = deficits_a + verdict.words(side_a.matrices, side_a.rows)
    return _PrepassPlan(
        side_a, side_b, deficits_a, deficits_b, deficits_b + verdict.words(side_b.matrices, side_b.rows)
    )


def run(
    launcher: Launcher,
    problem: GemmProblem | GemmReduceProblem,
    scheme: Scheme,
    a: Any,
    b: Any,
    *,
    widens: bool = False,
    keeps: bool = False,
    memory: tuple[Any, Any] | None = None,
) -> Prepass:
    """Splits the operands, arrays or PreparedOperands, of all of the problem's batch.

    `widens`: `widen` will be asked, which takes place in the same memory. `keeps`: another one will follow, with
    planes that are no larger, in the same memory, which is its `memory`: the `blocks` of this.
    """
    (stored_a, base_a), (stored_b, base_b) = (StoredArray.of(launcher, source_of(x)) for x in (a, b))
    plan = _plan(problem, stored_a, stored_b)
    prepared = [_ready(*each) for each in ((a, scheme, plan.a, "a"), (b, scheme, plan.b, "b"))]
    create = launcher.zeros if all(prepared) else launcher.empty  # zeroed ahead of what is split
    words = create((plan.words,), _INT)
    ready, fresh, blocks = [], [], []
    there = memory or (None, None)
    sides = (
        (prepared[0], plan.a, "a", plan.deficits_a, there[0]),
        (prepared[1], plan.b, "b", plan.deficits_b, there[1]),
    )
    for found, side, name, first, former in sides:
        made, block = None, former
        if found is None:
            if former is None and (widens or keeps):
                block = launcher.empty((_elements(scheme, side, name, widens=widens),), _HALF)
            deficits = None if is_wide(scheme) else Deficits(words, first)
            made = split.allocate(launcher, scheme, side, name, deficits, block)
        fresh.append(made)
        ready.append(found or made)
        blocks.append(block)
    status = launcher.pointer(words)
    split.run(launcher, fresh[0], fresh[1], base_a, base_b, status, clears=plan.words)
    left, right = ready
    assert left is not None
    assert right is not None
    return Prepass(left, right, status, words, (blocks[0], blocks[1]), base_a, base_b)


def prepare_operand(
    launcher: Launcher, array: Any, side: Literal["a", "b"], trans: str, *, planar: bool, scheme: Scheme
) -> SplitOperand | None:
    """Return float16 planes of op(array) for any partner; None where a vector is in doubt or there are no planes of it.

    `array`: (..., rows, columns) behind the planar axis, on the launcher's device. Waits for the device.
    """
    stored, base = StoredArray.of(launcher, array)
    batch = stored.shape[1:-2] if planar else stored.shape[:-2]
    left = side == "a"
    found = SplitSide.of(stored, batch, trans, left=left, planar=planar)
    axes, _ = coalesce(found.batch_shape, [found.view.batch_strides])
    if len(axes) > BATCH_DIMS or (scheme == "3xfp16-3m" and not found.complex):
        return None
    words = launcher.zeros((_STATUS_WORDS + verdict.words(found.matrices, found.rows),), _INT)
    operand = split.allocate(launcher, scheme, found, side, Deficits(words, _STATUS_WORDS))
    split.run(launcher, operand if left else None, None if left else operand, base, base, launcher.pointer(words))
    host = words if isinstance(words, np.ndarray) else words.get()
    return None if host[_STATUS_WORDS] else operand


def _elements(scheme: Scheme, side: SplitSide, name: str, *, widens: bool) -> int:
    """Return the elements of the planes of a scheme, or of the one that takes what they do not serve: the larger."""
    schemes = (scheme, WIDE[scheme]) if widens else (scheme,)
    count = max(len(PLANES[each, side.complex, name]) for each in schemes)
    return side.matrices * count * side.rows * side.pitch


def widen(launcher: Launcher, ready: Prepass) -> Prepass:
    """The operands as bfloat16 planes, split where a tile asks for them, in the place of those in `ready`."""
    scheme = WIDE[ready.a.planes.scheme]
    left, right = (
        split.allocate(launcher, scheme, operand.side, operand.planes.side, None, block)
        for operand, block in zip((ready.a, ready.b), ready.blocks, strict=True)
    )
    status = ready.status + _STATUS_WORDS * _INT.itemsize
    split.run(launcher, left, right, ready.base_a, ready.base_b, status, _wanted(ready))
    return replace(ready, a=left, b=right, status=status)


def split_where(
    launcher: Launcher, problem: GemmProblem, scheme: Scheme, a: Any, b: Any, status: int, wanted: int, *, clears: bool
) -> Prepass:
    """The operands, arrays, as bfloat16 planes, split where the word at `wanted` is not 0 on the device: the product of
    others, who judge by their own counts (`ozaki`), leaves tiles to them. `status`: the address of four int32, zeroed
    first if it `clears` them.
    """
    (stored_a, base_a), (stored_b, base_b) = (StoredArray.of(launcher, x) for x in (a, b))
    plan = _plan(problem, stored_a, stored_b)
    left, right = (split.allocate(launcher, scheme, *each, None) for each in ((plan.a, "a"), (plan.b, "b")))
    clearing = _STATUS_WORDS if clears else 0
    split.run(launcher, left, right, base_a, base_b, status, wanted, clearing)
    return Prepass(left, right, status, None, (None, None), base_a, base_b)


def judged(launcher: Launcher, ready: Prepass, counters: int) -> Judged:
    """Return what float16 planes serve of a product. `counters`: as in `Judged`."""
    return Judged("served", ready.a.deficits_at(launcher), ready.b.deficits_at(launcher), _wanted(ready), counters)


def _wanted(ready: Prepass) -> int:
    return ready.status + _WANTED_WORD * _INT.itemsize


def plane_bytes(problem: GemmProblem | GemmReduceProblem, scheme: Scheme, *, widens: bool) -> int:
    """Bytes of the planes of all of the batch."""
    schemes = (scheme, WIDE[scheme]) if widens else (scheme,)
    count = max(len(PLANES[each, problem.dtype.kind == "c", "a"]) for each in schemes)
    return _HALF.itemsize * count * math.prod(problem.batch_shape) * problem.k * (problem.m + problem.n)


def _ready(operand: Any, scheme: Scheme, side: SplitSide, name: str) -> SplitOperand | None:
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
