"""The arena: blocks that never overlap, serve again when nobody writes to them or looks at them, and become one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gemmserve_service.store.extents.arena import Arena
from gemmserve_service.store.extents.memfd import create_arena, memory_extents_supported

MIB = 1 << 20
PAGE = 4096
pytestmark = pytest.mark.skipif(not memory_extents_supported(), reason="this system has no memfd")


@pytest.fixture
def make():
    fds = []

    def make(nbytes=MIB, **fields):
        fds.append(create_arena(nbytes))
        return Arena(f"/proc/{os.getpid()}/fd/{fds[-1]}", nbytes, **fields)

    yield make
    for fd in fds:
        os.close(fd)


def test_extents_are_views_of_one_file_that_is_mapped_once(make):
    arena = make()
    first, second = arena.allocate(10 * PAGE), arena.allocate(1)
    assert first.file == second.file == (first.path, MIB)
    assert first.name != second.name
    assert (first.start, first.capacity, second.start, second.capacity) == (0, 10 * PAGE, 10 * PAGE, PAGE)
    first.view(PAGE)[:5] = b"first"
    second.view(1)[:] = b"2"
    content = Path(first.path).read_bytes()  # as another process sees it
    assert (content[:5], content[10 * PAGE : 10 * PAGE + 1]) == (b"first", b"2")
    assert arena.owns(first)


def test_the_lowest_room_serves_first_and_neighbours_become_one(make):
    arena = make(16 * PAGE)
    blocks = [arena.allocate(4 * PAGE) for _ in range(4)]
    assert arena.allocate(1) is None
    for number in (2, 0):
        arena.free(blocks[number])
    assert arena.allocate(5 * PAGE) is None, "there are eight pages, not in one place"
    again = arena.allocate(3 * PAGE)
    assert again.start == 0
    assert again.name != blocks[0].name, "a name never comes back"
    arena.free(blocks[1])
    assert arena.allocate(9 * PAGE).start == 3 * PAGE


def test_large_blocks_are_multiples_of_two_mebibytes(make):
    arena = make(64 * MIB)
    assert arena.allocate(16 * MIB + 1).capacity == 18 * MIB
    assert arena.allocate(16 * MIB - 1).capacity == 16 * MIB


def test_what_is_looked_at_serves_again_later(make):
    arena = make(4 * PAGE)
    extent = arena.allocate(4 * PAGE)
    piece = extent.view(4 * PAGE)[10:20].toreadonly()
    arena.free(extent)
    assert arena.allocate(1) is None
    assert arena.used_bytes == 4 * PAGE
    del piece
    assert arena.used_bytes == 0, "whoever asks has it looked at"
    assert arena.allocate(4 * PAGE) is not None


def test_what_a_lost_worker_may_write_to_serves_again_when_the_next_one_is_there(make):
    arena = make(8 * PAGE)
    first, second = arena.allocate(4 * PAGE), arena.allocate(4 * PAGE)
    view = second.view(PAGE)
    arena.quarantine(first, "cuda:0")
    arena.quarantine(second, "cuda:0")
    arena.worker_ready("cuda:1")
    assert arena.allocate(1) is None
    assert arena.quarantined_bytes == 8 * PAGE
    arena.worker_ready("cuda:0")
    assert (arena.quarantined_bytes, arena.used_bytes) == (0, 4 * PAGE), "somebody looks at the second one"
    assert arena.allocate(PAGE).start == 0
    del view
    assert arena.allocate(7 * PAGE).start == PAGE


def test_several_lost_workers_are_waited_for_though_the_extent_is_used_meanwhile(make):
    arena = make(8 * PAGE)
    extent, other = arena.allocate(4 * PAGE), arena.allocate(PAGE)
    for worker in ("cuda:0", "cuda:1", "cuda:2"):
        arena.suspect(extent, worker)
    arena.worker_ready("cuda:2")
    assert arena.owns(extent)
    arena.free(extent)
    arena.free(other)
    assert (arena.quarantined_bytes, arena.used_bytes) == (4 * PAGE, 4 * PAGE)
    with pytest.raises(ValueError, match="not live"):
        arena.suspect(extent, "cuda:3")
    arena.worker_ready("cuda:0")
    assert arena.quarantined_bytes == 4 * PAGE
    arena.worker_ready("cuda:1")
    assert (arena.quarantined_bytes, arena.used_bytes) == (0, 0)


def test_large_results_share_one_half_with_all_that_is_there(make):
    arena = make(16 * PAGE)
    assert arena.allocate_share([9 * PAGE]) is None
    assert arena.allocate_share([4 * PAGE, 5 * PAGE]) is None
    assert arena.used_bytes == 0
    first, second = arena.allocate_share([3 * PAGE, 1])
    assert (first.capacity, second.capacity, second.start) == (3 * PAGE, PAGE, 3 * PAGE)
    assert arena.allocate(PAGE) is not None
    assert arena.allocate_share([4 * PAGE]) is None, "five pages are taken"
    assert arena.allocate_share([3 * PAGE]) is not None
    assert arena.allocate(8 * PAGE) is not None, "the other half is free"


def test_room_for_large_results_is_there_when_nobody_looks_any_more_at_what_was_freed(make):
    arena = make(16 * PAGE)
    (extent,) = arena.allocate_share([8 * PAGE])
    view = extent.view(PAGE)
    arena.free(extent)
    assert arena.allocate_share([PAGE]) is None
    view.release()
    assert arena.allocate_share([8 * PAGE]) is not None


def test_of_several_large_results_each_finds_room_in_one_place_or_none_is_given_any(make):
    arena = make(32 * PAGE)
    for number, page in enumerate([arena.allocate(PAGE) for _ in range(32)]):
        if number % 4:
            arena.free(page)
    assert arena.allocate_share([2 * PAGE, 4 * PAGE]) is None
    assert arena.used_bytes == 8 * PAGE
    assert arena.allocate_share([2 * PAGE, 3 * PAGE]) is not None


def test_nothing_is_allocated_before_workers_of_an_earlier_front_have_said_hello(make):
    arena = make(writers=["cuda:0", "cuda:1"])
    assert arena.allocate(1) is None
    arena.worker_ready("cuda:1")
    assert arena.allocate(1) is None
    arena.worker_ready("cuda:0")
    assert arena.allocate(1) is not None


def test_an_extent_is_taken_back_once(make):
    arena, other = make(), make()
    extent = arena.allocate(1)
    with pytest.raises(ValueError, match="not live"):
        other.free(extent)
    arena.free(extent)
    assert not arena.owns(extent)
    with pytest.raises(ValueError, match="not live"):
        arena.free(extent)
    with pytest.raises(ValueError, match="not live"):
        arena.quarantine(extent, "cuda:0")


def test_an_arena_of_nothing_has_no_room():
    assert Arena("/nowhere", 0).allocate(1) is None


class Blocks(RuleBasedStateMachine):
    """Blocks in any order, against a list of what is taken."""

    PAGES = 64
    WORKERS = ("cuda:0", "cuda:1")

    @initialize()
    def begin(self):
        self.fd = create_arena(self.PAGES * PAGE)
        self.arena = Arena(f"/proc/{os.getpid()}/fd/{self.fd}", self.PAGES * PAGE)
        self.live, self.views, self.apart, self.gone = [], [], [], []

    def taken(self):
        """Blocks that are somebody's, as (first page, pages)."""
        blocks = [*self.live, *self.gone, *[extent for _, extent in self.apart]]
        return [(extent.start // PAGE, extent.capacity // PAGE) for extent in blocks]

    def holes(self):
        """Pages of each hole, in the order of their addresses."""
        used = [False] * self.PAGES
        for start, count in self.taken():
            for page in range(start, start + count):
                assert not used[page], "two blocks overlap"
                used[page] = True
        runs = "".join("x" if each else "." for each in used).split("x")
        return [len(run) for run in runs if run]

    def settle(self):
        """Forgets what was freed and is not looked at."""
        self.gone = [extent for extent in self.gone if any(owner is extent for owner, _ in self.views)]

    @rule(pages=st.integers(1, 20), look=st.booleans())
    def allocate(self, pages, look):
        self.settle()
        fits = max(self.holes(), default=0) >= pages
        extent = self.arena.allocate(pages * PAGE)
        assert (extent is not None) == fits
        if extent is None:
            return
        assert all(
            extent.start + extent.capacity <= s * PAGE or (s + n) * PAGE <= extent.start for s, n in self.taken()
        )
        self.live.append(extent)
        if look:
            self.views.append((extent, extent.view(extent.capacity)))

    @rule(data=st.data())
    def look_away(self, data):
        if self.views:
            self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))

    @rule(data=st.data())
    def free(self, data):
        if self.live:
            extent = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
            self.arena.free(extent)
            self.gone.append(extent)
            if not any(owner is extent for owner, _ in self.views):
                self.gone.remove(extent)

    @rule(data=st.data(), worker=st.sampled_from(WORKERS))
    def lose(self, data, worker):
        if self.live:
            extent = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
            self.arena.quarantine(extent, worker)
            self.apart.append((worker, extent))

    @rule(worker=st.sampled_from(WORKERS))
    def return_(self, worker):
        self.gone += [extent for owner, extent in self.apart if owner == worker]
        self.apart = [each for each in self.apart if each[0] != worker]
        self.arena.worker_ready(worker)
        self.settle()

    @invariant()
    def counts(self):
        if hasattr(self, "arena"):
            # What is looked at no more is counted until somebody asks for room.
            assert self.arena.used_bytes >= sum(self._bytes(self.settled()))
            assert self.arena.quarantined_bytes == sum(extent.capacity for _, extent in self.apart)

    def settled(self):
        looked_at = [extent for extent in self.gone if any(owner is extent for owner, _ in self.views)]
        return [*self.live, *looked_at, *[extent for _, extent in self.apart]]

    @staticmethod
    def _bytes(extents):
        return [extent.capacity for extent in extents]

    def teardown(self):
        if not hasattr(self, "arena"):
            return
        self.views.clear()
        for extent in self.live:
            self.arena.free(extent)
        for worker in self.WORKERS:
            self.arena.worker_ready(worker)
        whole = self.arena.allocate(self.PAGES * PAGE)
        assert whole is not None, "all of it is one block again"
        os.close(self.fd)


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
