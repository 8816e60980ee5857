"""Slots of panels: who waits for whom, what is beside them, and what an error leaves."""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref

import numpy as np
import pytest

from gemmserve_kernels import DeviceSpec, GemmProblem, Operand
from gemmserve_kernels.blocks.grid import Grid
from gemmserve_kernels.blocks.memory_plan import plan_memory
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_service.executor.worker.blocks.panel_slots import PanelSlots, PanelUse
from gemmserve_service.executor.worker.blocks.panels_ahead import PanelsAhead

WAIT_S = 60


@pytest.fixture
def slots():
    """One slot for each operand, of a grid of 3 x 3 blocks."""
    square = Operand.contiguous((48, 48), np.dtype("f8"))
    grid = Grid.with_sides(GemmProblem.build(square, square), (16, 16, 1))
    made = []

    def allocate(nbytes):
        made.append(nbytes)
        return np.empty(nbytes, np.uint8)

    def view(memory, layout):
        return memory[: layout.nbytes].view(layout.dtype).reshape(layout.shape)

    slots = PanelSlots(grid, plan_memory(grid, DeviceSpec.cpu(), 0), allocate, view)
    assert slots.plan.slots == (1, 1)
    assert made == [16 * 48 * 8] * 2
    slots.made = made
    return slots


def fill_with(value):
    return lambda array: array.fill(value)


def refuse(array):
    raise AssertionError("it is there")


def test_a_panel_is_brought_once_while_it_is_there(slots) -> None:
    first = slots.take("a", 0, fill_with(1), waits=True)
    again = PanelUse(slots, "a", 2).take(refuse, waits=True)  # another block of the same rows
    assert first.array is again.array
    assert (again.array == 1).all()
    for pin in (first, again, first):
        pin.release()
    assert slots.take("a", 1, refuse, waits=True).array.shape == (16, 48)
    assert (slots.uploads, slots.uploaded_bytes) == (1, 16 * 48 * 8)


def test_who_may_not_wait_has_memory_beside_the_slots(slots) -> None:
    held = slots.take("b", 0, fill_with(1), waits=True)
    beside = slots.take("b", 1, fill_with(2), waits=False)
    assert (held.array == 1).all()
    assert (beside.array == 2).all()
    assert len(slots.made) == 3
    beside.release()
    held.release()
    assert slots.take("b", 0, refuse, waits=False).array is not None


def test_who_waits_has_the_slot_when_it_is_let_go(slots) -> None:
    held = slots.take("a", 0, fill_with(1), waits=True)
    found = []
    waits = threading.Thread(target=lambda: found.append(slots.take("a", 3, fill_with(2), waits=True)))
    waits.start()
    assert not found
    assert (held.array == 1).all()
    held.release()
    waits.join(WAIT_S)
    assert (found[0].array == 2).all()
    assert len(slots.made) == 2


def test_who_waits_can_be_stopped(slots) -> None:
    slots.take("a", 0, fill_with(1), waits=True)

    def stop():
        raise TimeoutError

    with interruptible(stop), pytest.raises(TimeoutError):
        slots.take("a", 3, fill_with(2), waits=True)


def test_a_panel_that_could_not_be_brought_is_not_there(slots) -> None:
    def fail(array):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        slots.take("a", 0, fail, waits=True)
    assert (slots.take("a", 0, fill_with(3), waits=True).array == 3).all()


def test_what_is_closed_keeps_nothing_but_serves_on(slots) -> None:
    held = slots.take("a", 0, fill_with(1), waits=True)
    slots.close()
    assert (held.array == 1).all()
    assert (slots.take("a", 0, fill_with(2), waits=True).array == 2).all()
    assert (held.array == 1).all()
    held.release()


def test_windows_are_lent_as_long_as_there_are_any() -> None:
    square = Operand.contiguous((48, 48), np.dtype("f8"))
    grid = Grid.with_sides(GemmProblem.build(square, square), (16, 16, 1))
    slots = PanelSlots(grid, plan_memory(grid, DeviceSpec.cpu(), 0), bytearray, memoryview, windows=2)
    first, second = slots.take_window(16 * 16 * 8), slots.take_window(8)
    assert (len(first), len(second)) == (16 * 16 * 8, 16 * 16 * 8)
    assert first is not second
    assert slots.take_window(8) is None
    slots.give_window(first)
    assert slots.take_window(16 * 16 * 8 + 1) is None, "more than a block has"
    assert slots.take_window(16 * 16 * 8) is first
    slots.close()
    slots.give_window(second)
    assert slots.take_window(8) is None


# -- ahead of the blocks --------------------------------------------------------------------------------------------

PANEL, WINDOW = 16 * 64 * 8, 16 * 16 * 8


@pytest.fixture
def make_slots():
    """Slots of a grid of 4 x 4 blocks, for so many panels and three windows; what was brought ahead, in its order."""
    made = []

    def make(panels):
        square = Operand.contiguous((64, 64), np.dtype("f8"))
        grid = Grid.with_sides(GemmProblem.build(square, square), (16, 16, 1))
        least = plan_memory(grid, DeviceSpec.cpu(), 0)
        budget = least.needed_bytes + (panels - 2) * PANEL + 2 * WINDOW
        plan = plan_memory(grid, DeviceSpec.cpu(), budget)
        slots = PanelSlots(grid, plan, bytearray, lambda memory, _: memory, windows=3)
        assert (slots.plan.fits, slots.plan.windows) == (True, 3)
        ahead = PanelsAhead(lambda: None)
        ahead.follow(slots)
        made.append(slots)
        return slots, []

    yield make
    for slots in made:
        slots.close()


def bringing(slots, brought):
    def bring(side, index, memory):
        assert memory is not None
        brought.append((side, slots.grid.panel(side, index)))

    return bring


def planned(slots, *, computed=-1):
    """Panels, in their order, whose slots are free once so many blocks are computed."""
    found = []
    for upload in slots.plan.uploads:
        if upload.after > computed:
            break
        found.append((upload.side, upload.panel))
    return found


def until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("panels", [8, 7, 6, 5, 4, 3, 2])
def test_panels_come_ahead_in_the_order_of_the_plan_as_soon_as_their_slots_are_free(make_slots, panels) -> None:
    """The first block begins after one panel of each operand; every other panel is there, or on its way, before its
    block asks for it, and comes when the block that had its slot is computed: not before, and without being asked for.
    """
    slots, brought = make_slots(panels)
    order = slots.plan.order
    for position, index in enumerate(order):
        slots.expect(order[position:], bringing(slots, brought))
        until(lambda position=position: len(brought) >= len(planned(slots, computed=position - 1)))
        assert brought == planned(slots, computed=position - 1), position
        for pin in [slots.take(side, index, refuse, waits=True) for side in ("a", "b")]:
            pin.release()  # it is computed
    assert brought == [(upload.side, upload.panel) for upload in slots.plan.uploads]
    assert brought[:2] == [("a", 0), ("b", 0)]
    assert slots.uploaded_bytes == slots.plan.uploaded_bytes


def test_a_block_that_was_not_expected_goes_first(make_slots) -> None:
    """Panels that came ahead give way to it, which nobody waits for: their blocks bring them again."""
    slots, brought = make_slots(2)
    first, _second, *_ = slots.plan.order
    slots.expect([first], bringing(slots, brought))
    until(lambda: len(brought) == 2)
    other = next(i for i in slots.plan.order if not {slots.grid.panel(s, i) for s in "ab"} & {0})
    slots.expect([other], bringing(slots, brought))
    until(lambda: len(brought) == 4)
    for side in ("a", "b"):
        slots.take(side, other, refuse, waits=True).release()
        slots.take(side, first, lambda memory: None, waits=True).release()
    assert slots.uploads == 6


def test_who_may_not_wait_stops_what_comes_ahead(make_slots) -> None:
    slots, brought = make_slots(2)
    order = slots.plan.order
    held = [slots.take(side, order[0], lambda memory: None, waits=True) for side in ("a", "b")]
    slots.expect(order[1:], bringing(slots, brought))
    slots.take("a", order[0], refuse, waits=False).release()
    for pin in held:
        pin.release()
    time.sleep(0.02)
    assert not brought
    slots.expect(order[1:], bringing(slots, brought))
    until(lambda: brought)


def test_a_panel_that_could_not_be_brought_ahead_is_brought_by_its_block(make_slots) -> None:
    slots, brought = make_slots(8)
    tried = threading.Event()

    def fail(*_):
        tried.set()
        raise OSError("gone")

    slots.expect(slots.plan.order, fail)
    assert tried.wait(WAIT_S)
    pin = slots.take("a", slots.plan.order[0], brought.append, waits=True)
    assert brought == [pin.array]
    pin.release()


def test_nothing_is_read_any_more_once_they_are_closed(make_slots) -> None:
    slots, _ = make_slots(8)
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def bring(*_):
        begun.set()
        go_on.wait(WAIT_S)
        ended.append("bring")

    slots.expect(slots.plan.order, bring)
    assert begun.wait(WAIT_S)
    closes = threading.Thread(target=lambda: (slots.close(), ended.append("close")))
    closes.start()
    closes.join(0.05)
    assert not ended
    go_on.set()
    closes.join(WAIT_S)
    assert ended == ["bring", "close"]


class Memory:
    """Something that can be seen to go."""


@pytest.mark.parametrize(("closes", "more"), [(True, 1 << 40), (True, 2 * PANEL), (False, 1 << 40)])
def test_memory_of_panels_that_came_ahead_goes_with_them(closes, more) -> None:
    """At once: what is opened next may need it."""
    square = Operand.contiguous((64, 64), np.dtype("f8"))
    grid = Grid.with_sides(GemmProblem.build(square, square), (16, 16, 1))
    made = []

    def allocate(_):
        memory = Memory()
        made.append(weakref.ref(memory))
        return memory

    budget = plan_memory(grid, DeviceSpec.cpu(), 0).needed_bytes + more
    slots = PanelSlots(grid, plan_memory(grid, DeviceSpec.cpu(), budget), allocate, lambda memory, _: memory)
    PanelsAhead(lambda: None).follow(slots)
    brought = []
    slots.expect(slots.plan.order, bringing(slots, brought))
    until(lambda: len(brought) == len(made))
    if closes:
        time.sleep(0.02)  # for whoever waits for a slot
        slots.close()
        assert not [memory for memory in made if memory() is not None]
        return
    until(lambda: slots.uploads == 8)
    slots.expect([], refuse)
    slots.take("a", slots.plan.order[0], refuse, waits=False).release()  # nothing is under way
    slots.shrink(least=True)
    assert len([memory for memory in made if memory() is not None]) == 2
    slots.close()


# -- too little memory ----------------------------------------------------------------------------------------------


def test_what_is_let_go_first_is_what_no_block_uses_and_is_needed_last(make_slots) -> None:
    slots, _ = make_slots(8)
    assert slots.plan.slots == (4, 4)
    order = slots.plan.order
    for index in order[:4]:  # two panels of each
        for side in ("a", "b"):
            slots.take(side, index, lambda memory: None, waits=True).release()
    held = [slots.take(side, order[3], refuse, waits=True) for side in ("a", "b")]
    lent = slots.take_window(WINDOW)
    assert slots.shrink() == 2 * WINDOW + 2 * 2 * PANEL, "half of three, the empty ones, and windows that nobody has"
    slots.give_window(lent)
    assert slots.take_window(WINDOW) is None
    for side in ("a", "b"):
        for index in order[:4]:
            slots.take(side, index, refuse, waits=True).release()
    assert slots.shrink(least=True) == 2 * PANEL
    for side, pin in zip(("a", "b"), held, strict=True):
        slots.take(side, order[3], refuse, waits=True).release()
        pin.release()
        pin = slots.take(side, order[4], lambda memory: None, waits=True)  # noqa: PLW2901
        pin.release()
    assert slots.shrink(least=True) == 0, "one of each stays"


@pytest.mark.parametrize("seed", range(12))
def test_blocks_in_any_order_find_their_panels_whatever_comes_ahead(seed) -> None:
    """Two blocks at once, some of them not those that were expected, slots that go meanwhile, panels beside them:
    nobody waits for ever, and what a block reads is its panel.
    """
    chance = random.Random(seed)
    square = Operand.contiguous((64, 64), np.dtype("f8"))
    grid = Grid.with_sides(GemmProblem.build(square, square), (16, 16, 1))
    budget = plan_memory(grid, DeviceSpec.cpu(), 0).needed_bytes + chance.randrange(7) * PANEL
    plan = plan_memory(grid, DeviceSpec.cpu(), budget)
    slots = PanelSlots(
        grid, plan, lambda nbytes: np.empty(nbytes, np.uint8), lambda memory, layout: memory[: layout.nbytes]
    )

    def bring(side, index, array):
        if chance.random() < 0.1:
            raise OSError("gone")
        array[:] = grid.panel(side, index)

    ahead = PanelsAhead(lambda: None)
    ahead.follow(slots)
    order = list(plan.order)
    for _ in range(chance.randrange(4)):
        order.insert(chance.randrange(16), order.pop(chance.randrange(16)))
    computing: queue.Queue = queue.Queue(2)
    wrong = []

    def compute():
        while (found := computing.get()) is not None:
            index, pins = found
            if chance.random() < 0.3:
                time.sleep(0.001)
            wrong.extend(index for side, pin in pins if (pin.array != grid.panel(side, index)).any())
            for _, pin in pins:
                pin.release()

    computes = threading.Thread(target=compute, daemon=True)
    computes.start()

    def load():
        for place, index in enumerate(order):
            if chance.random() < 0.9:
                slots.expect(order[place : place + 5], bring)
            pins = []
            for side in ("a", "b"):
                fill = fill_with(grid.panel(side, index))
                pins.append((side, slots.take(side, index, fill, waits=chance.random() < 0.9)))
            computing.put((index, pins))
            if chance.random() < 0.1:
                slots.shrink(least=chance.random() < 0.5)
        computing.put(None)

    loads = threading.Thread(target=load, daemon=True)
    loads.start()
    loads.join(WAIT_S)
    computes.join(WAIT_S)
    assert not loads.is_alive()
    assert not computes.is_alive()
    slots.close()
    assert not wrong
