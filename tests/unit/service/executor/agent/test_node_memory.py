"""The memory of a node: copies that are kept as long as there is room, and pages that serve again."""

from __future__ import annotations

import pytest

from gemmserve_service.executor.agent.node_memory import NodeMemory

PAGE = 4096


@pytest.fixture
def gone():
    return []


@pytest.fixture
def memory(gone):
    return NodeMemory(4 * PAGE, 100, gone.append)


def bring(memory, array, nbytes=PAGE):
    copy, new = memory.hold(array, nbytes)
    copy.whole = True
    memory.release(copy)
    return new


def test_the_copy_that_was_used_longest_ago_goes(memory):
    assert [bring(memory, array) for array in "abcd"] == [True] * 4
    assert not bring(memory, "a")
    assert bring(memory, "e")  # for b
    assert [bring(memory, array) for array in "acde"] == [False] * 4
    assert bring(memory, "b")
    assert (memory.hits, memory.misses) == (5, 6)
    assert memory.used_bytes == 4 * PAGE


def test_pages_serve_again_under_their_name(memory, gone):
    first = memory.take(PAGE)
    first.view(4)[:] = b"1234"
    memory.give(first)
    assert memory.take(PAGE).name == first.name
    assert gone == []


def test_what_is_held_stays_and_says_so(memory):
    held = [memory.hold(array, PAGE)[0] for array in "ab"]
    assert memory.room_for([PAGE, PAGE])
    assert not memory.room_for([PAGE, PAGE, PAGE])
    for array in "cdef":
        bring(memory, array)
    assert all(memory.find(copy.array, PAGE) is copy for copy in held)
    memory.release(held[0])  # its bytes never came
    assert memory.find("a", PAGE) is None
    assert memory.room_for([PAGE] * 3)


def test_what_is_larger_than_all_has_room_alone(memory, gone):
    bring(memory, "a")
    assert memory.room_for([9 * PAGE])
    extent = memory.take(9 * PAGE)
    assert not memory.room_for([1])
    assert memory.find("a", PAGE) is None
    memory.give(extent)
    assert memory.used_bytes == 0
    assert extent.name in gone


def test_pieces_are_bounded_too(gone):
    memory = NodeMemory(100 * PAGE, 3, gone.append)
    for array in "abcde":
        bring(memory, array)
        assert memory.copies <= 3
    assert not bring(memory, "e")


def test_arrays_that_are_gone(memory):
    bring(memory, "a")
    copy, _ = memory.hold("b", PAGE)
    copy.whole = True
    memory.forget(["a", "b", "never"])
    assert memory.used_bytes == PAGE
    again, new = memory.hold("b", PAGE)
    assert new
    assert again.extent.name != copy.extent.name  # somebody still reads the other
    memory.release(copy)
    assert memory.used_bytes == PAGE


def test_a_longer_copy_takes_the_place_of_one_too_short(memory):
    bring(memory, "a", PAGE)
    copy, new = memory.hold("a", PAGE + 1)
    assert new
    assert memory.used_bytes == 2 * PAGE
    copy.whole = True
    memory.release(copy)
    assert not bring(memory, "a", PAGE)


def test_results_are_kept_until_the_link_ends(memory):
    extent = memory.take(PAGE)
    memory.keep("d", extent, 100)
    bring(memory, "a")
    assert memory.find("d", 100) is not None
    memory.forget_made()
    assert memory.find("d", 100) is None
    assert memory.find("a", PAGE) is not None
    memory.clear()
    assert memory.copies == memory.used_bytes == 0


def test_what_a_task_on_the_device_may_read_is_not_dropped(memory):
    memory.reads(["d", "d"])
    memory.keep("d", memory.take(PAGE), PAGE)
    for array in "abcdefgh".replace("d", ""):
        bring(memory, array)
    assert memory.find("d", PAGE) is not None
    memory.read(["d"])
    memory.read(["d"])
    for array in "abce":
        bring(memory, array)
    assert memory.find("d", PAGE) is None
