"""Inside a worker: mappings, copies on the device, one task, the product that must come out right."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from works import encode, packed

from gemmserve_service.executor.protocol import TO_FRONT, ArrayRef, Cancel, Decoder, Forget, Stop
from gemmserve_service.executor.worker import loop
from gemmserve_service.executor.worker.backend import DeviceUnavailable, HostArray, go_on
from gemmserve_service.executor.worker.checks.selftest import verified_error
from gemmserve_service.executor.worker.health.monitor import Monitor
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.memory.mappings import Mappings
from gemmserve_service.executor.worker.open_backend import open_backend
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import DeviceHealth, GemmParams, GemmReduceParams
from gemmserve_service.store.extents.extents import ExtentPool

A = np.arange(12.0).reshape(3, 4)


@pytest.fixture
def pool(tmp_path):
    return ExtentPool(tmp_path, keep_bytes=0)


@pytest.fixture
def place(pool):
    """Puts an array where a worker finds it; returns the reference and the front's view of it."""

    def make(array):
        if array.nbytes == 0:
            return ArrayRef(
                extent=None, path="", capacity=0, nbytes=0, dtype=array.dtype.name, shape=array.shape, order="C"
            ), None
        extent = pool.take(array.nbytes)
        view = extent.view(array.nbytes)
        view[:] = array.tobytes(order="A")
        ref = ArrayRef(
            extent=extent.file[0],
            path=extent.path,
            capacity=extent.file[1],
            offset=extent.start,
            nbytes=array.nbytes,
            dtype=array.dtype.name,
            shape=array.shape,
            order="C" if array.flags.c_contiguous else "F",
        )
        return ref, view

    return make


@pytest.fixture
def run(place):
    def make(params, results, **operands):
        refs = {name: place(array)[0] for name, array in operands.items()}
        outs = {name: place(array) for name, array in results.items()}
        message = Run(
            task="t",
            params=params,
            algorithm="numpy",
            operands=refs,
            results={name: ref for name, (ref, _) in outs.items()},
            verify=params.op == "gemm",
        )
        return message, {name: view for name, (_, view) in outs.items()}

    return make


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_mapping_is_the_array_itself(place, order):
    ref, view = place(np.asarray(A, order=order))
    mappings = Mappings()
    array = mappings.array(ref)
    np.testing.assert_array_equal(array, A)
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    mappings.array(ref, writable=True)[0, 0] = 77
    assert np.frombuffer(view, "f8")[0] == 77


def test_mappings_are_kept_until_they_are_forgotten(place, own_files):
    mappings = Mappings()
    refs = [place(A)[0] for _ in range(3)]
    arrays = [mappings.array(ref) for ref in refs]
    mappings.forget([refs[0].extent, "unknown"])
    Path(refs[0].path).unlink()
    Path(refs[1].path).unlink()
    np.testing.assert_array_equal(mappings.array(refs[1]), A)  # still mapped
    with pytest.raises(FileNotFoundError):
        mappings.array(refs[0])
    mappings.clear()
    with pytest.raises(FileNotFoundError):
        mappings.array(refs[1])
    np.testing.assert_array_equal(arrays[0], A)  # whoever uses one keeps it


def test_the_number_of_mappings_is_bounded(place, own_files, monkeypatch):
    monkeypatch.setattr("gemmserve_service.executor.worker.memory.mappings._MAX_MAPPINGS", 2)
    mappings = Mappings()
    refs = [place(A)[0] for _ in range(3)]
    for ref in refs:
        mappings.array(ref)
    assert list(mappings._maps) == [refs[1].extent, refs[2].extent]


def test_a_task(run):
    c = np.ones((3, 3))
    message, out = run(GemmParams(alpha=2, beta=-1, trans_b="T"), {"d": np.zeros((3, 3))}, a=A, b=A, c=c)
    done = Runner(CpuBackend()).run(message)
    assert (done.kind, done.task, done.algorithm) == ("done", "t", "numpy")
    np.testing.assert_array_equal(np.frombuffer(out["d"], "f8").reshape(3, 3), 2 * A @ A.T - c)
    assert done.residual < 1e-14
    assert done.timings.kernel_s > 0


def test_several_results_and_empty_ones(run):
    results = {"sum": np.zeros(4), "c": np.zeros((3, 4))}
    message, out = run(GemmReduceParams(reduce=["sum"], return_c=True), results, a=np.eye(3), b=A)
    assert Runner(CpuBackend()).run(message).kind == "done"
    np.testing.assert_array_equal(np.frombuffer(out["sum"], "f8"), A.sum(0))
    np.testing.assert_array_equal(np.frombuffer(out["c"], "f8").reshape(3, 4), A)
    message, _ = run(GemmParams(), {"d": np.zeros((0, 4))}, a=np.zeros((0, 3)), b=A)
    assert Runner(CpuBackend()).run(message).kind == "done"


def test_an_error_of_a_task_is_an_answer(run, own_files, monkeypatch, caplog):
    runner = Runner(CpuBackend())
    message, _ = run(GemmParams(), {"d": np.zeros((3, 3))}, a=A, b=A)  # inner extents differ
    failed = runner.run(message)
    assert (failed.kind, failed.slug, failed.status) == ("failed", "shape-mismatch", 422)
    message, _ = run(GemmParams(trans_b="T"), {"d": np.zeros((3, 3))}, a=A, b=A)
    Path(message.operands["a"].path).unlink()
    failed = runner.run(message)
    assert (failed.slug, failed.status) == ("internal", 500)
    assert message.operands["a"].path not in failed.detail
    assert "FileNotFoundError" in caplog.text
    monkeypatch.setattr(CpuBackend, "run", lambda *_: (_ for _ in ()).throw(MemoryError()))
    message, _ = run(GemmParams(trans_b="T"), {"d": np.zeros((3, 3))}, a=A, b=A)
    assert runner.run(message).slug == "out-of-memory"


def test_the_verified_product():
    assert verified_error(CpuBackend()) < 1e-6


@pytest.mark.parametrize("wrong", [0, np.nan])
def test_a_device_that_multiplies_wrongly_takes_no_task(monkeypatch, wrong):
    monkeypatch.setattr(CpuBackend, "run", lambda self, params, operands, results, *_: results["d"].fill(wrong))
    with pytest.raises(DeviceUnavailable, match="came out wrong"):
        verified_error(CpuBackend())


def test_a_device_that_is_not_there():
    with pytest.raises(DeviceUnavailable):
        open_backend("rocm:0" if Path("/dev/nvidiactl").exists() else "cuda:0", 0.5)


@pytest.fixture
def conversation(tmp_path):
    """A worker's loop in a thread, and the front's end of its socket."""
    near, far = socket.socketpair()
    runner = Runner(CpuBackend())
    thread = threading.Thread(target=loop._converse, args=(far, runner, 3600, Monitor(None)))
    with near, far:
        near.settimeout(60)
        thread.start()
        yield near, runner, thread
        near.close()
        thread.join(60)
        assert not thread.is_alive()


def test_a_conversation(conversation, run):
    near, runner, thread = conversation
    message, _ = run(GemmParams(trans_b="T"), {"d": np.zeros((3, 3))}, a=A, b=A)
    frames = encode(message) + encode(dataclasses.replace(message, task="u")) + encode(Forget(extents=["x"]))
    for byte in frames[:9]:
        near.sendall(bytes([byte]))
    near.sendall(frames[9:])
    decoder, answers = Decoder(), []
    while len(answers) < 2:
        answers += [TO_FRONT.validate_json(body) for body in decoder.feed(near.recv(1 << 16))]
    assert {answer.task for answer in answers} == {"t", "u"}
    name = message.operands["a"].extent
    assert name in runner._mappings._maps
    near.sendall(encode(Forget(extents=[name])) + encode(Stop()))
    thread.join(60)
    assert name not in runner._mappings._maps


class Slow(CpuBackend):
    """Many panels, each begun when the test says so."""

    def __init__(self):
        super().__init__()
        self.turns = threading.Semaphore(0)
        self.panels = 0

    def run(self, params, operands, results, checkpoint):
        for _ in range(100):
            assert self.turns.acquire(timeout=60)
            checkpoint()
            self.panels += 1
        return super().run(params, operands, results)


class Ear:
    """What a worker says, message by message: heartbeats come in between."""

    def __init__(self, near):
        self.near, self.decoder, self.heard = near, Decoder(), deque()

    def next(self, kind):
        """The next message of that kind."""
        while True:
            while self.heard:
                message = self.heard.popleft()
                if message.kind == kind:
                    return message
            self.heard += [TO_FRONT.validate_json(body) for body in self.decoder.feed(self.near.recv(1 << 16))]


@pytest.fixture
def slow(run, monkeypatch):
    """A worker in the middle of a long task, after two panels."""
    monkeypatch.setattr(loop, "_LOOK_S", 0.0)  # these panels take no time
    near, far = socket.socketpair()
    ear = Ear(near)
    backend = Slow()
    runner = Runner(backend)
    ended = []

    def converse():
        try:
            loop._converse(far, runner, 0.02, Monitor(None))
        except OSError as error:
            ended.append(error)

    thread = threading.Thread(target=converse)
    message, _ = run(GemmParams(trans_b="T"), {"d": np.zeros((3, 3))}, a=A, b=A)
    with near, far:
        near.settimeout(60)
        thread.start()
        near.sendall(encode(message))
        backend.turns.release(2)
        while ear.next("beat").progress < 2:
            pass
        yield near, ear, backend, message, ended, thread
        near.close()
        backend.turns.release(1000)
        thread.join(60)
        assert not thread.is_alive()


def test_a_cancelled_task_stops_at_its_next_panel_and_the_next_one_runs(slow):
    near, ear, backend, message, _, _ = slow
    near.sendall(encode(Cancel(task="t")))
    backend.turns.release(1)
    answer = ear.next("failed")
    assert (answer.task, answer.slug, answer.status) == ("t", "cancelled", 409)
    assert backend.panels == 2
    near.sendall(encode(dataclasses.replace(message, task="next")))
    backend.turns.release(100)
    assert ear.next("done").task == "next"


def test_a_short_task_passes_between_the_panels_of_a_long_one(run):
    near, far = socket.socketpair()
    order = []

    class Backend(CpuBackend):
        def run(self, params, operands, results, checkpoint):
            began = len(order)
            for panel in range(3):
                checkpoint()
                time.sleep(0.02)
                order.append((params.alpha.real, panel))
                if params.alpha == 1 and panel == 0:
                    near.sendall(encode(short) + encode(Forget(extents=["gone"])))
            timings = super().run(params, operands, results, go_on)
            return dataclasses.replace(timings, kernel_s=0.02 * (len(order) - began))

    runner = Runner(Backend())
    long, out = run(GemmParams(trans_b="T"), {"d": np.zeros((3, 3))}, a=A, b=A)
    short, short_out = run(GemmParams(trans_b="T", alpha=2), {"d": np.zeros((3, 3))}, a=A, b=A)
    short = dataclasses.replace(short, task="short")
    with near, far:
        near.sendall(encode(long))
        thread = threading.Thread(target=loop._converse, args=(far, runner, 3600, Monitor(None)))
        thread.start()
        decoder, answers = Decoder(), []
        while len(answers) < 2:
            answers += [TO_FRONT.validate_json(body) for body in decoder.feed(near.recv(1 << 16))]
        first, second = answers
        near.sendall(encode(Stop()))
        thread.join(60)
    assert order == [(1, 0), (2, 0), (2, 1), (2, 2), (1, 1), (1, 2)]
    assert (first.task, second.task) == ("short", "t")
    assert second.timings.kernel_s < 0.09, "the time of the one that passed is not the long one's"
    np.testing.assert_array_equal(np.frombuffer(out["d"], "f8").reshape(3, 3), A @ A.T)
    np.testing.assert_array_equal(np.frombuffer(short_out["d"], "f8").reshape(3, 3), 2 * A @ A.T)


def test_a_task_that_is_cancelled_before_it_begins_is_not_begun(run):
    near, far = socket.socketpair()
    message, _ = run(GemmParams(trans_b="T"), {"d": np.zeros((3, 3))}, a=A, b=A)
    with near, far:
        near.sendall(encode(message) + encode(Cancel(task="t")) + encode(message) + encode(Stop()))
        loop._converse(far, Runner(CpuBackend()), 3600, Monitor(None))
        kinds = [TO_FRONT.validate_json(body).kind for body in Decoder().feed(near.recv(1 << 16))]
    assert kinds == ["failed", "done"], "a cancellation holds for one run"


def test_a_worker_says_that_it_lives_and_how_far_it_is(slow):
    _, ear, _, _, _, _ = slow
    beat = ear.next("beat")
    assert (beat.task, beat.progress) == ("t", 2)


def test_a_task_ends_when_the_front_is_gone(slow):
    near, _, backend, _, ended, thread = slow
    near.close()
    backend.turns.release(2)
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(ended[0], OSError)
    assert backend.panels == 2


def test_a_broken_context_ends_the_process_without_an_answer(run, monkeypatch):
    class Broken(CpuBackend):
        def run(self, params, operands, results, checkpoint):
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

        def usable(self):
            return False

    class Ended(BaseException):
        pass

    def leave(status):
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", leave)
    near, far = socket.socketpair()
    message, _ = run(GemmParams(trans_b="T"), {"d": np.zeros((3, 3))}, a=A, b=A)
    with near, far:
        near.sendall(encode(message))
        with pytest.raises(Ended, match=str(loop.BROKEN_CONTEXT)):
            loop._converse(far, Runner(Broken()), 3600, Monitor(None))
        near.setblocking(False)
        with pytest.raises(BlockingIOError):
            near.recv(1)


def test_operands_with_a_name_are_cacheable():
    assert HostArray(A).cache_id is None


def test_a_group_is_answered_one_by_one_and_what_fails_or_is_cancelled_touches_no_other(run):
    near, far = socket.socketpair()
    order = []

    class Backend(CpuBackend):
        def run(self, params, operands, results, checkpoint):
            order.append(params.alpha.real)
            if params.alpha == 1:
                near.sendall(encode(later) + encode(Cancel(task="t3")))
            if params.alpha == 2:
                raise MemoryError
            return super().run(params, operands, results, checkpoint)

    made = [run(GemmParams(trans_b="T", alpha=i), {"d": np.zeros((3, 3))}, a=A, b=A) for i in (1, 2, 3, 4, 5)]
    messages = [dataclasses.replace(message, task=f"t{i}") for i, (message, _) in enumerate(made, 1)]
    later = messages.pop()
    with near, far:
        near.sendall(encode(packed(*messages)))
        thread = threading.Thread(target=loop._converse, args=(far, Runner(Backend()), 3600, Monitor(None)))
        thread.start()
        near.settimeout(60)
        decoder, answers = Decoder(), []
        while len(answers) < 5:
            answers += [TO_FRONT.validate_json(body) for body in decoder.feed(near.recv(1 << 16))]
        near.sendall(encode(Stop()))
        thread.join(60)
    assert [(answer.task, answer.kind) for answer in answers] == [
        ("t1", "done"), ("t2", "failed"), ("t3", "failed"), ("t4", "done"), ("t5", "done")
    ]  # fmt: skip
    assert answers[2].slug == "cancelled"
    assert order == [1, 2, 4, 5], "what came meanwhile waits for the group"
    assert 0 <= answers[0].timings.queue_s < answers[3].timings.queue_s
    for i in (0, 3, 4):
        np.testing.assert_array_equal(np.frombuffer(made[i][1]["d"], "f8").reshape(3, 3), (i + 1) * A @ A.T)


def test_cancellations_that_come_too_late_are_forgotten(monkeypatch):
    monkeypatch.setattr("gemmserve_service.executor.worker.runner._MAX_CANCELLED", 3)
    runner = Runner(CpuBackend())
    for number in range(10):
        runner.cancel(f"t{number}")
    assert [number for number in range(10) if runner.is_cancelled(f"t{number}")] == [7, 8, 9]


def test_what_sensors_say_goes_with_the_heartbeat(tmp_path) -> None:
    """Each front is told once, and again when there is something new."""
    warm, hot = DeviceHealth(temperature_celsius=40.0), DeviceHealth(temperature_celsius=90.0)
    monitor = SimpleNamespace(latest=warm)
    for then in (hot, warm):
        near, far = socket.socketpair()
        thread = threading.Thread(target=loop._converse, args=(far, Runner(CpuBackend()), 0.01, monitor))
        with near, far:
            near.settimeout(60)
            ear = Ear(near)
            thread.start()
            assert ear.next("beat").health == monitor.latest
            assert ear.next("beat").health is None
            monitor.latest = then
            while (said := ear.next("beat").health) is None:
                pass
            assert said == then
            near.sendall(encode(Stop()))
            thread.join(60)
            assert not thread.is_alive()


def test_a_short_product_of_stored_arrays_is_run_by_the_function_of_its_form(run, monkeypatch):
    """With the bits of any other product; and it is not begun once it is cancelled."""
    message, views = run(GemmParams(alpha=2), {"d": np.zeros((3, 3))}, a=A, b=A.T.copy())
    (work,) = packed(dataclasses.replace(message, verify=False)).tasks
    (name, path, capacity, _, _), (part,), rows = work.extents[0], work.parts, []
    for side in (part.operands, part.results):  # a row for each array, as the front has it
        for key, [(_, offset)] in side.items():
            side[key] = [(len(rows), 0)]
            rows.append((name, path, capacity, offset, None))
    work.extents = rows
    assert Runner(CpuBackend()).run(dataclasses.replace(message, verify=False)).kind == "done"
    expected = bytes(views["d"])
    views["d"][:] = bytes(len(expected))
    monkeypatch.setattr(CpuBackend, "run", None)
    runner = Runner(CpuBackend())
    assert runner.run(work).kind == "done"
    assert bytes(views["d"]) == expected
    views["d"][:] = bytes(len(expected))
    runner.look = lambda: runner.cancel(work.task)
    assert runner.run(work).slug == "cancelled"
    assert not any(bytes(views["d"]))
