"""Long work in turns: others run in between, more often while they are about; short work asks for nothing."""

from __future__ import annotations

import asyncio
import math

import pytest

from gemmserve_service.runtime import yielding


class Clock:
    """Stands still unless somebody works."""

    now = 0.0

    async def work(self, mine, seconds):
        """Work of one's own, in parts of a tenth of a millisecond."""
        for _ in range(round(seconds * 1e4)):
            self.now += 1e-4
            await mine.pause()


class Other:
    """Somebody who works for some milliseconds in each turn of the event loop."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.turns = clock, seconds, 0
        self.task = asyncio.ensure_future(self._run())

    async def _run(self):
        while True:
            self.turns += 1
            self.clock.now += self.seconds
            await asyncio.sleep(0)

    def taken(self):
        """Turns since the last call."""
        taken, self.turns = self.turns, 0
        return taken


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(yielding.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(yielding.Turns, "_others_at", -math.inf)
    return clock


async def test_others_have_their_turn_when_it_is_due(clock):
    other = Other(clock, 0.0)
    mine = yielding.Turns()
    for _ in range(100):
        await mine.pause()
    assert other.taken() == 0
    for _ in range(3):
        clock.now += 0.01
        await mine.pause()
        await mine.pause()
    assert other.taken() == 3
    other.task.cancel()


async def test_turns_are_brief_while_others_are_about(clock):
    """A request has some twenty steps, each of which waited for five milliseconds."""
    mine = yielding.Turns()
    other = Other(clock, 2e-4)
    await clock.work(mine, 0.006)  # in which it is noticed
    other.taken()
    await clock.work(mine, 0.01)
    assert other.taken() >= 20
    other.seconds = 0.0  # it looks around and does nothing
    await clock.work(mine, 0.03)
    other.taken()
    await clock.work(mine, 0.05)
    assert other.taken() == 10
    other.task.cancel()


async def test_who_begins_while_others_are_about_is_brief_at_once(clock):
    other = Other(clock, 2e-4)
    await clock.work(yielding.Turns(), 0.006)
    other.taken()
    await clock.work(yielding.Turns(), 0.0006)
    assert other.taken() > 0
    other.task.cancel()


@pytest.mark.parametrize(("seconds", "taken"), [(2e-4, 5), (0.003, 1), (0.0, 1)])
async def test_others_go_on_as_long_as_they_are_busy_up_to_a_bound(clock, seconds, taken):
    mine = yielding.Turns()
    other = Other(clock, seconds)
    clock.now += 0.01
    await mine.pause()
    assert other.taken() == taken
    other.task.cancel()
