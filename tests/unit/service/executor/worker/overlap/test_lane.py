"""What is told of lanes: the oldest task of the one that stands still."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

from staged_devices import WAIT_S, until
from works import packed

from gemmserve_service.executor.worker import loop
from gemmserve_service.executor.worker.overlap.overlap import Overlap
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.schemas import Timings


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
