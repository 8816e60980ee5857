"""The watchdog: who is killed, and who is not."""

from __future__ import annotations

import asyncio
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from inline_executor import InlineExecutor

from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.scheduling.estimates import Estimates
from gemmserve_service.scheduling.watchdog import Watchdog
from gemmserve_service.schemas import JobState, Timings

A = np.ones((4, 4), "c8")


def has(worker, name="t", **fields):
    """Gives the worker a task that may stand still for 50 s."""
    task = worker.tasks[name] = SimpleNamespace(
        **{"id": name, "limit_s": 50, "expected_s": 0.0, "over": False, "stalled": False} | fields
    )
    return task


@pytest.fixture
def dog(fake):
    fake.owner = SimpleNamespace(worker_ready=lambda _: None, worker_lost=lambda worker: worker.tasks.clear())
    fake.hello()
    return Watchdog(fake, silence_s=30, hang_s=100)


@pytest.fixture
def worker(dog, fake):
    worker = fake.fleet["cpu"]
    worker.heard = worker.moved = 1000.0
    return worker


def test_a_silent_worker_is_killed_whether_it_has_a_task_or_not(dog, worker, fake):
    for now in range(1000, 1030, 1):
        dog.look(now)
    assert fake.killed == []
    dog.look(1031)
    assert [name for name, _ in fake.killed] == ["cpu"]
    assert "no sign of life for 31.0 s" in fake.killed[0][1]
    dog.look(1032)  # it is being replaced
    assert dog.killed == len(fake.killed) == 1


def test_a_task_that_does_not_get_on_costs_its_worker(dog, worker, fake):
    has(worker)
    for now in range(1000, 1050):
        worker.heard = now
        dog.look(now)
    assert fake.killed == []
    worker.heard = 1051
    dog.look(1051)
    assert "task t has not got on for 51.0 s" in fake.killed[0][1]


def test_an_array_that_is_not_copied_to_its_client_costs_the_worker(dog, worker, fake):
    worker.delivering = 1000.0
    for now in range(1000, 1101):
        worker.heard = now
        dog.look(now)
    assert fake.killed == []
    worker.heard = 1101
    dog.look(1101)
    assert "an array that somebody waits for was not copied in 101.0 s" in fake.killed[0][1]


def test_each_panel_renews_the_lease(dog, worker, fake, monkeypatch):
    has(worker)
    for now in range(1000, 2000, 10):
        monkeypatch.setattr("gemmserve_service.executor.port.time.monotonic", lambda now=now: float(now))
        worker.heard = now
        worker.beat("t", now // 40)
        dog.look(now)
    assert fake.killed == []
    worker.beat("another", 10**6)  # a late word of an earlier task is no progress
    assert worker.progress == 49


def test_who_was_stopped_himself_blames_nobody(dog, worker, fake):
    has(worker)
    dog.look(1001)
    dog.look(1500)  # the machine slept
    assert fake.killed == []
    for now in range(1501, 1530):
        dog.look(now)
    assert fake.killed == []
    dog.look(1531)
    assert len(fake.killed) == 1


def product(dtype):
    """A product as estimates know it."""
    task = SimpleNamespace(size=(1 << 20, 10**10), plans={}, models={}, problem=SimpleNamespace(dtype=np.dtype(dtype)))
    task.whole = task
    task.beside = False
    task.model_seconds = lambda _: None
    return task


def test_estimates_follow_what_was_measured_and_the_cautious_ones_only_upwards(fake):
    fake.owner = SimpleNamespace(worker_ready=lambda _: None)
    fake.hello()
    worker = fake.fleet["cpu"]
    task = product("c8")
    estimates = Estimates()
    model = estimates.seconds(task, worker)
    assert 1 < model < 10
    for _ in range(50):
        estimates.learn(task, worker, Timings(kernel_s=model / 16))
    assert estimates.seconds(task, worker) == pytest.approx(model / 16)
    assert estimates.cautious_seconds(task, worker) == pytest.approx(model)
    for _ in range(50):
        estimates.learn(task, worker, Timings(kernel_s=model * 16))
    assert estimates.cautious_seconds(task, worker) == pytest.approx(model * 16, rel=0.01)
    other = product("c16")
    assert estimates.seconds(other, worker) == model, "another dtype is another matter"
    estimates.learn(task, worker, Timings())
    assert math.isfinite(estimates.seconds(task, worker))


def test_what_ran_beside_others_took_no_longer_than_it_is_expected_to(fake):
    fake.owner = SimpleNamespace(worker_ready=lambda _: None)
    fake.hello()
    worker = fake.fleet["cpu"]
    task = product("c8")
    estimates = Estimates()

    def ran(seconds):
        busy = estimates.busy_seconds(task, worker, Timings(kernel_s=seconds))
        estimates.learn(task, worker, Timings(kernel_s=seconds))
        return busy

    assert ran(0.5) == 0.5
    known = estimates.seconds(task, worker)
    task.beside = True
    assert ran(8.0) == pytest.approx(known)
    assert estimates.seconds(task, worker) == known
    assert ran(0.25) == 0.25
    assert estimates.seconds(task, worker) < known


def test_what_nobody_wants_has_less_time(dog, worker, fake):
    task = has(worker, limit_s=150, over=True)  # hang_s is 100, silence_s 30
    for now in range(1000, 1080):
        worker.heard = now
        dog.look(now)
    assert fake.killed == []
    worker.heard = 1081
    dog.look(1081)
    assert "task t has not got on for 81.0 s" in fake.killed[0][1]
    assert task.stalled


def test_the_task_that_it_is_at_is_to_blame(dog, worker, fake):
    first, second = has(worker, "first"), has(worker, "second")
    worker.beat("second", 0)
    worker.moved, worker.heard = 1000.0, 1051.0
    dog.look(1051)
    assert len(fake.killed) == 1
    assert (first.stalled, second.stalled) == (False, True)


def test_a_silent_worker_says_nothing_of_its_task(dog, worker, fake):
    task = has(worker)
    dog.look(1001)
    dog.look(1014)
    dog.look(1027)
    dog.look(1031)
    assert len(fake.killed) == 1
    assert not task.stalled


@pytest.mark.parametrize("max_attempts", [1, 2, 5])
async def test_a_job_that_stood_still_is_tried_once_more_behind_all_others(
    make_core, make_settings, put, gemm, fake, max_attempts
):
    core = await make_core(make_settings(hang_s=3600, hang_factor=0, max_attempts=max_attempts), fake)
    watchdog, worker = core.scheduler.watchdog, fake.fleet["cpu"]
    await watchdog.stop()  # it looks when the test says so

    def look(after_s):
        worker.heard = watchdog._last_look = worker.moved + after_s
        watchdog.look(worker.moved + after_s)

    a = await put(core.store, A)
    hangs, _ = await core.jobs.submit(gemm(a, a, priority=100))
    others = [(await core.jobs.submit(gemm(a, a)))[0].id for _ in range(3)]
    tries = min(max_attempts, 2)
    for attempt in range(1, tries + 1):
        assert fake.running() == [hangs.id]
        look(3599)
        assert len(fake.killed) == attempt - 1
        look(3601)
        assert len(fake.killed) == attempt
        fake.hello()
        while others:
            assert hangs.id not in fake.running(), "the others first"
            others.remove(fake.running()[0])
            fake.done()
    failed = await core.jobs.wait(hangs.id, 60)
    assert (failed.state, failed.attempt, failed.error.type) == (JobState.FAILED, tries, "/problems/worker-crashed")
    assert "did not get on" in failed.error.detail
    assert fake.running() == []
    assert watchdog.killed == tries


async def test_a_job_that_stood_still_does_not_wait_for_ever(make_core, make_settings, put, gemm, fake):
    core = await make_core(make_settings(hang_s=3600, hang_factor=0, max_grouped_jobs=1), fake)
    watchdog, worker = core.scheduler.watchdog, fake.fleet["cpu"]
    await watchdog.stop()  # it looks when the test says so
    a = await put(core.store, A)
    hangs, _ = await core.jobs.submit(gemm(a, a, priority=100))
    waiting = [(await core.jobs.submit(gemm(a, a, priority=priority)))[0].id for priority in (-3, 2, -3)]
    worker.heard = worker.moved + 3601
    watchdog.look(worker.moved + 3601)
    fake.hello()
    seen = []
    for _ in range(6):  # another comes whenever one ends
        waiting.append((await core.jobs.submit(gemm(a, a, priority=-3)))[0].id)
        seen += fake.running()
        fake.done()
    first, second, third, *later = waiting
    assert seen == [second, first, third, hangs.id, *later[:2]]


async def test_readiness_notices_a_worker_that_stands_still_while_others_wait(
    make_core, make_settings, put, gemm, fake
):
    core = await make_core(make_settings(), fake)
    worker = fake.fleet["cpu"]
    a = await put(core.store, A)
    await core.jobs.submit(gemm(a, a))
    worker.moved -= 60
    assert core.ready() == (True, []), "nobody waits"
    await core.jobs.submit(gemm(a, a))
    ready, (reason,) = core.ready()
    assert not ready
    assert reason == "1 jobs wait, and worker cpu has not got on for 60 s"
    worker.beat(fake.running()[0], 1)
    assert core.ready() == (True, []), "it gets on"
    worker.moved -= 4
    assert core.ready() == (True, []), "a few seconds are nothing"
    worker.moved -= 4
    assert not core.ready()[0]
    next(iter(worker.tasks.values())).expected_s = 60.0
    assert core.ready() == (True, []), "it is expected to take a minute"


async def test_one_worker_that_gets_on_is_enough_to_be_ready(make_core, make_settings, put, gemm, make_fake):
    fake = make_fake("cuda:0", "cuda:1")
    core = await make_core(make_settings(), fake)
    a = await put(core.store, A)
    for _ in range(3):
        await core.jobs.submit(gemm(a, a))
    fake.fleet["cuda:0"].moved -= 60
    assert core.ready() == (True, [])
    fake.fleet["cuda:1"].moved -= 60
    assert len(core.ready()[1]) == 1


async def test_it_looks_by_itself(make_core, make_settings, put, gemm, fake, eventually):
    core = await make_core(make_settings(hang_s=0.05, hang_factor=0, max_attempts=1), fake)
    a = await put(core.store, A)
    hangs, _ = await core.jobs.submit(gemm(a, a))
    await eventually(lambda: fake.killed)
    assert (await core.jobs.wait(hangs.id, 60)).state == JobState.FAILED


async def test_it_looks_again_after_one_that_could_not_be_ended(dog, worker, fake, eventually, monkeypatch):
    kill, tries = fake.kill, []

    def refused(*arguments):
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not now")
        kill(*arguments)

    monkeypatch.setattr(fake, "kill", refused)
    dog._every_s = 0.01
    dog.start()
    await eventually(lambda: fake.killed)
    await dog.stop()
    assert len(tries) == 2


async def test_a_thread_that_hangs_is_given_up(make_core, make_settings, put, gemm, monkeypatch, eventually):
    run, begun = CpuBackend.run, []
    gates = [threading.Event(), threading.Event()]

    def held(self, *arguments):
        begun.append(gates[len(begun)])
        assert begun[-1].wait(60)
        return run(self, *arguments)

    executor = InlineExecutor()
    core = await make_core(make_settings(hang_s=3600, hang_factor=0), executor)
    watchdog, (worker,) = core.scheduler.watchdog, executor.workers()
    await watchdog.stop()  # it looks when the test says so
    monkeypatch.setattr(CpuBackend, "run", held)
    monkeypatch.setattr(CpuBackend, "repeated", lambda *_: None)  # short ones would go past it
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    await eventually(lambda: len(begun) == 1)
    thread = executor._thread
    watchdog._last_look = worker.moved + 3601
    watchdog.look(worker.moved + 3601)
    assert core.ready()[0]
    await eventually(lambda: len(begun) == 2)
    gates[0].set()  # the one that was given up answers, to nobody
    await asyncio.to_thread(thread.shutdown)
    assert (await core.jobs.wait(info.id, 0.01)).state == JobState.RUNNING
    gates[1].set()
    finished = await core.jobs.wait(info.id, 60)
    assert (finished.state, finished.attempt) == (JobState.SUCCEEDED, 2)
