"""Tiles of single precision that residues do not serve, the wide way: from three bfloat16 parts of every element.

`ozaki.bound` decides on the device which tiles residues have; all others are multiplied here by `wgmma` ("6xbf16",
`splits.gemm` says what that loses), and what bfloat16 parts do not hold of those in double (`splits.fallback`). Each
kernel asks the same deficits of the same tile, so that every element is written by one of the three ways, whatever
panels, strips and launches there are. Planes are made where a tile fails at all: a word says so, and the kernels, which
are launched for every product, are over at once where it is 0. The host never waits.

Planes take their memory when residues are over. They are made in strips where they would need more than the workspace;
a product's tile is that of the whole, and strips show in no bit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.splits import SCHEMES, strip_shape
from gemmserve_kernels.algorithms.common.verdict import Judged
from gemmserve_kernels.algorithms.ozaki.bound import LINES, WORDS, limit
from gemmserve_kernels.algorithms.splits import fallback, prepass
from gemmserve_kernels.algorithms.splits import gemm as splits
from gemmserve_kernels.algorithms.splits.flags import Failing, Flags
from gemmserve_kernels.algorithms.wgmma import gemm as wgmma

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.ozaki.plan import Found
    from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem

_COMPUTE: Final = "6xbf16"
_WORD: Final = 4
"""Bytes."""


@lru_cache(maxsize=1024)
def serves(problem: GemmProblem, spec: DeviceSpec) -> bool:
    """Whether tiles of `problem` go this way: products of single precision, but for layouts that have no planes."""
    if problem.dtype.name not in {"complex64", "float32"}:
        return False
    taken = _wide(problem)
    unfit = splits.supports(taken, spec) or wgmma.supports_planes(taken, SCHEMES[_COMPUTE], spec)
    return unfit is None


def _wide(problem: GemmProblem) -> GemmProblem:
    return replace(problem, compute=_COMPUTE, config=None)


@lru_cache(maxsize=1024)
def _tile(problem: GemmProblem, spec: DeviceSpec) -> WgmmaTile:
    return wgmma.failing_tile(problem, SCHEMES[_COMPUTE], spec)


def strips_of(problem: GemmProblem, strips: int, workspace: int) -> int:
    """Return the strips in which planes of a product are made: so many at least, and so that they fit `workspace` bytes
    if any do.
    """
    while strips < problem.m * problem.n and _strip_bytes(problem, strips) > workspace:
        if strip_shape(problem.m, problem.n, 2 * strips) == strip_shape(problem.m, problem.n, strips):
            break
        strips *= 2
    return strips


def _strip_bytes(problem: GemmProblem, strips: int) -> int:
    m, n = strip_shape(problem.m, problem.n, strips)
    strip = replace(problem, m=min(problem.m, m), n=min(problem.n, n))
    return prepass.plane_bytes(strip, SCHEMES[_COMPUTE], widens=False)


def plane_bytes(problem: GemmProblem, strips: int, workspace: int) -> int:
    """Bytes of the planes that there are at once, for a product that goes this way."""
    one = replace(problem, batch_shape=())
    bound = _strip_bytes(one, strips_of(one, strips, workspace))
    return min(bound * problem.batch, max(bound, workspace))


def run(
    launcher: Launcher,
    problem: GemmProblem,
    strips: int,
    workspace: int,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
    found: Found,
) -> None:
    """Writes those elements of alpha op(a) op(b) + beta c into `out` whose tiles residues do not serve. `strips` at
    least, and `workspace` bytes of planes at most, if strips and shares of the batch fit.
    """
    whole = _wide(problem)
    tile = _tile(whole, launcher.spec)
    words = [WORDS * groups for groups in found.groups]
    failing = Failing(words[0], words[1], limit(problem.k))
    first, clears = 0, False
    for part, *arrays in splits.parts_of(whole, a, b, c, out, widens=False, workspace=workspace):
        count = strips_of(part, strips, workspace)
        for strip in splits.strips_in(part, count, *arrays):
            deficits = [
                address + _WORD * (step * first + WORDS * (line // LINES))
                for address, step, line in zip(found.deficits, words, (strip.row, strip.column), strict=True)
            ]
            judged = Judged(
                "failing", deficits[0], deficits[1], found.failing, found.counters, words[0], words[1], failing.most
            )
            _run_strip(launcher, strip, tile, judged, failing, found.status, clears=clears)
            clears = True
        first += part.batch


def _run_strip(
    launcher: Launcher,
    strip: splits.Strip,
    tile: WgmmaTile,
    judged: Judged,
    failing: Failing,
    status: int,
    *,
    clears: bool,
) -> None:
    problem, a, b, c, out = strip[:5]
    scheme = SCHEMES[_COMPUTE]
    ready = prepass.split_where(launcher, problem, scheme, a, b, status, judged.wanted, clears=clears)
    planes = ready.a.planes, ready.b.planes
    wgmma.multiply(launcher, problem, tile, *planes, c, out, judged)
    flags = Flags(
        launcher.pointer(ready.a.flags),
        launcher.pointer(ready.b.flags),
        judged.deficits_a,
        judged.deficits_b,
        (status, status),
        planes[0].batch_strides,
        planes[1].batch_strides,
        judged.counters,
        widened=True,
        failing=failing,
    )
    fallback.run(launcher, problem, a, b, c, out, flags)
