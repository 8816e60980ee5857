"""Scheduler and fleet together, by chance: after every event no worker is left out that a queued task could go to."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from gemmserve_kernels import KernelError
from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_service.executor.protocol import Kept
from gemmserve_service.scheduling import links, placement
from gemmserve_service.scheduling.estimates import Estimates
from gemmserve_service.scheduling.tasks import Task, plan_of

SMALL, LARGE = DeviceSpec.cpu(), replace(DeviceSpec.cpu(), name="another processor")
NAMES = ("w0", "w1", "w2", "w3")
COSTS = {0: 1e-4, 1: 0.03, 2: 5.0}
"""Estimated seconds by priority: express; bulk that others pass; what a worker may have no other behind."""


@pytest.fixture
def by_priority(monkeypatch):
    monkeypatch.setattr(Estimates, "seconds", lambda _, task, __: COSTS[task.priority])
    monkeypatch.setattr(links, "DEFAULT_RATE", 1e-9)
    monkeypatch.setattr(placement, "_MAX_WAIT_S", 3600.0)


@pytest.fixture
def picky(monkeypatch):
    """Tasks that ask for a check run on SMALL alone."""

    def plan(task, spec):
        return KernelError("not here") if task.verify and spec.name != SMALL.name else plan_of(task.problem, spec)

    monkeypatch.setattr(Task, "plan", plan)


def could_begin(scheduler, task, worker):
    """Whether that task could run there now, asked of the two alone."""
    return scheduler.placement.able(task, worker) and not scheduler.placement.better_elsewhere(task, worker)


@pytest.mark.parametrize("seed", range(16))
async def test_nobody_is_left_out(seed, make_scheduler, make_fake, make_task, store, put, by_priority, picky):
    chance = random.Random(seed)
    fake = make_fake(*NAMES)
    fake.interleaves, fake.express = chance.random() < 0.5, chance.random() < 0.5
    fake.ahead = chance.choice((0, 1, 3))
    fake.specs = dict.fromkeys(NAMES[2:], LARGE) if chance.random() < 0.5 else {}
    scheduler = await make_scheduler(fake, max_attempts=3, max_grouped_jobs=chance.choice((1, 4)))
    arrays = [await put(store, np.ones((4, 4), "c8")) for _ in range(3)]
    made = []

    async def add():
        fields = {
            "owner": chance.choice(("x", "y", "z")), "priority": chance.choice((0, 0, 1, 2)),
            "verify": chance.random() < 0.2, "durable": chance.random() < 0.5,
        }  # fmt: skip
        task = await make_task(f"t{len(made)}", **fields)
        if chance.random() < 0.4:
            for pinned in task.operands.values():
                pinned.release()
            info = chance.choice(arrays)
            task.operands = {name: store.pin(info.id) for name in ("a", "b")}
        made.append(task)
        scheduler.submit(task)

    def end(worker):
        if worker.tasks:
            name = chance.choice(list(worker.tasks)) if fake.interleaves else next(iter(worker.tasks))
            fake.done(worker.id, name) if chance.random() < 0.9 else fake.fail(worker.id, name)

    def restart(worker):
        if not worker.ready:
            fake.hello(worker.id)
        elif chance.random() < 0.3:
            fake.lose(worker.id)

    def copies(worker):
        if worker.ready:
            kept = Kept(came=[], went=[], used=0, budget=0)
            way, array = chance.choice(("came", "went")), chance.choice(arrays).id
            fake.owner.copies_changed(worker, kept.model_copy(update={way: [array]}))
            scheduler._dispatch()  # the clock of a task that waited for them, which stands still here

    def check():
        left = list(scheduler.queue)
        for worker in fake.workers():
            if worker.ready and not worker.tasks:
                stranded = [task.id for task in left if could_begin(scheduler, task, worker)]
                assert not stranded, f"{worker.id} is idle, and {stranded} wait"
        assert scheduler.running == sum(len(worker.tasks) for worker in fake.workers())
        assert scheduler.fleet.idle == sum(worker.ready and not worker.tasks for worker in fake.workers())
        before = -1
        while before != len(fake.sent):  # what workers take that are known to be open, all of it
            before = len(fake.sent)
            scheduler._dispatch()
        said = len(fake.sent)
        for worker in fake.workers():
            scheduler.fleet.open(worker)
        scheduler._dispatch()
        assert len(fake.sent) == said, "a worker was not open that takes something"

    for _ in range(150):
        worker = fake.fleet[chance.choice(NAMES)]
        event = chance.choices((add, end, restart, copies, "cancel"), (6, 5, 2, 2, 1))[0]
        if event is add:
            await add()
        elif event == "cancel":
            if made:
                scheduler.cancel(chance.choice(made))
        else:
            event(worker)
        await asyncio.sleep(0)
        check()
    for worker in fake.workers():
        if not worker.ready:
            fake.hello(worker.id)
    while scheduler.running:
        for worker in fake.workers():
            while worker.tasks:
                fake.done(worker.id)
    assert not scheduler.queued or all(task.verify for task in scheduler.queue)
