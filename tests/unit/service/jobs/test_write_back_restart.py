"""Results that only a device had when the server ended: the next one computes them again, or calls them lost."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_service.errors import ArrayLost
from gemmserve_service.jobs.core import Core
from gemmserve_service.schemas import ArrayView, GemmReduceJob

pytestmark = pytest.mark.usefixtures("small_results_stay")

A = np.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize("how", ["stop", "die"])
async def test_a_new_server_computes_what_the_old_one_had_not_written(
    settings, make_fake, make_core, put, gemm, fetch, die, held, eventually, how
):
    fake = make_fake()
    fake.result_bytes = 1 << 20
    first = Core(settings, fake)
    await first.start()
    a = await put(first.store, A)
    ids = []
    operands = (a.id, a.id)
    for _ in range(3):
        info, _ = await first.jobs.submit(gemm(*operands))
        fake.done(task=info.id, written=False)
        ids.append((await first.jobs.wait(info.id, 60)).result["d"])
        operands = (ids[-1], a.id)
    waiting, _ = await first.jobs.submit(gemm(ids[1], ids[2]))
    gone, _ = await first.jobs.submit(gemm(a, a, alpha=7))
    fake.done(task=waiting.id, written=False)
    await first.jobs.wait(waiting.id, 60)
    fake.done(task=gone.id, written=False)
    unseen = (await first.jobs.wait(gone.id, 60)).result["d"]
    await first.store.delete(unseen)
    for array in (a.id, ids[0], ids[1]):
        await first.store.delete(array)
    await first.database.write(lambda _: None)
    await (first.stop() if how == "stop" else die(first))

    second = await make_core(settings)  # which really multiplies
    final = (await second.jobs.get(waiting.id)).result["d"]
    for array, expected in ((ids[2], A @ A @ A @ A), (final, (A @ A @ A) @ (A @ A @ A @ A))):
        with second.store.pin(array) as pinned:
            await second.scheduler.writes.wait_readable(pinned, 60)
        np.testing.assert_array_equal(fetch(second.store, array), expected)
    await second.scheduler.writes.stop()
    await second.database.write(lambda _: None)
    assert second.scheduler.writes.recomputed == 4
    assert second.scheduler.writes.spared == 0, "of what nobody could see, and nothing was made of, nothing was left"
    # What only served to compute them goes when its task lets go of it.
    await eventually(lambda: {record.info.id for record in second.store._catalog} == {ids[2], final})
    assert held(second.store) == (0, 0, 0)
    assert len(list((settings.data_dir / "extents").iterdir())) >= 1


async def test_a_job_that_waits_at_the_crash_finds_its_operand_again(settings, make_fake, make_core, put, gemm, die):
    fake = make_fake()
    fake.result_bytes = 1 << 20
    first = Core(settings, fake)
    await first.start()
    a = await put(first.store, A)
    info, _ = await first.jobs.submit(gemm(a, a))
    fake.done(written=False)
    square = (await first.jobs.wait(info.id, 60)).result["d"]
    waiting, _ = await first.jobs.submit(gemm(square, square))
    for array in (a.id, square):
        await first.store.delete(array)
    await first.database.write(lambda _: None)
    await die(first)
    second = await make_core(settings)
    done = await second.jobs.wait(waiting.id, 60)
    with second.store.pin(done.result["d"]) as pinned:
        found = np.frombuffer(pinned.view).reshape(4, 4)
        np.testing.assert_array_equal(found, (A @ A) @ (A @ A))
        del found


async def test_lost_operands_lose_what_was_made_of_them_and_nothing_else(
    settings, make_fake, make_core, put, gemm, die, fetch, own_files
):
    fake = make_fake()
    fake.result_bytes = 1 << 20
    first = Core(settings, fake)
    await first.start()
    bad, good = await put(first.store, A), await put(first.store, A)
    results = []
    for operand in (bad, good):
        info, _ = await first.jobs.submit(gemm(operand, operand))
        fake.done(written=False)
        results.append(await first.jobs.wait(info.id, 60))
    (settings.data_dir / "extents" / first.store._catalog.get(bad.id).extent.name).unlink()
    await die(first)
    second = await make_core(settings)
    with pytest.raises(ArrayLost, match="no array"):
        second.store.pin(results[0].result["d"])
    with second.store.pin(results[1].result["d"]) as pinned:
        await second.scheduler.writes.wait_readable(pinned, 60)
    np.testing.assert_array_equal(fetch(second.store, results[1].result["d"]), A @ A)
    await second.scheduler.writes.stop()
    assert (await second.jobs.get(results[0].id)).error.type == "/problems/array-lost"
    assert (second.store.used_bytes, second.store._space.unplaced_bytes) == (2 * A.nbytes, 0)


@pytest.mark.parametrize("how", ["stop", "die"])
async def test_results_of_views_are_computed_again_from_the_same_views(
    settings, make_fake, make_core, put, fetch, die, how
):
    fake = make_fake()
    fake.result_bytes = 1 << 20
    first = Core(settings, fake)
    await first.start()
    a = await put(first.store, A)
    turned = ArrayView(id=a.id, offset=15, shape=(4, 4), strides=(-4, -1))
    job = GemmReduceJob(op="gemm_reduce", a=turned, b=a.id, reduce=["sum", "absmax"])
    info, _ = await first.jobs.submit(job)
    fake.done(task=info.id, written=False)
    result = (await first.jobs.wait(info.id, 60)).result
    await first.store.delete(a.id)
    await first.database.write(lambda _: None)
    await (first.stop() if how == "stop" else die(first))
    second = await make_core(settings)
    product = A[::-1, ::-1] @ A
    for name, expected in (("sum", product.sum(axis=0)), ("absmax", np.abs(product).max(axis=0))):
        with second.store.pin(result[name]) as pinned:
            await second.scheduler.writes.wait_readable(pinned, 60)
        np.testing.assert_array_equal(fetch(second.store, result[name]), expected)
    await second.scheduler.writes.stop()
    assert second.scheduler.writes.recomputed == 1
