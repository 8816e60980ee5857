"""A worker whose products go through stages: answers in order, two lanes, the compiler, fronts that go."""

from __future__ import annotations

import threading
import time

import numpy as np
from staged_devices import WAIT_S, A, Front, NoRoomError, Staged, until
from works import packed

from gemmserve_service.executor.protocol import Cancel, Forget, Stop
from gemmserve_service.executor.worker import loop
from gemmserve_service.executor.worker.overlap.overlap import Overlap
from gemmserve_service.executor.worker.runner import Runner


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


def test_nothing_enters_a_lane_that_is_held(backend, task, computed_by):
    answers = []
    overlap = Overlap(Runner(backend), backend, answers.append)
    names = []
    for held in (True, False):
        overlap._express.held = held
        message, result = task(f"held {held}", 3.0, express=True)
        overlap.start(packed(message).tasks[0])
        until(lambda: len(answers) > len(names))
        names.append(computed_by[-1].name)
        np.testing.assert_array_equal(result(), 3 * A @ A.T)
    overlap.close()
    assert names == ["gemmserve-compute", threading.current_thread().name]


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
