"""The scheduler alone, with workers that answer when the test says so."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gemmserve_kernels import ComputeUnsupported
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_service.errors import (
    JobCancelled,
    JobFailed,
    JobTimeout,
    WorkerCrashed,
)
from gemmserve_service.executor.packing import form_of
from gemmserve_service.executor.protocol import Done
from gemmserve_service.scheduling.estimates import Estimates
from gemmserve_service.schemas import GemmParams, Timings

A = np.ones((4, 4), "c8")


async def test_priority_then_first_come(make_scheduler, fake, submit, store):
    scheduler = await make_scheduler(fake, max_grouped_jobs=1)
    await submit(scheduler, "running")
    for name, priority in (("low", -5), ("first", 0), ("high", 9), ("second", 0)):
        await submit(scheduler, name, priority=priority)
    order = []
    while scheduler.running:
        order += fake.running()
        fake.done()
    assert order == ["running", "high", "first", "second", "low"]
    assert store.scratch_bytes == 0


async def test_each_worker_has_one_task_at_a_time(make_scheduler, make_fake, submit):
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await make_scheduler(fake)
    for name in "abc":
        await submit(scheduler, name)
    assert (fake.running("cuda:0"), fake.running("cuda:1")) == (["a"], ["b"])
    assert (scheduler.queued, scheduler.running) == (1, 2)
    fake.done("cuda:1")
    assert (fake.running("cuda:0"), fake.running("cuda:1")) == (["a"], ["c"])


async def test_answers_that_came_together_are_followed_by_one_look_for_tasks(make_scheduler, make_fake, submit):
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await make_scheduler(fake, max_grouped_jobs=1)
    for name in "abcd":
        await submit(scheduler, name)
    for device, task in (("cuda:1", "b"), ("cuda:0", "a")):
        done = Done(task=task, algorithm="numpy", timings=Timings(kernel_s=0.001))
        scheduler.task_ended(fake.fleet[device], done, more=True)
    assert (scheduler.queued, scheduler.running) == (2, 0)
    scheduler.answers_over()
    assert (fake.running("cuda:0"), fake.running("cuda:1")) == (["c"], ["d"])


async def test_an_owner_is_charged_once_for_answers_that_came_together(make_scheduler, fake, submit, charged):
    scheduler = await make_scheduler(fake)
    for name in ("before", "a", "b", "c"):
        await submit(scheduler, name)
    fake.done()
    seen = charged(scheduler)
    for name in "abc":
        done = Done(task=name, algorithm="numpy", timings=Timings(kernel_s=0.25))
        scheduler.task_ended(fake.fleet["cpu"], done, more=True)
    assert seen == []
    scheduler.answers_over()
    assert seen == [("", 0.75)]


@pytest.fixture
def charged(monkeypatch):
    """Notes what owners are charged with by a scheduler's quotas from then on."""

    def note(scheduler):
        seen = []
        monkeypatch.setattr(scheduler.quotas, "charge_device", lambda *each: seen.append(each))
        return seen

    return note


async def test_equal_products_are_described_once(make_scheduler, make_task, fake, monkeypatch):
    scheduler, made = await make_scheduler(fake), []
    tasks = [await make_task(name) for name in "abc"]
    for task in tasks:
        task.problem = tasks[0].problem
        task.plans = scheduler.check(task.problem)
    monkeypatch.setattr("gemmserve_service.scheduling.tasks.form_of", lambda *each: made.append(each) or form_of(*each))
    for task in tasks:
        scheduler.submit(task, soon=True)
    await asyncio.sleep(0)
    assert len(made) == 1
    assert len({id(task.form) for task in tasks}) == 1


async def test_plans_are_those_of_the_devices_that_there_are(make_scheduler, make_fake, make_task):
    fake = make_fake("cuda:0", "cuda:1")
    fake.specs = {"cuda:0": KNOWN["H200"], "cuda:1": KNOWN["H200"]}
    scheduler = await make_scheduler(fake)
    problem = (await make_task("t")).problem
    plans = scheduler.check(problem)
    assert plans == scheduler.check(problem)
    plans.clear()  # the task's own
    (known,) = scheduler.check(problem).values()
    fake.lose("cuda:1")
    fake.specs["cuda:1"] = KNOWN["RTX5090"]
    fake.hello("cuda:1")
    assert len(scheduler.check(problem)) == 2
    assert known in scheduler.check(problem).values()


async def test_a_mode_that_no_device_has_is_refused_with_those_of_all(make_scheduler, make_fake, make_task):
    fake = make_fake("cuda:0", "cuda:1")
    fake.specs = {"cuda:0": KNOWN["MI250X"], "cuda:1": KNOWN["A100"]}
    scheduler = await make_scheduler(fake)
    problem = (await make_task("t")).problem
    object.__setattr__(problem, "compute", "ozaki")
    with pytest.raises(ComputeUnsupported) as caught:
        scheduler.check(problem)
    assert caught.value.available == ["auto", "fp32", "fp64", "tf32", "1xtf32", "3xtf32", "3xfp16", "6xbf16", "9xbf16"]
    assert "9xbf16" in str(caught.value)


@pytest.fixture
def by_priority(monkeypatch):
    """Estimated seconds: 10 of a task with priority 50, else 0.01."""
    monkeypatch.setattr(Estimates, "seconds", lambda _, task, __: 10.0 if task.priority == 50 else 0.01)


async def test_short_tasks_pass_a_long_one_where_the_worker_has_panels(scheduler, fake, submit, by_priority):
    await submit(scheduler, "long", priority=50)
    await submit(scheduler, "another long", priority=50)
    await submit(scheduler, "short", owner="somebody")
    assert fake.running() == ["long"]
    fake.fleet["cpu"].interleaves = True
    scheduler.fleet.open(fake.fleet["cpu"])
    await submit(scheduler, "second", owner="somebody")
    assert fake.running() == ["long", "short"], "one at a time, and no long one"
    fake.done(task="short")
    assert fake.running() == ["long", "second"]
    fake.done(task="long")
    fake.done(task="second")
    assert fake.running() == ["another long"]


async def test_one_that_waits_beside_a_long_one_passes_it_at_once(scheduler, fake, submit, by_priority):
    fake.interleaves = True
    fake.lose()
    await submit(scheduler, "long", priority=50)
    await submit(scheduler, "short")
    fake.hello()
    assert fake.running() == ["long", "short"]


async def test_what_stood_behind_a_cancelled_one_passes_at_once(scheduler, fake, submit, by_priority):
    fake.fleet["cpu"].interleaves = True
    await submit(scheduler, "long", priority=50)
    blocks = await submit(scheduler, "another long", priority=50)
    await submit(scheduler, "short")
    assert fake.running() == ["long"]
    scheduler.cancel(blocks)
    await asyncio.sleep(0)
    assert fake.running() == ["long", "short"]


@pytest.mark.parametrize(
    ("long_s", "short_s", "passes"),
    [
        (0.04, 0.003, True),  # a quarter of a gigabyte of zeros, and a product of 128 x 128
        (0.04, 0.005, False),  # more than a tenth
        (0.015, 0.001, False),
        (100.0, 0.05, True),
        (100.0, 0.06, False),
    ],
)
async def test_what_passes_takes_a_tenth_of_what_is_passed(
    scheduler, fake, submit, monkeypatch, long_s, short_s, passes
):
    monkeypatch.setattr(Estimates, "seconds", lambda _, task, __: long_s if task.priority == 50 else short_s)
    fake.fleet["cpu"].interleaves = True
    await submit(scheduler, "long", priority=50)
    await submit(scheduler, "short", owner="somebody")
    assert fake.running() == (["long", "short"] if passes else ["long"])


async def test_who_may_have_killed_a_worker_neither_passes_nor_is_passed(
    make_scheduler, fake, submit, listener, by_priority, store
):
    fake.interleaves = True
    scheduler = await make_scheduler(fake, max_attempts=3)
    await submit(scheduler, "long", priority=50)
    await submit(scheduler, "poison", owner="somebody")
    assert fake.running() == ["long", "poison"]
    fake.lose()
    fake.hello()
    while fake.running() != ["long"]:
        fake.lose()
        fake.hello()
    await submit(scheduler, "harmless", owner="a third")
    assert fake.running() == ["long"]
    for _ in range(10):
        if not fake.running():
            break
        if "poison" in fake.running():
            fake.lose()
            fake.hello()
            assert len(fake.running()) <= 1
        else:
            fake.done()
    assert isinstance(listener.outcomes["poison"], WorkerCrashed)
    assert isinstance(listener.outcomes["long"], Done)
    assert store.scratch_bytes == 0


async def test_a_suspect_does_not_pass(scheduler, fake, submit, by_priority):
    fake.fleet["cpu"].interleaves = True
    await submit(scheduler, "long", priority=50)
    await submit(scheduler, "first", owner="somebody")
    fake.done(task="first")
    suspect = await submit(scheduler, "suspect", owner="somebody", crashes=1)
    assert fake.running() == ["long"]
    assert suspect.worker is None


async def test_a_suspect_may_come_before_its_worker_has_said_what_it_is(scheduler, fake, submit):
    """As a job does whose worker was lost, when the server starts again."""
    worker = fake.fleet["cpu"]
    worker.ready, worker.spec = False, None
    await submit(scheduler, "suspect", crashes=1)
    assert fake.running() == []
    fake.hello("cpu")
    assert fake.running() == ["suspect"]


async def test_a_check_has_its_time_and_is_not_sampled_of_huge_products(make_scheduler, fake, make_task):
    scheduler = await make_scheduler(fake, verify_share=1.0)
    for name, nbytes, asked, checked in (
        ("a", 64, False, True),
        ("b", 1 << 40, False, False),
        ("c", 1 << 40, True, True),
    ):
        task = await make_task(name, verify=asked)
        task.__dict__["size"] = (nbytes, 0)
        scheduler.submit(task)
        assert fake.sent[-1][1][0].verify is checked
        limit_s = task.limit_s
        fake.done()
    assert limit_s > 20 * (1 << 40) / 1e8


async def test_a_lost_task_takes_its_old_place_and_its_results(scheduler, fake, submit, listener):
    task = await submit(scheduler, "a")
    await submit(scheduler, "b")
    fake.lose()
    assert listener.told[-1] == ("requeued", "a")
    assert (scheduler.queued, scheduler.running) == (2, 0)
    fake.hello()
    assert fake.running() == ["a"]
    assert (task.attempt, fake.fleet["cpu"].restarts) == (2, 1)


async def test_a_poisonous_task_fails_after_its_attempts(make_scheduler, fake, submit, listener, store):
    scheduler = await make_scheduler(fake, max_attempts=3)
    await submit(scheduler, "poison")
    await submit(scheduler, "good")
    for _ in range(3):
        assert fake.running() == ["poison"]
        fake.lose()
        fake.hello()
    assert isinstance(listener.outcomes["poison"], WorkerCrashed)
    assert fake.running() == ["good"]
    fake.done()
    assert store.scratch_bytes == 0


async def test_space_that_a_lost_worker_had_is_not_used_again(make_scheduler, fake, submit, store):
    scheduler = await make_scheduler(fake, max_attempts=1)
    task = await submit(scheduler, "a")
    name = task.results["d"].extent.name
    fake.lose()
    assert store.scratch_bytes == 0
    assert name not in store._memory._free


async def test_space_of_a_cancelled_task_that_its_lost_worker_had_is_not_used_again(scheduler, fake, submit, store):
    task = await submit(scheduler, "a")
    name = task.results["d"].extent.name
    scheduler.cancel(task)
    fake.lose()
    assert store.scratch_bytes == 0
    assert name not in store._memory._free


async def test_cancelled_while_queued_is_never_run(scheduler, fake, submit, listener, store):
    await submit(scheduler, "a")
    waiting = await submit(scheduler, "b")
    scheduler.cancel(waiting)
    scheduler.cancel(waiting)
    assert isinstance(listener.outcomes["b"], JobCancelled)
    fake.done()
    assert [run.task for _, (run,) in fake.sent] == ["a"]
    assert store.scratch_bytes == 0


async def test_cancelled_while_running_holds_its_space_until_the_worker_is_through(
    scheduler, fake, submit, listener, store
):
    running = await submit(scheduler, "a")
    held = store.scratch_bytes
    scheduler.cancel(running)
    assert isinstance(listener.outcomes["a"], JobCancelled)
    assert store.scratch_bytes == held
    waiting = await submit(scheduler, "b")
    assert fake.running() == ["a"]
    fake.done(task="a")
    assert fake.running() == ["b"]
    scheduler.cancel(waiting)
    fake.lose()
    assert store.scratch_bytes == 0
    assert listener.told.count(("ended", "a")) == 1


async def test_the_deadline_counts_queue_and_run(scheduler, fake, submit, listener, store, eventually):
    await submit(scheduler, "runs", timeout_s=0.03)
    await submit(scheduler, "waits", timeout_s=0.03)
    await eventually(lambda: len(listener.outcomes) == 2)
    assert all(isinstance(outcome, JobTimeout) for outcome in listener.outcomes.values())
    assert (scheduler.queued, scheduler.running) == (0, 1)
    fake.done()
    assert store.scratch_bytes == 0


async def test_no_deadline_fires_after_the_end(scheduler, fake, submit, listener):
    await submit(scheduler, "a", timeout_s=0.01)
    fake.done()
    await asyncio.sleep(0.02)  # a timer that was left would have come before this one
    assert isinstance(listener.outcomes["a"], Done)


async def test_a_failure_ends_the_task_and_not_the_worker(scheduler, fake, submit, listener, store):
    await submit(scheduler, "a")
    await submit(scheduler, "b")
    fake.fail()
    failed = listener.outcomes["a"]
    assert isinstance(failed, JobFailed)
    assert failed.description.slug == "device-error"
    assert fake.running() == ["b"]
    fake.done()
    assert store.scratch_bytes == 0


async def test_an_answer_that_nobody_waits_for_is_ignored(scheduler, fake, submit, listener):
    await submit(scheduler, "a")
    fake.lose()
    fake.hello()
    fake.done(task="a")
    fake.done(task="a")
    fake.done(task="never heard of")
    assert listener.told.count(("ended", "a")) == 1


async def test_a_task_that_no_device_can_run_any_more_fails_and_lets_others_pass(
    scheduler, fake, submit, listener, make_task, store
):
    task = await make_task("tf32", params=GemmParams(compute="fp32"))
    object.__setattr__(task.problem, "compute", "tf32")  # admitted by a server with another device
    await submit(scheduler, "runs")
    scheduler.submit(task)
    await submit(scheduler, "next")
    fake.done()
    assert fake.running() == ["next"]
    assert listener.outcomes["tf32"].description.slug == "compute-unsupported"
    fake.done()
    assert store.scratch_bytes == 0


async def test_ended_tasks_do_not_pile_up_behind_a_long_one(scheduler, submit):
    await submit(scheduler, "long")
    for i in range(1500):
        scheduler.cancel(await submit(scheduler, f"{i}"))
    assert sum(len(line.heap) for flow in scheduler.queue._flows.values() for line in flow.lines) < 600
    assert len(scheduler.queue._heap) < 600
    assert scheduler.queued == 0
