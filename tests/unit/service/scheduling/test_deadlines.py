"""Deadlines: each at its moment, those that nobody needs any more forgotten, one timer for all."""

from __future__ import annotations

import asyncio
import collections
import functools
import weakref

import pytest
import uvloop
from stepped_loop import SteppedLoop

from gemmserve_service.scheduling.deadlines import Deadlines


def in_steps(test):
    """Runs a test on a loop whose clock stands still."""

    @functools.wraps(test)
    def run(*args, **fields):
        async def stopped():
            asyncio.get_running_loop().stop_clock()
            await test(*args, **fields)
            asyncio.get_running_loop().start_clock()

        with asyncio.Runner(loop_factory=SteppedLoop) as runner:
            runner.run(stopped())

    return run


@pytest.fixture
def expired():
    return []


@pytest.fixture
def deadlines(expired):
    return Deadlines(expired.append)


async def pass_(seconds):
    asyncio.get_running_loop().advance(seconds)
    for _ in range(4):
        await asyncio.sleep(0)


@in_steps
async def test_each_at_its_moment_in_whatever_order_they_came(deadlines, expired):
    for thing, seconds in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("now", 0.0), ("past", -1.0), ("b'", 2.0)):
        deadlines.add(thing, seconds)
    await pass_(0.0)
    assert sorted(expired) == ["now", "past"]
    expired.clear()
    await pass_(0.99)
    assert expired == []
    await pass_(0.02)
    assert expired == ["a"]
    await pass_(1.0)
    assert expired == ["a", "b", "b'"]
    await pass_(10.0)
    assert expired == ["a", "b", "b'", "c"]


@in_steps
async def test_what_is_cancelled_does_not_expire(deadlines, expired):
    made = [deadlines.add(thing, 1.0 + thing) for thing in range(5)]
    for thing in (0, 2, 4):
        deadlines.cancel(made[thing])
    await pass_(10.0)
    assert expired == [1, 3]


@in_steps
async def test_what_is_cancelled_is_let_go_and_forgotten(deadlines):
    class Thing:
        pass

    things = collections.deque()
    for _ in range(10_000):
        thing = Thing()
        things.append((deadlines.add(thing, 300.0), weakref.ref(thing)))
        del thing
        if len(things) > 10:
            deadline, reference = things.popleft()
            deadlines.cancel(deadline)
            assert reference() is None
    assert all(reference() is not None for _, reference in things)
    assert len(deadlines._heap) < 600


@in_steps
async def test_there_is_one_timer(deadlines, monkeypatch):
    loop = asyncio.get_running_loop()
    made = []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *args: made.append(args) or call_at(*args))
    for thing in range(100):
        deadlines.add(thing, 300.0 + thing)
    assert len(made) == 1
    deadlines.add("sooner", 1.0)
    assert len(made) == 2


@in_steps
async def test_one_may_lead_to_another():
    loop = asyncio.get_running_loop()
    seen = []

    def expire(thing):
        seen.append(thing)
        if thing == "fails":
            raise ValueError(thing)
        if thing < 3:
            deadlines.add(thing + 1, 1.0)

    told = []
    loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
    deadlines = Deadlines(expire)
    deadlines.add(0, 1.0)
    for _ in range(4):
        await pass_(1.01)
    assert seen == [0, 1, 2, 3]
    deadlines.add("fails", 1.0)
    deadlines.add(5, 2.0)
    for _ in range(3):
        await pass_(1.01)
    assert seen[4:] == ["fails", 5]
    assert told == ["fails"]
    deadlines.add(6, 1.0)
    deadlines.stop()
    await pass_(2.0)
    assert seen[-1] == 5


@pytest.mark.parametrize("first", [-1.0, 0.0, 0.0004, 0.002])
def test_uvloop_takes_what_is_due_now_or_past_beside_others(first):
    async def add_some():
        expired, over = [], asyncio.Event()

        def expire(thing):
            expired.append(thing)
            if len(expired) == 4:
                over.set()

        deadlines = Deadlines(expire)
        for thing, seconds in (("a", first), ("b", 0.001), ("c", 300.0), ("d", -1.0), ("e", 0.0)):
            deadlines.add(thing, seconds)
        await over.wait()
        deadlines.stop()
        return sorted(expired)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(add_some()) == ["a", "b", "d", "e"]
