"""Tasks that cannot run yet, for want of room or of their operands, and what others do meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_service.errors import JobTimeout
from gemmserve_service.scheduling import scheduler as scheduling
from gemmserve_service.scheduling.estimates import Estimates
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import GemmParams
from gemmserve_service.store.extents import extents

A = np.arange(16.0).reshape(4, 4)

pytestmark = pytest.mark.usefixtures("small_results_stay", "own_files")


@pytest.fixture
def settings(make_settings):
    return make_settings(write_back_delay_s=60.0)


@pytest.fixture
def fake(make_fake):
    fake = make_fake()
    fake.result_bytes = 1 << 20
    return fake


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


@pytest.fixture
def long_wait(monkeypatch):
    """The disk is not asked again for room of itself."""
    monkeypatch.setattr(scheduling, "_ROOM_RETRY_S", 3600.0)


async def reached(condition):
    """Return when it holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (a thread's doing)
            await asyncio.sleep(0.001)


async def test_a_worker_that_waits_for_room_that_there_is_not_does_not_hang(core, fake, a, gemm, full_disk):
    core.store._files.trim()
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done(written=False)
    info = await core.jobs.wait(info.id, 60)
    await core.jobs.submit(gemm(a, a))
    full_disk(True)
    worker = fake.fleet["cpu"]
    worker.moved -= 1e6
    with core.store.pin(info.result["d"]) as pinned, pytest.raises(JobTimeout):
        await core.scheduler.writes.wait_readable(pinned, 0)
    worker.heard = time.monotonic()
    core.scheduler.watchdog.look(time.monotonic())
    assert not fake.killed


async def test_a_task_that_finds_no_room_is_not_charged_for_its_tries(core, fake, a, gemm, full_disk, monkeypatch):
    monkeypatch.setattr(Estimates, "seconds", lambda *_: 1e-3)
    monkeypatch.setattr(core.scheduler, "_is_checked", lambda _: True)
    core.store._files.trim()
    full_disk(True)
    info, _ = await core.jobs.submit(gemm(a, a))
    for _ in range(3):
        core.scheduler._dispatch()
    assert not fake.running()
    (flow,) = core.scheduler.queue._flows.values()
    assert [line.tag for line in flow.lines] == pytest.approx([0.0] * len(flow.lines))
    await core.jobs.cancel(info.id)


async def test_a_suspect_that_waits_for_the_disk_keeps_no_worker_from_running_ahead(
    core, fake, a, gemm, full_disk, long_wait, monkeypatch
):
    monkeypatch.setattr(core.scheduler.placement, "companions", lambda *_: [])
    suspect, _ = await core.jobs.submit(gemm(a, a))
    others = [(await core.jobs.submit(gemm(a, a, verify=True, priority=1)))[0].id for _ in range(5)]
    assert fake.running() == [suspect.id]
    fake.lose()
    core.store._files.trim()
    full_disk(True)
    fake.ahead, fake.result_bytes = 2, 0
    core.scheduler._wait_for_room()
    fake.hello()
    assert fake.running() == others[:3]
    full_disk(False)
    core.scheduler._room_timer = None
    for left in (2, 1):
        fake.done()
        assert len(fake.running()) == left, "now it could have the worker alone"
    fake.done()
    assert fake.running() == [others[3]]
    fake.done()
    fake.done()
    assert fake.running() == [suspect.id]
    fake.done()


async def test_a_task_that_finds_no_room_keeps_no_other_from_an_idle_worker(core, fake, a, gemm, full_disk):
    first, _ = await core.jobs.submit(gemm(a, a))
    second, _ = await core.jobs.submit(gemm(a, a, verify=True))
    fake.lose()
    core.store._files.trim()
    full_disk(True)
    fake.result_bytes = 0
    fake.hello()
    assert fake.running() == [second.id]
    full_disk(False)
    core.scheduler._room_timer = None
    fake.done()
    assert fake.running() == [first.id]
    fake.done()


async def test_a_task_is_tried_again_for_room_though_the_timer_comes_before_the_clock_has_it(
    core, fake, a, gemm, full_disk, monkeypatch
):
    """A loop's timers are set by the time at which its turn began, which may be long before."""
    clock = time.monotonic()
    monkeypatch.setattr(scheduling, "_ROOM_RETRY_S", 0.05)
    monkeypatch.setattr(scheduling, "time", SimpleNamespace(monotonic=lambda: clock))
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.lose()
    core.store._files.trim()
    full_disk(True)
    fake.result_bytes = 0
    fake.hello()
    assert not fake.running()
    full_disk(False)
    await reached(fake.running)
    assert fake.running() == [info.id]
    fake.done()


async def test_a_result_for_which_neither_device_nor_disk_has_room_waits_with_its_job_and_others_pass_it(
    core, fake, a, gemm, scratch, full_disk, eventually
):
    """It would wait there for others to be written, none of which is, and hold up what needs no such room."""
    most = 4
    fake.lose()
    fake.result_bytes = most * A.nbytes
    fake.hello()
    core.store._files.trim()
    full_disk(True)
    held = []
    for _ in range(most - 1):
        info, _ = await core.jobs.submit(gemm(a, a))
        fake.done(written=False)
        held.append(await core.jobs.wait(info.id, 60))
    jobs = [(await core.jobs.submit(gemm(a, a)))[0].id for _ in range(3)]
    assert fake.running() == jobs[:1], "for which there is room"
    fake.done(written=False)
    await core.jobs.wait(jobs[0], 60)
    assert not fake.running()
    running = asyncio.create_task(core.jobs.run(GemmParams(), await scratch(core.store, a=A, b=A)))
    await eventually(fake.running)
    fake.done()
    (await running).release()
    assert not fake.running()
    await core.store.delete(held[0].result["d"])
    await eventually(lambda: fake.drops() == [held[0].id])
    fake.written(held[0].id)
    await eventually(lambda: fake.running() == jobs[1:2], 5)
    fake.done(written=False)
    await core.jobs.wait(jobs[1], 60)
    assert not fake.running()
    full_disk(False)
    await eventually(fake.writes)
    assert not fake.running()
    for job in list(fake.writes()):
        fake.write(job, A @ A)
    await eventually(lambda: fake.running() == jobs[2:], 5)
    fake.done(written=False)
    await core.jobs.wait(jobs[2], 60)


LARGE = np.arange(4096.0).reshape(64, 64)


@pytest.fixture
def slow_files(core, monkeypatch):
    """Files of 32 KiB and more take long to make, until `go` is set; the threads that made them. All tasks are checked:
    results that may be deferred need their places when they are sent.
    """
    allocate = extents._allocate
    made = SimpleNamespace(threads=[], go=threading.Event())

    def late(fd, capacity):
        if capacity >= LARGE.nbytes:
            made.threads.append(threading.current_thread())
            assert made.go.wait(20)
        allocate(fd, capacity)

    monkeypatch.setattr(core.scheduler, "_is_checked", lambda _: True)
    monkeypatch.setattr(extents, "_LARGE", LARGE.nbytes)
    monkeypatch.setattr(extents, "_BRIEF_S", 0.0)
    monkeypatch.setattr(extents, "_allocate", late)
    yield made
    made.go.set()


@pytest.fixture
async def large(core, put):
    """Stored before files are slow."""
    return await put(core.store, LARGE)


async def test_a_file_that_takes_long_is_made_by_a_thread_while_others_pass(core, fake, a, large, slow_files, gemm):
    core.store._files.trim()
    first, _ = await core.jobs.submit(gemm(large, large))
    assert not fake.running(), "the event loop goes on"
    small, _ = await core.jobs.submit(gemm(a, a))
    assert fake.running() == [small.id]
    fake.done()
    core.scheduler._dispatch()
    assert not fake.running()
    (flow,) = core.scheduler.queue._flows.values()
    assert min(line.tag for line in flow.lines) == 0.0
    slow_files.go.set()
    await reached(fake.running)
    assert fake.running() == [first.id]
    fake.done()
    assert [thread is threading.current_thread() for thread in slow_files.threads] == [False]
    assert (await core.jobs.wait(first.id, 60)).state == "succeeded"


async def test_a_task_that_is_cancelled_while_its_file_is_made_is_not_sent(core, fake, large, slow_files, gemm):
    core.store._files.trim()
    info, _ = await core.jobs.submit(gemm(large, large))
    await reached(lambda: slow_files.threads)
    await core.jobs.cancel(info.id)
    slow_files.go.set()
    await core.scheduler.writes._background.wait()
    assert not fake.running()
    assert core.scheduler.queued == 0


async def test_a_file_that_a_thread_could_not_make_is_asked_for_once_more(
    core, fake, large, slow_files, gemm, full_disk
):
    """As one whose making is brief: the task waits for room, and runs when there is."""
    core.store._files.trim()
    slow_files.go.set()
    full_disk(True)
    info, _ = await core.jobs.submit(gemm(large, large))
    await reached(lambda: core.scheduler._room_timer is not None)
    assert not fake.running()
    full_disk(False)
    await reached(fake.running)
    assert fake.running() == [info.id]
    fake.done()


@pytest.fixture
def waits(monkeypatch):
    """Names of tasks that cannot run: their operands are where no worker can use them."""
    names: set[str] = set()
    monkeypatch.setattr(
        "gemmserve_service.scheduling.results.write_back.WriteBack.usable", lambda _, task, __: task.id not in names
    )
    return names


@pytest.mark.parametrize("why", ["operands", "room", "suspect"])
async def test_a_worker_runs_ahead_with_what_comes_behind_one_that_cannot_run(
    make_scheduler, fake, submit, waits, long_wait, monkeypatch, why
):
    fake.ahead = 2
    scheduler = await make_scheduler(fake, max_grouped_jobs=1)
    await submit(scheduler, "running")
    if why == "room":
        monkeypatch.setattr(Task, "needs_place", lambda task, *_, **__: task.id == "head")
        scheduler._wait_for_room()
    else:
        waits.add("head")
    head = await submit(scheduler, "head", crashes=int(why == "suspect"))
    for name in "ab":
        await submit(scheduler, name)
    assert fake.running() == ["running", "a", "b"]
    scheduler._room_timer = None
    waits.clear()
    await submit(scheduler, "c")
    for _ in range(3):
        fake.done()
    assert fake.running()[0] == "head", "it is the next when it can run"
    assert head.worker is not None
    while fake.running():
        fake.done()


async def test_one_that_cannot_run_is_passed_by_those_that_go_with_the_one_before_it(
    scheduler, fake, submit, waits, monkeypatch
):
    monkeypatch.setattr(Estimates, "seconds", lambda _, task, __: 1.0 if task.id == "long" else 1e-6)
    await submit(scheduler, "running")
    waits.add("waits")
    for name in ("a", "waits", "b", "long", "c"):
        await submit(scheduler, name)
    fake.done()
    assert fake.running() == ["a", "b", "c"]
    while fake.running():
        fake.done()


async def test_a_short_task_passes_a_long_one_though_its_owner_s_first_cannot_run(
    scheduler, fake, submit, waits, monkeypatch
):
    monkeypatch.setattr(Estimates, "seconds", lambda _, task, __: 10.0 if task.id.startswith("long") else 0.01)
    fake.fleet["cpu"].interleaves = True
    await submit(scheduler, "long")
    waits.add("first")
    await submit(scheduler, "first", owner="somebody")
    await submit(scheduler, "short", owner="somebody")
    assert fake.running() == ["long", "short"]
    while fake.running():
        fake.done()
