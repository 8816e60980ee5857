"""Panels of a large product's operands that a device holds, in the slots that `plan_memory` gives them, and windows of
its result.

Blocks that come in the plan's order find just what the plan says, whatever runs at once: a panel that the plan lets go
is waited for while a block still reads it. Blocks in another order (some are computed elsewhere) are served too; which
panel goes follows from the plan's order then as well.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from gemmserve_kernels import GemmProblem
from gemmserve_kernels.blocks.grid import panel_operand
from gemmserve_kernels.device.interruption import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels import Operand
    from gemmserve_kernels.blocks.grid import Grid
    from gemmserve_kernels.blocks.memory_plan import MemoryPlan

Side = Literal["a", "b"]

_LOOK_S: Final = 0.05
"""Seconds between two moments at which one who waits for a slot can be stopped."""
_NEVER: Final = 1 << 62


class _Slot:
    """Memory of one panel at a time."""

    __slots__ = ("array", "memory", "panel", "pins", "ready")

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.panel: int | None = None
        self.array: Any = None
        """The panel, once it is `ready`."""
        self.ready = False
        self.pins = 0


class Pin:
    """A panel in use: `array` stays what it is until `release`, which may be called again."""

    def __init__(self, slots: PanelSlots, slot: _Slot | None, array: Any) -> None:
        self.array = array
        self._slots = slots
        self._slot = slot

    def release(self) -> None:
        """Let the panel go."""
        slot, self._slot = self._slot, None
        self.array = None
        if slot is not None:
            self._slots.unpin(slot)


class PanelSlots:
    """Slots of one grid. Every method may be called from any thread."""

    def __init__(
        self,
        grid: Grid,
        plan: MemoryPlan,
        allocate: Callable[[int], Any],
        view: Callable[[Any, Operand], Any],
        *,
        windows: int = 0,
    ) -> None:
        """`allocate` returns memory of so many bytes, `view` an array that lies as an operand where it begins.
        `windows`: of the result, to be held ready: a device's memory would give them out of what the planes of a block
        have left, which had no room there afterwards. Raises what `allocate` raises.
        """
        self._allocate = allocate
        self.grid = grid
        self.plan = plan
        self.uploads = 0
        self.uploaded_bytes = 0
        """Panels that were brought, and their bytes, each as often as it was."""
        self._view = view
        self._positions = {index: position for position, index in enumerate(plan.order)}
        self._uses: dict[Side, dict[int, list[int]]] = {"a": {}, "b": {}}
        for position, index in enumerate(plan.order):
            for side, uses in self._uses.items():
                uses.setdefault(grid.panel(side, index), []).append(position)
        self._slots: dict[Side, list[_Slot]] = {
            "a": [_Slot(allocate(plan.slot_bytes[0])) for _ in range(plan.slots[0])],
            "b": [_Slot(allocate(plan.slot_bytes[1])) for _ in range(plan.slots[1])],
        }
        first = grid.block_problem(plan.order[0])
        self.window_bytes = first.result.nbytes if isinstance(first, GemmProblem) else 0
        """Bytes of a block's result, the first one's, than which none is larger; a reduction's are small."""
        self._windows = [allocate(self.window_bytes) for _ in range(windows)] if self.window_bytes else []
        self._closed = False
        self._changed = threading.Condition()

    def close(self) -> None:
        """Let all memory go, that of panels in use when they are released; what is taken from now on is beside it."""
        with self._changed:
            self._closed = True
            self._slots = {"a": [], "b": []}
            self._windows = []
            self._changed.notify_all()

    def take(self, side: Side, index: int, fill: Callable[[Any], None], *, waits: bool) -> Pin:
        """Return the panel of A or B that a block needs, brought by `fill(array)` where it is not here.

        `waits`: for a slot, if none can be had; only where all who hold panels go on without whoever waits. Else it is
        brought to memory beside the slots. Raises what `fill` and the allocation raise, and what the thread's
        checkpoint does.
        """
        slot, found = self._slot_for(side, index, waits)
        if found and slot is not None:
            return Pin(self, slot, slot.array)
        problem = self.grid.problem
        operand = problem.a if side == "a" else problem.b
        layout = panel_operand(operand, self.grid.operand_panel(side, index))
        try:
            array = self._view(self._allocate(layout.nbytes) if slot is None else slot.memory, layout)
            fill(array)
        except BaseException:
            if slot is not None:
                with self._changed:
                    slot.panel, slot.pins = None, slot.pins - 1
                    self._changed.notify_all()
            raise
        with self._changed:
            if slot is not None:
                slot.array, slot.ready = array, True
            self.uploads += 1
            self.uploaded_bytes += layout.nbytes
            self._changed.notify_all()
        return Pin(self, slot, array)

    def take_window(self, nbytes: int) -> Any | None:
        """Return memory for a block's result, to be given back; None where there is none ready, or not so much."""
        with self._changed:
            return self._windows.pop() if self._windows and nbytes <= self.window_bytes else None

    def give_window(self, memory: Any) -> None:
        """Take memory of a window back: nothing on the device writes to it or reads it any more."""
        with self._changed:
            if not self._closed:
                self._windows.append(memory)

    def unpin(self, slot: _Slot) -> None:
        """See `Pin.release`."""
        with self._changed:
            slot.pins -= 1
            self._changed.notify_all()

    def _slot_for(self, side: Side, index: int, waits: bool) -> tuple[_Slot | None, bool]:
        """Return the slot of a panel, pinned, and whether the panel is in it; None: there is none, and no waiting."""
        panel = self.grid.panel(side, index)
        while True:
            checkpoint()
            with self._changed:
                if self._closed:
                    return None, False
                slot = next((each for each in self._slots[side] if each.panel == panel), None)
                if slot is not None and slot.ready:
                    slot.pins += 1
                    return slot, True
                if slot is None:
                    slot = self._victim(side, self._positions[index])
                    if slot.pins == 0:
                        slot.panel, slot.array, slot.ready, slot.pins = panel, None, False, 1
                        return slot, False
                if not waits:
                    return None, False
                self._changed.wait(_LOOK_S)

    def _victim(self, side: Side, position: int) -> _Slot:
        """Return an empty slot, or the one that the plan's rule takes (`memory_plan`)."""
        uses = self._uses[side]

        def rank(slot: _Slot) -> tuple[bool, bool, int, int]:
            if slot.panel is None:
                return True, True, 0, 0
            mine = uses[slot.panel]
            number = bisect_right(mine, position)
            just_used = number > 0 and mine[number - 1] == position - 1
            return False, not just_used, mine[number] if number < len(mine) else _NEVER, -slot.panel

        return max(self._slots[side], key=rank)


@dataclass(frozen=True, slots=True)
class PanelUse:
    """Use of a panel as an operand of one block."""

    slots: PanelSlots
    side: Side
    index: int

    def take(self, fill: Callable[[Any], None], *, waits: bool) -> Pin:
        """See `PanelSlots.take`."""
        return self.slots.take(self.side, self.index, fill, waits=waits)
