"""FP32-accurate products (and TF32's class) from float16 planes on tensor cores: pre-pass, product, fallback.

Four launches: `split` makes planes of both operands, `balance` looks whether they will do, `wgmma` or `mma`
multiplies them, and `fallback` computes in plain FP32 what was flagged: nothing, on usual data. The host never waits.
Schemes: "3xfp16" (`auto` and "3xfp16"; real and imaginary parts each as accurate as FP32's), "3xfp16-3m" (Gauss's three
products; accurate in norm only), "1xfp16" ("tf32": one product, TF32's class of error).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.arguments import BATCH_DIMS, StoredArray, coalesce
from gemmserve_kernels.errors import ConfigInfeasible
from gemmserve_kernels.mma import gemm as mma_sync
from gemmserve_kernels.planes import balance, fallback, split
from gemmserve_kernels.planes.fallback import Flags
from gemmserve_kernels.planes.layout import PLANES, SCHEMES
from gemmserve_kernels.planes.split import Side, SplitOperand, Statistics
from gemmserve_kernels.planes.watch import note
from gemmserve_kernels.prepared import PreparedOperand, source_of
from gemmserve_kernels.wgmma import gemm as wgmma

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.config import GemmConfig
    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.operand import Operand
    from gemmserve_kernels.planes.layout import Scheme
    from gemmserve_kernels.problem import GemmProblem

_WORKSPACE: Final = 256 << 20
"""Bytes of planes of one turn through a batch; a single pair of matrices is never cut."""
_INT: Final = np.dtype(np.int32)
_STATUS_WORDS: Final = 4


def supports(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Why this cannot run `problem` on `spec`, or None."""
    scheme = SCHEMES.get(problem.compute)
    if scheme is None:
        return f"float16 planes have no {problem.compute} arithmetic"
    stored = np.dtype(np.float32) if problem.planar else problem.dtype
    if problem.dtype.name not in {"float32", "complex64"} or {problem.a.dtype, problem.b.dtype} != {stored}:
        return f"float16 planes serve float32 and complex64, not {problem.a.dtype.name} by {problem.b.dtype.name}"
    if scheme == "3xfp16-3m" and problem.dtype.kind != "c":
        return "3xfp16-3m multiplies complex data"
    if 0 in {problem.m, problem.n, problem.k, problem.batch} or problem.alpha == 0:
        return "an empty product or alpha = 0"
    if len(_pair_axes(problem)) > BATCH_DIMS:
        return f"the operands' batches have more than {BATCH_DIMS} axes of their own"
    if wgmma.supports(problem, spec) is None:
        return None
    return mma_sync.supports_planes(problem, scheme, spec)


def _pair_axes(problem: GemmProblem) -> tuple[int, ...]:
    """Extents of the batch after merging what all operands walk through evenly, each axis of every operand kept."""

    def steps(operand: Operand) -> tuple[int, ...]:
        first = 1 if problem.planar else 0
        axes = list(zip(operand.shape[first:-2], operand.strides[first:-2], strict=True))
        missing = len(problem.batch_shape) - len(axes)
        return (0,) * missing + tuple(0 if extent == 1 else stride for extent, stride in axes)

    return coalesce(problem.batch_shape, [steps(problem.a), steps(problem.b)])[0]


def resolve(config: GemmConfig | None, problem: GemmProblem, spec: DeviceSpec) -> Any:
    """The tile of the multiplying kernel, a WgmmaTile or an MmaTile. Raises ConfigInfeasible."""
    scheme = SCHEMES[problem.compute]
    if _algorithm(config, spec) == "wgmma":
        if reason := wgmma.supports(problem, spec):
            raise ConfigInfeasible(reason)
        return wgmma.resolve(config, problem, spec, scheme)
    if reason := mma_sync.supports_planes(problem, scheme, spec):
        raise ConfigInfeasible(reason)
    return mma_sync.resolve_planes(config, problem, scheme, spec)


def _algorithm(config: GemmConfig | None, spec: DeviceSpec) -> str:
    if config is not None and config.algorithm is not None:
        return config.algorithm
    return "wgmma" if spec.arch == "sm_90a" else "mma"


def run_gemm(
    launcher: Launcher, problem: GemmProblem, config: GemmConfig | None, a: Any, b: Any, c: Any | None, out: Any
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0.

    `a` and `b` are arrays of `problem`, or PreparedOperands of them. `c` may be `out`, but not overlap it otherwise.
    Raises ConfigInfeasible, CompileError.
    """
    if c is not None and (problem.beta == 0 or launcher.pointer(c) == launcher.pointer(out)):
        c = None if problem.beta == 0 else c.copy()
    if problem.batch > 1 and _plane_bytes(problem) > _WORKSPACE:
        for part in _parts(problem, a, b, c, out):
            _run(launcher, part[0], config, *part[1:])
        return
    _run(launcher, problem, config, a, b, c, out)


@lru_cache(maxsize=256)
def _plane_bytes(problem: GemmProblem) -> int:
    """Bytes of the planes of all of the batch."""
    scheme, complex_data = SCHEMES[problem.compute], problem.dtype.kind == "c"
    count = len(PLANES[scheme, complex_data, "a"])
    return 2 * count * problem.batch * problem.k * (problem.m + problem.n)


def _parts(problem: GemmProblem, a: Any, b: Any, c: Any, out: Any) -> Iterator[tuple[GemmProblem, Any, Any, Any, Any]]:
    """Shares of a batch along its first axis whose planes fit the workspace."""
    extent = problem.batch_shape[0]
    step = max(1, min(extent, _WORKSPACE * extent // _plane_bytes(problem)))
    for first in range(0, extent, step):
        here = slice(first, min(first + step, extent))
        cut = [_cut(problem, array, here) for array in (a, b, c, out)]
        part = replace(
            problem,
            a=_operand(problem.a, cut[0]),
            b=_operand(problem.b, cut[1]),
            c=None if problem.c is None or cut[2] is None else _operand(problem.c, cut[2]),
            batch_shape=(here.stop - here.start, *problem.batch_shape[1:]),
        )
        if part.batch_shape[0] == 1 and part.batch > 1 and _plane_bytes(part) > _WORKSPACE:
            inner = replace(part, batch_shape=part.batch_shape[1:])
            yield from _parts(inner, *(_inner(problem, array) for array in cut))
        else:
            yield (part, cut[0], cut[1], cut[2], cut[3])


def _operand(was: Operand, array: Any) -> Operand:
    return was if array is None else type(was).of(source_of(array))


def _cut(problem: GemmProblem, array: Any, here: slice) -> Any:
    """That part of the batch's first axis; the whole array where it does not have the axis or is broadcast over it."""
    if array is None:
        return None
    planar = 1 if problem.planar else 0
    source = source_of(array)
    if source.ndim - planar - 2 < len(problem.batch_shape) or source.shape[planar] == 1:
        return array
    return source[:, here] if planar else source[here]


def _inner(problem: GemmProblem, array: Any) -> Any:
    """Without the batch's first axis, which is of length 1."""
    if array is None or source_of(array).ndim - (1 if problem.planar else 0) - 2 < len(problem.batch_shape):
        return array
    return source_of(array)[:, 0] if problem.planar else source_of(array)[0]


@dataclass(frozen=True)
class _Plan:
    """What does not depend on addresses. Offsets count words of what is zero before the launches."""

    scheme: Scheme
    a: Side
    b: Side
    tile: Any
    multiply: Any
    pairs: int
    more_a: int
    more_b: int
    statistics_a: int
    statistics_b: int
    words: int


@lru_cache(maxsize=1024)
def _plan(spec: DeviceSpec, problem: GemmProblem, config: GemmConfig | None, a: StoredArray, b: StoredArray) -> _Plan:
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
    module = wgmma if _algorithm(config, spec) == "wgmma" else mma_sync
    tile = resolve(config, problem, spec)
    pairs, more_a, more_b, statistics_a, statistics_b = offsets
    return _Plan(
        SCHEMES[problem.compute],
        side_a,
        side_b,
        tile,
        module.multiply,
        pairs,
        more_a,
        more_b,
        statistics_a,
        statistics_b,
        at,
    )


def takes(payload: Any) -> bool:
    """Whether a prepared operand's payload is this algorithm's."""
    return isinstance(payload, SplitOperand)


def _run(launcher: Launcher, problem: GemmProblem, config: GemmConfig | None, a: Any, b: Any, c: Any, out: Any) -> None:
    source_a, source_b = source_of(a), source_of(b)
    (stored_a, base_a), (stored_b, base_b) = (StoredArray.of(launcher, x) for x in (source_a, source_b))
    plan = _plan(launcher.spec, problem, config, stored_a, stored_b)
    words = launcher.zeros((plan.words,), _INT)
    status = launcher.pointer(words)
    ready_a, ready_b = (_ready(x, plan.scheme, side, name) for x, side, name in ((a, plan.a, "a"), (b, plan.b, "b")))
    fresh_a = None if ready_a else _fresh(launcher, plan.scheme, plan.a, "a", words, plan.statistics_a)
    fresh_b = None if ready_b else _fresh(launcher, plan.scheme, plan.b, "b", words, plan.statistics_b)
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
    plan.multiply(launcher, problem, plan.tile, left.planes, right.planes, c, out)
    rows, columns = ((launcher.pointer(s.flags), more) for s, more in ((left, more_a), (right, more_b)))
    strides = left.planes.batch_strides, right.planes.batch_strides
    fallback.run(launcher, problem, source_a, source_b, c, out, Flags(rows, columns, pairs, status), *strides)
    note(problem, left, right, words, (plan.more_a, plan.more_b, plan.pairs))


def _fresh(launcher: Launcher, scheme: Scheme, side: Side, name: str, words: Any, first: int) -> SplitOperand:
    return split.allocate(launcher, scheme, side, name, Statistics(words, first))


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
