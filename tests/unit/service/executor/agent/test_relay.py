"""Results that stay on a device for a while: a worker on the stand-in for a device, behind an agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from python_path import python_path

from gemmserve_service.executor.protocol import Done, Drop, Kept, RunBatch, Write, Written, row_without_place

SUPPORT = Path(__file__).parents[4] / "support"
RNG = np.random.default_rng(11)
A, B = RNG.integers(-4, 5, (2, 200, 200)).astype("complex64")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", python_path(SUPPORT / "device_on_host", SUPPORT / "cupy_on_numpy"))
    monkeypatch.setenv("GEMMSERVE_ARENA_AHEAD_BYTES", "16777216")


def deferred(message):
    """The same task, whose result has no place yet."""
    (work,) = message.tasks
    rows = [row_without_place(row[4]) if row[4] == f"{work.task}-d" else row for row in work.extents]
    return RunBatch(tasks=[replace(work, extents=rows, defer=True, attempt=3)])


@pytest.mark.parametrize("inline", [0, 1 << 20])
async def test_results_are_written_when_and_where_the_front_says(front, joined, product, inline):
    await joined(front, device="cuda:0", inline_bytes=inline)
    assert front.hellos[0].result_bytes > 0
    small = A[:50, :50].copy() if inline else A
    message, result = product(front, small, small)
    front.say(deferred(message))
    answer = await front.hear(Done)
    assert not answer.written
    assert front.puts == front.inline == []
    place = next(row for row in message.tasks[0].extents if row[4] == "t1-d")
    front.say(Write(task="t1", places={"t1-d": place}))
    front.say(Write(task="t1", places={"t1-d": place}, urgent=True))
    assert (await front.hear(Written)).tasks == ["t1"]
    assert {head.attempt for head in (front.inline if inline else front.puts)} == {3}
    np.testing.assert_array_equal(result(), small @ small)
    front.gets.clear()
    second, result = product(front, small, small @ small, task="t2", ids=("a", "t1-d"))
    front.say(second)  # of what was made here nothing is fetched
    assert (await front.hear(Done)).written
    np.testing.assert_array_equal(result(), small @ (small @ small))
    assert front.gets == []


async def test_chains_on_the_device_need_no_place(front, joined, product):
    await joined(front, device="cuda:0")
    message, _ = product(front, A, B)
    chained, result = product(front, A, A @ B, task="t2", ids=("a", "t1-d"))
    (work,) = chained.tasks
    rows = [row_without_place("t1-d") if row[4] == "t1-d" else row for row in work.extents]
    front.say(deferred(message))
    assert (await front.hear(Done)).task == "t1"
    front.say(RunBatch(tasks=[replace(work, extents=rows)]))
    assert (await front.hear(Done)).task == "t2"
    np.testing.assert_array_equal(result(), A @ (A @ B))
    front.say(Drop(tasks=["t1"]))
    assert (await front.hear(Written)).tasks == ["t1"]
    assert {get.extent for get in front.gets} == {"x-a", "x-b"}


async def test_what_the_device_has_is_told_to_every_front(front, joined, product):
    await joined(front, device="cuda:0")
    message, _ = product(front, A, B)
    front.say(message)
    await front.hear(Done)
    await front.stop()
    await front.start()
    while True:
        kept = await front.hear()
        if isinstance(kept, Kept) and kept.came:
            break
    assert {"a", "b"} <= set(kept.came)


async def test_a_dropped_result_is_not_uploaded(front, joined, product):
    await joined(front, device="cuda:0", inline_bytes=0)
    message, _ = product(front, A, B)
    place = next(row for row in message.tasks[0].extents if row[4] == "t1-d")
    front.say(deferred(message))
    await front.hear(Done)
    front.say(Drop(tasks=["t1"]), Write(task="t1", places={"t1-d": place}))
    assert (await front.hear(Written)).tasks == ["t1"]
    again, result = product(front, A, B, task="t2", ids=("a", None))
    front.say(again)
    await front.hear(Done)
    assert {put.task for put in front.puts} == {"t2"}
    np.testing.assert_array_equal(result(), A @ B)
