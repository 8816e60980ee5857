"""Ends of jobs, and what the disk does not take of their results."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_service.schemas import JobState

A = np.arange(16.0).reshape(4, 4)

pytestmark = pytest.mark.usefixtures("own_files")


@pytest.mark.parametrize("times", [1, 3])
async def test_a_result_that_the_disk_does_not_take_is_computed_again(
    make_core, make_settings, put, gemm, fetch, lossy_disk, held, eventually, times
):
    """After an fsync that failed the next one succeeds, whatever became of the pages."""
    core = await make_core(make_settings(durability="power"))
    a = await put(core.store, A)
    lossy_disk(times)
    info, _ = await core.jobs.submit(gemm(a, a))
    info = await core.jobs.wait(info.id, 60)
    assert info.state == JobState.SUCCEEDED
    array = info.result["d"]
    with core.store.pin(array) as pinned:
        await core.scheduler.writes.wait_readable(pinned, 60)
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    assert core.scheduler.writes.recomputed == times

    def read(db):
        return db.execute("SELECT written, extent FROM arrays WHERE id = ?", (array,)).fetchone()

    assert tuple(await core.database.read(read)) == (1, core.store._catalog.get(array).extent.name)
    assert core.store._space.unplaced_bytes == 0
    assert held(core.store) == (0, 0, 0)


async def test_a_server_that_ends_before_it_was_computed_again_leaves_that_to_the_next(
    make_core, make_settings, make_fake, put, gemm, fetch, lossy_disk, die
):
    settings, fake = make_settings(durability="power"), make_fake()
    first = await make_core(settings, fake)
    a = await put(first.store, A)
    lossy_disk(1)
    info, _ = await first.jobs.submit(gemm(a, a))
    fake.done()
    array = (await first.jobs.wait(info.id, 60)).result["d"]
    await die(first)
    second = await make_core(settings)
    with second.store.pin(array) as pinned:
        await second.scheduler.writes.wait_readable(pinned, 60)
    np.testing.assert_array_equal(fetch(second.store, array), A @ A)
