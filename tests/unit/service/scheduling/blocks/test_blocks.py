"""Large products, block by block: who gets which, what a loss costs, what waits for them; and each block once."""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
from block_jobs import SIDE, run, sent

from gemmserve_kernels import KernelError, Operand
from gemmserve_kernels.blocks.grid import Grid
from gemmserve_kernels.blocks.memory_plan import plan_memory
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_service import products
from gemmserve_service.errors import Draining, JobCancelled, JobFailed, JobTimeout, QueueFull, WorkerCrashed
from gemmserve_service.executor.port import Worker
from gemmserve_service.executor.protocol import Done
from gemmserve_service.scheduling.blocks import blocks as blocks_module
from gemmserve_service.scheduling.blocks.blocks import Blocks, BlockTask, _tiles
from gemmserve_service.scheduling.estimates import Estimates
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import Elements, GemmParams, GemmReduceParams, Timings

LARGE, SMALL = DeviceSpec.cpu(), replace(DeviceSpec.cpu(), name="another processor")


def most_at_once(fake):
    """Has the only worker answer until it has nothing; return how many tasks it had at most."""
    most = 0
    while running := fake.running("cuda:0"):
        most = max(most, len(running))
        fake.done("cuda:0")
    return most


async def test_every_block_is_computed_once_and_the_whole_ends_with_the_last(blocky, fake, large, listener, store):
    scheduler = await blocky(fake)
    task = await large(scheduler)
    assert task.blocks.grid.count == 16
    for number in range(16):
        assert not task.over
        assert scheduler.queued == (1 if number < 15 else 0)
        (name,) = fake.running()
        assert name.startswith("large/")
        fake.done()
    assert sorted(sent(fake)) == list(range(16))
    assert listener.told == [("started", "large"), ("ended", "large")]
    shares = [share for _, share in listener.shares]
    assert shares == [pytest.approx(number / 16) for number in range(1, 16)]
    assert (task.attempt, store.scratch_bytes, scheduler.running, scheduler.queued) == (1, 0, 0, 0)
    assert fake.forgotten.count("large") == 1, "its panels"


async def test_what_a_worker_is_sent(blocky, fake, large):
    scheduler = await blocky(fake)
    task = await large(scheduler, verify=True)
    ((_, (work,)),) = fake.sent
    assert work.task == f"large/{work.block.index}"
    assert (work.block.parent, work.block.sides, work.block.algorithm) == ("large", task.blocks.grid.sides, "numpy")
    assert (work.verify, work.defer, work.express) == (True, False, False)
    assert (work.operands["a"].shape, work.results["d"].shape) == ((64, 64), (64, 64)), "the whole product's"
    scheduler.cancel(task)
    fake.done()


async def test_the_whole_s_answer_is_made_of_the_blocks_(blocky, fake, large, listener):
    scheduler = await blocky(fake)
    task = await large(scheduler)
    for number in range(16):
        (name,) = fake.running()
        index = int(name.split("/")[1])
        done = Done(
            task=name,
            algorithm="numpy" if index else "simt",
            timings=Timings(h2d_s=1.0, kernel_s=2.0, d2h_s=0.5, queue_s=100.0),
            residual=None if number % 2 else number / 1000,
            mismatch=0.25 if number == 3 else None,
            elements=Elements(planned=10, wide=number, plain=1),
        )
        fake.owner.task_ended(fake.fleet["cpu"], done)
    found = listener.outcomes["large"]
    assert found.algorithm == "simt, numpy"
    timings = found.timings
    assert (timings.h2d_s, timings.kernel_s, timings.d2h_s, timings.queue_s) == (16.0, 32.0, 8.0, task.queue_s)
    assert (found.residual, found.mismatch, found.written) == (0.014, 0.25, True)
    assert found.elements == Elements(planned=160, wide=120, plain=16)


async def test_small_products_are_not_cut(blocky, fake, large, submit):
    scheduler = await blocky(fake)
    small = await submit(scheduler, "small")
    square = await large(scheduler, "square", 32)  # 2^18 operations
    assert small.blocks is square.blocks is None
    assert run(fake) == 2


@pytest.mark.parametrize(("ahead", "most"), [(0, 1), (1, 2), (3, 2)])
async def test_a_worker_has_two_blocks_at_most(blocky, make_fake, large, monkeypatch, ahead, most):
    monkeypatch.setattr(Estimates, "seconds", lambda *_: 10.0)  # more than is sent ahead of other products
    fake = make_fake("cuda:0")
    fake.ahead = ahead
    scheduler = await blocky(fake)
    await large(scheduler)
    assert most_at_once(fake) == most
    assert sorted(sent(fake)) == list(range(16))


@pytest.mark.parametrize(
    ("seconds", "windows", "most"), [(0.01, 3, 3), (0.01, 2, 2), (0.01, 1, 1), (1.0, 3, 2), (1.0, 1, 1)]
)
async def test_a_worker_has_three_brief_blocks_where_memory_has_room(
    blocky, make_fake, large, monkeypatch, seconds, windows, most
):
    """By what is known of blocks now, not by what was when the product came; never more than there are windows."""
    charged = 10.0  # before any block was sent
    monkeypatch.setattr(Estimates, "seconds", lambda *_: seconds if sent(fake) else charged)
    monkeypatch.setattr(Estimates, "learn", lambda *_: None)
    fake = make_fake("cuda:0")
    fake.ahead = 3
    scheduler = await blocky(fake)
    worker = fake.fleet["cuda:0"]
    least = plan_memory(Grid.with_sides(products_of(64), (SIDE, SIDE, 1)), worker.spec, 0)
    worker.planned_bytes = least.needed_bytes + (windows - 1) * least.window_bytes
    await large(scheduler)
    assert most_at_once(fake) == most
    assert sorted(sent(fake)) == list(range(16))


async def test_blocks_of_the_first_product_of_a_server_are_known_to_be_brief(make_large):
    """By the kernels' own estimate, not by a rate that any accelerator has; the watchdog waits by that."""
    task = await make_large("large")
    square = Operand.contiguous((32768, 32768), np.dtype("c8"))
    grid = Grid.of(products.build(GemmParams(), {"a": square, "b": square}))
    worker = Worker("cuda:0", spec=KNOWN["H200"], device_class=0)
    block = Blocks(task, grid, None, None).typical
    block.plans[worker.device_class] = block.plan(worker.spec)
    estimates = Estimates()
    assert 0.02 < estimates.seconds(block, worker) < 0.1
    assert estimates.cautious_seconds(block, worker) > 4
    estimates.learn(block, worker, Timings(kernel_s=0.08))
    assert estimates.seconds(block, worker) == pytest.approx(0.08)


async def test_a_worker_is_told_which_blocks_come_next(blocky, make_fake, large):
    """Those of its own tile, so that their panels come ahead."""
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await blocky(fake)
    task = await large(scheduler, "large", 96)  # 6 x 6 blocks, in two tiles of 18
    run(fake)
    assert task.over
    for name in ("cuda:0", "cuda:1"):
        blocks = [work.block for to, works in fake.sent for work in works if to.id == name]
        tile = [block.index for block in blocks[:18]]
        assert len({index // 18 for index in tile}) == 1
        for number, block in enumerate(blocks[:18]):
            assert block.ahead == tuple(tile[number + 1 : number + 17])


@pytest.mark.parametrize("owner", ["x", "y"], ids=["same owner", "another"])
@pytest.mark.parametrize("seconds", [1e-4, 1.0], ids=["express", "bulk"])
@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("after", [0, 1, 7])
async def test_a_small_product_waits_for_two_blocks_at_most(
    blocky, make_fake, large, submit, monkeypatch, owner, seconds, ahead, after
):
    monkeypatch.setattr(Estimates, "seconds", lambda _, task, __: 1.0 if task.size[0] > 1000 else seconds)
    fake = make_fake("cuda:0")
    fake.ahead = ahead
    scheduler = await blocky(fake)
    await large(scheduler, owner="x")
    for _ in range(after):
        fake.done("cuda:0")
    small = await submit(scheduler, "small", owner=owner)
    waited = 0
    while not small.over:
        name = fake.running("cuda:0")[0]
        waited += name != "small"
        fake.done("cuda:0")
    assert waited <= 2
    run(fake)
    assert sorted(sent(fake)) == list(range(16))


async def test_other_owners_and_other_classes_have_their_shares(blocky, fake, large, submit, monkeypatch):
    """Blocks are charged one by one: a large product neither keeps others out nor is kept out by them."""
    monkeypatch.setattr(Estimates, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(Estimates, "learn", lambda *_: None)
    scheduler = await blocky(fake, max_grouped_jobs=1)
    monkeypatch.setattr(scheduler, "_settle_cost", lambda *_: None)
    await large(scheduler, owner="x")
    for number in range(8):
        await submit(scheduler, f"x{number}", owner="x")
        await submit(scheduler, f"y{number}", owner="y")
    order = []
    while scheduler.running:
        order += fake.running()
        fake.done()
    counts = [sum(name.startswith(kind) for name in order[:13]) for kind in ("large", "x", "y")]
    assert counts == [3, 4, 6]  # the owners half each, and of one's half each class


async def test_two_large_products_of_an_owner_go_one_after_the_other(blocky, fake, large):
    scheduler = await blocky(fake)
    await large(scheduler, "first")
    await large(scheduler, "second")
    order = []
    while scheduler.running:
        order += [name.split("/")[0] for name in fake.running()]
        fake.done()
    assert order == ["first"] * 16 + ["second"] * 16


async def test_it_is_one_task_of_its_owner(blocky, fake, make_large, submit):
    scheduler = await blocky(fake, max_queued_jobs=2)
    task = await make_large("large", owner="x")
    with scheduler.admission("x") as claim:
        claim(task.problem.nbytes())
    scheduler.submit(task)
    assert scheduler.queue.waiting("x") == 1
    assert scheduler.queue.waiting_bytes("x") == 0, "it has begun"
    run(fake, 15)
    assert (scheduler.queue.waiting("x"), scheduler.queue.nbytes) == (0, 0)
    run(fake)


# -- ends of all kinds ----------------------------------------------------------------------------------------------


async def test_cancel_stops_within_a_block(blocky, make_fake, large, listener, store):
    fake = make_fake("cuda:0", "cuda:1")
    fake.ahead = 3
    scheduler = await blocky(fake)
    task = await large(scheduler)
    fake.done("cuda:0")
    under_way = {(worker.id, name) for worker in fake.workers() for name in worker.tasks}
    assert len(under_way) == 4
    before = len(fake.sent)
    scheduler.cancel(task)
    assert set(fake.cancelled) == under_way
    assert isinstance(listener.outcomes["large"], JobCancelled)
    assert store.scratch_bytes, "workers write to the result, and read the operands"
    assert "large" not in fake.forgotten, "they use the panels"
    run(fake)
    assert (store.scratch_bytes, len(fake.sent), scheduler.queued) == (0, before, 0)
    assert fake.forgotten.count("large") == 1


async def test_cancel_before_the_first_block(blocky, fake, large, submit, listener, store):
    scheduler = await blocky(fake)
    await submit(scheduler, "running")
    task = await large(scheduler)
    scheduler.cancel(task)
    assert isinstance(listener.outcomes["large"], JobCancelled)
    run(fake)
    assert (sent(fake), store.scratch_bytes) == ([], 0)


async def test_no_device_can_compute_its_blocks(blocky, make_fake, large, listener, store, monkeypatch):
    monkeypatch.setattr(BlockTask, "plan", lambda *_: KernelError("not here"))
    scheduler = await blocky(make_fake("cuda:0", "cuda:1"))
    await large(scheduler)
    assert isinstance(listener.outcomes["large"], JobFailed)
    assert (store.scratch_bytes, scheduler.queued, scheduler.running) == (0, 0, 0)


async def test_one_of_its_blocks_cannot_be_computed(blocky, make_fake, large, listener, store, monkeypatch):
    """The last one, which may have another shape than the others."""
    plan, last = BlockTask.plan, KernelError("not of that shape")
    monkeypatch.setattr(BlockTask, "plan", lambda block, spec: last if block.index == 15 else plan(block, spec))
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await blocky(fake)
    task = await large(scheduler)
    run(fake)
    assert isinstance(listener.outcomes["large"], JobFailed)
    assert (task.over, store.scratch_bytes, scheduler.queued, scheduler.running) == (True, 0, 0, 0)


async def test_a_deadline(blocky, fake, large, listener, eventually, store):
    scheduler = await blocky(fake)
    await large(scheduler, timeout_s=0.01)
    await eventually(lambda: "large" in listener.outcomes)
    assert isinstance(listener.outcomes["large"], JobTimeout)
    assert len(fake.cancelled) == 1
    run(fake)
    assert (len(sent(fake)), store.scratch_bytes) == (1, 0)


async def test_a_block_that_fails_ends_the_whole(blocky, make_fake, large, listener, store):
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await blocky(fake)
    await large(scheduler)
    (other,) = fake.running("cuda:1")
    fake.fail("cuda:0")
    assert isinstance(listener.outcomes["large"], JobFailed)
    assert fake.cancelled == [("cuda:1", other)]
    assert store.scratch_bytes
    fake.fail("cuda:1", slug="job-cancelled")
    assert (store.scratch_bytes, scheduler.queued, scheduler.running) == (0, 0, 0)


async def test_a_lost_worker_costs_its_blocks_only(blocky, make_fake, large, listener):
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await blocky(fake)
    task = await large(scheduler)
    fake.done("cuda:0")
    fake.done("cuda:1")
    (lost,) = fake.running("cuda:1")
    fake.lose("cuda:1")
    assert not task.over
    run(fake)
    again = [index for index in range(16) if sent(fake).count(index) > 1]
    assert [f"large/{index}" for index in again] == [lost]
    assert listener.told == [("started", "large"), ("ended", "large")]
    assert isinstance(listener.outcomes["large"], Done)


async def test_a_block_that_loses_its_workers_ends_the_whole(blocky, make_fake, large, listener, store):
    """It goes alone, so that others of the product are not blamed; elsewhere they go on."""
    fake = make_fake("cuda:0", "cuda:1")
    fake.ahead = 1
    scheduler = await blocky(fake, max_attempts=3)
    task = await large(scheduler)
    assert len(fake.running("cuda:0")) == 2
    for losses in (1, 2):
        fake.lose("cuda:0")
        assert task.crashes == losses
        fake.hello("cuda:0")
        assert len(fake.running("cuda:0")) == 1, "alone"
    fake.lose("cuda:0")
    assert isinstance(listener.outcomes["large"], WorkerCrashed)
    for _, name in list(fake.cancelled):
        fake.done("cuda:1", name)
    assert (store.scratch_bytes, scheduler.queued, scheduler.running) == (0, 0, 0)


async def test_the_suspicion_goes_with_the_block(blocky, make_fake, large, listener):
    fake = make_fake("cuda:0")
    fake.ahead = 1
    scheduler = await blocky(fake)
    task = await large(scheduler)
    fake.lose("cuda:0")
    fake.hello("cuda:0")
    assert (task.crashes, len(fake.running("cuda:0"))) == (1, 1)
    fake.done("cuda:0")
    fake.done("cuda:0")
    assert (task.crashes, len(fake.running("cuda:0"))) == (0, 2)
    run(fake)
    assert isinstance(listener.outcomes["large"], Done)


async def test_a_block_that_hangs_is_judged_by_itself(blocky, make_fake, large, listener, monkeypatch):
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await blocky(fake, hang_s=60.0, hang_factor=0.0)
    task = await large(scheduler)
    now = 1000.0
    for worker in fake.workers():
        worker.heard = worker.moved = now
    fake.fleet["cuda:1"].moved = now - 61
    (hung,) = fake.running("cuda:1")
    scheduler.watchdog.look(now)
    assert [name for name, _ in fake.killed] == ["cuda:1"]
    fake.hello("cuda:1")
    run(fake)
    assert sent(fake).count(int(hung.split("/")[1])) == 2
    assert isinstance(listener.outcomes["large"], Done)
    assert not task.stalled


@pytest.mark.parametrize("durable", [False, True])
async def test_draining(blocky, fake, large, listener, durable):
    """What is under way ends; a durable product's other blocks wait for the next start, as it does."""
    scheduler = await blocky(fake)
    task = await large(scheduler, durable=durable)
    scheduler.drain()
    assert isinstance(listener.outcomes.get("large"), Draining) is not durable
    waiting = asyncio.create_task(scheduler.idle(60))
    await asyncio.sleep(0)
    fake.done()
    assert await waiting
    assert (len(sent(fake)), task.over) == (1, not durable)
    scheduler.stop()


async def test_no_room_for_the_result(blocky, fake, make_large, listener, full_disk, store, monkeypatch):
    scheduler = await blocky(fake)
    task = await make_large("large")
    (upload,) = task.results.values()
    calls = []

    def take_place():
        calls.append(len(calls))
        if len(calls) == 1:
            raise OSError(28, "no space left")

    monkeypatch.setattr(Task, "placeless", property(lambda _: len(calls) < 2))
    monkeypatch.setattr(upload, "take_place", take_place)
    scheduler.submit(task)
    assert (sent(fake), scheduler.queued, task.blocks.left) == ([], 1, 16)
    scheduler._room_timer = None
    scheduler._dispatch()
    run(fake)
    assert sorted(sent(fake)) == list(range(16))
    assert isinstance(listener.outcomes["large"], Done)


# -- who gets which -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "grid", "tiles"),
    [
        (1, (8, 8), (1, 1)),
        (2, (8, 8), (2, 1)),
        (3, (8, 8), (3, 1)),
        (4, (8, 8), (2, 2)),
        (6, (8, 8), (2, 3)),
        (8, (32, 4), (8, 1)),
        (8, (16, 8), (4, 2)),
        (7, (2, 3), (2, 3)),
        (2, (1, 8), (1, 2)),
        (64, (2, 2), (2, 2)),
        (5, (1, 1), (1, 1)),
    ],
)
def test_tiles(workers, grid, tiles):
    assert _tiles(workers, *grid) == tiles


async def test_two_workers_have_shares_of_the_rows(blocky, make_fake, large):
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await blocky(fake)
    task = await large(scheduler)
    run(fake)
    grid = task.blocks.grid
    rows = [{grid.row_panel(index) for index in sent(fake, name)} for name in ("cuda:0", "cuda:1")]
    assert rows == [{0, 1}, {2, 3}]


async def test_four_workers_have_rectangles(blocky, make_fake, large):
    names = tuple(f"cuda:{number}" for number in range(4))
    fake = make_fake(*names)
    scheduler = await blocky(fake)
    task = await large(scheduler, n=128)
    run(fake)
    grid = task.blocks.grid
    for name in names:
        mine = sent(fake, name)
        assert len(mine) == 16
        assert len({grid.row_panel(index) for index in mine}) == len({grid.column_panel(index) for index in mine}) == 4


async def test_an_idle_worker_takes_from_the_others(blocky, make_fake, large):
    """One that is many times as fast computes as many times as much; nobody waits while there are blocks."""
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await blocky(fake)
    await large(scheduler, n=128)
    while scheduler.queued:
        fake.done("cuda:0")
    assert len(sent(fake, "cuda:0")) == 63
    assert fake.running("cuda:1")
    run(fake)


async def test_what_is_taken_from_others_needs_few_panels(blocky, make_fake, large):
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await blocky(fake)
    task = await large(scheduler, n=128)
    while scheduler.queued:
        fake.done("cuda:0")
    grid, rows, columns, new = task.blocks.grid, set(), set(), []
    for index in sent(fake, "cuda:0"):
        new.append((grid.row_panel(index) not in rows) + (grid.column_panel(index) not in columns))
        rows.add(grid.row_panel(index))
        columns.add(grid.column_panel(index))
    assert sum(new) == 16, "each panel once"
    assert max(new[1:]) == 1
    run(fake)


async def test_a_worker_that_comes_later_takes_its_part(blocky, make_fake, large):
    fake = make_fake("cuda:0", "cuda:1", "cuda:2")
    scheduler = await blocky(fake)
    fake.lose("cuda:2")
    await large(scheduler, n=128)
    fake.hello("cuda:2")
    run(fake)
    assert min(len(sent(fake, name)) for name in ("cuda:0", "cuda:1", "cuda:2")) > 15
    assert sorted(sent(fake)) == list(range(64))


async def test_the_blocks_of_a_product_go_to_one_class_of_devices(blocky, make_fake, large):
    fake = make_fake("w0", "w1", "w2")
    fake.specs = {"w0": LARGE, "w1": SMALL, "w2": LARGE}
    scheduler = await blocky(fake)
    await large(scheduler)
    run(fake)
    assert sent(fake, "w1") == []
    assert sent(fake, "w2")


@pytest.mark.parametrize(("factor", "chosen"), [(1.5, "slow"), (10.0, "fast")])
async def test_the_class_is_that_which_is_through_first(blocky, make_fake, large, monkeypatch, factor, chosen):
    """One fast device against three slow ones, which come first."""
    monkeypatch.setattr(Estimates, "seconds", lambda _, __, worker: factor if worker.spec == LARGE else 1.0)
    fake = make_fake("slow0", "slow1", "slow2", "fast")
    fake.specs = dict.fromkeys(("slow0", "slow1", "slow2"), LARGE) | {"fast": SMALL}
    scheduler = await blocky(fake)
    await large(scheduler)
    run(fake)
    used = {worker.id for worker, works in fake.sent for work in works}
    assert used == ({"fast"} if chosen == "fast" else {"slow0", "slow1", "slow2"})


async def test_it_begins_again_on_another_class_when_there_is_no_other(blocky, make_fake, large, listener):
    fake = make_fake("w0")
    fake.specs = {"w0": LARGE}
    scheduler = await blocky(fake)
    task = await large(scheduler)
    for _ in range(5):
        fake.done("w0")
    fake.lose("w0")
    fake.specs = {"w0": SMALL}
    fake.hello("w0")
    before = len(sent(fake)) - 1
    run(fake)
    assert sorted(sent(fake)[before:]) == list(range(16))
    assert isinstance(listener.outcomes["large"], Done)
    assert task.blocks.left == 0


async def test_a_block_costs_the_scheduler_as_much_with_many_workers(blocky, make_fake, make_large, put, store):
    """Counted in calls of functions, which a busy machine does not change."""

    async def calls(workers):
        names = tuple(f"w{number}" for number in range(workers))
        fake = make_fake(*names)
        scheduler = await blocky(fake)
        scheduler.submit(await make_large(f"large{workers}", n=512))  # 1,024 blocks
        count = 0

        def note(_frame, event, _arg):
            nonlocal count
            count += event == "call"

        answers = 0
        sys.setprofile(note)
        try:
            for name in names * (512 // workers):
                fake.done(name)
                answers += 1
        finally:
            sys.setprofile(None)
        run(fake)
        return count / answers

    assert await calls(256) <= 1.3 * await calls(8)


# -- by chance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
async def test_by_chance(seed, blocky, make_fake, large, submit, listener, store):
    """Whatever happens to workers and owners: a whole ends once, well only with every block done by its class of
    devices; nothing is held at the end, and no worker is idle while there are blocks for it.
    """
    chance = random.Random(seed)
    names = ("w0", "w1", "w2", "w3")[: chance.choice((1, 2, 4))]
    fake = make_fake(*names)
    fake.ahead, fake.interleaves, fake.express = chance.choice((0, 1, 3)), chance.random() < 0.5, chance.random() < 0.5
    scheduler = await blocky(fake, max_attempts=4, max_grouped_jobs=chance.choice((1, 4)))
    done: dict[str, list[int]] = {}
    tasks = []

    def check():
        for worker in fake.workers():
            waiting = [task for task in scheduler.queue if task.blocks is not None and not task.crashes]
            assert not (worker.ready and not worker.tasks and waiting), f"{worker.id} is idle"
            blocks = [task for task in worker.tasks.values() if task.whole is not task]
            assert len(blocks) <= blocks_module.MAX_ON_WORKER
        assert scheduler.running == sum(len(worker.tasks) for worker in fake.workers())
        for task in tasks:
            if task.blocks is not None and not task.over:
                held = task.blocks.left + len(task.blocks.under_way) + len(set(done.get(task.id, ())))
                assert held == task.blocks.grid.count
                assert (task.blocks.left > 0) == (task in scheduler.queue)

    def end(worker):
        if worker.tasks:
            name = chance.choice(list(worker.tasks)) if fake.express else next(iter(worker.tasks))
            task = worker.tasks[name]
            if chance.random() < 0.02:
                fake.fail(worker.id, name)
                return
            fake.done(worker.id, name)
            if task.whole is not task:
                assert task.index not in done.setdefault(task.whole.id, []), "twice"
                done[task.whole.id].append(task.index)

    def restart(worker):
        fake.hello(worker.id) if not worker.ready else fake.lose(worker.id)

    for number in range(200):
        worker = fake.fleet[chance.choice(names)]
        event = chance.choices(("large", "small", "end", "restart", "cancel"), (2, 4, 60, 2, 0.5))[0]
        owner = chance.choice("xy")
        if event == "large" and scheduler.queued < 5:
            tasks.append(await large(scheduler, f"l{number}", chance.choice((64, 96)), owner=owner))
        elif event == "small":
            tasks.append(await submit(scheduler, f"s{number}", owner=owner, priority=chance.choice((0, 0, 1))))
        elif event == "cancel" and tasks:
            scheduler.cancel(chance.choice(tasks))
        elif event == "restart":
            restart(worker)
        elif event == "end":
            end(worker)
        await asyncio.sleep(0)
        check()
    for worker in fake.workers():
        if not worker.ready:
            fake.hello(worker.id)
    while scheduler.running:
        for worker in fake.workers():
            end(worker)
        check()
    for task in tasks:
        outcome = listener.outcomes[task.id]
        if task.blocks is not None and isinstance(outcome, Done):
            assert sorted(done[task.id]) == list(range(task.blocks.grid.count))
    assert (store.scratch_bytes, scheduler.queued, scheduler.fleet.running) == (0, 0, 0)


def _corner(grid, tile):
    """Blocks of the first two rows and columns of a tile, in its order."""
    rows, columns = (
        [*dict.fromkeys(which(index) for index in tile)][:2] for which in (grid.row_panel, grid.column_panel)
    )
    return [grid.at(0, row, column) for row in rows for column in columns]


@pytest.mark.parametrize(
    ("workers", "rows", "columns"),
    [
        (1, [[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4, 1, 5, 2, 6, 3, 7], [4, 0, 5, 1, 6, 2, 7, 3]]),
        (3, [[0, 1, 2], [3, 4, 5], [6, 7]],
         [[0, 2, 5, 1, 3, 6, 4, 7], [2, 5, 0, 3, 6, 1, 4, 7], [5, 0, 2, 6, 1, 3, 7, 4]]),
        (4, [[0, 2, 1, 3], [2, 0, 3, 1], [4, 6, 5, 7], [6, 4, 7, 5]],
         [[0, 2, 1, 3], [4, 6, 5, 7], [2, 0, 3, 1], [6, 4, 7, 5]]),
    ],
)  # fmt: skip
async def test_tiles_that_share_panels_begin_with_different_ones(make_large, workers, rows, columns):
    """Each takes a part of them from the host just before the others want it: these come from device to device."""
    task = await make_large("large", 128)
    blocks = Blocks(task, Grid.with_sides(task.problem, (SIDE, SIDE, 1)), print, print)
    blocks._cut(workers, None)
    grid = blocks.grid
    assert (grid.down, grid.across) == (8, 8)
    assert [[*dict.fromkeys(map(grid.row_panel, tile))] for tile in blocks._tiles] == rows
    assert [[*dict.fromkeys(map(grid.column_panel, tile))] for tile in blocks._tiles] == columns
    task.close()


@pytest.mark.parametrize("workers", [2, 4])
async def test_a_tile_is_a_wavefront_of_its_own_where_its_panels_have_slots(make_large, workers):
    """Its first four blocks need two panels of A and two of B, in the corner's tile and in every other."""
    task = await make_large("large", 128)
    grid = Grid.with_sides(task.problem, (SIDE, SIDE, 1))
    down, across = (8 // workers, 8) if workers == 2 else (4, 4)
    for slots in (None, (down, across), (down, across - 1)):
        blocks = Blocks(task, grid, print, print)
        blocks._cut(workers, slots)
        assert sorted(index for tile in blocks._tiles for index in tile) == sorted(grid.order)
        for tile in blocks._tiles:
            first = list(tile)[:4]
            panels = len({grid.row_panel(index) for index in first}), len({grid.column_panel(index) for index in first})
            if slots != (down, across - 1):
                assert panels == (2, 2)
            assert (slots == (down, across - 1)) or set(first) == set(_corner(grid, tile))
            positions = [grid.order.index(index) for index in tile]
            assert (slots != (down, across - 1)) or positions == sorted(positions), "as its plan of memory has it"
    task.close()


async def test_a_product_that_has_begun_does_not_keep_others_from_the_queue(blocky, fake, make_large):
    """However many bytes it has: they are no bytes of a job that waits."""
    first, second = [await make_large(name) for name in ("first", "second")]
    scheduler = await blocky(fake, max_queued_bytes=first.queued_bytes + 1000)
    scheduler.submit(first)
    assert scheduler.queue.nbytes == 0
    with scheduler.admission("") as claim:
        claim(second.queued_bytes)
    scheduler.submit(second)
    assert scheduler.queue.nbytes == second.queued_bytes > 0
    with pytest.raises(QueueFull), scheduler.admission("") as claim:
        claim(2000)
    run(fake)
    assert (scheduler.queued, scheduler.queue.nbytes, scheduler.queue.waiting_bytes("")) == (0, 0, 0)


@pytest.mark.parametrize("share", [0, 3])
async def test_a_worker_goes_through_the_blocks_by_its_plan_of_memory(blocky, fake, large, share):
    """Whatever the budget, one worker is sent the blocks in the order in which it uploads least."""
    scheduler = await blocky(fake)
    worker = fake.fleet["cpu"]
    least = plan_memory(Grid.with_sides(products_of(96), (SIDE, SIDE, 1)), worker.spec, 0)
    worker.planned_bytes = least.needed_bytes + share * sum(least.slot_bytes)
    task = await large(scheduler, n=96)
    run(fake)
    plan = plan_memory(task.blocks.grid, worker.spec, worker.planned_bytes)
    assert sent(fake) == list(plan.order)
    assert plan.order != task.blocks.grid.order


def products_of(n):
    square = Operand.contiguous((n, n), np.dtype("c8"))
    return products.build(GemmParams(), {"a": square, "b": square})


# -- reductions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def reduction(store, squares, listener):
    """Largest magnitudes of a product of n x n matrices, of (n / SIDE)^2 blocks."""

    async def make_and_submit(scheduler, name="large", n=64, **fields):
        square, operands = await squares(n)
        params = GemmReduceParams(reduce=["absmax", "argmax", "mean"])
        problem = products.build(params, {key: Operand.of(square) for key in operands})
        results = {
            key: store.allocate(dtype, shape, "C", ttl_s=None, scratch=True)
            for key, (shape, dtype) in problem.results.items()
        }
        task = Task(name, params, problem, operands, results, listener, **fields)
        scheduler.submit(task)
        return task

    return make_and_submit


def combined(fake):
    """Workers that were sent what makes a reduction's results."""
    return [to.id for to, works in fake.sent for work in works if work.block is not None and work.block.combine]


def blocks_sent(fake):
    return [w.block.index for _, works in fake.sent for w in works if w.block is not None and not w.block.combine]


async def test_a_reduction_is_put_together_when_every_block_is_done(blocky, make_fake, reduction, listener, store):
    fake = make_fake("w0", "w1")
    scheduler = await blocky(fake)
    task = await reduction(scheduler, verify=True)
    before = store.scratch_bytes
    assert task.blocks.partial_bytes > 0
    places = {work.results["partials"].path for _, works in fake.sent for work in works}
    assert len(places) == 1, "all blocks have one place for what they leave"
    for number in range(16):
        assert combined(fake) == []
        assert (task.over, store.scratch_bytes) == (False, before)
        assert scheduler.queued == (number < 14), "those on workers do not wait"
        fake.done("w0" if fake.running("w0") else "w1")
    assert sorted(blocks_sent(fake)) == list(range(16))
    (worker,) = combined(fake)
    (_, (work,)) = fake.sent[-1]
    assert (work.verify, work.task, work.results["absmax"].shape) == (False, "large/16", (64,))
    assert listener.shares[-1][1] == 15 / 16
    assert not task.over
    fake.done(worker)
    assert listener.told == [("started", "large"), ("ended", "large")]
    assert (store.scratch_bytes, scheduler.running, scheduler.queued) == (0, 0, 0)
    assert fake.forgotten.count("large") == 1
    assert listener.outcomes["large"].algorithm == "numpy"


async def test_a_worker_that_is_lost_as_it_puts_a_reduction_together_costs_that_alone(
    blocky, make_fake, reduction, listener, store
):
    fake = make_fake("w0", "w1")
    scheduler = await blocky(fake)
    await reduction(scheduler)
    while not combined(fake):
        fake.done(next(worker.id for worker in fake.workers() if worker.tasks))
    (worker,) = combined(fake)
    fake.lose(worker)
    assert "large" not in listener.outcomes
    other = {"w0": "w1", "w1": "w0"}[worker]
    assert combined(fake) == [worker, other]
    fake.done(other)
    assert isinstance(listener.outcomes["large"], Done)
    assert sorted(blocks_sent(fake)) == list(range(16))
    assert store.scratch_bytes == 0


@pytest.mark.parametrize("blocks", [0, 5, 16])
async def test_a_cancelled_reduction_gives_everything_back(blocky, fake, reduction, listener, store, blocks):
    """Before it began, in the middle, and while it is put together."""
    scheduler = await blocky(fake)
    task = await reduction(scheduler)
    for _ in range(blocks):
        fake.done()
    scheduler.cancel(task)
    assert isinstance(listener.outcomes["large"], JobCancelled)
    assert store.scratch_bytes, "a worker may write"
    run(fake)
    assert (store.scratch_bytes, scheduler.queued, scheduler.running) == (0, 0, 0)
    assert fake.forgotten.count("large") == 1


async def test_a_reduction_that_waits_and_is_cancelled(blocky, fake, reduction, submit, listener, store):
    scheduler = await blocky(fake)
    await submit(scheduler, "running")
    task = await reduction(scheduler)
    scheduler.cancel(task)
    run(fake)
    assert (blocks_sent(fake), store.scratch_bytes) == ([], 0)


@pytest.mark.parametrize("durable", [False, True])
async def test_a_reduction_that_drains_before_it_is_put_together(blocky, fake, reduction, listener, store, durable):
    """All blocks are done or on workers when the server begins to drain: nothing else is sent."""
    scheduler = await blocky(fake)
    task = await reduction(scheduler, durable=durable)
    for _ in range(15):
        fake.done()
    scheduler.drain()
    fake.done()
    assert combined(fake) == []
    assert task.over is not durable
    if not durable:
        assert isinstance(listener.outcomes["large"], Draining)
        assert store.scratch_bytes == 0
    scheduler.stop()


async def test_no_room_for_partial_results(blocky, fake, reduction, listener, store, monkeypatch):
    scheduler = await blocky(fake)
    allocate, calls = store.allocate, []

    def refused(dtype, *args, **kwargs):
        if kwargs.get("granted"):
            calls.append(len(calls))
            if len(calls) == 1:
                raise OSError(28, "no space left")
        return allocate(dtype, *args, **kwargs)

    monkeypatch.setattr(store, "allocate", refused)
    task = await reduction(scheduler)
    assert (fake.sent, scheduler.queued, task.blocks.left) == ([], 1, 16)
    scheduler._room_timer = None
    scheduler._dispatch()
    run(fake)
    assert sorted(blocks_sent(fake)) == list(range(16))
    assert isinstance(listener.outcomes["large"], Done)
    assert len(calls) == 2


async def test_a_block_of_a_reduction_that_fails_ends_it(blocky, fake, reduction, listener, store):
    scheduler = await blocky(fake)
    await reduction(scheduler)
    for _ in range(16):
        fake.done()
    assert combined(fake)
    fake.fail("cpu")
    assert isinstance(listener.outcomes["large"], JobFailed)
    assert (store.scratch_bytes, scheduler.queued, scheduler.running) == (0, 0, 0)
