"""Memory of one device through its share of a product's blocks: what stays, what streams, what is uploaded.

A panel is the rows of A, or the columns of B, that a row or a column of blocks needs, with all of k. Panels of the
operand that streams pass by two at a time, one under the other's products, while as many panels of the other as there
is room for stay; beside them lie the planes that the algorithm makes of the panels of one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_kernels.algorithms.common.splits import DEPTHS
from gemmserve_kernels.algorithms.common.time_model import ITEMSIZE
from gemmserve_kernels.algorithms.ozaki.lines import PITCH
from gemmserve_kernels.algorithms.ozaki.moduli import Moduli, needed
from gemmserve_kernels.algorithms.ozaki.plan import WORKSPACE, panel_bytes, panel_shape
from gemmserve_kernels.blocks import memory_plan
from gemmserve_kernels.blocks.grid import Grid
from gemmserve_kernels.problem.errors import ParameterInvalid
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from gemmserve_kernels.blocks.memory_plan import MemoryPlan
    from gemmserve_kernels.device.spec import DeviceSpec

_MAX_PLANNED: Final = 64
"""Rows and columns of blocks up to which a worker's own plan is made: that of a larger share takes seconds."""
_PLANE_BYTES: Final = 2
_WINDOWS: Final = 2
"""Windows of the result on the device: one is computed while the other goes to the host."""
_STREAMING: Final = 2
"""Panels of the operand that streams: one is multiplied while the next one comes."""


@dataclass(frozen=True)
class Share:
    """Part of a product that one device computes: rows, columns and steps of k, and the extents of its blocks."""

    rows: int
    columns: int
    k: int
    block_rows: int
    block_columns: int
    dtype: str
    arithmetic: str

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks along rows and along columns."""
        return math.ceil(self.rows / self.block_rows), math.ceil(self.columns / self.block_columns)

    @property
    def copied_bytes(self) -> int:
        """Bytes of its operands, each once."""
        return (self.rows + self.columns) * self.k * ITEMSIZE[self.dtype]

    @property
    def result_bytes(self) -> int:
        """Bytes of its part of the result."""
        return self.rows * self.columns * ITEMSIZE[self.dtype]

    @property
    def window_bytes(self) -> int:
        """Bytes of a block of the result."""
        return self.block_rows * self.block_columns * ITEMSIZE[self.dtype]

    @property
    def line_bytes(self) -> int:
        """Bytes of a row of A, or a column of B."""
        return self.k * ITEMSIZE[self.dtype]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the planes of one block's panels, or of residues."""
        if self.arithmetic == "ozaki":
            return residue_bytes(self.block_rows, self.block_columns, self.k, self.dtype)
        return (self.block_rows + self.block_columns) * self.k * plane_bytes(self.dtype, self.arithmetic)


@dataclass(frozen=True)
class Memory:
    """Memory of a device: bytes in use at once, bytes uploaded, what streams: "a", "b", "both" (each panel takes the
    place of one that was just used, and nothing comes under products), or None: everything stays.
    """

    used_bytes: int
    uploaded_bytes: int
    streams: str | None


def residue_bytes(rows: int, columns: int, k: int, dtype: str) -> int:
    """Return the bytes of residues of a block: of its panels and of its products, in pieces where they are large."""
    moduli = Moduli.first(needed(k, np.dtype(dtype)), complex_=dtype.startswith("complex"))
    pitch = -(-k // PITCH) * PITCH
    smallest = panel_shape(rows, columns, pitch, moduli.planes, WORKSPACE)
    whole = panel_bytes(rows, columns, pitch, moduli.planes)
    return min(whole, max(WORKSPACE, panel_bytes(*smallest, pitch, moduli.planes)))


def plane_bytes(dtype: str, arithmetic: str) -> int:
    """Return the bytes of planes that an algorithm of that arithmetic makes of an element; 0 where it takes operands as
    they are.
    """
    parts = 2 if dtype.startswith("complex") else 1
    if arithmetic == "3xfp16-3m":
        return 3 * DEPTHS["3xfp16-3m"] * _PLANE_BYTES if parts == 2 else 0
    depth = next((depth for scheme, depth in DEPTHS.items() if scheme == arithmetic), 0)
    return parts * depth * _PLANE_BYTES


def least_bytes(share: Share) -> int:
    """Return the bytes without which not one block fits: a pair of panels, its planes and a window."""
    return (share.block_rows + share.block_columns) * share.line_bytes + share.workspace_bytes + share.window_bytes


@lru_cache(maxsize=256)
def worker_bytes(share: Share, spec: DeviceSpec, compute: str) -> int:
    """Return the bytes without which a worker with such a device computes not one block: less than `least_bytes` where
    it makes planes strip by strip. Raises what planning a block raises (ComputeUnsupported, ConfigInfeasible).
    """
    least = least_bytes(share)
    if max(share.grid) > _MAX_PLANNED:
        return least
    return min(least, memory_plan.least_bytes(_grid(share, compute), spec))


def _grid(share: Share, compute: str) -> Grid:
    dtype = np.dtype(share.dtype)
    a, b = Operand.contiguous((share.rows, share.k), dtype), Operand.contiguous((share.k, share.columns), dtype)
    return Grid.with_sides(GemmProblem.build(a, b, compute=compute), (share.block_rows, share.block_columns, 1))


@lru_cache(maxsize=256)
def planned_memory(share: Share, spec: DeviceSpec, compute: str, budget: int) -> Memory:
    """Return the way that a worker with such a device takes within `budget` bytes: where not everything stays, that of
    the plan it makes (`blocks.memory_plan`), which reserves more for one block than its planes, or makes these strip by
    strip. Where that does not fit, or there are very many blocks, it is `memory_of`. Raises what that raises.
    """
    found = memory_of(share, budget) if least_bytes(share) <= budget else None
    if found is not None and (found.streams is None or max(share.grid) > _MAX_PLANNED):
        return found
    if found is None and worker_bytes(share, spec, compute) > budget:
        return memory_of(share, budget)
    plan = memory_plan.plan_memory(_grid(share, compute), spec, budget)
    if found is not None and not plan.fits:
        return found
    held_a, held_b = plan.slots
    alone = sum(upload.nbytes for upload in plan.uploads if upload.after == upload.before - 1 >= 0)
    streams = "both" if 2 * alone > plan.uploaded_bytes else "b" if held_a > held_b else "a"
    return Memory(plan.peak_bytes, plan.uploaded_bytes, streams)


@lru_cache(maxsize=256)
def worker_plan(share: Share, spec: DeviceSpec, compute: str, budget: int) -> tuple[Grid, MemoryPlan] | None:
    """Return the grid of a share, and the way that a worker with such a device takes through it; None where that is not
    planned: blocks that do not fit, or very many. Raises what planning a block raises.
    """
    if max(share.grid) > _MAX_PLANNED or worker_bytes(share, spec, compute) > budget:
        return None
    grid = _grid(share, compute)
    plan = memory_plan.plan_memory(grid, spec, budget)
    return (grid, plan) if plan.fits else None


def memory_of(share: Share, budget: int) -> Memory:
    """Return the way that uploads least within `budget` bytes. Raises ParameterInvalid where not one block fits."""
    whole = share.copied_bytes + share.workspace_bytes + _WINDOWS * share.window_bytes
    if whole <= budget:
        return Memory(whole, share.copied_bytes, None)
    if least_bytes(share) > budget:
        raise ParameterInvalid(
            f"a block of {share.block_rows} x {share.block_columns} with k = {share.k} needs {least_bytes(share):,} "
            f"bytes of a device; there are {budget:,}",
            "device_memory",
        )
    longer_first = "ba" if share.columns > share.rows else "ab"
    return min(
        (found for side in longer_first if (found := _streaming(share, budget, side)) is not None),
        key=lambda found: found.uploaded_bytes,
        default=Memory(least_bytes(share), _paired(share), "both"),
    )


def _streaming(share: Share, budget: int, side: str) -> Memory | None:
    """Return how it goes when panels of `side` stream; None where there is no room for one that stays beside two."""
    stay, step = share.rows, share.block_rows
    pass_by, passing_step = share.columns, share.block_columns
    if side == "a":
        stay, step, pass_by, passing_step = pass_by, passing_step, stay, step
    passing = _STREAMING * min(passing_step, pass_by) * share.line_bytes
    fixed = _WINDOWS * share.window_bytes + share.workspace_bytes + passing
    held = (budget - fixed) // (step * share.line_bytes) * step
    if held < min(step, stay):
        return None
    held = min(held, stay)
    sweeps = math.ceil(stay / held)
    # Back and forth: the panels that a sweep ends with are there when the next one begins.
    kept = (sweeps - 1) * min(_STREAMING * passing_step, pass_by)
    uploaded = (stay + sweeps * pass_by - kept) * share.line_bytes
    return Memory(fixed + held * share.line_bytes, uploaded, side)


def _paired(share: Share) -> int:
    """Bytes uploaded where one panel of each operand fits: all columns for every row of blocks, back and forth."""
    down, _ = share.grid
    lines = share.rows + down * share.columns - (down - 1) * min(share.block_columns, share.columns)
    return lines * share.line_bytes
