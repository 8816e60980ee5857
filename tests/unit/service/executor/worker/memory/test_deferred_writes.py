"""A worker whose results may stay on its device: what it says to the front, and in which order."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading

import numpy as np
import pytest
from works import encode

from gemmserve_service.executor.protocol import (
    TO_FRONT,
    ArrayRef,
    Decoder,
    Forget,
    Prefetch,
    Stop,
    WriteOrder,
)
from gemmserve_service.executor.worker import loop
from gemmserve_service.executor.worker.backend import call, go_on
from gemmserve_service.executor.worker.checks.verification import Verdict
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.memory import write_queue
from gemmserve_service.executor.worker.memory.residency import Residency
from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import GemmParams, Timings
from gemmserve_service.store.extents.extents import ExtentPool

WAIT_S = 60
A = np.arange(9.0).reshape(3, 3)
ROOM = 4
"""Results that may be unwritten."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(write_queue, "_MIN_BYTES", A.nbytes)


class Copies:
    """The "device" is memory of its own."""

    def __init__(self):
        self.resident = Residency(4 * ROOM * A.nbytes)
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Semaphore(0)

    def begin(self, data):
        return np.empty_like(data)

    def extend(self, copy, data, start, stop):
        copy.reshape(-1).view(np.uint8)[start:stop] = data.reshape(-1).view(np.uint8)[start:stop]

    def store(self, value, out):
        self.begun.release()
        assert self.go.wait(WAIT_S)
        out[...] = value


class Keeping(CpuBackend):
    out_of_memory = (MemoryError,)
    cuts = False
    checks = False
    """Whether it checks its products itself."""
    wrong = False
    """Whether it then finds them wrong."""

    def __init__(self):
        super().__init__()
        self.copies = Copies()
        self.write_queue = WriteQueue(self.copies, lambda: None, delay_s=3600.0)

    def enter(self):
        pass

    def forget(self, array):
        self.copies.resident.forget(array)

    def flush(self, arrays):
        self.write_queue.flush(arrays)

    def product(self, params, operands, results, checkpoint=go_on, *, check=None):
        return Product(self, params, operands, results, check if self.checks else None)


class Product:
    verdict = None
    elements = None

    def __init__(self, backend, params, operands, results, check):
        self.timings = Timings()
        self.backend, self.params, self.operands, self.results = backend, params, operands, results
        self.check = check
        self.made = {}

    def load(self):
        resident = self.backend.copies.resident
        self.there = {
            name: resident.get(operand.cache_id, operand.data.nbytes, operand.data.copy)
            for name, operand in self.operands.items()
        }

    def compute(self):
        self.made = {name: np.empty_like(out) for name, out in self.results.items()}
        call(self.params, self.there, self.made)
        if self.check is not None:
            assert self.check.startswith("task t")
            self.verdict = Verdict(1e-15, 0.5 if self.backend.wrong else None, self.backend.wrong)

    def store(self):
        for name, out in self.results.items():
            self.backend.copies.store(self.made[name], out)

    def release(self):
        pass


class Front:
    """The other end of the connection."""

    def __init__(self, backend):
        self.near, self.far = socket.socketpair()
        self.near.settimeout(WAIT_S)
        self.decoder = Decoder()
        self.heard = []
        self.thread = threading.Thread(target=self._converse, args=(Runner(backend),))
        self.thread.start()

    def _converse(self, runner):
        with contextlib.suppress(OSError):
            loop._converse(self.far, runner, 3600)

    def send(self, *messages):
        self.near.sendall(b"".join(encode(message) for message in messages))

    def hear(self, *kinds, skip=("kept",)):
        """The next messages of those kinds."""
        found = []
        while len(found) < len(kinds):
            while not self.heard:
                data = self.near.recv(1 << 16)
                assert data, "the worker is gone"
                self.heard += [TO_FRONT.validate_json(body) for body in self.decoder.feed(data)]
            message = self.heard.pop(0)
            if message.kind == kinds[len(found)]:
                found.append(message)
            else:
                assert message.kind in skip, message
        return found

    def end(self):
        self.near.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.far.close()


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
    """An array's reference, and the front's view of its place in the store."""
    pool = ExtentPool(tmp_path, keep_bytes=0)

    def make(array, cache_id):
        extent = pool.take(array.nbytes)
        view = np.frombuffer(extent.view(array.nbytes)).reshape(array.shape)
        view[...] = array
        ref = ArrayRef(
            extent=extent.file[0], path=extent.path, capacity=extent.file[1], offset=extent.start, nbytes=array.nbytes,
            dtype=array.dtype.name, shape=array.shape, order="C", cache_id=cache_id,
        )  # fmt: skip
        return ref, view

    return make


@pytest.fixture
def product(place):
    """The message of a square, the reference of its result, and the view of where that belongs."""
    numbers = itertools.count(1)

    def make(operand, **fields):
        number = next(numbers)
        out, view = place(np.zeros((3, 3)), f"r{number}")
        message = Run(
            task=f"t{number}", params=GemmParams(), algorithm="numpy", operands={"a": operand, "b": operand},
            results={"d": out}, **{"defer": True} | fields,
        )  # fmt: skip
        return message, out, view

    return make


def test_a_chain_on_the_device_of_which_the_end_alone_is_written(front, place, product):
    ref, _ = place(A, "a")
    first, square, square_view = product(ref)
    second, _, view = product(square)
    for message in (first, second):  # as a front does: nobody knows of a result before its job has ended
        front.send(message)
        assert [(done.task, done.written) for done in front.hear("done")] == [(message.task, False)]
    assert not square_view.any()
    front.send(WriteOrder(last=["t1"]), WriteOrder(first=["t2"]))
    assert front.hear("written")[0].tasks == ["t2"]
    np.testing.assert_array_equal(view, A @ A @ A @ A)
    front.send(WriteOrder(drop=["t1"]))
    assert front.hear("written")[0].tasks == ["t1"]
    assert not square_view.any()


def test_what_may_not_wait_or_finds_no_room_is_written_first(front, backend, place, product):
    ref, _ = place(A, "a")
    plain, _, view = product(ref, defer=False)
    front.send(plain)
    assert front.hear("done")[0].written
    np.testing.assert_array_equal(view, A @ A)
    assert backend.copies.resident.holds("r1"), "others may want it"
    backend.copies.go.clear()
    many = [product(ref) for _ in range(ROOM + 1)]
    front.send(*[message for message, _, _ in many])
    assert [done.written for done in front.hear(*["done"] * ROOM)] == [False] * ROOM
    for _ in range(3):  # the plain one, the first of the others, and the one that finds no room
        assert backend.copies.begun.acquire(timeout=WAIT_S)
    backend.copies.go.set()
    (last,) = front.hear("done", skip=("kept", "written"))
    assert last.written
    np.testing.assert_array_equal(many[-1][2], A @ A)


def test_a_check_reads_an_operand_that_is_not_written_and_changes_no_copy(front, backend, place, product):
    ref, _ = place(A, "a")
    first, square, view = product(ref)
    checked, _, _ = product(square, verify=True, defer=False)
    front.send(first)
    assert not front.hear("done")[0].written
    front.send(checked)
    (written,) = front.hear("written")
    assert written.tasks == ["t1"]
    (done,) = front.hear("done")
    assert done.residual < 1e-12
    np.testing.assert_array_equal(view, A @ A)
    assert not backend.copies.resident.holds("r2")


def test_what_is_checked_on_the_device_is_written_later_too_unless_it_was_replaced(front, backend, place, product):
    backend.checks = True
    ref, _ = place(A, "a")
    for wrong, mismatch in ((False, None), (True, 0.5)):
        backend.wrong = wrong
        message, _, view = product(ref, verify=True)
        front.send(message)
        (done,) = front.hear("done")
        assert (done.residual, done.mismatch, done.written) == (1e-15, mismatch, wrong)
        assert view.any() == wrong
    assert backend.copies.resident.holds("r2"), "it is what the store has"


def test_what_its_device_cannot_check_is_written_first(front, place, product):
    ref, _ = place(A, "a")
    message, _, view = product(ref, verify=True)
    front.send(message)
    (done,) = front.hear("done")
    assert done.written
    assert done.residual < 1e-12
    np.testing.assert_array_equal(view, A @ A)


def test_a_prefetched_array_is_told_of_and_one_that_is_gone_does_not_come(front, backend, place):
    (ref, _), (gone, _) = place(A, "a"), place(A, "b")
    (first,) = front.hear("kept")
    assert (first.came, first.budget) == ([], 4 * ROOM * A.nbytes)
    front.send(Prefetch(array=ref), Prefetch(array=gone), Forget(arrays=["b"]))
    (kept,) = front.hear("kept")
    assert "a" in kept.came
    np.testing.assert_array_equal(backend.copies.resident.get("a", A.nbytes, lambda: None), A)


def test_a_new_front_is_told_of_every_copy_and_owns_none_of_the_old_one_s_results(backend, place, product):
    front = Front(backend)
    ref, _ = place(A, "a")
    message, _, view = product(ref)
    front.send(message)
    front.hear("done")
    front.end()
    assert backend.write_queue.nbytes == 0
    second = Front(backend)
    (kept,) = second.hear("kept")
    assert sorted(kept.came) == ["a", "r1"]
    second.send(WriteOrder(first=["t1"]), Stop())
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
    assert threads[0] == ("load", "load")  # there is something to bring
    threads.clear()
    again, _, view = product(ref, defer=defer)
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
