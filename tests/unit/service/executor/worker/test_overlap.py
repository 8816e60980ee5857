"""A worker whose products go through stages: answers in order, memory that runs out, cancellations, fronts that go."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from works import encode, form_of, packed

from gemmserve_kernels.blocks.grid import DEFAULT_RULE, GridRule
from gemmserve_kernels.problem.errors import OutOfDeviceMemory
from gemmserve_service.executor.protocol import (
    TO_FRONT,
    ArrayRef,
    Cancel,
    Decoder,
    Forget,
    Kind,
    Part,
    RunBatch,
    Stop,
    Work,
)
from gemmserve_service.executor.worker import loop, overlap, unpack
from gemmserve_service.executor.worker.backend import go_on
from gemmserve_service.executor.worker.health.monitor import Monitor
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.overlap import Overlap
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import Elements, GemmParams, ProgramParams, Timings
from gemmserve_service.store.extents.extents import ExtentPool

WAIT_S = 60
A = np.arange(12.0).reshape(3, 4)


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class NoRoomError(Exception):
    """Memory ran out."""


class Staged(CpuBackend):
    """Products in stages on the host; `faults` = {(alpha, stage): what is called there}."""

    out_of_memory = (NoRoomError,)
    cuts = False

    def __init__(self):
        super().__init__()
        self.faults = {}
        self.log = []
        self.threads = set()
        self.at_once = 0
        self._loaded = set()

    def forget(self, array):
        self.log.append(("forget", array))

    def enter(self, *, express=False):
        self.threads.add((threading.current_thread().name, express))

    def product(self, params, operands, results, checkpoint=go_on, *, check=None):
        return Product(self, params, operands, results, checkpoint)

    def note(self, stage, alpha):
        self.log.append((stage, alpha))
        self.faults.get((alpha, stage), lambda: None)()


class Product:
    verdict = None
    elements = None

    def __init__(self, backend, params, operands, results, checkpoint):
        self.timings = Timings()
        self.backend, self.params, self.operands, self.results = backend, params, operands, results
        self.checkpoint = checkpoint
        self.loaded = False

    def load(self):
        self.checkpoint()
        self.backend.note("load", self.params.alpha.real)
        self.loaded = True

    def compute(self):
        if not self.loaded:
            self.load()
        self.checkpoint()
        self.backend.note("compute", self.params.alpha.real)

    def finish(self):
        pass

    def store(self):
        self.checkpoint()
        self.backend.note("store", self.params.alpha.real)
        self.backend.run(self.params, self.operands, self.results)

    def release(self):
        self.backend.log.append(("release", self.params.alpha.real))
        self.loaded = False


@pytest.fixture
def place(tmp_path):
    """Puts an array where a worker finds it; returns the reference and the front's view of it."""
    pool = ExtentPool(tmp_path, keep_bytes=0)

    def make(array):
        extent = pool.take(array.nbytes)
        view = extent.view(array.nbytes)
        view[:] = array.tobytes()
        kind = {"dtype": array.dtype.name, "shape": array.shape, "order": "C", "nbytes": array.nbytes}
        return ArrayRef(
            extent=extent.file[0], path=extent.path, capacity=extent.file[1], offset=extent.start, **kind
        ), view

    return make


@pytest.fixture
def task(place):
    """task("name", 2.0) -> the message for 2 A A^T, and what reads its result."""

    def make(name, alpha, **fields):
        ref, _ = place(A)
        out, view = place(np.zeros((3, 3)))
        params = GemmParams(trans_b="T", alpha=alpha)
        message = Run(
            task=name, params=params, algorithm="numpy", operands={"a": ref, "b": ref}, results={"d": out}, **fields
        )
        return message, lambda: np.frombuffer(view).reshape(3, 3)

    return make


class Front:
    """The other end of a worker's connection."""

    def __init__(self, backend):
        self.near, self.far = socket.socketpair()
        self.near.settimeout(WAIT_S)
        self.runner = Runner(backend)
        self.decoder = Decoder()
        self.heard = []
        self.thread = threading.Thread(target=self._converse)
        self.thread.start()

    def _converse(self):
        with contextlib.suppress(OSError):
            loop._converse(self.far, self.runner, 3600, Monitor(None))

    def send(self, *messages):
        self.near.sendall(b"".join(encode(message) for message in messages))

    def answers(self, count):
        while len(self.heard) < count:
            data = self.near.recv(1 << 16)
            assert data, "the worker is gone"
            self.heard += [TO_FRONT.validate_json(body) for body in self.decoder.feed(data)]
        heard, self.heard = self.heard[:count], self.heard[count:]
        return heard

    def end(self):
        self.near.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.far.close()


@pytest.fixture
def backend():
    return Staged()


@pytest.fixture
def front(backend):
    front = Front(backend)
    yield front
    front.end()


def test_answers_come_in_order_and_results_are_right(front, backend, task):
    tasks = [task(f"t{number}", 1.0 + number) for number in range(6)]
    front.send(*[message for message, _ in tasks[:3]], packed(*[message for message, _ in tasks[3:]]))
    answers = front.answers(6)
    assert [(answer.kind, answer.task) for answer in answers] == [("done", f"t{number}") for number in range(6)]
    for number, (_, result) in enumerate(tasks):
        np.testing.assert_array_equal(result(), (1 + number) * A @ A.T)
    stages = ("load", "compute", "finish", "store")
    assert backend.threads == {
        *((f"gemmserve-{stage}", False) for stage in stages),
        *((f"gemmserve-express-{stage}", True) for stage in stages),
        (front.thread.name, True),
    }


@pytest.fixture
def computed_by(backend):
    """Threads that have computed products, in the order of these."""
    names = []

    def note(stage, alpha, note=backend.note):
        if stage == "compute":
            names.append(threading.current_thread())
        note(stage, alpha)

    backend.note = note
    return names


def test_a_tiny_express_product_is_computed_by_the_thread_that_reads(front, task, computed_by):
    for number in range(3):
        message, result = task(f"t{number}", 1.0 + number, express=True)
        front.send(message)
        assert [(answer.kind, answer.task) for answer in front.answers(1)] == [("done", f"t{number}")]
        np.testing.assert_array_equal(result(), (1 + number) * A @ A.T)
    assert computed_by == [front.thread] * 3


def test_tiny_products_that_came_together_are_answered_together(front, backend, task, computed_by, monkeypatch):
    """The front is woken once. Each answer says how long those before it took."""
    monkeypatch.setattr(loop, "_MAX_HOLD_S", 3600.0)
    go_on = threading.Event()
    backend.faults = {(1.0, "compute"): lambda: time.sleep(0.05), (4.0, "load"): lambda: go_on.wait(WAIT_S)}
    tasks = [task(f"t{number}", 1.0 + number, express=True) for number in range(3)]
    tasks += [task("long", 4.0), task("last", 5.0, express=True)]
    front.send(packed(*[message for message, _ in tasks]))
    answers = front.answers(1)
    assert [answer.task for answer in (*answers, *front.heard)][:3] == ["t0", "t1", "t2"], "by one call"
    go_on.set()
    answers += front.answers(4)
    assert sorted(answer.task for answer in answers[3:]) == ["last", "long"]
    assert computed_by[:3] == [front.thread] * 3
    assert [answer.timings.queue_s >= 0.05 for answer in answers[:3]] == [False, True, True]
    for number, (_, result) in enumerate(tasks):
        np.testing.assert_array_equal(result(), (1 + number) * A @ A.T)


def test_an_answer_is_not_held_for_long(front, backend, task, monkeypatch):
    monkeypatch.setattr(loop, "_MAX_HOLD_S", 0.0)
    go_on = threading.Event()
    backend.faults = {(2.0, "compute"): lambda: go_on.wait(WAIT_S)}
    front.send(packed(*[task(f"t{number}", 1.0 + number, express=True)[0] for number in range(2)]))
    assert front.answers(1)[0].task == "t0"
    go_on.set()
    assert front.answers(1)[0].task == "t1"


def test_what_is_not_tiny_or_not_alone_is_computed_by_the_stages(front, backend, task, computed_by, monkeypatch):
    front.send(task("long", 1.0)[0])
    front.send(task("checked", 2.0, express=True, verify=True)[0])
    front.answers(2)
    monkeypatch.setattr(overlap, "TINY", 1)
    front.send(task("larger", 4.0, express=True)[0])
    front.answers(1)
    monkeypatch.undo()
    assert front.thread not in computed_by
    go_on = threading.Event()
    backend.faults = {(5.0, "compute"): lambda: go_on.wait(WAIT_S)}
    front.send(task("before", 5.0)[0])
    until(lambda: ("load", 5.0) in backend.log)
    front.send(task("beside", 6.0, express=True)[0])
    assert front.answers(1)[0].task == "beside"
    go_on.set()
    front.answers(1)
    assert front.thread not in computed_by

    def alone():  # soon: who hears of an answer is before the thread that has given it
        front.send(task("alone", 7.0, express=True)[0])
        front.answers(1)
        return computed_by[-1] is front.thread

    until(alone)


def test_a_tiny_product_without_room_goes_to_the_others(front, backend, task, computed_by):
    def full():
        del backend.faults[1.0, "load"]
        raise NoRoomError

    backend.faults = {(1.0, "load"): full}
    message, result = task("t", 1.0, express=True)
    front.send(message)
    assert [(answer.kind, answer.task) for answer in front.answers(1)] == [("done", "t")]
    np.testing.assert_array_equal(result(), A @ A.T)
    assert [thread.name for thread in computed_by] == ["gemmserve-compute"]


class AtOnce(Staged):
    """With a shorter way for tiny products; `there`: what is on the device, by array."""

    def __init__(self):
        super().__init__()
        self.there = {}
        self.kept = {}
        self.counted = None

    def tiny(self, params, operands, results):
        self.note("asked", params.alpha.real)
        return Short(self, params, operands)


class Short:
    """What computes them, with a note of each step."""

    def __init__(self, backend, params, operands):
        self.backend, self.params, self.names = backend, params, list(operands)

    def resident(self, arrays):
        found = [self.backend.there.get(array) for array in arrays]
        return None if any(each is None for each in found) else found

    def begin(self, operands):
        self.backend.note("begin", self.params.alpha.real)
        a, b = (each.view(A.dtype).reshape(A.shape) if each.dtype == np.uint8 else each for each in operands)
        self.made = self.params.alpha.real * (a @ b.T)

    def store(self, name, memory):
        self.backend.note("store", self.params.alpha.real)
        memory[:] = self.made.reshape(-1).view(np.uint8)

    def finish(self, kept):
        self.backend.note("over", self.params.alpha.real)
        for name, array in kept.items():
            assert name == "d"
            self.backend.kept[array] = self.made
        return Timings(kernel_s=2.0), self.backend.counted


@pytest.fixture
def quick():
    """A device with the shorter way, and its front."""
    backend = AtOnce()
    front = Front(backend)
    yield SimpleNamespace(backend=backend, front=front, steps=lambda: [stage for stage, _ in backend.log])
    front.end()


STEPS = ["begin", "store", "over"]


def kept_nowhere(message, *, result=None, operands=None):
    """The message with ids of immutable arrays, of the result and of both operands, where they are given."""
    refs = {name: replace(ref, cache_id=operands) for name, ref in message.operands.items()}
    return replace(message, operands=refs, results={"d": replace(message.results["d"], cache_id=result)})


def test_a_tiny_product_goes_the_shorter_way_where_the_device_has_one(quick, task):
    backend, front = quick.backend, quick.front
    backend.there["a"], backend.counted = A, Elements(planned=9)
    for number, ids in enumerate([{"operands": "a", "result": "d"}, {"operands": "a"}, {}]):
        message, result = task(f"t{number}", 1.0, express=number > 1)
        front.send(kept_nowhere(message, **ids))
        (answer,) = front.answers(1)
        assert (answer.kind, answer.task, answer.algorithm, answer.written) == ("done", f"t{number}", "numpy", True)
        assert (answer.timings.kernel_s, answer.elements) == (2.0, Elements(planned=9))
        np.testing.assert_array_equal(result(), A @ A.T)
    assert quick.steps() == ["asked", *STEPS * 3], "the form is looked at once"
    assert list(backend.kept) == ["d"], "what has an id stays"


def test_who_asks_hears_of_a_task_on_the_shorter_way(task):
    """A device that hangs there is noticed by it."""
    backend = AtOnce()
    answers, seen = [], []
    overlap = Overlap(Runner(backend), backend, answers.append)
    before = overlap.at[1]
    backend.faults = {(1.0, "begin"): lambda: seen.append(overlap.at)}
    (work,) = packed(task("t", 1.0, express=True)[0]).tasks
    overlap.start(work)
    assert [answer.task for answer in answers] == ["t"]
    assert seen[0][0] == "t"
    assert seen[0][1] > before
    assert overlap.at[0] is None
    overlap.close()


@pytest.mark.parametrize("fields", [{"verify": True}, {"operands": "b"}, {"defer": True, "placeless": True}], ids=str)
def test_what_the_shorter_way_is_not_for(quick, task, fields):
    front = quick.front
    operands, placeless = fields.pop("operands", None), fields.pop("placeless", False)
    message, _ = task("t", 1.0, **{"express": True, **fields})
    message = kept_nowhere(message, operands=operands, result="d" if placeless else None)
    if placeless:
        ref = replace(message.results["d"], extent=None, path="", capacity=0, offset=0)
        message = replace(message, results={"d": ref})
    front.send(message)
    (answer,) = front.answers(1)
    assert answer.kind == "done"
    assert not {"begin", "over"} & set(quick.steps())
    assert "compute" in quick.steps()


def test_blocks_and_what_is_not_tiny_never_go_the_shorter_way(monkeypatch):
    backend = AtOnce()

    def found(shape=(100, 100), rule=DEFAULT_RULE, backend=backend):
        kind = Kind(dtype="float64", shape=shape, order="C")
        runner = Runner(backend, rule)
        return runner.tiny(runner.form(form_of(GemmParams(trans_b="T"), {"a": kind, "b": kind}, {"d": kind})))

    monkeypatch.setattr(unpack, "TINY", 3 * 80_000)
    assert isinstance(found(), Short)
    assert found(rule=GridRule(16)) is None, "it has blocks"
    assert found((100, 0)) is None
    assert found(backend=Staged()) is None
    monkeypatch.setattr(unpack, "TINY", 3 * 80_000 - 1)
    assert found() is None
    assert [stage for stage, _ in backend.log] == ["asked"]


def test_the_shorter_way_is_not_taken_beside_something_else(quick, task):
    backend, front = quick.backend, quick.front
    go_on = threading.Event()
    backend.faults = {(1.0, "compute"): lambda: go_on.wait(WAIT_S)}
    front.send(task("long", 1.0, verify=True)[0])
    until(lambda: ("load", 1.0) in backend.log)
    front.send(task("t", 2.0, express=True)[0])
    assert front.answers(1)[0].task == "t"
    go_on.set()
    front.answers(1)
    assert not {"begin", "over"} & set(quick.steps())


def test_a_product_without_room_on_the_shorter_way_goes_to_the_others(quick, task, computed_by):
    def full():
        raise NoRoomError

    backend, front = quick.backend, quick.front
    for step in ("begin", "over"):
        backend.faults = {(1.0, step): full}
        message, result = task(step, 1.0, express=True)
        front.send(message)
        assert [(answer.kind, answer.task) for answer in front.answers(1)] == [("done", step)]
        np.testing.assert_array_equal(result(), A @ A.T)
    assert quick.steps().count("compute") == 2


def test_an_error_on_the_shorter_way_is_answered(quick, task):
    def wrong():
        raise ValueError("no")

    backend, front = quick.backend, quick.front
    backend.faults = {(1.0, "over"): wrong}
    front.send(task("t", 1.0, express=True)[0])
    (answer,) = front.answers(1)
    assert (answer.kind, answer.task, answer.status) == ("failed", "t", 500)
    message, _ = task("gone", 2.0, express=True)
    ref = replace(message.results["d"], extent="gone", path=message.results["d"].path + "-gone")
    front.send(replace(message, results={"d": ref}))
    (answer,) = front.answers(1)
    assert (answer.kind, answer.task) == ("failed", "gone")
    assert backend.log[-2:] == [("begin", 2.0), ("over", 2.0)], "nothing is left on the device"
    front.send(task("after", 3.0, express=True)[0])
    assert front.answers(1)[0].kind == "done"


def test_a_product_that_nobody_wants_is_not_computed_on_the_shorter_way(quick, task):
    quick.front.send(Cancel(task="t"))
    quick.front.send(task("t", 1.0, express=True)[0])
    (answer,) = quick.front.answers(1)
    assert (answer.kind, answer.slug) == ("failed", "cancelled")
    assert not {"begin", "compute"} & set(quick.steps())


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="switches are counted by Linux")
def test_an_answer_that_is_read_wakes_nobody(front, task):
    """The thread that reads sleeps once a task: until the next one."""
    rounds = 200
    messages = [task(f"t{number}", 1.0, express=True)[0] for number in range(rounds)]
    began = None
    for message in messages:
        front.send(message)
        front.answers(1)
        if began is None:
            began = slept(front.thread)
    assert slept(front.thread) - began <= 1.5 * rounds


def slept(thread):
    """How often a thread has slept."""
    text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def test_the_next_one_is_loaded_while_one_is_computed(front, backend, task):
    loaded = threading.Event()
    backend.faults = {(1.0, "compute"): lambda: loaded.wait(WAIT_S), (2.0, "load"): loaded.set}
    front.send(task("a", 1.0)[0], task("b", 2.0)[0])
    assert [answer.task for answer in front.answers(2)] == ["a", "b"]
    assert loaded.is_set()


@pytest.mark.parametrize("stage", ["load", "compute", "store"])
def test_one_that_finds_no_memory_runs_alone_and_the_others_lose_nothing(front, backend, task, stage):
    def full():
        raise NoRoomError

    backend.faults = {(2.0, stage): full}
    tasks = [task(f"t{number}", float(number)) for number in range(6)]
    front.send(*[message for message, _ in tasks])
    answers = front.answers(6)
    assert [(answer.kind, answer.task) for answer in answers] == [("done", f"t{number}") for number in range(6)]
    for number, (_, result) in enumerate(tasks):
        np.testing.assert_array_equal(result(), number * A @ A.T)
    assert ("release", 2.0) in backend.log


@pytest.mark.parametrize("stage", ["load", "compute", "store"])
def test_an_error_is_one_task_s(front, backend, task, stage):
    def fail():
        raise ValueError("no")

    backend.faults = {(1.0, stage): fail}
    front.send(*[task(f"t{number}", float(number))[0] for number in range(3)])
    assert [answer.kind for answer in front.answers(3)] == ["done", "failed", "done"]


def test_a_cancelled_one_stops_at_its_next_stage(front, backend, task):
    reached, go = threading.Event(), threading.Event()

    def hold():
        reached.set()
        go.wait(WAIT_S)

    backend.faults = {(0.0, "compute"): hold}
    front.send(*[task(f"t{number}", float(number))[0] for number in range(3)])
    assert reached.wait(WAIT_S)
    front.send(Cancel(task="t2"), Cancel(task="t0"))
    until(lambda: front.runner.is_cancelled("t0") and front.runner.is_cancelled("t2"))
    go.set()
    assert [(answer.kind, answer.task) for answer in front.answers(3)] == [
        ("failed", "t0"),
        ("done", "t1"),
        ("failed", "t2"),
    ]
    assert ("store", 0.0) not in backend.log
    assert ("compute", 2.0) not in backend.log
    assert not front.runner.is_cancelled("t0")


def test_a_check_and_a_program_go_the_same_way(front, task, place):
    checked, _ = task("checked", 1.0, verify=True)
    whole, _ = task("whole", 1.0)
    out, view = place(np.zeros((3, 3)))
    step = {"id": "x", "op": "gemm", "a": "arr_" + "0" * 26, "b": "arr_" + "0" * 26, "trans_b": "T"}
    program = dataclasses.replace(
        whole,
        params=ProgramParams(steps=[step]),
        operands={"arr_" + "0" * 26: whole.operands["a"]},
        results={"x": out},
    )
    front.send(checked, program)
    first, second = front.answers(2)
    assert (first.kind, second.kind) == ("done", "done"), (first, second)
    assert first.residual < 1e-14
    np.testing.assert_array_equal(np.frombuffer(view).reshape(3, 3), A @ A.T)


def test_a_program_that_others_left_too_little_memory_runs_again_alone(front, backend, task, place):
    tries = []

    def run_program(run, checkpoint):
        tries.append(len(tries))
        if len(tries) == 1:
            raise OutOfDeviceMemory("others hold it")
        return CpuBackend.run_program(backend, run, checkpoint)

    backend.run_program = run_program
    whole, _ = task("whole", 1.0)
    out, view = place(np.zeros((3, 3)))
    name = "arr_" + "0" * 26
    step = {"id": "x", "op": "gemm", "a": name, "b": name, "trans_b": "T"}
    program = dataclasses.replace(
        whole,
        params=ProgramParams(steps=[step]),
        operands={name: whole.operands["a"]},
        results={"x": out},
    )
    after, result = task("after", 2.0)
    front.send(program, after)
    assert [(answer.kind, answer.task) for answer in front.answers(2)] == [("done", "whole"), ("done", "after")]
    assert tries == [0, 1]
    np.testing.assert_array_equal(np.frombuffer(view).reshape(3, 3), A @ A.T)
    np.testing.assert_array_equal(result(), 2 * A @ A.T)


@pytest.mark.parametrize("express", [False, True])
def test_a_program_that_is_cancelled_while_memory_runs_out_is_not_run_again(front, backend, task, place, held, express):
    tries, runner = [], front.runner

    def run_program(run, checkpoint):
        tries.append(len(tries))
        front.send(Cancel(task="whole"))
        until(lambda: runner.is_cancelled("whole"))
        raise OutOfDeviceMemory("others hold it")

    backend.run_program = run_program
    before, _ = task("before", 1.0)
    front.send(before)
    assert held.reached.wait(WAIT_S)
    if not express:
        held.go()
    whole, _ = task("whole", 2.0, express=express)
    out, _ = place(np.zeros((3, 3)))
    name = "arr_" + "0" * 26
    step = {"id": "x", "op": "gemm", "a": name, "b": name, "trans_b": "T"}
    params = ProgramParams(steps=[step])
    front.send(dataclasses.replace(whole, params=params, operands={name: whole.operands["a"]}, results={"x": out}))
    until(lambda: tries)
    held.go()
    answers = {answer.task: answer for answer in front.answers(2)}
    assert (answers["whole"].kind, answers["whole"].slug) == ("failed", "cancelled")
    assert tries == [0]
    assert not runner.is_cancelled("whole"), "its cancellation is forgotten"


def test_what_was_sent_before_the_end_is_answered(front, task):
    front.send(*[task(f"t{number}", 1.0)[0] for number in range(5)], Stop())
    assert len(front.answers(5)) == 5
    front.thread.join(WAIT_S)
    assert not front.thread.is_alive()


def test_what_a_device_keeps_of_arrays_that_are_gone_is_dropped(front, backend, task):
    front.send(Forget(arrays=["arr_a", "arr_b"]), task("t", 1.0)[0])
    front.answers(1)
    assert backend.log[:2] == [("forget", "arr_a"), ("forget", "arr_b")]


def test_nobody_computes_for_a_front_that_is_gone(backend, task):
    reached, go = threading.Event(), threading.Event()

    def hold():
        reached.set()
        go.wait(WAIT_S)

    backend.faults = {(0.0, "compute"): hold}
    front = Front(backend)
    front.send(*[task(f"t{number}", float(number))[0] for number in range(9)])
    assert reached.wait(WAIT_S)
    front.near.close()
    until(lambda: all(front.runner.is_cancelled(f"t{number}") for number in range(9)))
    go.set()
    front.end()
    assert ("compute", 8.0) not in backend.log


def test_progress_is_that_of_the_oldest(backend, task):
    reached, go = threading.Event(), threading.Event()

    def hold():
        reached.set()
        go.wait(WAIT_S)

    backend.faults = {(1.0, "store"): hold}
    runner = Runner(backend)
    near, far = socket.socketpair()
    with near, far:
        line = loop._Line(far, runner)
        assert line.at == (None, 0)
        for number in range(3):
            line.handle(packed(task(f"t{number}", float(number))[0]))
        assert reached.wait(WAIT_S)
        name, progress = line.at
        go.set()
        line.overlap.close()
        assert name == "t1"
        assert line.at == (None, line.at[1])
        assert line.at[1] > progress > 0


def test_one_thread_alone_reads_what_the_front_sends(front, place, monkeypatch):
    """A batch is run whole, in a thread of its own, and looks between its parts whether it is cancelled."""
    monkeypatch.setattr(loop, "_LOOK_S", 0.0)
    readers = set()
    take = loop._Line._take

    def noting(line, *flags):
        readers.add(threading.current_thread())
        return take(line, *flags)

    monkeypatch.setattr(loop._Line, "_take", noting)
    ref, _ = place(A)
    out, view = place(np.zeros((50, 3, 3)))
    rows = [(each.extent, each.path, each.capacity, each.offset, None) for each in (ref, out)]
    one = SimpleNamespace(dtype="float64", shape=(3, 3), order="C")
    parts = [
        Part(
            form=form_of(GemmParams(trans_b="T", alpha=number), {"a": ref, "b": ref}, {"d": one}),
            algorithm="numpy",
            operands={"a": [(0, 0)], "b": [(0, 0)]},
            results={"d": [(1, 72 * number)]},
        )
        for number in range(50)
    ]
    front.send(RunBatch(tasks=[Work(task="batch", extents=rows, parts=parts)]))
    for _ in range(20):
        front.send(Forget(extents=["e" * 1000]))
    (answer,) = front.answers(1)
    assert answer.kind == "done", answer
    np.testing.assert_array_equal(np.frombuffer(view).reshape(50, 3, 3)[49], 49 * A @ A.T)
    assert readers <= {front.thread}


@pytest.fixture
def held(backend):
    """Holds the device up with the product of alpha 1, until it is called."""
    reached, go = threading.Event(), threading.Event()

    def hold():
        reached.set()
        go.wait(WAIT_S)

    backend.faults[(1.0, "compute")] = hold
    hold.reached, hold.go = reached, go.set
    yield hold
    go.set()


def test_an_express_task_passes_those_before_it(front, task, held):
    tasks = {alpha: task(f"t{alpha}", float(alpha), express=alpha > 2) for alpha in range(1, 5)}
    front.send(*[tasks[alpha][0] for alpha in (1, 2)])
    assert held.reached.wait(WAIT_S)
    front.send(packed(tasks[3][0], tasks[4][0]))
    assert [answer.task for answer in front.answers(2)] == ["t3", "t4"]
    np.testing.assert_array_equal(tasks[3][1](), 3 * A @ A.T)
    held.go()
    assert [answer.task for answer in front.answers(2)] == ["t1", "t2"]


def test_an_express_task_that_finds_no_memory_waits_its_turn(front, backend, task, held):
    """It loads in its own lane, and alone in the other."""

    def full():
        raise NoRoomError

    backend.faults[(2.0, "compute")] = full
    tasks = {alpha: task(f"t{alpha}", float(alpha), express=alpha == 2) for alpha in (1, 2)}
    front.send(tasks[1][0])
    assert held.reached.wait(WAIT_S)
    front.send(tasks[2][0])
    until(lambda: backend.log.count(("compute", 2.0)) == 1)
    held.go()
    answers = front.answers(2)
    assert [(answer.kind, answer.task) for answer in answers] == [("done", "t1"), ("done", "t2")]
    np.testing.assert_array_equal(tasks[2][1](), 2 * A @ A.T)
    assert backend.log.count(("compute", 2.0)) == 2


def test_an_express_batch_whose_memory_runs_out_runs_again_in_its_turn(front, backend, task, held):
    tries = []

    def run_many(products, checkpoint):
        tries.append(threading.current_thread().name)
        if len(tries) == 1:
            raise OutOfDeviceMemory("others hold it")
        return CpuBackend.run_many(backend, products, checkpoint)

    backend.run_many = run_many
    first, (second, result) = task("t1", 1.0), task("t2", 2.0, express=True)
    front.send(first[0])
    assert held.reached.wait(WAIT_S)
    batch = packed(second)
    (work,) = batch.tasks
    front.send(RunBatch(tasks=[replace(work, parts=[*work.parts, *work.parts])]))
    until(lambda: tries)
    held.go()
    assert {answer.task for answer in front.answers(2)} == {"t1", "t2"}
    assert tries[0] == "gemmserve-express-compute"
    assert set(tries[1:]) == {"gemmserve-compute"}
    np.testing.assert_array_equal(result(), 2 * A @ A.T)


def test_a_lane_that_stands_still_is_not_hidden_by_the_other(backend, task, held):
    answers = []
    overlap = Overlap(Runner(backend), backend, answers.append)
    overlap.start(task("t1", 1.0)[0])
    assert held.reached.wait(WAIT_S)
    still = overlap.at
    assert still[0] == "t1"
    for number in range(2, 6):
        overlap.start(task(f"t{number}", float(number), express=True)[0])
    until(lambda: len(answers) == 4)
    assert overlap.at == still
    held.go()
    overlap.close()
    assert overlap.at[0] is None
    assert len(answers) == 5


def test_nor_by_batches_that_get_on_in_the_other(backend, task, held):
    """A batch gets on by its runner, which knows of no lane."""
    answers, go, steps = [], threading.Event(), threading.Semaphore(0)

    def run_many(products, checkpoint):
        while not go.is_set():
            assert steps.acquire(timeout=WAIT_S)
            checkpoint()
        return Timings()

    backend.run_many = run_many
    overlap = Overlap(Runner(backend), backend, answers.append)
    (work,) = packed(task("t2", 2.0, express=True)[0]).tasks
    overlap.start(replace(work, parts=[*work.parts, *work.parts]))
    until(lambda: overlap.at[0] == "t2")
    overlap.start(task("t1", 1.0)[0])
    assert held.reached.wait(WAIT_S)
    until(lambda: steps.release() or overlap.at[0] == "t1")
    at = set()
    for _ in range(20):
        steps.release()
        time.sleep(0.001)
        at.add(overlap.at)
    assert {task for task, _ in at} == {"t1"}
    assert len(at) == 1
    held.go()
    go.set()
    steps.release()
    overlap.close()
    assert len(answers) == 2


def test_a_front_that_goes_ends_both_lanes(front, backend, task, held):
    front.send(task("t1", 1.0)[0], task("t2", 2.0)[0])
    assert held.reached.wait(WAIT_S)
    front.send(task("t3", 3.0, express=True)[0])
    front.near.close()
    until(lambda: front.runner.is_cancelled("t1") and front.runner.is_cancelled("t2"))
    held.go()
    front.thread.join(WAIT_S)
    assert ("compute", 2.0) not in backend.log


class Compiled(Staged):
    """Staged, with one kernel for each alpha: compiled when `compiler` lets it."""

    def __init__(self):
        super().__init__()
        self.there = set()
        self.compiler = threading.Event()

    def missing_kernels(self, params, operands, *, checked):
        return [] if params.alpha.real in self.there or params.alpha.real < 10 else [params.alpha.real]

    def compile_kernel(self, kernel):
        assert self.compiler.wait(WAIT_S)
        self.there.add(kernel)


def test_warm_products_pass_one_whose_kernels_are_compiled(task):
    backend = Compiled()
    front = Front(backend)
    try:
        cold, result = task("cold", 11.0)
        front.send(packed(cold))
        (said,) = front.answers(1)
        assert (said.kind, said.task, said.compiling) == ("compiling", "cold", True)
        front.send(packed(task("warm", 2.0)[0]))
        (warm,) = front.answers(1)
        assert (warm.kind, warm.task) == ("done", "warm")
        assert warm.timings.compile_s == 0
        backend.compiler.set()
        over, done = front.answers(2)
        assert (over.kind, over.compiling, done.task) == ("compiling", False, "cold")
        assert done.timings.compile_s > 0
        np.testing.assert_array_equal(result(), 11 * A @ A.T)
        front.send(packed(task("again", 11.0)[0]))
        (again,) = front.answers(1)
        assert (again.kind, again.timings.compile_s) == ("done", 0)
    finally:
        backend.compiler.set()
        front.end()


def test_a_task_that_is_cancelled_while_it_waits_for_the_compiler_is_not_computed(task):
    backend = Compiled()
    front = Front(backend)
    try:
        front.send(packed(task("cold", 11.0)[0]))
        front.answers(1)
        front.send(Cancel(task="cold"))
        front.send(packed(task("warm", 2.0)[0]))
        assert front.answers(1)[0].task == "warm"  # the word of the cancellation has been read
        backend.compiler.set()
        _, answer = front.answers(2)
        assert (answer.kind, answer.slug) == ("failed", "cancelled")
        assert ("compute", 11.0) not in backend.log
    finally:
        backend.compiler.set()
        front.end()


def test_a_front_that_goes_waits_for_no_compiler(task):
    backend = Compiled()
    front = Front(backend)
    front.send(packed(task("cold", 11.0)[0]))
    front.answers(1)
    front.end()
    backend.compiler.set()
    assert backend.log == []
