"""Products in stages: who computes them, memory that runs out, errors, cancellations."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from staged_devices import WAIT_S, A, NoRoomError, until

from gemmserve_service.executor.protocol import Cancel
from gemmserve_service.executor.worker.overlap import product


def test_a_tiny_express_product_is_computed_by_the_thread_that_reads(front, task, computed_by):
    for number in range(3):
        message, result = task(f"t{number}", 1.0 + number, express=True)
        front.send(message)
        assert [(answer.kind, answer.task) for answer in front.answers(1)] == [("done", f"t{number}")]
        np.testing.assert_array_equal(result(), (1 + number) * A @ A.T)
    assert computed_by == [front.thread] * 3


def test_what_is_not_tiny_or_not_alone_is_computed_by_the_stages(front, backend, task, computed_by, monkeypatch):
    front.send(task("long", 1.0)[0])
    front.send(task("checked", 2.0, express=True, verify=True)[0])
    front.answers(2)
    monkeypatch.setattr(product, "TINY", 1)
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


def test_one_that_finds_no_memory_beside_the_other_lane_waits_for_that(front, backend, task, held, monkeypatch):
    """What tasks of the other lane have is free when they have ended: no reason for an error."""
    monkeypatch.setattr(product, "TINY", 1)
    tries, run = [], backend.run

    def run_alone(params, *arguments):
        if params.alpha == 2:
            tries.append(("store", 1.0) in backend.log)
            if not tries[-1]:
                raise NoRoomError
        return run(params, *arguments)

    backend.run = run_alone

    def full():
        raise NoRoomError

    backend.faults[(2.0, "compute")] = full
    tasks = [task("beside", 1.0, express=True), task("long", 2.0)]
    front.send(tasks[0][0])
    assert held.reached.wait(WAIT_S)
    front.send(tasks[1][0])
    until(lambda: tries)
    held.go()
    answers = front.answers(2)
    assert [(answer.kind, answer.task) for answer in answers] == [("done", "beside"), ("done", "long")]
    assert tries == [False, True]
    for number, (_, result) in enumerate(tasks, 1):
        np.testing.assert_array_equal(result(), number * A @ A.T)


def test_one_that_finds_no_memory_with_nothing_beside_it_is_an_error(front, backend, task):
    def full(*_):
        raise NoRoomError

    backend.faults[(2.0, "compute")] = backend.run = full
    front.send(task("long", 2.0)[0])
    (answer,) = front.answers(1)
    assert (answer.kind, answer.status) == ("failed", 500)


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
