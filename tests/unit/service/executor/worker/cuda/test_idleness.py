"""Idleness of a worker: what counts as a task, how long it has to be over, and who is waited for."""

from __future__ import annotations

import threading

from gemmserve_service.executor.worker.cuda.idleness import QUIET_S, Idleness

WAIT_S = 60.0


class Time:
    """A clock that is set."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_worker_that_has_had_no_task_is_idle():
    assert Idleness(Time()).quiet


def test_it_is_idle_a_while_after_the_last_task_came_or_went():
    time = Time()
    subject = Idleness(time)
    subject.worked()
    time.now += 0.9 * QUIET_S
    assert not subject.quiet
    subject.worked()
    time.now += 0.9 * QUIET_S
    assert not subject.quiet
    time.now += 0.2 * QUIET_S
    assert subject.quiet


def test_it_is_not_idle_while_it_has_a_task_however_long_nor_at_once_afterwards():
    time, tasks = Time(), ["a task"]
    subject = Idleness(time)
    subject.follow(lambda: bool(tasks))
    assert not subject.quiet
    time.now += 100 * QUIET_S
    assert not subject.quiet
    tasks.clear()
    assert not subject.quiet
    time.now += QUIET_S
    assert subject.quiet
    subject.follow(lambda: True)  # the next front's
    assert not subject.quiet


def test_it_waits_for_that_or_for_what_comes_sooner():
    subject, looked, busy, sooner = Idleness(), threading.Event(), threading.Event(), threading.Event()
    busy.set()

    def is_busy():
        looked.set()
        return busy.is_set()

    subject.follow(is_busy)
    waits = [threading.Thread(target=subject.wait, args=args, daemon=True) for args in ((), (sooner.is_set,))]
    for wait in waits:
        wait.start()
    assert looked.wait(WAIT_S)
    assert all(wait.is_alive() for wait in waits)
    sooner.set()
    waits[1].join(WAIT_S)
    assert not waits[1].is_alive()
    assert waits[0].is_alive()
    busy.clear()
    waits[0].join(WAIT_S)
    assert not waits[0].is_alive()
