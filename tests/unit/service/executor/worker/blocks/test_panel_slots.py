"""Slots of panels: who waits for whom, what is beside them, and what an error leaves."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gemmserve_kernels import DeviceSpec, GemmProblem, Operand
from gemmserve_kernels.blocks.grid import Grid
from gemmserve_kernels.blocks.memory_plan import plan_memory
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_service.executor.worker.blocks.panel_slots import PanelSlots, PanelUse

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
