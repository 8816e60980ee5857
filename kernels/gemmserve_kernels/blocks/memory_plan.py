"""Plan of one device's memory through a grid of blocks: which panels stay, which stream, and in which order.

Memory holds so many panels of A and so many of B (slots, each as long as the longest panel), windows of the result and
what the algorithm takes. What is uploaded, into which slot and from when on, is known before anything is: in a given
order of blocks the panel goes whose next use is farthest (L. Belady, A study of replacement algorithms for a
virtual-storage computer, 1966), but none that the last block has used where there is another, so that the next one
comes while that block is computed. Orders that are tried hold a group of panels of one operand and let the other
operand's pass by, back and forth. The first group begins as a wavefront, so that its panels come under products: the
panel of a block comes no faster than that block is computed, and each one opens several blocks so.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from gemmserve_kernels.blocks.grid import shells
from gemmserve_kernels.blocks.workspace import STRIPS, algorithm_with_strips, block_seconds, workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gemmserve_kernels.blocks.grid import Grid
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.vocabulary import AlgorithmName

Side = Literal["a", "b"]

LINK_RATE: Final = 50e9
"""Bytes a second from pinned memory to a device over PCIe 5 (one H200: 55e9)."""
_WINDOWS: Final = 3
"""Windows of the result, and blocks under way at once, at most: one comes, one is computed, one goes to the host."""
_ALIKE: Final = 1.02
"""Times the shortest time of a plan within which the one that uploads least is taken."""
_TRIED: Final = 12
"""Numbers of panels held, of one operand, that are tried at most."""
_FOLLOWED: Final = 4
"""Ways that are followed from block to block; of the others an estimate is enough."""
_NEVER: Final = 1 << 62


@dataclass(frozen=True)
class Upload:
    """One panel's way to the device: into a slot of its side, as soon as the block at position `after` in the order is
    computed (-1: at once), before the one at position `before`.
    """

    side: Side
    panel: int
    slot: int
    after: int
    before: int
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Way of one device through blocks. `fits`: whether a pair of panels, a window and what the algorithm takes go into
    the budget, for which `needed_bytes` is the least there is; if not, the plan is that of just so much.

    `slots`: panels of A and of B that are held; `slot_bytes`: of each of them. `windows`: of the result (and of C),
    as many as there may be blocks under way at once.
    `seconds`: by the model, copies beneath the computation counted so. `strips`: in which a block is computed, one
    after the other, so that planes take less (`GemmConfig.strips`): those that are `stripped`, all that have that
    `algorithm`. The bits are the same.
    """

    order: tuple[int, ...]
    uploads: tuple[Upload, ...]
    slots: tuple[int, int]
    slot_bytes: tuple[int, int]
    windows: int
    window_bytes: int
    workspace_bytes: int
    needed_bytes: int
    fits: bool
    seconds: float
    strips: int = 1
    algorithm: AlgorithmName | None = None
    stripped: frozenset[int] = frozenset()

    @property
    def uploaded_bytes(self) -> int:
        """Bytes of panels that are uploaded, each as often as it is."""
        return sum(upload.nbytes for upload in self.uploads)

    @property
    def peak_bytes(self) -> int:
        """Bytes of device memory that are in use at once."""
        held = sum(count * nbytes for count, nbytes in zip(self.slots, self.slot_bytes, strict=True))
        return held + self.windows * self.window_bytes + self.workspace_bytes


@lru_cache(maxsize=64)
def plan_memory(grid: Grid, spec: DeviceSpec, budget: int) -> MemoryPlan:
    """Return the plan for all blocks of `grid` on a device of which `budget` bytes may be used.

    Pure: the same arguments give the same plan. Raises what planning a block raises (ComputeUnsupported,
    ConfigInfeasible).
    """
    planners = _planners(grid, spec)
    if budget < planners[-1].least:
        return planners[-1].plan(budget)
    found: MemoryPlan | None = None
    for planner in planners:
        if planner.least > budget:
            continue
        plan = planner.plan(budget)
        if found is None or plan.seconds * _ALIKE < found.seconds:
            found = plan
    assert found is not None
    return found


def least_bytes(grid: Grid, spec: DeviceSpec) -> int:
    """Return the least budget with which a plan fits. Raises what `plan_memory` raises."""
    return _planners(grid, spec)[-1].least


def _planners(grid: Grid, spec: DeviceSpec) -> list[_Planner]:
    """Return planners for blocks computed at once, and in more and more strips if they can be."""
    planners = [_Planner(grid, spec)]
    if planners[0].algorithm is not None:
        planners += [_Planner(grid, spec, strips) for strips in STRIPS[1:]]
    return planners


def _panels(grid: Grid) -> dict[Side, dict[int, int]]:
    """Return the bytes of every panel, by side and number."""
    found: dict[Side, dict[int, int]] = {"a": {}, "b": {}}
    for index in range(grid.count):
        for side, panels in found.items():
            number = grid.panel(side, index)
            if number not in panels:
                panels[number] = grid.panel_bytes(side, index)
    return found


class _Way(NamedTuple):
    """Slots, windows, how many panels stay and whether they are A's (None: all fit), and what is estimated of that."""

    slots: tuple[int, int]
    windows: int
    group: tuple[int, bool] | None
    nbytes: int
    seconds: float


class _Planner:
    """Plans for one grid on one kind of device."""

    def __init__(self, grid: Grid, spec: DeviceSpec, strips: int = 1) -> None:
        self.grid = grid
        self.strips = strips
        self.panels = _panels(grid)
        self.needs = tuple((grid.row_panel(index), grid.column_panel(index)) for index in range(grid.count))
        self.slot_bytes = max(self.panels["a"].values()), max(self.panels["b"].values())
        shapes: dict[tuple[int, int, int], int] = {}
        self.kinds = [shapes.setdefault(grid.block(index).shape, index) for index in range(grid.count)]
        problems = {index: grid.block_problem(index) for index in shapes.values()}
        self.block_s = {index: block_seconds(problem, spec, strips) for index, problem in problems.items()}
        self.compute_s = sum(self.block_s[kind] for kind in self.kinds)
        algorithms = {index: algorithm_with_strips(problem, spec) for index, problem in problems.items()}
        largest = max(problems, key=lambda index: problems[index].flops())
        self.algorithm = None if None in algorithms.values() else algorithms[largest]
        """Algorithm of the largest blocks, if all can be computed in strips; others may have another one."""
        self.stripped = frozenset(
            index for index, kind in enumerate(self.kinds) if strips > 1 and algorithms[kind] == self.algorithm
        )
        self.workspace = max(
            workspace_bytes(problem, spec, strips if index in self.stripped else 1)
            for index, problem in problems.items()
        )
        self.window = max(grid.window_bytes(index) for index in problems)
        self.least = sum(self.slot_bytes) + self.window + self.workspace

    def plan(self, budget: int) -> MemoryPlan:
        ways = sorted(self._ways(max(budget, self.least)), key=lambda way: way.seconds)
        shortest = ways[0].seconds * _ALIKE
        ways.sort(key=lambda way: (max(way.seconds, shortest), way.nbytes))
        found: MemoryPlan | None = None
        for way in ways[:_FOLLOWED]:
            order = self.grid.order if way.group is None else self._grouped(*way.group, way.slots)
            uploads = self._uploads(order, way.slots)
            plan = MemoryPlan(
                order,
                uploads,
                way.slots,
                self.slot_bytes,
                way.windows,
                self.window,
                self.workspace,
                self.least,
                budget >= self.least,
                self._seconds(order, uploads, overlaps=way.windows > 1),
                self.strips,
                self.algorithm if self.strips > 1 else None,
                self.stripped,
            )
            if found is None or _better(plan, found):
                found = plan
        assert found is not None
        return found

    def _ways(self, budget: int) -> Iterator[_Way]:
        """Yield ways for which there is memory; at least one."""
        size_a, size_b = self.slot_bytes
        count_a, count_b = len(self.panels["a"]), len(self.panels["b"])
        for windows in range(min(_WINDOWS, 1 + (budget - self.least) // self.window), 0, -1):
            room = budget - windows * self.window - self.workspace
            if count_a * size_a + count_b * size_b <= room:
                yield self._way((count_a, count_b), windows, None)
                continue
            for held in _some(min(count_a, (room - size_b) // size_a)):
                slots = held, min(count_b, (room - held * size_a) // size_b)
                for group in {max(1, held - 1), held}:
                    yield self._way(slots, windows, (group, True))
            for held in _some(min(count_b, (room - size_a) // size_b)):
                slots = min(count_a, (room - held * size_b) // size_a), held
                for group in {max(1, held - 1), held}:
                    yield self._way(slots, windows, (group, False))

    def _way(self, slots: tuple[int, int], windows: int, group: tuple[int, bool] | None) -> _Way:
        """Return a way with an estimate of what it uploads, and of how long it takes."""
        sizes, counts = self.slot_bytes, (len(self.panels["a"]), len(self.panels["b"]))
        nbytes = sum(count * size for count, size in zip(counts, sizes, strict=True))
        serial = windows == 1
        if group is not None:
            size, by_rows = group
            stays = self.grid.down if by_rows else self.grid.across
            passing = 1 if by_rows else 0
            turns = len(self.grid.runs) * -(-stays // size) - 1
            nbytes += turns * max(0, counts[passing] - slots[passing] + 1) * sizes[passing]
            serial = serial or slots[passing] < min(2, counts[passing])
        link_s = nbytes / LINK_RATE
        seconds = self.compute_s + link_s if serial else max(self.compute_s, link_s)
        return _Way(slots, windows, group, nbytes, seconds)

    def _grouped(self, size: int, by_rows: bool, slots: tuple[int, int]) -> tuple[int, ...]:
        """Return the order in which `size` panels of one operand stay while the other's pass by, back and forth. As
        many of these as there are `slots` for, but the one in which the next comes, begin together, in shells.
        """
        grid = self.grid
        found: list[int] = []
        stay, passing = (grid.down, grid.across) if by_rows else (grid.across, grid.down)
        count = -(-stay // size)
        forth = True
        for run in range(len(grid.runs)):
            for group in range(count):
                held = range(group * stay // count, (group + 1) * stay // count)
                for other in range(passing) if forth else reversed(range(passing)):
                    found += (grid.at(run, *((one, other) if by_rows else (other, one))) for one in held)
                forth = not forth
        opened = shells(stay // count, min(passing, slots[by_rows] - 1))
        first = [grid.at(0, *((one, other) if by_rows else (other, one))) for one, other in opened]
        return tuple(dict.fromkeys(first + found))

    def _uploads(self, order: Sequence[int], slots: tuple[int, int]) -> tuple[Upload, ...]:
        """Return what is uploaded in that order of blocks."""
        sides: tuple[tuple[int, Side], ...] = ((0, "a"), (1, "b"))
        uses: list[dict[int, list[int]]] = [{}, {}]
        for position, index in enumerate(order):
            for number, _ in sides:
                uses[number].setdefault(self.needs[index][number], []).append(position)
        held: list[dict[int, int]] = [{}, {}]
        """Slots by the panels in them."""
        found = []
        for position, index in enumerate(order):
            for number, side in sides:
                panel = self.needs[index][number]
                there = held[number]
                if panel in there:
                    continue
                if len(there) < slots[number]:
                    slot, after = len(there), -1
                else:
                    victim = self._victim(there, uses[number], position)
                    slot = there.pop(victim)
                    after = uses[number][victim][bisect_right(uses[number][victim], position) - 1]
                there[panel] = slot
                found.append(Upload(side, panel, slot, after, position, self.panels[side][panel]))
        return tuple(found)

    @staticmethod
    def _victim(there: dict[int, int], uses: dict[int, list[int]], position: int) -> int:
        """Return the panel to go: one whose next use is farthest, of those that the last block has not used."""

        def next_use(panel: int) -> int:
            number = bisect_right(uses[panel], position)
            return uses[panel][number] if number < len(uses[panel]) else _NEVER

        def just_used(panel: int) -> bool:
            return uses[panel][bisect_right(uses[panel], position) - 1] == position - 1

        return max(there, key=lambda panel: (not just_used(panel), next_use(panel), -panel))

    def _seconds(self, order: Sequence[int], uploads: Sequence[Upload], *, overlaps: bool) -> float:
        """Return how long it takes, uploads one after the other beside blocks one after the other, and the last window
        down. `overlaps`: whether one block may come while another is there.
        """
        ended: list[float] = []
        link = 0.0
        next_upload = 0
        at = 0.0
        for position, index in enumerate(order):
            while next_upload < len(uploads) and uploads[next_upload].before == position:
                upload = uploads[next_upload]
                begun = ended[upload.after] if upload.after >= 0 else 0.0
                link = max(link, begun if overlaps else at) + upload.nbytes / LINK_RATE
                at = max(at, link)
                next_upload += 1
            at += self.block_s[self.kinds[index]]
            ended.append(at)
        return at + self.window / LINK_RATE


def _some(most: int) -> list[int]:
    """Return numbers from 1 to `most`, not too many, with both ends."""
    if most <= _TRIED:
        return list(range(1, most + 1))
    return sorted({1 + (most - 1) * step // (_TRIED - 1) for step in range(_TRIED)} | {2, most - 1})


def _better(plan: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether a plan is to be preferred: clearly shorter, or alike and with less to upload."""
    if plan.seconds * _ALIKE < other.seconds:
        return True
    return plan.seconds <= other.seconds * _ALIKE and plan.uploaded_bytes < other.uploaded_bytes
