"""FP32-accurate products (and TF32's class) from planes on tensor cores: pre-pass, product, wide product, fallback.

`split` makes float16 planes of both operands and counts what `common.verdict` decides by; `wgmma`, `mma` or `mfma`
multiplies them. What they do not serve is computed anew: where there is the wide way (`wgmma`, `mma`), from three
bfloat16 parts of every element, tile by tile, else in plain FP32 or double, as is at the end what bfloat16 parts do not
hold (`fallback`). On usual data these launches are over at once. The host never waits.

Schemes: "3xfp16" (`auto` and "3xfp16"; every element as accurate as FP32's), "3xfp16-3m" (Gauss's three products;
accurate in norm only), "1xfp16" ("tf32": one product, TF32's class of error), "6xbf16" and "9xbf16" (the wide way for
all of a product).

The wide way: x = x0 + x1 + x2 exactly, three bfloat16 of a float's 24 bits. Of the nine products of parts six are
taken; the other three together are less than 2**-24 |x y| (|x1| <= 2**-8 |x|, |x2| <= 2**-16 |x|, times 2**-1 for
rounding to nearest: x1 y2 + x2 y1 + x2 y2 < (2 2**-26 + 2**-34) |x y|). Vectors are scaled so that products and
partial sums neither overflow nor vanish. Source: G. Henry, P. T. P. Tang, A. Heinecke, "Leveraging the bfloat16
artificial intelligence datatype for higher-precision computations", ARITH 2019.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gemmserve_kernels.algorithms.common.prepared_operand import source_of
from gemmserve_kernels.algorithms.common.splits import SCHEMES, WIDE, strip_shape
from gemmserve_kernels.algorithms.mfma import gemm as mfma
from gemmserve_kernels.algorithms.mma import gemm as mma
from gemmserve_kernels.algorithms.splits import fallback, prepass
from gemmserve_kernels.algorithms.splits.flags import Flags
from gemmserve_kernels.algorithms.wgmma import gemm as wgmma
from gemmserve_kernels.device.struct_params import BATCH_DIMS, coalesce
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.algorithms.splits.multiplier import PlanesAlgorithm, WideningAlgorithm
    from gemmserve_kernels.algorithms.splits.prepass import Prepass
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.operand import Operand
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

_WORKSPACE: Final = 384 << 20
"""Bytes of planes of one turn through a batch, of bfloat16 ones where there may be; a single pair of matrices is never
cut."""


def supports(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Return why this cannot run `problem` on `spec`, or None."""
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
    if spec.kind == "rocm":
        return mfma.supports_planes(problem, scheme, spec)
    if wgmma.supports_planes(problem, scheme, spec) is None:
        return None
    return mma.supports_planes(problem, scheme, spec)


def _pair_axes(problem: GemmProblem) -> tuple[int, ...]:
    """Extents of the batch after merging what all operands walk through evenly, each axis of every operand kept."""

    def steps(operand: Operand) -> tuple[int, ...]:
        first = 1 if problem.planar else 0
        axes = list(zip(operand.shape[first:-2], operand.strides[first:-2], strict=True))
        missing = len(problem.batch_shape) - len(axes)
        return (0,) * missing + tuple(0 if extent == 1 else stride for extent, stride in axes)

    return coalesce(problem.batch_shape, [steps(problem.a), steps(problem.b)])[0]


def resolve(config: GemmConfig | None, problem: GemmProblem, spec: DeviceSpec) -> Any:
    """The tile of the multiplying kernel: a WgmmaTile, an MmaTile or an MfmaTile. Raises ConfigInfeasible."""
    scheme = SCHEMES[problem.compute]
    strips_of(config)
    module = module_of(config, spec)
    if reason := module.supports_planes(problem, scheme, spec):
        raise ConfigInfeasible(reason)
    return module.resolve_planes(_of_tile(config), problem, scheme, spec)


def strips_of(config: GemmConfig | None) -> int:
    """Return into how many parts the result is cut. Raises ConfigInfeasible."""
    strips = 1 if config is None or config.strips is None else config.strips
    if strips < 1:
        raise ConfigInfeasible(f"strips: must be at least 1, not {strips}")
    return strips


def _of_tile(config: Any) -> Any:
    """Return what a configuration says of tiles: as if the whole were computed at once."""
    return replace(config, strips=None) if isinstance(config, GemmConfig) else config


def _algorithm(config: GemmConfig | None, spec: DeviceSpec) -> str:
    if config is not None and config.algorithm is not None:
        return config.algorithm
    if spec.kind == "rocm":
        return "mfma"
    return "wgmma" if spec.has_wgmma else "mma"


def run_gemm(
    launcher: Launcher, problem: GemmProblem, config: GemmConfig | None, a: Any, b: Any, c: Any | None, out: Any
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0.

    `a` and `b` are arrays of `problem`, or PreparedOperands of them. `c` may be `out`, but not overlap it otherwise.
    Raises ConfigInfeasible, CompileError.
    """
    if c is not None and (problem.beta == 0 or launcher.pointer(c) == launcher.pointer(out)):
        c = None if problem.beta == 0 else c.copy()
    widening = widening_module(problem, config, launcher.spec)
    for part in parts_of(problem, a, b, c, out, widens=widening is not None):
        _run(launcher, part[0], config, *part[1:], widening)


class Strip(NamedTuple):
    """A part of a product, from `row` and `column` on, with A, B, C and the result."""

    problem: GemmProblem
    a: Any
    b: Any
    c: Any
    out: Any
    row: int = 0
    column: int = 0


def strips_in(problem: GemmProblem, strips: int, a: Any, b: Any, c: Any, out: Any) -> Iterator[Strip]:
    """Yield the strips of a product; an operand that comes prepared is not cut."""
    rows, columns = strip_shape(problem.m, problem.n, strips)
    down = [slice(None)] if source_of(a) is not a else _slices(problem.m, rows)
    along = [slice(None)] if source_of(b) is not b else _slices(problem.n, columns)
    if len(down) == len(along) == 1:
        yield Strip(problem, a, b, c, out)
        return
    for here in down:
        a_part = a if len(down) == 1 else _cut_axis(a, here, -1 if problem.trans_a in {"T", "C"} else -2)
        for there in along:
            b_part = b if len(along) == 1 else _cut_axis(b, there, -2 if problem.trans_b in {"T", "C"} else -1)
            c_part, out_part = (_cut_axis(_cut_axis(array, here, -2), there, -1) for array in (c, out))
            yield Strip(
                replace(
                    problem,
                    m=out_part.shape[-2],
                    n=out_part.shape[-1],
                    a=_operand(problem.a, a_part),
                    b=_operand(problem.b, b_part),
                    c=None if problem.c is None or c is None else _operand(problem.c, c_part),
                ),
                a_part,
                b_part,
                c_part,
                out_part,
                here.start or 0,
                there.start or 0,
            )


def _slices(extent: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, extent)) for first in range(0, extent, step)]


def _cut_axis(array: Any, here: slice, axis: int) -> Any:
    """Return that part of an array's rows or columns; all of one that is broadcast along them; None of None."""
    if array is None or array.shape[axis] == 1:
        return array
    index = [slice(None)] * array.ndim
    index[axis] = here
    return array[tuple(index)]


def parts_of(
    problem: GemmProblem, a: Any, b: Any, c: Any, out: Any, *, widens: bool, workspace: int | None = None
) -> Iterator[tuple[GemmProblem, Any, Any, Any, Any]]:
    """The problem with its operands, or shares of its batch in their order, so that planes fit the workspace."""
    workspace = workspace or _WORKSPACE
    if problem.batch > 1 and _plane_bytes(problem, widens) > workspace:
        yield from _parts(problem, a, b, c, out, widens, workspace)
    else:
        yield problem, a, b, c, out


@lru_cache(maxsize=256)
def _plane_bytes(problem: GemmProblem, widens: bool) -> int:
    return prepass.plane_bytes(problem, SCHEMES[problem.compute], widens=widens)


def _parts(
    problem: GemmProblem, a: Any, b: Any, c: Any, out: Any, widens: bool, workspace: int
) -> Iterator[tuple[GemmProblem, Any, Any, Any, Any]]:
    """Shares of a batch along its first axis whose planes fit the workspace."""
    extent = problem.batch_shape[0]
    step = max(1, min(extent, workspace * extent // _plane_bytes(problem, widens)))
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
        if part.batch_shape[0] == 1 and part.batch > 1 and _plane_bytes(part, widens) > workspace:
            inner = replace(part, batch_shape=part.batch_shape[1:])
            a_in, b_in, c_in, out_in = (_inner(problem, array) for array in cut)
            yield from _parts(inner, a_in, b_in, c_in, out_in, widens, workspace)
        else:
            yield (part, cut[0], cut[1], cut[2], cut[3])


def _operand(was: Operand, array: Any) -> Operand:
    return was if array is None else type(was).of(source_of(array))


def _cut(problem: GemmProblem, array: Any, here: slice) -> Any:
    """Return that part of the batch's first axis; the whole array where it does not have the axis or is broadcast over
    it.
    """
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


def _run(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | None,
    a: Any,
    b: Any,
    c: Any,
    out: Any,
    widening: WideningAlgorithm | None,
) -> None:
    # As the whole would be computed: what a strip's own shape suggests could have other bits.
    tile = resolve(config, problem, launcher.spec)
    of_wide = None if widening is None else widening.wide_tile(problem, WIDE[SCHEMES[problem.compute]], launcher.spec)
    strips = strips_of(config)
    memory = None
    for strip, a_part, b_part, c_part, out_part, *_ in strips_in(problem, strips, a, b, c, out):
        widens = widening is not None
        ready = prepass.run(
            launcher, strip, SCHEMES[problem.compute], a_part, b_part, widens=widens, keeps=strips > 1, memory=memory
        )
        memory = ready.blocks
        _multiply(launcher, strip, config, a_part, b_part, c_part, out_part, widening, tile, of_wide, ready)


def _multiply(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | None,
    a: Any,
    b: Any,
    c: Any,
    out: Any,
    widening: WideningAlgorithm | None,
    tile: Any,
    of_wide: Any,
    ready: Prepass,
) -> None:
    """Compute a strip, whose planes are `ready`, by those tiles."""
    counters = launcher.counters(problem.batch * problem.m * problem.n)
    wide = None
    if widening is not None:
        judged = prepass.judged(launcher, ready, counters)
        widening.multiply(launcher, problem, tile, ready.a.planes, ready.b.planes, c, out, judged)
        wide = prepass.widen(launcher, ready)
        rest = judged._replace(tiles="rest")
        widening.multiply(launcher, problem, of_wide, wide.a.planes, wide.b.planes, c, out, rest)
    else:
        module_of(config, launcher.spec).multiply(launcher, problem, tile, ready.a.planes, ready.b.planes, c, out)
    flags = Flags.of(launcher, ready, wide, counters)
    fallback.run(launcher, problem, source_of(a), source_of(b), c, out, flags)


def module_of(config: GemmConfig | None, spec: DeviceSpec) -> PlanesAlgorithm:
    """Return the module that multiplies planes."""
    algorithm = _algorithm(config, spec)
    return mfma if algorithm == "mfma" else wgmma if algorithm == "wgmma" else mma


def widening_module(
    problem: GemmProblem | GemmReduceProblem, config: GemmConfig | None, spec: DeviceSpec
) -> WideningAlgorithm | None:
    """Return the module that multiplies planes where tiles that float16 planes do not serve go the wide way."""
    if SCHEMES[problem.compute] not in WIDE:
        return None
    return {"wgmma": wgmma, "mma": mma}.get(_algorithm(config, spec))
