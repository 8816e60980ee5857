"""Division of the pre-pass's work: the units of each operand, and the blocks that begin with either. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.splits.geometry import Geometry
    from gemmserve_kernels.algorithms.splits.split import SplitOperandParams, SplitSide
    from gemmserve_kernels.device.spec import DeviceSpec

    _Sides = tuple[SplitSide | None, SplitSide | None]

_FILL: Final = 0.92
"""Clusters to launch, of what multiprocessors could hold: they do not divide evenly into clusters."""
_STRIPS_FIRST: Final = 1.15
"""More groups begin with strips than these are of the work: the last units shall be single vectors, which are short."""
_TURNS: Final = 6
"""Chunks for each group, so that all of them end together."""


def deal(spec: DeviceSpec, geometry: Geometry, cluster: int, sides: _Sides, both: list[SplitOperandParams]) -> int:
    """Sets units, and where blocks work together groups and chunks, of both operands, and returns the grid."""
    if geometry.alone:
        return _alone(spec, geometry, sides, both)
    return _together(spec, geometry, cluster, sides, both)


def _alone(spec: DeviceSpec, geometry: Geometry, sides: _Sides, both: list[SplitOperandParams]) -> int:
    """Return the number of blocks that take units in turn."""
    units = 0
    for side, params in zip(sides, both, strict=True):
        if side is not None:
            params.units = -(-side.rows // geometry.columns(complex_data=side.complex))
            units += int(params.units) * side.matrices
    return min(units, spec.sm_count * geometry.blocks)


def _together(spec: DeviceSpec, geometry: Geometry, cluster: int, sides: _Sides, both: list[SplitOperandParams]) -> int:
    """Return the division among groups of blocks, each of which begins with one operand and takes units of it as they
    come.
    """
    wanted = [0, 0]  # groups that would have one unit each
    for i, (side, params) in enumerate(zip(sides, both, strict=True)):
        if side is None:
            continue
        if side.along_k:
            together = geometry.ranks > 1
            step = geometry.threads // geometry.team(side.k) * (cluster // geometry.ranks if together else 1)
            params.units = -(-side.rows // step)
            wanted[i] = -(-params.units * side.matrices // (1 if together else cluster))
        else:
            params.units = -(-side.rows // geometry.columns(complex_data=side.complex))
            wanted[i] = params.units * side.matrices
    resident = max(2, int(spec.sm_count * geometry.blocks / cluster * (_FILL if cluster > 1 else 1)))
    work = [
        0.0 if side is None else side.rows * side.matrices * (1 if side.along_k else _STRIPS_FIRST) for side in sides
    ]
    both[0].groups, both[1].groups = _shares(wanted, work, resident)
    for side, params in zip(sides, both, strict=True):
        if side is not None:
            blocks = cluster if side.along_k and geometry.ranks == 1 else 1
            ahead = geometry.stages if side.along_k and side.k <= geometry.along_k else 1
            params.chunk = _chunk(params.units, side.matrices, params.groups * blocks, ahead)
    return int(both[0].groups + both[1].groups) * cluster


def _chunk(units: int, matrices: int, groups: int, ahead: int) -> int:
    """Units of a matrix that a group takes at a time, `ahead` at least or one: enough for every group to have some."""
    if matrices == 1 or groups == 0:
        return 1
    wanted = min(units, max(1, units * matrices // (_TURNS * groups)))
    chunk = -(-units // -(-units // wanted))
    return chunk if chunk >= ahead else 1


def _shares(wanted: list[int], work: list[float], most: int) -> tuple[int, int]:
    """Groups for either operand: all that are wanted, or `most` by the work of each."""
    if sum(wanted) <= most:
        return wanted[0], wanted[1]
    if not wanted[0] or not wanted[1]:
        return min(wanted[0], most), min(wanted[1], most)
    first = min(max(1, round(most * work[0] / sum(work))), most - 1, wanted[0])
    second = min(most - first, wanted[1])
    return min(most - second, wanted[0]), second
