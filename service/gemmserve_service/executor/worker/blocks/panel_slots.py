"""Panels of a large product's operands that a device holds, in the slots that `plan_memory` gives them, and windows of
its result.

Blocks that come in the plan's order find just what the plan says, whatever runs at once: a panel that the plan lets go
is waited for while a block still reads it. Blocks in another order (some are computed elsewhere) are served too; which
panel goes follows from the plan's order then as well.

Panels of blocks that are known to come (`expect`) are brought ahead of them, by a thread of their own, each as soon as
the block that had its place before is computed: who computes need not ask for them.

Slots may be shared with other devices of the host (`peer_panels`): a panel is copied from there where it can be, while
the host's memory holds this one up; one that another device reads just now stays in its slot for so long.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from gemmserve_kernels import GemmProblem
from gemmserve_kernels.blocks.grid import panel_operand
from gemmserve_kernels.device.interruption import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemmserve_kernels import Operand
    from gemmserve_kernels.blocks.grid import Grid
    from gemmserve_kernels.blocks.memory_plan import MemoryPlan
    from gemmserve_service.executor.worker.blocks.peer_panels import SharedSlots

Side = Literal["a", "b"]

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
"""Seconds between two moments at which one who waits for a slot can be stopped."""
_READ_S: Final = 0.002
"""Likewise, for who waits until another device has read what is in one."""
_NEVER: Final = 1 << 62


class _Slot:
    """Memory of one panel at a time."""

    __slots__ = ("array", "memory", "number", "panel", "pins", "ready", "seconds", "taken")

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.number = 0
        """Among all slots."""
        self.panel: int | None = None
        self.array: Any = None
        """The panel, once it is `ready`."""
        self.ready = False
        self.pins = 0
        self.seconds = 0.0
        """For which it was brought, until the first block that has it counts them."""
        self.taken = 0
        """Number of the last use that began."""


class Pin:
    """A panel in use: `array` stays what it is until `release`, which may be called again. `seconds`: that it took to
    be brought, ahead of this use perhaps; 0 where an earlier one has counted them.
    """

    def __init__(self, slots: PanelSlots, slot: _Slot | None, array: Any, seconds: float) -> None:
        self.array = array
        self.seconds = seconds
        self._slots = slots
        self._slot = slot

    def computed(self, seconds: float) -> None:
        """Note for how long the device has computed the block."""
        self._slots.computed(seconds)

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
        share: Callable[[Sequence[tuple[Any, int]]], SharedSlots | None] | None = None,
    ) -> None:
        """`allocate` returns memory of so many bytes, `view` an array that lies as an operand where it begins.
        `windows`: of the result, to be held ready: a device's memory would give them out of what the planes of a block
        have left, which had no room there afterwards. `share` shares memory and bytes of all slots with other devices.
        Raises what `allocate` raises.
        """
        self._allocate = allocate
        self.grid = grid
        self.plan = plan
        self.uploads = 0
        self.uploaded_bytes = 0
        """Panels that were brought from the host, and their bytes, each as often as it was."""
        self.copies = 0
        self.copied_bytes = 0
        """Likewise, from other devices."""
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
        for number, slot in enumerate(slot for slots in self._slots.values() for slot in slots):
            slot.number = number
        first = grid.block_problem(plan.order[0])
        self.window_bytes = first.result.nbytes if isinstance(first, GemmProblem) else 0
        """Bytes of a block's result, the first one's, than which none is larger; a reduction's are small."""
        self._windows = [allocate(self.window_bytes) for _ in range(windows)] if self.window_bytes else []
        sizes: dict[Side, int] = {"a": plan.slot_bytes[0], "b": plan.slot_bytes[1]}
        memory = [(slot.memory, sizes[side]) for side, slots in self._slots.items() for slot in slots]
        self._shared = None if share is None else share(memory)
        self._closed = False
        self._shrunk = False
        self._taken = 0
        self._position = -1
        """Place in the plan's order of the block that took a panel last."""
        self._expected: list[int] = []
        """Blocks whose panels may come, in their order."""
        self._wanted: dict[Side, list[int]] = {"a": [], "b": []}
        """Those of them that have not taken their panel of that side yet."""
        self._bring: Callable[[Side, int, Any], None] = _nothing
        self._bringing = False
        """Whether a panel is being brought ahead."""
        self._read_elsewhere = False
        """Whether the next one waits for another device alone."""
        self._changed = threading.Condition()

    def close(self) -> None:
        """Let all memory go, that of panels in use when they are released; what is taken from now on is beside it.
        Nothing is brought ahead any more when this returns, from memory that may go afterwards.
        """
        with self._changed:
            self._closed = True
            memory = [slot.memory for slots in self._slots.values() for slot in slots]
            self._slots = {"a": [], "b": []}
            self._windows = []
            self._expected, self._wanted, self._bring = [], {"a": [], "b": []}, _nothing
            self._changed.notify_all()
        if self._shared is not None:
            self._shared.close(memory)
        with self._changed:
            while self._bringing:
                self._changed.wait()

    def shrink(self, *, least: bool = False) -> int:
        """Let windows go that nobody has, and half of the slots that nobody uses, those that are needed last; return
        their bytes. `least`: all of these slots but that of the last block. Blocks are computed as before, but panels
        are brought more often.
        """
        freed = 0
        memory: list[Any] = []
        with self._changed:
            self._shrunk = True
            freed += len(self._windows) * self.window_bytes
            self._windows = []
            for side, slots in self._slots.items():
                idle = [slot for slot in slots if not slot.pins]
                idle.sort(key=self._rank(side, self._position + 1), reverse=True)
                last = max(slots, key=lambda slot: slot.taken, default=None)
                goes = [slot for slot in idle if slot is not last][: None if least else -(-len(idle) // 2)]
                gone = [slot for slot in goes if self._is_idle(slot)]
                freed += len(gone) * self.plan.slot_bytes["ab".index(side)]
                memory += [slot.memory for slot in gone]
                self._slots[side] = [slot for slot in slots if slot not in gone]
            self._changed.notify_all()
        if self._shared is not None and memory:
            self._shared.drop(memory)
        return freed

    def _is_idle(self, slot: _Slot) -> bool:
        """Whether neither a block nor another device reads what is in a slot; others learn of nothing there then."""
        return slot.pins == 0 and (self._shared is None or self._shared.retract(slot.number))

    def expect(self, indices: Sequence[int], bring: Callable[[Side, int, Any], None]) -> None:
        """Expect these blocks next, in that order, and no others: `bring(side, index, array)` fills the panel of one,
        in the thread of `bring_ahead`.
        """
        with self._changed:
            if not self._closed:
                self._expected, self._bring = list(indices), bring
                self._wanted = {"a": list(indices), "b": list(indices)}
                self._changed.notify_all()

    def bring_ahead(self) -> None:
        """Bring panels of the blocks that are expected, one after the other, until this is closed. A panel takes the
        place that it would have if its block asked for it, once no block before that one needs what is there.
        """
        while self._bring_next():
            pass

    def _bring_next(self) -> bool:
        """Bring the next panel; False: this is closed. Whoever waits for the end finds no slot held here any more."""
        found = self._next_ahead()
        if found is None:
            return False
        try:
            self._bring_to(*found)
        finally:
            del found
            with self._changed:
                self._bringing = False
                self._changed.notify_all()
        return True

    def _bring_to(self, slot: _Slot, side: Side, index: int, bring: Callable[[Side, int, Any], None]) -> None:
        try:
            self._fill(slot, side, index, partial(bring, side, index), ahead=True)
        except Exception as error:  # whoever needs it finds the same, and says so
            log.warning("a panel could not be brought ahead: %s", error)
            with self._changed:
                self._expected = []
        else:
            self.unpin(slot)

    def _hold(self) -> None:
        """Bring nothing ahead before other blocks are expected; return when nothing is under way."""
        with self._changed:
            self._expected = []
            while self._bringing:
                self._changed.wait()

    def _next_ahead(self) -> tuple[_Slot, Side, int, Callable[[Side, int, Any], None]] | None:
        """Wait for the next panel that may come; return its slot, taken for it; None once this is closed."""
        with self._changed:
            while not self._closed:
                if (found := self._claim_ahead()) is not None:
                    self._bringing = True
                    return (*found, self._bring)
                # Holding no slot, which may be let go meanwhile.
                self._changed.wait(_READ_S if self._read_elsewhere else None)
        return None

    def _claim_ahead(self) -> tuple[_Slot, Side, int] | None:
        """Take a slot for the first panel that is not here; None: there is none, or no block before may miss what is in
        its slot.
        """
        self._read_elsewhere = False
        missing = self._missing()
        if missing is None:
            return None
        side, index = missing
        slot = self._victim(side, self._positions[index])
        if slot.pins or slot.panel in self._needed(side, index):
            return None
        if not self._is_idle(slot):
            self._read_elsewhere = True
            return None
        self._claim(slot, self.grid.panel(side, index))
        return slot, side, index

    def _missing(self) -> tuple[Side, int] | None:
        """Return side and block of the first panel that is not here; one that is under way to another device goes
        behind the others, as long as there is a slot for each.
        """
        there = {side: {slot.panel for slot in slots} for side, slots in self._slots.items()}
        found: tuple[Side, int] | None = None
        for index in self._expected:
            for side, wanted in self._wanted.items():
                panel = self.grid.panel(side, index)
                if index not in wanted or panel in there[side]:
                    continue
                room = None in there[side]
                if room and (shared := self._others(side, index)) is not None and shared.is_coming(side, panel):
                    found = found or (side, index)
                elif room or found is None:
                    return side, index
        return found

    def _others(self, side: Side, index: int) -> SharedSlots | None:
        """Return the way to other devices if a panel is to come from there: this one would wait for the host, with what
        it has to compute before the panel is needed and with it.
        """
        wanted, panel = self._wanted[side], self.grid.panel(side, index)
        before = wanted.index(index) if index in wanted else 0
        blocks = before + 1 + sum(each != index and self.grid.panel(side, each) == panel for each in wanted)
        shared, nbytes = self._shared, self.plan.slot_bytes["ab".index(side)]
        return shared if shared is not None and shared.held_up(self.grid, nbytes, blocks) else None

    def _needed(self, side: Side, index: int) -> set[int]:
        """Return panels that blocks need before that one, and have not taken yet."""
        wanted = self._wanted[side]
        return {self.grid.panel(side, each) for each in wanted[: wanted.index(index)]}

    def _claim(self, slot: _Slot, panel: int) -> None:
        slot.panel, slot.array, slot.ready, slot.pins = panel, None, False, 1

    def _fill(
        self, slot: _Slot | None, side: Side, index: int, fill: Callable[[Any], None], *, ahead: bool = False
    ) -> tuple[Any, float]:
        """Bring a panel to a slot that is taken for it, or beside all, and return it with the seconds that it took,
        which the slot keeps of one that comes `ahead`; the slot is empty if that fails.
        """
        began = time.perf_counter()
        problem = self.grid.problem
        operand = problem.a if side == "a" else problem.b
        layout = panel_operand(operand, self.grid.operand_panel(side, index))
        try:
            array = self._view(self._allocate(layout.nbytes) if slot is None else slot.memory, layout)
            copied = self._bring_in(slot, side, index, array, fill)
        except BaseException:
            if slot is not None:
                with self._changed:
                    slot.panel, slot.pins = None, slot.pins - 1
                    if self._shared is not None:
                        self._shared.retract(slot.number)
                    self._changed.notify_all()
            raise
        seconds = time.perf_counter() - began
        way = "across" if copied else "up"
        log.debug("panel %s%d: %s from %.4f to %.4f", side, self.grid.panel(side, index), way, began, began + seconds)
        with self._changed:
            if slot is not None:
                slot.array, slot.ready, slot.seconds = array, True, seconds if ahead else 0.0
            if copied:
                self.copies += 1
                self.copied_bytes += layout.nbytes
            else:
                self.uploads += 1
                self.uploaded_bytes += layout.nbytes
            self._changed.notify_all()
        return array, seconds

    def _bring_in(self, slot: _Slot | None, side: Side, index: int, array: Any, fill: Callable[[Any], None]) -> bool:
        """Bring a panel, from another device where that is wanted and has it, else from the host, and let others know;
        return whether it came from a device.
        """
        shared, panel = self._shared, self.grid.panel(side, index)
        if shared is None:
            fill(array)
            return False
        with self._changed:
            others = self._others(side, index)
        copied = others is not None and others.bring(side, panel, array)
        if slot is not None:
            shared.coming(slot.number, side, panel)
        if not copied:
            began = time.perf_counter()
            fill(array)
            shared.came(array.nbytes, time.perf_counter() - began)
        if slot is not None:
            shared.ready(slot.number)
        return copied

    def take(self, side: Side, index: int, fill: Callable[[Any], None], *, waits: bool) -> Pin:
        """Return the panel of A or B that a block needs, brought by `fill(array)` where it is not here.

        `waits`: for a slot, if none can be had; only where all who hold panels go on without whoever waits. Else it is
        brought to memory beside the slots, and nothing comes ahead meanwhile. Raises what `fill` and the allocation
        raise, and what the thread's checkpoint does.
        """
        if not waits:
            self._hold()
        slot, found = self._slot_for(side, index, waits)
        if found and slot is not None:
            with self._changed:
                seconds, slot.seconds = slot.seconds, 0.0
            return Pin(self, slot, slot.array, seconds)
        array, seconds = self._fill(slot, side, index, fill)
        return Pin(self, slot, array, seconds)

    def computed(self, seconds: float) -> None:
        """See `Pin.computed`."""
        if self._shared is not None:
            self._shared.computed(self.grid, seconds)

    def take_window(self, nbytes: int) -> Any | None:
        """Return memory for a block's result, to be given back; None where there is none ready, or not so much."""
        with self._changed:
            return self._windows.pop() if self._windows and nbytes <= self.window_bytes else None

    def give_window(self, memory: Any) -> None:
        """Take memory of a window back: nothing on the device writes to it or reads it any more."""
        with self._changed:
            if not self._closed and not self._shrunk:
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
                    self._note_use(slot, side, index)
                    return slot, True
                if slot is None:
                    slot = self._victim(side, self._positions[index])
                    if self._is_idle(slot):
                        self._claim(slot, panel)
                        self._note_use(slot, side, index)
                        return slot, False
                if not waits:
                    return None, False
                self._changed.wait(_LOOK_S if slot.pins else _READ_S)

    def _note_use(self, slot: _Slot, side: Side, index: int) -> None:
        self._taken += 1
        slot.taken = self._taken
        self._position = self._positions[index]
        if index in self._wanted[side]:
            self._wanted[side].remove(index)
            self._changed.notify_all()

    def _victim(self, side: Side, position: int) -> _Slot:
        """Return an empty slot, or the one that the plan's rule takes (`memory_plan`)."""
        return max(self._slots[side], key=self._rank(side, position))

    def _rank(self, side: Side, position: int) -> Callable[[_Slot], tuple[bool, bool, int, int]]:
        """Return what is greatest of the slot that goes first before the block at that position."""
        uses = self._uses[side]

        def rank(slot: _Slot) -> tuple[bool, bool, int, int]:
            if slot.panel is None:
                return True, True, 0, 0
            mine = uses[slot.panel]
            number = bisect_right(mine, position)
            just_used = number > 0 and mine[number - 1] == position - 1
            return False, not just_used, mine[number] if number < len(mine) else _NEVER, -slot.panel

        return rank


@dataclass(frozen=True, slots=True)
class PanelUse:
    """Use of a panel as an operand of one block."""

    slots: PanelSlots
    side: Side
    index: int

    def take(self, fill: Callable[[Any], None], *, waits: bool) -> Pin:
        """See `PanelSlots.take`."""
        return self.slots.take(self.side, self.index, fill, waits=waits)


def _nothing(*_: object) -> None:
    """Bring nothing: no block is expected."""
