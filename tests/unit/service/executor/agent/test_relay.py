"""Results on their way to the front, in frames or by exchanges; and those that stay on a device for a while, of a
worker on the stand-in for a device.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel
from python_path import python_path

from gemmserve_service.executor.agent.node_memory import NodeMemory
from gemmserve_service.executor.agent.relay import Relay
from gemmserve_service.executor.agent.texts import Finished, Texts
from gemmserve_service.executor.join_protocol import RESULT_BYTES
from gemmserve_service.executor.protocol import (
    TO_WORKER,
    Done,
    Drop,
    Failed,
    Kept,
    RunBatch,
    Write,
    Written,
    encode,
    row_without_place,
)
from gemmserve_service.executor.worker.memory.mappings import Mappings
from gemmserve_service.schemas import Timings

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


@pytest.mark.parametrize(("inline", "by_link"), [(1 << 16, False), (1 << 20, True)])
async def test_results_of_a_megabyte_go_with_the_answer_if_they_may(front, joined, product, inline, by_link):
    await joined(front, inline_bytes=inline)
    message, result = product(front, A, B)
    front.say(message)
    await front.hear(Done)
    assert (len(front.inline), len(front.puts)) == ((1, 0) if by_link else (0, 1))
    np.testing.assert_array_equal(result(), A @ B)


class Connection:
    """Link, or worker's connection, that keeps what it is sent; `waiting_bytes` it has not taken."""

    def __init__(self, waiting_bytes=0):
        self.waiting_bytes = waiting_bytes
        self.sent = []

    def send(self, *messages):
        self.sent.append([each if isinstance(each, BaseModel | RunBatch) else bytes(each) for each in messages])


class Exchanges:
    """Exchanges that end when the test says so."""

    moved = 0

    def __init__(self):
        self.started, self.asked = [], []

    def fetch(self, pieces, done, *, urgency=0):
        self.asked.append(done)
        return object()

    def came(self):
        """Ends all that was asked for."""
        while self.asked:
            self.asked.pop()(None)

    def send(self, pieces, done, *, urgency=0):
        self.started.append((pieces, done))
        return object()


@pytest.fixture
def relay_of():
    """(relay, front, worker, fetches, uploads) of a link that has not taken so many bytes."""

    def make(waiting_bytes=0):
        front, worker, fetches, uploads = Connection(waiting_bytes), Connection(), Exchanges(), Exchanges()
        memory = NodeMemory(64 << 20, 100, lambda _: None)
        return Relay(front, worker, memory, fetches, uploads, pytest.fail), front, worker, fetches, uploads

    return make


def answer(relay, task):
    message = Done(task=task, algorithm="blas", timings=Timings())
    relay.worker_said(message, message.model_dump_json().encode())


def memory_of(worker, task):
    """Memory that the worker was told to write a task's result to."""
    (message,) = [each for (each,) in worker.sent if each.tasks[0].task == task]
    (row,) = [row for row in message.tasks[0].extents if row[4] == f"{task}-d"]
    return Mappings().of(*row[:3])


@pytest.mark.parametrize(("side", "waiting", "by_link"), [(64, 1, True), (200, 0, True), (200, 1, False)])
def test_a_large_result_is_no_burden_to_a_link_that_has_not_taken_the_last(
    relay_of, front, product, side, waiting, by_link
):
    relay, link, _, fetches, uploads = relay_of(waiting)
    message, _ = product(front, A[:side, :side].copy(), B[:side, :side].copy())
    relay.front_said(message)
    fetches.came()
    answer(relay, "t1")
    assert (len(link.sent), len(uploads.started)) == ((1, 0) if by_link else (0, 1))


def test_a_result_that_waits_for_an_earlier_answer_is_what_it_was(relay_of, front, product):
    relay, link, worker, fetches, uploads = relay_of()
    large = np.zeros((400, 400), "complex64")
    for task, array in (("t1", large), ("t2", A), ("t3", A)):
        relay.front_said(product(front, array, array, task=task, ids=(f"{task}-a", f"{task}-a"))[0])
    fetches.came()
    memory = memory_of(worker, "t2")
    memory[: A.nbytes] = 7
    answer(relay, "t1")
    answer(relay, "t2")
    assert link.sent == []  # behind the upload of the first one
    memory[: A.nbytes] = 8  # of another task by now
    ((_, done),) = uploads.started
    done(None)
    assert bytes([7]) * A.nbytes in b"".join(link.sent[1])


@pytest.mark.parametrize("known", [False, True])
def test_a_task_of_a_known_text_reaches_the_worker_as_any_other(relay_of, front, product, known):
    relay, link, worker, fetches, _ = relay_of()
    texts = Texts()
    for task in ("t1", "t2"):
        message, _ = product(front, A[:50, :50].copy(), B[:50, :50].copy(), task=task)
        body = encode(message)[4:]
        sent = texts.find(body) if known else None
        if sent is None:
            texts.learn(body, message)
            relay.front_said(message)
        else:
            relay.tasks_came([sent])
        fetches.came()
    (first,), (second,) = worker.sent
    assert isinstance(second, bytes) == known
    second = TO_WORKER.validate_json(second[4:]) if known else second
    assert second.tasks[0].parts == first.tasks[0].parts
    assert second.tasks[0].task == "t2"
    assert second.tasks[0].extents[:2] == first.tasks[0].extents[:2]
    memory = Mappings().of(*second.tasks[0].extents[2][:3])
    start = second.tasks[0].extents[2][3]
    memory[start : start + 20_000] = 9
    relay.worker_said(Finished("t2"), b"{}")
    head, raw, end = link.sent[0]
    assert b'"task":"t2"' in head
    assert (raw, end) == (bytes([9]) * 20_000, b"\0\0\0\2{}")


def test_a_result_as_long_as_may_go_by_the_link_does(relay_of, front, product):
    relay, link, _, fetches, uploads = relay_of()
    array = np.zeros((512, 512), "float32")
    relay.front_said(product(front, array, array)[0])
    fetches.came()
    answer(relay, "t1")
    assert sum(map(len, link.sent[0])) > RESULT_BYTES == array.nbytes
    assert uploads.started == []


def test_a_result_that_was_to_go_by_the_link_is_let_go_when_the_task_fails(relay_of, front, product):
    relay, link, _, fetches, _ = relay_of()
    relay.front_said(product(front, A, B)[0])
    fetches.came()
    message = Failed(task="t1", slug="s", status=500, title="t", detail="d")
    relay.worker_said(message, body := message.model_dump_json().encode())
    assert link.sent == [[encode(message)]]
    assert body in link.sent[0][0]
