"""The tier: three times what the store holds comes back bit for bit, whatever dies, is gone or does not answer."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("obstore", reason="the extra tier is not installed")

from gemmserve_service.errors import ArrayCorrupt, JobTimeout, NotFound, StoreFull, TierUnavailable
from gemmserve_service.schemas import GemmJob, JobState
from gemmserve_service.settings import Settings
from gemmserve_service.store.array_store import ArrayStore
from gemmserve_service.store.database.database import Database
from gemmserve_service.store.tier import objects as tier_objects
from gemmserve_service.store.tier import tier as tier_module
from gemmserve_service.store.tier.objects import Objects

SIDE = 128
NBYTES = SIDE * SIDE * 8
ROOM = 4 * NBYTES


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of which an array has several."""
    for module in (tier_objects, tier_module):
        monkeypatch.setattr(module, "CHUNK", 40_000)


@pytest.fixture
def tiered(tmp_path, make_settings):
    def make(**fields):
        return make_settings(**{"tier": (tmp_path / "tier").as_uri(), "max_store_bytes": ROOM, **fields})

    return make


def matrix(seed):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((SIDE, SIDE)) + 1j * rng.standard_normal((SIDE, SIDE))).astype("c8")


async def store_array(store, array):
    await store.make_room(array.nbytes, "")
    upload = store.allocate(array.dtype, array.shape, "C", ttl_s=None)
    upload.write(array.tobytes())
    return await upload.commit()


async def read(store, array_id):
    with store.pin(array_id) as pinned:
        await store.bring_back([pinned], 60.0)
        return np.frombuffer(bytes(pinned.view), pinned.info.dtype).reshape(pinned.info.shape)


async def _store_for_ever(store):
    for seed in itertools.count(100):
        await store_array(store, matrix(seed))


def _result(info):
    (array_id,) = info.result.values()
    return array_id


def is_cold(store, array_id):
    return store._catalog.get(array_id).cold is not None


def objects_in(tmp_path):
    folder = tmp_path / "tier" / "arrays"
    return {path.name.removesuffix(".json") for path in folder.iterdir()} if folder.exists() else set()


async def out(store, eventually, array_id):
    """Has one array leave: others come until it has."""
    while not is_cold(store, array_id):
        await store_array(store, matrix(99))
        await eventually(lambda: not store.tier._leaving)


async def test_three_times_what_the_store_holds(make_core, tiered):
    core = await make_core(tiered())
    store = core.store
    given = {}
    for seed in range(12):
        array = matrix(seed)
        given[(await store_array(store, array)).id] = array
        assert store.used_bytes <= ROOM
    ids = list(given)
    jobs = []
    for a, b in zip(ids, reversed(ids), strict=True):
        info, _ = await core.jobs.submit(GemmJob(op="gemm", a=a, b=b))
        jobs.append((await core.jobs.wait(info.id, 60.0), a, b))
    for seed, array_id in enumerate(ids):
        np.testing.assert_array_equal(await read(store, array_id), matrix(seed))
    for info, a, b in jobs:
        assert info.state is JobState.SUCCEEDED
        wide = [given[name].astype("c16") for name in (a, b)]
        bound = 2 * (SIDE + 2) * np.finfo("f4").eps * (np.abs(wide[0]) @ np.abs(wide[1]))
        found = await read(store, _result(info))
        assert (np.abs(found - wide[0] @ wide[1]) <= bound).all()
    assert store.used_bytes <= ROOM
    assert store.quotas.stored_bytes("") == 24 * NBYTES
    assert store.tier.arrays >= 20


async def test_many_jobs_whose_operands_are_all_in_the_tier(make_core, tiered):
    core = await make_core(tiered(max_store_bytes=6 * NBYTES))
    ids = [(await store_array(core.store, matrix(seed))).id for seed in range(12)]
    submitted = await asyncio.gather(
        *(core.jobs.submit(GemmJob(op="gemm", a=a, b=b)) for a, b in itertools.pairwise(ids))
    )
    ended = [await core.jobs.wait(info.id, 60.0) for info, _ in submitted]
    assert {info.state for info in ended} == {JobState.SUCCEEDED}


async def test_requests_for_one_array_bring_it_back_once(make_store, tiered, eventually):
    store = await make_store(tiered())
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    before = store.tier.bytes_in
    found = await asyncio.gather(*(read(store, info.id) for _ in range(5)))
    assert all(np.array_equal(each, matrix(0)) for each in found)
    assert store.tier.bytes_in - before == NBYTES


async def test_what_is_in_use_stays(make_store, tiered, eventually):
    store = await make_store(tiered())
    info = await store_array(store, matrix(0))
    with store.pin(info.id) as pinned:
        view = pinned.view
        for seed in range(1, 9):
            await store_array(store, matrix(seed))
        assert not is_cold(store, info.id)
        assert bytes(view) == matrix(0).tobytes()
        del view
    await out(store, eventually, info.id)


async def test_a_range_reads_no_more_than_its_chunks(make_store, tiered, eventually):
    store = await make_store(tiered())
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    before = store.tier.bytes_in
    with store.pin(info.id) as pinned:
        data = b"".join([bytes(piece) async for piece in store.tier.read_range(pinned, 39_990, 80_010)])
    assert data == matrix(0).tobytes()[39_990:80_010]
    assert store.tier.bytes_in - before == 3 * 40_000
    assert is_cold(store, info.id)


async def test_deleted_in_the_tier_too(make_store, tiered, eventually, tmp_path):
    store = await make_store(tiered())
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    used = store.quotas.stored_bytes("")
    assert info.id in objects_in(tmp_path)
    await store.delete(info.id)
    assert store.quotas.stored_bytes("") == used - NBYTES
    await eventually(lambda: info.id not in objects_in(tmp_path))


async def test_a_deletion_survives_a_restart(make_store, tiered, eventually, tmp_path, monkeypatch, database):
    settings = tiered()
    store = await make_store(settings)
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "delete", _unreachable)
        await store.delete(info.id)
        await eventually(lambda: store.tier.failures)
        await store.stop()
    assert info.id in objects_in(tmp_path)
    again = await make_store(settings)
    await eventually(lambda: info.id not in objects_in(tmp_path))
    await eventually(lambda: not again.tier._garbage)
    assert await database.read(lambda db: db.execute("SELECT count(*) FROM tier_garbage").fetchone()[0]) == 0


def _unreachable(*_, **__):
    raise TierUnavailable("nothing answers", retry_after_s=5.0)


async def test_without_the_tier_uploads_that_need_room_are_refused_and_all_else_goes_on(
    make_store, tiered, eventually, monkeypatch
):
    store = await make_store(tiered())
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    near = await store_array(store, matrix(1))
    with monkeypatch.context() as patch:
        for name in ("put", "read", "delete"):
            patch.setattr(Objects, name, _unreachable)
        with pytest.raises(TierUnavailable) as caught:
            await asyncio.wait_for(_store_for_ever(store), 60.0)
        assert caught.value.retry_after_s > 0
        with pytest.raises(TierUnavailable):
            await read(store, info.id)
        np.testing.assert_array_equal(await read(store, near.id), matrix(1))
    np.testing.assert_array_equal(await read(store, info.id), matrix(0))
    await eventually(lambda: store.tier._refusal() is None)
    await store_array(store, matrix(10))


async def test_a_full_tier(make_store, tiered):
    store = await make_store(tiered(max_tier_bytes=2 * NBYTES))
    with pytest.raises(StoreFull, match="the tier is full"):
        await asyncio.wait_for(_store_for_ever(store), 60.0)
    assert store.tier.used_bytes <= 2 * NBYTES


async def test_a_task_waits_for_the_tier_and_its_deadline_goes_on(make_core, tiered, eventually, monkeypatch):
    core = await make_core(tiered())
    store = core.store
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "read", _unreachable)
        late, _ = await core.jobs.submit(GemmJob(op="gemm", a=info.id, b=info.id, timeout_s=0.2))
        patient, _ = await core.jobs.submit(GemmJob(op="gemm", a=info.id, b=info.id))
        assert (await core.jobs.wait(late.id, 60.0)).state is JobState.EXPIRED
        await eventually(lambda: store.tier.failures)
        assert (await core.jobs.wait(patient.id, 0.0)).state is JobState.QUEUED
    assert (await core.jobs.wait(patient.id, 60.0)).state is JobState.SUCCEEDED


async def test_no_room_for_ever_ends_a_wait(make_store, tiered, eventually, monkeypatch):
    store = await make_store(tiered())
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    monkeypatch.setattr(store.tier, "_grant", lambda: None)
    with store.pin(info.id) as pinned, pytest.raises(JobTimeout):
        await store.bring_back([pinned], 0.05)


async def test_wrong_bytes_are_an_error_and_not_an_answer(make_core, tiered, eventually, tmp_path):
    core = await make_core(tiered())
    store = core.store
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    path = tmp_path / "tier" / "arrays" / info.id
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ArrayCorrupt):
        await read(store, info.id)
    with store.pin(info.id) as pinned, pytest.raises(ArrayCorrupt):
        _ = [piece async for piece in store.tier.read_range(pinned, NBYTES - 4, NBYTES)]
    job, _ = await core.jobs.submit(GemmJob(op="gemm", a=info.id, b=info.id))
    ended = await core.jobs.wait(job.id, 60.0)
    assert (ended.state, ended.error.type) == (JobState.FAILED, "/problems/array-corrupt")
    path.write_bytes(good)  # as an operator brings an earlier version back
    np.testing.assert_array_equal(await read(store, info.id), matrix(0))


# -- what a process that is killed leaves -----------------------------------------------------------------------------


class Snapshots:
    """Copies of the data directory and of the tier, as kill -9 would leave them, at each step of what arrays do."""

    def __init__(self, tmp_path):
        self.root = tmp_path
        self.taken = []
        self._lock = threading.Lock()

    def take(self, step):
        with self._lock:
            self._take(step)

    def _take(self, step):
        folder = self.root / "snapshots" / f"{len(self.taken):03}"
        for name in ("data", "tier"):
            shutil.copytree(self.root / name, folder / name)
        self.taken.append((step, folder))

    def around(self, patch, owner, name, *, asynchronous=False):
        real = getattr(owner, name)

        def call(*args, **options):
            self.take(f"before {name}")
            result = real(*args, **options)
            self.take(f"after {name}")
            return result

        async def call_async(*args, **options):
            self.take(f"before {name}")
            result = await real(*args, **options)
            self.take(f"after {name}")
            return result

        patch.setattr(owner, name, call_async if asynchronous else call)


async def test_a_process_killed_at_any_step_loses_nothing(
    make_store, tiered, eventually, monkeypatch, tmp_path, own_files
):
    store = await make_store(tiered(tier_high_water=1.0, recycle_bytes=0))
    kept = {(await store_array(store, matrix(seed))).id: seed for seed in range(4)}
    await eventually(lambda: store.tier._claimed is True)
    oldest = next(iter(kept))
    snapshots = Snapshots(tmp_path)
    obstore = store.tier._objects._obstore
    with monkeypatch.context() as patch:
        steps = SimpleNamespace(**{name: getattr(obstore, name) for name in dir(obstore) if name[0] != "_"})
        patch.setattr(store.tier._objects, "_obstore", steps)
        for name in ("put", "get_range", "delete"):
            snapshots.around(patch, steps, name)
        for name in ("_set_tier", "_bring"):
            snapshots.around(patch, type(store.tier), name, asynchronous=True)
        for name in ("give_extent_back", "take_extent"):
            snapshots.around(patch, store, name)
        await store.make_room(NBYTES, "")
        assert is_cold(store, oldest)
        await eventually(lambda: not store.tier._leaving)
        snapshots.take("out")
        np.testing.assert_array_equal(await read(store, oldest), matrix(0))
        snapshots.take("back")
        await store.make_room(NBYTES, "")
        await eventually(lambda: not store.tier._leaving)
        gone = list(kept)[1]
        with store.pin(oldest) as pinned:
            await store.bring_back([pinned], 60.0)
        deleted = len(snapshots.taken)
        await store.delete(gone)
        await eventually(lambda: gone not in objects_in(tmp_path))
        await eventually(lambda: not store.tier._garbage)
        snapshots.take("deleted")
    names = {step for step, _ in snapshots.taken}
    assert {f"{when} {name}" for when in ("before", "after") for name in ("put", "get_range", "_set_tier")} <= names
    for number, (step, folder) in enumerate(snapshots.taken):
        live = {array_id: seed for array_id, seed in kept.items() if array_id != gone}
        settings = tiered(data_dir=folder / "data", tier=(folder / "tier").as_uri())
        await _recovers(settings, folder, live, kept if number < deleted else live, f"{number}: {step}", eventually)


async def _recovers(settings, folder, live, all_of_them, step, eventually):
    database = Database(settings.data_dir / "gemmserve.sqlite")
    await database.start()
    store = ArrayStore(settings, database)
    try:
        await store.start()
        store.finish_recovery()
        for array_id, seed in all_of_them.items():
            np.testing.assert_array_equal(await read(store, array_id), matrix(seed), err_msg=step)
        await eventually(lambda: store.tier._claimed is True and not store.tier._garbage)
        await eventually(lambda: objects_in(folder) <= {record.info.id for record in store._catalog})
        assert set(live) <= {record.info.id for record in store._catalog}, step
        rows = await database.read(lambda db: db.execute("SELECT extent FROM arrays").fetchall())
        named = {row["extent"] for row in rows} - {None}
        await eventually(lambda: not store.tier._leaving)
        files = {path.name for path in (settings.data_dir / "extents").iterdir()}
        assert named <= files | {record.extent and record.extent.name for record in store._catalog}, step
    finally:
        await store.stop()
        await database.stop()


async def test_objects_that_no_record_names_go_at_the_start(make_store, tiered, eventually, tmp_path):
    settings = tiered()
    store = await make_store(settings)
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    await store.stop()
    folder = tmp_path / "tier" / "arrays"
    orphan = "arr_0000000000" + "0" * 16
    (folder / orphan).write_bytes(b"abc")
    (folder / "notes.txt").write_bytes(b"an operator's")
    later = await make_store(settings)
    await eventually(lambda: orphan not in objects_in(tmp_path))
    assert {info.id, "notes.txt"} <= objects_in(tmp_path)
    np.testing.assert_array_equal(await read(later, info.id), matrix(0))


# -- what the disk loses ----------------------------------------------------------------------------------------------


async def test_replicated_arrays_come_back_after_the_loss_of_every_file(make_core, tiered, eventually):
    settings = tiered(durability="replicated", max_store_bytes=None)
    core = await make_core(settings)
    a, b = [await store_array(core.store, matrix(seed)) for seed in range(2)]
    empty = await store_array(core.store, np.zeros((0, 3), "c8"))
    job, _ = await core.jobs.submit(GemmJob(op="gemm", a=a.id, b=b.id))
    result = _result(await core.jobs.wait(job.id, 60.0))
    expected = await read(core.store, result)
    assert core.store.tier.arrays == 4
    await core.stop()
    shutil.rmtree(settings.data_dir / "extents")
    again = await make_core(settings)
    assert again.store.count == 4
    for array_id, array in ((a.id, matrix(0)), (b.id, matrix(1)), (result, expected)):
        np.testing.assert_array_equal(await read(again.store, array_id), array)
    assert (await again.store.info(empty.id)).shape == (0, 3)
    await again.stop()
    both = await make_core(settings)  # their rows name files once more
    assert not any(is_cold(both.store, array_id) for array_id in (a.id, b.id, result))


async def test_replicated_means_that_the_tier_has_answered(make_store, tiered, monkeypatch, tmp_path):
    store = await make_store(tiered(durability="replicated"))
    info = await store_array_when_claimed(store, matrix(0))
    assert info.id in objects_in(tmp_path)
    monkeypatch.setattr(Objects, "put", _unreachable)
    with pytest.raises(TierUnavailable):
        await store_array(store, matrix(1))
    assert (store.count, store.used_bytes, store.tier.used_bytes) == (1, NBYTES, NBYTES)


async def store_array_when_claimed(store, array):
    while True:
        try:
            return await store_array(store, array)
        except TierUnavailable:
            await asyncio.sleep(0.002)


async def test_a_lost_database_leaves_arrays_that_another_server_may_adopt(make_core, tiered, eventually, tmp_path):
    settings = tiered(durability="replicated")
    core = await make_core(settings)
    info = await store_array_when_claimed(core.store, matrix(0))
    await core.stop()
    other = tmp_path / "other"
    refused = await make_core(tiered(data_dir=other))
    await eventually(lambda: refused.store.tier.error)
    with pytest.raises(NotFound):
        await refused.store.info(info.id)
    assert info.id in objects_in(tmp_path)
    await refused.stop()
    adopting = await make_core(tiered(data_dir=other, tier_adopt=True))
    found = await adopting.store.info(info.id)
    assert found.model_copy(update={"created_at": info.created_at}) == info
    np.testing.assert_array_equal(await read(adopting.store, info.id), matrix(0))


async def test_without_the_setting_arrays_in_a_tier_stay_on_record(make_store, tiered, make_settings, eventually):
    settings = tiered()
    store = await make_store(settings)
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    await store.stop()
    bare = await make_store(make_settings())
    with pytest.raises(TierUnavailable, match="without GEMMSERVE_TIER"):
        await read(bare, info.id)
    await bare.stop()
    np.testing.assert_array_equal(await read(await make_store(settings), info.id), matrix(0))


def test_settings_that_contradict_each_other(tmp_path):
    with pytest.raises(ValueError, match="needs a tier"):
        Settings(data_dir=tmp_path, durability="replicated")
    with pytest.raises(ValueError, match="none of s3"):
        Settings(data_dir=tmp_path, tier="/mnt/tier")
    assert tier_objects.DIGEST_BYTES == 32
