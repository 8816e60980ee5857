"""A worker whose results may stay on its device: what it says to the front, and in which order."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from keeping_devices import ROOM, WAIT_S, A, Front, Keeping, Product, placing, squares
from works import form_of

from gemmserve_service.executor.protocol import (
    Cancel,
    Drop,
    Forget,
    Part,
    RunBatch,
    Stop,
    Work,
    Write,
    row_without_place,
)
from gemmserve_service.executor.worker import loop
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import GemmParams, ProgramParams


@pytest.fixture
def backend():
    return Keeping()


@pytest.fixture
def front(backend):
    front = Front(backend)
    yield front
    front.end()


@pytest.fixture
def place(tmp_path):
    return placing(tmp_path)


@pytest.fixture
def product(place):
    return squares(place)


def test_a_chain_on_the_device_of_which_the_end_alone_is_written(front, place, product):
    ref, _ = place(A, "a")
    first, square, (_, square_view) = product(ref)
    second, _, (places, view) = product(square)
    for message in (first, second):  # as a front does: nobody knows of a result before its job has ended
        front.send(message)
        assert [(done.task, done.written) for done in front.hear("done")] == [(message.task, False)]
    front.send(Write(task="t2", places=places, urgent=True))
    assert front.hear("written")[0].tasks == ["t2"]
    np.testing.assert_array_equal(view, A @ A @ A @ A)
    front.send(Drop(tasks=["t1"]))
    assert front.hear("written")[0].tasks == ["t1"]
    assert not square_view.any()


def test_results_that_are_dropped_together_are_told_of_together(front, place, product):
    ref, _ = place(A, "a")
    many = [product(ref)[0] for _ in range(3)]
    front.send(*many)
    front.hear("done", "done", "done")
    front.send(*[Drop(tasks=[message.task]) for message in many], Forget(arrays=["r1"]), Drop(tasks=["unknown"]))
    assert front.hear("written")[0].tasks == [message.task for message in many]


def test_what_has_a_place_is_there_when_its_task_ends(front, backend, place, product):
    ref, _ = place(A, "a")
    plain, _, (_, view) = product(ref, defer=False)
    front.send(plain)
    assert front.hear("done")[0].written
    np.testing.assert_array_equal(view, A @ A)
    assert backend.copies.resident.holds("r1"), "others may want it"


def test_what_finds_no_room_waits_until_others_are_written(front, backend, place, product):
    ref, _ = place(A, "a")
    many = [product(ref) for _ in range(ROOM + 1)]
    front.send(*[message for message, _, _ in many])
    assert [done.task for done in front.hear(*["done"] * ROOM)] == [f"t{number + 1}" for number in range(ROOM)]
    assert backend.write_queue.nbytes == ROOM * A.nbytes
    short, _, (_, view) = product(ref, defer=False, express=True)
    front.send(short)
    assert front.hear("done")[0].task == short.task, "it does not wait behind that"
    np.testing.assert_array_equal(view, A @ A)
    front.send(Write(task="t2", places=many[1][2][0]))
    last, written = front.hear_both("done", "written")
    assert written.tasks == ["t2"]
    assert (last.task, last.written) == (f"t{ROOM + 1}", False)
    front.send(Write(task=last.task, places=many[-1][2][0]))
    front.hear("written")
    np.testing.assert_array_equal(many[-1][2][1], A @ A)


def test_what_waits_for_room_is_cancelled_and_others_come_through(front, place, product):
    ref, _ = place(A, "a")
    many = [product(ref) for _ in range(ROOM + 1)]
    front.send(*[message for message, _, _ in many])
    front.hear(*["done"] * ROOM)
    front.send(Cancel(task=f"t{ROOM + 1}"))
    assert front.hear("failed")[0].slug == "cancelled"
    plain, _, (_, view) = product(ref, defer=False)
    front.send(plain)
    assert front.hear("done")[0].written
    np.testing.assert_array_equal(view, A @ A)


def test_a_front_that_goes_while_something_waits_for_room(backend, place, product):
    front = Front(backend)
    ref, _ = place(A, "a")
    front.send(*[product(ref)[0] for _ in range(ROOM + 2)])
    front.hear(*["done"] * ROOM)
    front.end()
    assert backend.write_queue.nbytes == 0


def test_a_front_that_stops_hears_of_what_waited_for_room(front, backend, place, product):
    ref, _ = place(A, "a")
    count = ROOM + 2
    front.send(*[product(ref)[0] for _ in range(count)], Stop())
    assert [done.task for done in front.hear(*["done"] * count)] == [f"t{number + 1}" for number in range(count)]
    front.thread.join(WAIT_S)
    assert not front.thread.is_alive()
    assert backend.write_queue.nbytes == 0


def test_a_check_reads_an_operand_that_is_not_written(front, backend, place, product):
    """On the host: this device does not check its products."""
    ref, _ = place(A, "a")
    first, square, (places, view) = product(ref)
    checked, _, (_, checked_view) = product(square, verify=True, defer=False)
    late, _, (late_places, late_view) = product(square, verify=True)
    front.send(first)
    front.hear("done")
    front.send(checked, late)
    done = front.hear("done", "done")
    assert [each.written for each in done] == [True, False]
    assert max(each.residual for each in done) < 1e-12
    np.testing.assert_array_equal(checked_view, A @ A @ A @ A)
    assert not backend.copies.resident.holds("r2")
    assert not view.any()
    front.send(Write(task="t1", places=places), Write(task="t3", places=late_places))
    assert front.written(2) == ["t1", "t3"]
    np.testing.assert_array_equal(view, A @ A)
    np.testing.assert_array_equal(late_view, A @ A @ A @ A)


def test_a_result_that_a_check_replaced_stays_on_the_device_too(front, backend, place, product):
    backend.checks = True
    ref, _ = place(A, "a")
    for wrong, mismatch in ((False, None), (True, 0.5)):
        backend.wrong = wrong
        message, _, _ = product(ref, verify=True)
        front.send(message)
        (done,) = front.hear("done")
        assert (done.residual, done.mismatch, done.written) == (1e-15, mismatch, False)
    assert backend.copies.resident.holds("r2")


def test_too_little_memory_on_the_device(front, backend, place, product):
    """The product is computed piece by piece, alone, and its result waits in memory of the worker."""
    ref, _ = place(A, "a")
    first, square, _ = product(ref)
    front.send(first)
    front.hear("done")
    backend.full = lambda: True
    second, fourth, (places, view) = product(square)
    front.send(second)
    assert not front.hear("done")[0].written
    assert not backend.copies.resident.holds("r2")
    backend.full = lambda: False
    third, _, (_, last) = product(fourth, defer=False)
    front.send(third)
    assert front.hear("done")[0].written
    np.testing.assert_array_equal(last, np.linalg.matrix_power(A, 8))
    front.send(Write(task="t2", places=places))
    front.hear("written")
    np.testing.assert_array_equal(view, np.linalg.matrix_power(A, 4))


def test_an_operand_is_found_in_its_place_by_a_task_that_was_sent_before_the_front_knew(front, backend, place, product):
    ref, _ = place(A, "a")
    first, square, (places, _) = product(ref)
    front.send(first)
    front.hear("done")
    front.send(Write(task="t1", places=places))
    front.hear("written")
    backend.copies.resident.clear()
    second, _, (_, view) = product(square, defer=False)
    front.send(second)
    assert front.hear("done")[0].written
    np.testing.assert_array_equal(view, A @ A @ A @ A)
    front.send(Forget(arrays=["r1"]))
    third, _, _ = product(square, defer=False)
    front.send(third)
    assert front.hear("failed")[0].task == "t3"


def test_a_batch_reads_an_operand_that_is_not_written(front, place, product):
    ref, _ = place(A, "a")
    first, square, _ = product(ref)
    front.send(first)
    front.hear("done")
    outs = [place(np.zeros((3, 3)), None) for _ in range(2)]
    rows = [row_without_place("r1"), *[(out.extent, out.path, out.capacity, out.offset, None) for out, _ in outs]]
    part = Part(
        form=form_of(GemmParams(), {"a": square, "b": square}, {"d": square}), algorithm="numpy",
        operands={"a": [(0, 0)] * 2, "b": [(0, 0)] * 2}, results={"d": [(1, 0), (2, 0)]},
    )  # fmt: skip
    front.send(RunBatch(tasks=[Work(task="batch", extents=rows, parts=[part])]))
    assert front.hear("done")[0].task == "batch"
    for _, view in outs:
        np.testing.assert_array_equal(view, A @ A @ A @ A)


@pytest.fixture
def slow(backend):
    """Holds up whatever is written, until it is called."""
    go, write = threading.Event(), backend.copies.write

    def held(*given):
        assert go.wait(WAIT_S)
        write(*given)

    backend.copies.write = held
    yield go.set
    go.set()


def placed(ref, places):
    """The reference of an array that has a place, whether it is written or not."""
    name, path, capacity, start, _ = places[ref.cache_id]
    return replace(ref, extent=name, path=path, capacity=capacity, offset=start)


def test_an_operand_whose_place_has_not_its_bytes_yet_is_read_where_they_are(front, place, product, slow):
    """The front names the place from the moment at which it orders the write; a check on the host reads the bytes."""
    ref, _ = place(A, "a")
    first, square, (places, view) = product(ref)
    front.send(first)
    front.hear("done")
    there = placed(square, places)
    checked, _, (_, result) = product(there, verify=True, defer=False)
    outs = [place(np.zeros((3, 3)), None) for _ in range(2)]
    rows = [(*places["r1"][:4], "r1"), *[(out.extent, out.path, out.capacity, out.offset, None) for out, _ in outs]]
    part = Part(
        form=form_of(GemmParams(), {"a": square, "b": square}, {"d": square}), algorithm="numpy",
        operands={"a": [(0, 0)] * 2, "b": [(0, 0)] * 2}, results={"d": [(1, 0), (2, 0)]},
    )  # fmt: skip
    front.send(Write(task="t1", places=places), checked)
    done = front.hear("done")[0]
    assert done.residual < 1e-12
    front.send(RunBatch(tasks=[Work(task="batch", extents=rows, parts=[part])]))
    front.hear("done")
    assert not view.any()
    for found in (result, *(out for _, out in outs)):
        np.testing.assert_array_equal(found, A @ A @ A @ A)
    slow()
    front.written(1)
    np.testing.assert_array_equal(view, A @ A)


def test_a_program_whose_result_stays(front, place):
    """This backend has the values of programs on the host: the result waits in memory of the worker."""
    ref, _ = place(A, "a")
    there, view = place(np.zeros((3, 3)), "r")
    out = replace(there, extent=None, path="", capacity=0, offset=0)
    kept, kept_view = place(np.zeros((3, 3)), "kept")
    name = f"arr_{'0' * 26}"
    steps = [{"id": step, "op": "gemm", "a": a, "b": name} for step, a in (("s", name), ("t", "$s"))]
    message = Run(
        task="p", params=ProgramParams(steps=steps), algorithm="", operands={name: ref},
        results={"s": kept, "t": out}, defer=True,
    )  # fmt: skip
    front.send(message)
    assert not front.hear("done")[0].written
    np.testing.assert_array_equal(kept_view, A @ A)
    assert not view.any()
    places = {"r": (there.extent, there.path, there.capacity, there.offset, None)}
    front.send(Write(task="p", places=places))
    assert front.hear("written")[0].tasks == ["p"]
    np.testing.assert_array_equal(view, A @ A @ A)


class RandomFront:
    """Sends products of its results, orders and drops these, and cancels, as they come, but orders enough of them, so
    that none waits for room for ever.
    """

    COUNT = 40

    def __init__(self, backend, product, source, seed):
        self.rng = random.Random(seed)
        self.front = Front(backend)
        self.product = product
        self.operands = [(source, A, 0)]
        """References, values and depths of what products can be made of."""
        self.messages = {}
        self.expected = {}
        self.places = {}
        self.waiting, self.held, self.ordered, self.used = set(), [], set(), set()

    def send(self):
        ref, value, depth = self.rng.choice(self.operands)
        message, out, (places, view) = self.product(
            ref, defer=self.rng.random() < 0.8, express=self.rng.random() < 0.3, verify=self.rng.random() < 0.1
        )
        self.messages[message.task] = out, places, view, value @ value, depth + 1
        self.waiting.add(message.task)
        self.used.add(ref.cache_id)
        self.front.send(message)
        if self.rng.random() < 0.1:
            self.front.send(Cancel(task=self.rng.choice(sorted(self.waiting))))

    def hear(self):
        message = self.front.next()
        if message.kind == "written":
            assert message.lost == []
            self.ordered.difference_update(message.tasks)
        elif message.kind == "failed":
            assert message.slug == "cancelled", message
            self.waiting.remove(message.task)
        elif message.kind == "done":
            self.waiting.remove(message.task)
            out, _, view, value, depth = self.messages[message.task]
            if message.written:
                np.testing.assert_array_equal(view, value)
            else:
                self.held.append(message.task)
                if depth < 3:
                    self.operands.append((out, value, depth))

    def order(self):
        task = self.held.pop(self.rng.randrange(len(self.held)))
        out, places, _, _, _ = self.messages[task]
        self.ordered.add(task)
        if self.rng.random() < 0.3 and out.cache_id not in self.used:
            self.operands = [each for each in self.operands if each[0] is not out]
            self.front.send(Drop(tasks=[task]))
            self.expected.pop(task, None)
        else:
            self.front.send(Write(task=task, places=places, urgent=self.rng.random() < 0.3))
            self.expected[task] = self.messages[task]

    def run(self, count):
        """Until `count` tasks were sent and all is over; or, with fewer, until then."""
        sent = 0
        while sent < count:
            while sent < count and len(self.waiting) < 4:
                self.send()
                sent += 1
            self.hear()
            while len(self.held) > ROOM // 2:
                self.order()
        while count == self.COUNT and (self.waiting or self.held or self.ordered):
            while self.held:
                self.order()
            self.hear()

    def end(self):
        self.front.end()


@pytest.mark.parametrize("seed", range(6))
def test_random_work_with_too_little_memory_ends_and_is_right(backend, place, product, seed):
    """The front goes in the middle of every third one; the next has all of it computed again."""
    faults = random.Random(seed)
    backend.full = lambda: faults.random() < 0.15
    source, _ = place(A, "a")
    if seed % 3 == 1:
        lost = RandomFront(backend, product, source, 100 + seed)
        lost.run(lost.COUNT // 2)
        lost.end()
        assert backend.write_queue.nbytes == 0
    front = RandomFront(backend, product, source, seed)
    front.run(front.COUNT)
    for _, _, view, value, _ in front.expected.values():
        np.testing.assert_array_equal(view, value)
    assert front.expected
    assert backend.write_queue.nbytes == 0
    front.end()


def test_a_new_front_is_told_of_every_copy_and_owns_none_of_the_old_one_s_results(backend, place, product):
    front = Front(backend)
    (first,) = front.hear("kept")
    assert (first.came, first.budget) == ([], backend.copies.resident.budget)
    ref, _ = place(A, "a")
    message, _, (places, view) = product(ref)
    front.send(message)
    front.hear("done")
    front.end()
    assert backend.write_queue.nbytes == 0
    second = Front(backend)
    (kept,) = second.hear("kept")
    assert kept.came == ["a"], "what the old one's results were is computed again"
    second.send(Write(task="t1", places=places), Stop())
    second.thread.join(WAIT_S)
    second.end()
    assert not view.any()


@pytest.mark.parametrize("defer", [True, False])
def test_one_thread_takes_a_small_product_of_what_is_there_all_the_way(front, place, product, monkeypatch, defer):
    threads = []
    for stage in ("load", "compute", "store"):
        method = getattr(Product, stage)

        def note(self, stage=stage, method=method):
            threads.append((stage, threading.current_thread().name.removeprefix("gemmserve-")))
            return method(self)

        monkeypatch.setattr(Product, stage, note)
    ref, _ = place(A, "a")
    first, _, _ = product(ref, defer=False)
    front.send(first)
    front.hear("done")
    assert threads[0] == ("load", "compute")  # it is short, and alone
    threads.clear()
    again, _, (_, view) = product(ref, defer=defer)
    front.send(again)
    front.hear("done")
    if defer:
        assert threads == [("load", "compute"), ("compute", "compute")]
        return
    assert threads == [("load", "compute"), ("compute", "compute"), ("store", "compute")]
    np.testing.assert_array_equal(view, A @ A)


def test_how_often_copies_were_used_is_told_now_and_then_and_what_came_at_once(front, place, product, monkeypatch):
    monkeypatch.setattr(loop, "_ACCOUNT_S", 3600.0)
    ref, _ = place(A, "a")
    out, _ = place(np.zeros((3, 3)), None)
    message, _, _ = product(ref, defer=False)
    unnamed = [dataclasses.replace(message, task=f"u{number}", results={"d": out}) for number in range(4)]
    front.hear("kept")
    front.send(unnamed[0])
    (came,) = front.hear("kept", skip=())
    assert came.came == ["a"]
    front.hear("done", skip=())
    front.send(*unnamed[1:3])
    front.hear("done", "done", skip=())
    monkeypatch.setattr(loop, "_ACCOUNT_S", 0.0)
    front.send(unnamed[3])
    (kept,) = front.hear("kept", skip=())
    assert (kept.came, kept.went) == ([], [])
    assert kept.hits > came.hits


def test_an_answer_that_is_ready_at_once_does_not_wait_for_the_account_of_copies(front, place, product, monkeypatch):
    monkeypatch.setattr(loop, "_ACCOUNT_S", 3600.0)
    ref, _ = place(A, "a")
    out, _ = place(np.zeros((3, 3)), None)
    message, _, _ = product(ref, defer=False)
    front.hear("kept")
    front.send(dataclasses.replace(message, results={"d": out}, express=True))
    front.hear("done", skip=())
    (came,) = front.hear("kept", skip=())  # though nobody sends anything
    assert came.came == ["a"]


def test_the_account_goes_with_an_answer_where_the_worker_is_never_still(front, place, product, monkeypatch):
    monkeypatch.setattr(loop, "_QUIET_MS", 3_600_000)
    monkeypatch.setattr(loop, "_ACCOUNT_S", 0.05)
    ref, _ = place(A, "a")
    out, _ = place(np.zeros((3, 3)), None)
    message, _, _ = product(ref, defer=False)
    front.hear("kept")
    came, until = [], time.monotonic() + WAIT_S
    while not came and time.monotonic() < until:
        front.send(dataclasses.replace(message, results={"d": out}, express=True))
        while (heard := front.next()).kind == "kept":
            came += heard.came
        assert heard.kind == "done"
    assert came == ["a"]
