"""Results of large products in the host arena: blocks write them there, if there is room; what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import numpy as np
import pytest
from block_jobs import SIDE

from gemmserve_kernels import Operand
from gemmserve_service import products
from gemmserve_service.errors import NotFound
from gemmserve_service.executor.port import NodeLink
from gemmserve_service.jobs.core import Core
from gemmserve_service.scheduling.estimates import Estimates
from gemmserve_service.scheduling.results.recomputation import Lineage, Recomputation
from gemmserve_service.schemas import GemmParams, GemmReduceJob, JobState
from gemmserve_service.store.pending import State

N = 64
BLOCKS = (N // SIDE) ** 2
PAGE = 1 << 12
RESULT = N * N * 8
"""Bytes of a result: the arena has room for two in its half."""

pytestmark = pytest.mark.usefixtures("small_results_stay", "own_files")


@pytest.fixture
def settings(make_settings):
    return make_settings(write_back_delay_s=60.0, block_side=SIDE)


@pytest.fixture
def new_arena(make_arena):
    return make_arena(4 * RESULT)


@pytest.fixture
def arena(new_arena):
    return new_arena()


@pytest.fixture
def fake(make_fake):
    fake = make_fake("cuda:0", "cuda:1")
    fake.result_bytes = 1 << 20
    return fake


@pytest.fixture
async def core(make_core, settings, fake, arena):
    return await make_core(settings, fake, arena)


@pytest.fixture
def matrix():
    rng = np.random.default_rng(5)
    return (rng.integers(-4, 5, (N, N)) + 1j * rng.integers(-4, 5, (N, N))).astype("c8")


@pytest.fixture
async def a(core, put, matrix):
    return await put(core.store, matrix)


@pytest.fixture
def large(core, gemm, a):
    """Id of the job of a large product."""

    async def submit(**fields):
        info, _ = await core.jobs.submit(gemm(a, a, **fields))
        return info.id

    return submit


def works(fake):
    """The last work that each worker was sent, by task."""
    return {work.task: work for _, sent in fake.sent for work in sent}


@pytest.fixture
def compute(fake, matrix):
    """Has workers write the blocks that they have, as products of `matrix`, and answer, `most` times."""

    def run(most=1000):
        done = 0
        while done < most and (busy := [worker.id for worker in fake.workers() if worker.ready and worker.tasks]):
            for name in busy[: most - done]:
                (task, block) = next(iter(fake.fleet[name].tasks.items()))
                ref = works(fake)[task].results["d"]
                whole = np.memmap(ref.path, "c8", "r+", offset=ref.offset, shape=(N, N))
                window = block.blocks_of_whole.grid.window(block.index)
                whole[window] = (matrix @ matrix)[window]
                whole.flush()
                fake.done(name, task)
                done += 1
        return done

    return run


@pytest.fixture
def in_arena(core, compute, large):
    """Job and array of a large product whose result is in the arena."""

    async def run(**fields):
        job = await large(**fields)
        assert compute() == BLOCKS
        info = await core.jobs.wait(job, 60)
        assert info.state == JobState.SUCCEEDED
        array = info.result["d"]
        assert core.store.arena.owns(core.store._catalog.get(array).extent)
        return job, array

    return run


async def row(core, array):
    def read(db):
        return db.execute("SELECT written, extent FROM arrays WHERE id = ?", (array,)).fetchone()

    return tuple(await core.database.read(read))


def files(settings):
    return len(list((settings.data_dir / "extents").iterdir()))


async def test_blocks_write_there_and_everybody_reads_it_before_it_goes_to_a_file(
    core, settings, fake, in_arena, a, matrix, fetch, held, eventually
):
    before = files(settings)
    _, array = await in_arena()
    assert files(settings) == before
    places = {(work.results["d"].path, work.results["d"].offset) for work in works(fake).values()}
    assert len(places) == 1, "all write to one"
    record = core.store._catalog.get(array)
    assert record.pending.state is State.HOST
    assert await row(core, array) == (0, None)
    assert core.store._catalog.get(a.id).pins > 0, "after a crash it would be computed again"
    assert core.scheduler.writes.unwritten == (1, RESULT)
    assert core.store.used_bytes == 2 * RESULT, "it counts"
    assert core.store._space.unplaced_bytes == RESULT, "and so does the room on the disk for its file"
    np.testing.assert_array_equal(fetch(core.store, array), matrix @ matrix)
    core.scheduler.writes._spill.hurry()
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    assert files(settings) == before + 1
    assert not core.store.arena.owns(record.extent)
    assert await row(core, array) == (1, record.extent.name)
    np.testing.assert_array_equal(fetch(core.store, array), matrix @ matrix)
    await eventually(lambda: core.store.arena.allocate(4 * RESULT))
    assert core.store._space.unplaced_bytes == 0
    assert held(core.store) == (0, 0, 0)


async def test_what_is_deleted_there_never_goes_to_the_disk(core, settings, in_arena, held):
    before = files(settings)
    _, array = await in_arena()
    await core.store.delete(array)
    await core.database.write(lambda _: None)
    assert files(settings) == before
    assert core.scheduler.writes.spared == 1
    assert core.store.arena.used_bytes == core.store._space.unplaced_bytes == 0
    assert held(core.store) == (0, 0, 0)


async def test_half_of_the_arena_is_for_others(core, fake, in_arena, large, compute):
    """What is in it counts, whatever put it there; the next result goes to a file, and none waits."""
    arrays = [(await in_arena())[1] for _ in range(2)]
    assert core.store.arena.used_bytes == 2 * RESULT == core.store.arena.share_bytes
    job = await large()
    assert compute() == BLOCKS
    array = (await core.jobs.wait(job, 60)).result["d"]
    record = core.store._catalog.get(array)
    assert core.store.is_file(record.extent)
    assert record.pending is None
    assert core.store.arena.allocate(2 * RESULT) is not None
    await core.store.delete(arrays[0])


@pytest.mark.parametrize("fields", [{"verify": True}, {"reduce": "c"}])
async def test_what_could_differ_the_next_time_is_in_files_before_the_job_ends(core, fake, a, gemm, large, fields):
    if "reduce" in fields:
        job = GemmReduceJob(op="gemm_reduce", a=a.id, b=a.id, axis="m", reproducible=False)
        await core.jobs.submit(job)
    else:
        await large(**fields)
    assert core.store.arena.used_bytes == 0
    assert all(ref.path.startswith(str(core.settings.data_dir)) for ref in fake.sent[-1][1][-1].results.values())


async def test_blocks_are_not_checked_unasked_there(make_core, make_settings, fake, arena, put, gemm, matrix):
    settings = make_settings(write_back_delay_s=60.0, block_side=SIDE, verify_share=1.0)
    core = await make_core(settings, fake, arena)
    a = await put(core.store, matrix)
    await core.jobs.submit(gemm(a, a))
    assert core.store.arena.used_bytes == RESULT
    assert not any(work.verify for work in works(fake).values())


async def test_a_cancelled_product_gives_its_place_back_when_nobody_writes_there(core, fake, large, compute, held):
    job = await large()
    compute(4)
    await core.jobs.cancel(job)
    assert core.store.arena.used_bytes == RESULT, "two workers are at blocks of it"
    for name in fake.fleet:
        while fake.running(name):
            fake.done(name)
    assert core.store.arena.used_bytes == 0
    assert core.store._space.unplaced_bytes == 0
    assert held(core.store) == (0, 0, 0)


async def test_a_failed_product_likewise(core, fake, large, compute, held):
    job = await large()
    compute(4)
    fake.fail("cuda:0")
    while fake.running("cuda:1"):
        fake.done("cuda:1")
    while fake.running("cuda:0"):
        fake.done("cuda:0")
    assert (await core.jobs.wait(job, 60)).state == JobState.FAILED
    assert core.store.arena.used_bytes == core.store._space.unplaced_bytes == 0
    assert held(core.store) == (0, 0, 0)


@pytest.mark.parametrize("ends", ["cancelled", "deleted"])
async def test_where_a_lost_worker_may_write_on_nothing_else_comes_to_lie(
    core, fake, large, compute, matrix, fetch, held, ends
):
    """Its blocks are written again by others, which takes nothing away from who reads the whole."""
    job = await large()
    compute(4)
    fake.lose("cuda:1")
    if ends == "cancelled":
        await core.jobs.cancel(job)
        while fake.running("cuda:0"):
            fake.done("cuda:0")
    else:
        compute()
        info = await core.jobs.wait(job, 60)
        assert info.state == JobState.SUCCEEDED
        np.testing.assert_array_equal(fetch(core.store, info.result["d"]), matrix @ matrix)
        await core.store.delete(info.result["d"])
        await core.database.write(lambda _: None)
    assert core.store.arena.quarantined_bytes == RESULT
    assert core.store.arena.allocate(PAGE).start == RESULT
    fake.hello("cuda:1")
    assert core.store.arena.quarantined_bytes == 0
    assert core.store.arena.allocate(PAGE).start == 0
    assert held(core.store) == (0, 0, 0)


async def test_a_worker_that_is_lost_and_has_come_back_by_the_end_is_under_no_suspicion(core, fake, large, compute):
    job = await large()
    compute(4)
    fake.lose("cuda:1")
    fake.hello("cuda:1")
    compute()
    array = (await core.jobs.wait(job, 60)).result["d"]
    await core.store.delete(array)
    await core.database.write(lambda _: None)
    assert core.store.arena.used_bytes == 0


async def test_all_of_it_is_reserved_before_the_first_block(core, fake, large, compute):
    """Others may fill what is left meanwhile."""
    job = await large()
    while core.store.arena.allocate(PAGE) is not None:
        pass
    assert compute() == BLOCKS
    assert (await core.jobs.wait(job, 60)).state == JobState.SUCCEEDED


@pytest.mark.parametrize("when", ["in the middle", "in the arena", "while it is written"])
async def test_a_front_that_dies_loses_nothing(
    settings, make_fake, make_core, new_arena, put, gemm, fetch, die, eventually, compute, matrix, fake, when
):
    first = Core(settings, fake, new_arena())
    await first.start()
    a = await put(first.store, matrix)
    info, _ = await first.jobs.submit(gemm(a, a))
    compute(5 if when == "in the middle" else BLOCKS)
    if when != "in the middle":
        array = (await first.jobs.wait(info.id, 60)).result["d"]
        await first.store.delete(a.id)
        if when == "while it is written":
            first.store.set_written = lambda *_: asyncio.get_running_loop().create_future()
            first.scheduler.writes._spill.hurry()
            await eventually(lambda: not first.store.arena.owns(first.store._catalog.get(array).extent))
    await first.database.write(lambda _: None)
    await die(first)
    second = await make_core(settings, None, new_arena("cpu"))
    array = (await second.jobs.wait(info.id, 60)).result["d"]
    with second.store.pin(array) as pinned:
        await second.scheduler.writes.wait_readable(pinned, 60)
    np.testing.assert_array_equal(fetch(second.store, array), matrix @ matrix)
    second.scheduler.writes._spill.hurry()
    await eventually(lambda: not second.scheduler.writes.unwritten[0])
    assert second.scheduler.writes.recomputed == (when != "in the middle")
    assert files(settings) <= 2


async def test_an_end_that_cannot_be_recorded_gives_the_place_back(core, large, compute, held, monkeypatch):
    job = await large()
    compute(BLOCKS - 1)

    def fails(*_, **__):
        raise RuntimeError("no")

    async def never(*_, **__):
        raise RuntimeError("no")

    monkeypatch.setattr(core.jobs.queue, "end", fails)
    monkeypatch.setattr(core.jobs.recorder, "record", never)
    compute()
    assert (await core.jobs.wait(job, 60)).state == JobState.FAILED
    assert core.store.arena.used_bytes == core.store._space.unplaced_bytes == 0
    assert core.scheduler.writes.unwritten == (0, 0)


async def test_with_durability_power_it_is_on_the_disk_before_its_row_says_so_and_readable_before(
    make_core, make_settings, fake, arena, put, gemm, matrix, compute, fetch, eventually, lossy_disk
):
    """A file that the disk did not take is written anew from the arena: nothing is computed again."""
    core = await make_core(make_settings(write_back_delay_s=60.0, block_side=SIDE, durability="power"), fake, arena)
    a = await put(core.store, matrix)
    info, _ = await core.jobs.submit(gemm(a, a))
    assert compute() == BLOCKS
    array = (await core.jobs.wait(info.id, 60)).result["d"]
    np.testing.assert_array_equal(fetch(core.store, array), matrix @ matrix)
    assert await row(core, array) == (0, None)
    lossy_disk(1)
    core.scheduler.writes._spill.hurry()
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    record = core.store._catalog.get(array)
    assert await row(core, array) == (1, record.extent.name)
    np.testing.assert_array_equal(fetch(core.store, array), matrix @ matrix)
    assert core.scheduler.writes.recomputed == 0


async def test_a_worker_of_another_host_that_takes_it_over_is_given_a_file(
    make_core, settings, make_fake, arena, put, gemm, matrix, compute, monkeypatch
):
    """It has all of the product, and keeps results, whose place in the arena would be taken for a file of theirs."""
    fake = make_fake("cpu", "node/cuda:0")
    fake.result_bytes = 1 << 20
    fake.fleet["node/cuda:0"].link = NodeLink("node", "10.0.0.2", 1e9, 1 << 30)
    seconds = {"cpu": 0.01, "node/cuda:0": 100.0}
    monkeypatch.setattr(Estimates, "seconds", lambda _, task, worker: seconds[worker.id])
    core = await make_core(settings, fake, arena)
    a = await put(core.store, matrix)
    info, _ = await core.jobs.submit(gemm(a, a))
    compute(2)
    assert core.store.arena.used_bytes == RESULT
    (task,) = {each.whole for each in fake.fleet["cpu"].tasks.values()}
    fake.lose("cpu")
    task.blocks.choose(task.blocks.device_class)  # it begins again
    task.crashes = 0  # as where the worker is lost between two blocks
    seconds["node/cuda:0"] = 1e-4
    fake.hello("cpu")
    assert fake.running("node/cuda:0") == [info.id]
    assert works(fake)[info.id].defer
    assert works(fake)[info.id].results["d"].extent is None
    assert core.store.arena.used_bytes == 0
    fake.done("node/cuda:0", written=False)
    assert (await core.jobs.wait(info.id, 60)).state == JobState.SUCCEEDED


def test_it_is_computed_again_by_the_algorithm_of_its_whole_blocks():
    """Those at the edges may have had another, which their shape decides again."""
    square = Operand.contiguous((N, N), np.dtype("c8"))
    problem = products.build(GemmParams(), {"a": square, "b": square})
    lineage = Lineage(GemmParams(), problem, {}, {}, "wgmma, simt", "", verify=False)
    assert Recomputation(lineage, [], None, None, None).task.algorithm == "wgmma"


@pytest.mark.parametrize("seed", range(12))
async def test_by_chance(seed, core, fake, gemm, a, matrix, fetch, eventually, held, monkeypatch):
    """Products come, are cancelled, deleted and spilled; workers answer, are lost and come back, and write what they
    had begun there until then, again and again. Whoever reads a result reads that one.
    """
    monkeypatch.setattr("gemmserve_service.jobs.jobs._ENDS_WITHIN_S", 0.0)
    chance = random.Random(seed)
    expected = {alpha: alpha * (matrix @ matrix) for alpha in range(1, 5)}
    alphas, late = {}, {name: [] for name in fake.fleet}

    def block_of(name, task):
        block = fake.fleet[name].tasks[task]
        ref = works(fake)[task].results["d"]
        window = block.blocks_of_whole.grid.window(block.index)
        return ref, window, expected[alphas[block.whole.id]][window]

    def write(ref, window, data):
        whole = np.memmap(ref.path, "c8", "r+", offset=ref.offset, shape=(N, N))
        whole[window] = data

    def answer(name):
        if fake.fleet[name].ready and (tasks := fake.running(name)):
            write(*block_of(name, tasks[0]))
            fake.done(name, tasks[0])

    async def finished():
        infos = [await core.jobs.get(job) for job in alphas]
        return {info.id: info.result["d"] for info in infos if info.state == JobState.SUCCEEDED}

    async def check():
        for each in itertools.chain(*late.values()):
            write(*each)
        for job, array in (await finished()).items():
            if core.store._catalog.get(array) is not None and not core.store._catalog.get(array).hidden:
                np.testing.assert_array_equal(fetch(core.store, array), expected[alphas[job]])

    in_arena = 0
    for _ in range(500):
        name = chance.choice(list(fake.fleet))
        steps = {"submit": 2, "lose": 1, "hello": 1, "cancel": 1, "delete": 3, "spill": 1, "answer": 60}
        await core.database.write(lambda _: None)  # the ends of jobs are on record
        match chance.choices(list(steps), steps.values())[0]:
            case "submit" if len(alphas) < 30:
                alpha = chance.randint(1, 4)
                info, _ = await core.jobs.submit(gemm(a, a, alpha=alpha))
                alphas[info.id] = alpha
            case "lose" if fake.fleet[name].ready:
                begun = [block_of(name, task) for task in fake.running(name)]
                late[name] += [each for each in begun if each[0].path == core.store.arena.path]
                fake.lose(name)
            case "hello" if not fake.fleet[name].ready:
                late[name].clear()
                fake.hello(name)
            case "cancel" if alphas:
                await core.jobs.cancel(chance.choice(list(alphas)))
            case "delete" if found := await finished():
                with contextlib.suppress(NotFound):
                    await core.store.delete(chance.choice(list(found.values())))
            case "spill":
                core.scheduler.writes._spill._hurry = chance.random() < 0.5
                core.scheduler.writes._spill.look()
                await asyncio.sleep(0)
            case "answer":
                answer(name)
                in_arena = max(in_arena, core.store.arena.used_bytes)
                assert in_arena <= core.store.arena.share_bytes
        await check()
    for name in fake.fleet:
        late[name].clear()
        if not fake.fleet[name].ready:
            fake.hello(name)
    while any(map(fake.running, fake.fleet)):
        for name in fake.fleet:
            answer(name)
    await eventually(lambda: not core.jobs._live)
    await check()
    for array in (await finished()).values():
        with contextlib.suppress(NotFound):
            await core.store.delete(array)
    await eventually(lambda: not core.scheduler.writes._spill._copying)
    await core.database.write(lambda _: None)
    await eventually(lambda: core.store.arena.allocate(4 * RESULT))
    assert in_arena
    assert core.store._space.unplaced_bytes == 0
    assert core.scheduler.writes.recomputed == 0
    assert held(core.store) == (0, 0, 0)
