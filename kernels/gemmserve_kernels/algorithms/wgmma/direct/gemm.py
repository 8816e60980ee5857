"""Products of float16 operands on Hopper's tensor cores, read from the caller's arrays as they lie.

An operand whose strides the copy engine cannot take is copied first, if it is not too large.

The kernel is the one that multiplies planes (wgmma_gemm.cu), with one plane and no exponents: the copy engine
brings boxes along k or across it, and the matrix instruction takes either. Products are exact in float32. The tensor
core adds with truncation; sums are promoted (see `wgmma.candidates.promotion`) where that could be seen in the result:
where k is long, or where the result keeps more than float16 does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import Operands
from gemmserve_kernels.algorithms.wgmma import candidates
from gemmserve_kernels.algorithms.wgmma.direct.operand import DirectSide, direct_side, unfit
from gemmserve_kernels.algorithms.wgmma.direct.pack import MAX_BYTES, Packing
from gemmserve_kernels.algorithms.wgmma.plan import Source, plan
from gemmserve_kernels.device.struct_params import StoredArray

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.device.struct_params import MatrixView
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.operand import Operand
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

_MAX_EXTENT: Final = 1 << 30
_MAX_TILES: Final = 1 << 27


def supports(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why this cannot run `problem` on `spec`, or None. An operand off a 16-byte boundary is copied."""
    if not spec.has_wgmma:
        return f"needs a Hopper GPU (sm_90a), and {spec.name} is none"
    if {problem.dtype.name, problem.a.dtype.name, problem.b.dtype.name} != {"float16"}:
        return f"multiplies float16, not {problem.a.dtype.name} by {problem.b.dtype.name}"
    if 0 in {problem.m, problem.n, problem.k, problem.batch} or problem.alpha == 0:
        return "an empty product or alpha = 0"
    if max(problem.m, problem.n, problem.k, problem.batch) >= _MAX_EXTENT:
        return "an extent is 2^30 or more"
    if -(-problem.m // 64) * -(-problem.n // 64) * problem.batch >= _MAX_TILES:
        return "more than 2^27 tiles"
    for name, view in zip("ab", _views(problem, _stored(problem.a), _stored(problem.b)), strict=True):
        reason = unfit(view, problem.batch_shape)
        if reason and Packing.of(view, problem.batch_shape).nbytes > MAX_BYTES:
            return f"{name}: {reason}; a copy would take more than {MAX_BYTES >> 20} MiB"
    return None


def copies(problem: GemmProblem | GemmReduceProblem) -> tuple[int, int]:
    """Bytes read and written by copies of operands, and how many there are. Of a problem that `supports` has passed."""
    views = _views(problem, _stored(problem.a), _stored(problem.b))
    made = [Packing.of(view, problem.batch_shape) for view in views if unfit(view, problem.batch_shape)]
    return 2 * sum(packing.nbytes for packing in made), len(made)


def _views(problem: GemmProblem | GemmReduceProblem, a: StoredArray, b: StoredArray) -> tuple[MatrixView, MatrixView]:
    """Both operands as rows by k."""
    operands = Operands.of(problem, a, b)
    return operands.a, operands.b.transposed()


def _stored(operand: Operand) -> StoredArray:
    """The operand as an array at an aligned address."""
    item = operand.dtype.itemsize
    return StoredArray(operand.shape, tuple(item * stride for stride in operand.strides), operand.dtype, 0)


def resolve(config: GemmConfig | WgmmaTile | None, problem: GemmProblem, spec: DeviceSpec) -> WgmmaTile:
    """The tile: what `config` asks for, the rest chosen. Raises ConfigInfeasible naming the limit."""
    return candidates.resolve(config, problem, spec, "fp16")


@lru_cache(maxsize=1024)
def _sides(
    problem: GemmProblem | GemmReduceProblem, a: StoredArray, b: StoredArray
) -> list[tuple[DirectSide, Packing | None]]:
    """Return how each operand is read, and the copy that must be made of it first if any."""
    found: list[tuple[DirectSide, Packing | None]] = []
    for view in _views(problem, a, b):
        packing = Packing.of(view, problem.batch_shape) if unfit(view, problem.batch_shape) else None
        found.append((direct_side(packing.view if packing else view, problem.batch_shape), packing))
    return found


def sources_of(launcher: Launcher, problem: GemmProblem | GemmReduceProblem, a: Any, b: Any) -> list[Source]:
    """Both operands for `WgmmaPlan.run`, those copied that must be."""
    (stored_a, base_a), (stored_b, base_b) = StoredArray.of(launcher, a), StoredArray.of(launcher, b)
    found = []
    for (side, packing), base in zip(_sides(problem, stored_a, stored_b), (base_a, base_b), strict=True):
        if packing is None:
            found.append(Source(side, base + side.offset))
            continue
        copy = launcher.empty((packing.elements,), np.dtype(np.float16))
        packing.run(launcher, base, launcher.pointer(copy))
        found.append(Source(side, launcher.pointer(copy) + side.offset, keep=copy))
    return found


def run_gemm(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | WgmmaTile | None,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0.

    `c` may be `out`, but not overlap it otherwise. Raises ConfigInfeasible, CompileError, DeviceError.
    """
    tile = resolve(config, problem, launcher.spec)
    left, right = sources_of(launcher, problem, a, b)
    found = [StoredArray.of(launcher, array) for array in (out if c is None or problem.beta == 0 else c, out)]
    made = plan(launcher.spec.sm_count, problem, tile, left.side, right.side, *(stored for stored, _ in found))
    made.run(launcher, left, right, [base for _, base in found])
