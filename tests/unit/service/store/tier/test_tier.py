"""The tier: three times what the store holds comes back bit for bit, whatever dies, is gone or does not answer."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import sys
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
from gemmserve_service.store.tier import beside as tier_beside
from gemmserve_service.store.tier import objects as tier_objects
from gemmserve_service.store.tier import tier as tier_module
from gemmserve_service.store.tier.objects import Objects

SIDE = 128
NBYTES = SIDE * SIDE * 8
ROOM = 4 * NBYTES


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of which an array has several."""
    for module in (tier_beside, tier_objects, tier_module):
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


async def _waiting_job(core, eventually):
    """Submit a job whose operand is in the tier alone; return how often the queue is looked at, from now on, too."""
    info = await store_array(core.store, matrix(0))
    await out(core.store, eventually, info.id)
    looks = []
    dispatch = core.scheduler._dispatch
    core.scheduler._dispatch = lambda: (looks.append(core.store.tier._refusal()), dispatch())[1]
    job, _ = await core.jobs.submit(GemmJob(op="gemm", a=info.id, b=info.id))
    return job, looks


async def test_a_task_asks_again_though_the_timer_comes_before_the_tier_may_be_asked(
    make_core, tiered, eventually, monkeypatch
):
    """A loop's timers may come some milliseconds early, or what is refused is refused anew meanwhile."""
    core = await make_core(tiered())
    tier, now = core.store.tier, [1000.0]
    with monkeypatch.context() as patch:
        patch.setattr(tier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr(tier_module, "_MIN_RETRY_S", 0.05)
        tier._delay_s = 0.05
        with patch.context() as unreachable:
            unreachable.setattr(Objects, "read", _unreachable)
            job, looks = await _waiting_job(core, eventually)
            await eventually(lambda: tier.failures)
        at_first = len(looks)
        await eventually(lambda: len(looks) >= at_first + 2)
        assert all(looks[at_first:]), "the tier was refused whenever the queue was looked at"
        now[0] += 60.0
        assert (await core.jobs.wait(job.id, 60.0)).state is JobState.SUCCEEDED


async def test_a_task_for_whose_operands_the_disk_has_no_room_does_not_ask_without_a_pause(
    make_core, tiered, eventually, monkeypatch
):
    core = await make_core(tiered())
    tier, asked = core.store.tier, []
    monkeypatch.setattr(tier_module, "_MIN_RETRY_S", 3600.0)
    with monkeypatch.context() as patch:

        def full(nbytes):
            asked.append(nbytes)
            raise StoreFull(f"no room for {nbytes} bytes on the disk")

        patch.setattr(core.store, "take_extent", full)
        job, looks = await _waiting_job(core, eventually)
        await eventually(lambda: tier._again)
        for count in range(len(looks), len(looks) + 5):
            core.scheduler.dispatch_soon()
            await eventually(lambda count=count: len(looks) > count)
        assert asked == [NBYTES]
    tier._ask_again()
    assert (await core.jobs.wait(job.id, 60.0)).state is JobState.SUCCEEDED


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


async def test_killed_while_an_upload_is_replicated(make_store, tiered, eventually, monkeypatch, tmp_path, own_files):
    store = await make_store(tiered(durability="replicated"))
    first = await store_array_when_claimed(store, matrix(0))
    snapshots = Snapshots(tmp_path)
    obstore = store.tier._objects._obstore
    with monkeypatch.context() as patch:
        steps = SimpleNamespace(**{name: getattr(obstore, name) for name in dir(obstore) if name[0] != "_"})
        patch.setattr(store.tier._objects, "_obstore", steps)
        snapshots.around(patch, steps, "put")
        snapshots.around(patch, store, "index")
        second = await store_array(store, matrix(1))
    assert len(snapshots.taken) == 6
    for number, (step, folder) in enumerate(snapshots.taken):
        settings = tiered(data_dir=folder / "data", tier=(folder / "tier").as_uri())
        kept = {first.id: 0} | ({second.id: 1} if "index" in step else {})
        await _recovers(settings, folder, kept, kept, f"{number}: {step}", eventually)


class Held:
    """Writes of objects that stand still until they are let go."""

    def __init__(self, patch):
        self.go, self.calls, real = threading.Event(), 0, Objects.put

        def put(*args, **options):
            self.calls += 1
            assert self.go.wait(60.0)
            return real(*args, **options)

        patch.setattr(Objects, "put", put)


async def test_an_upload_given_up_while_it_is_replicated_leaves_no_object(
    make_store, tiered, eventually, monkeypatch, tmp_path
):
    store = await make_store(tiered(durability="replicated"))
    await store_array_when_claimed(store, matrix(0))
    with monkeypatch.context() as patch:
        held = Held(patch)
        upload = asyncio.ensure_future(store_array(store, matrix(1)))
        await eventually(lambda: held.calls)
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert store.tier._garbage
        held.go.set()
        await eventually(lambda: not store.tier._garbage)
    assert len(objects_in(tmp_path)) == store.tier.arrays == 1
    assert (store.tier.used_bytes, store.used_bytes) == (NBYTES, NBYTES)


async def test_an_array_deleted_while_it_is_written_leaves_no_object(
    make_store, tiered, eventually, monkeypatch, tmp_path
):
    store = await make_store(tiered())
    await eventually(lambda: store.tier._claimed is True)
    info = await store_array(store, matrix(0))
    with monkeypatch.context() as patch:
        held = Held(patch)
        written = asyncio.ensure_future(store.tier.replicate(store._catalog.get(info.id)))
        await eventually(lambda: held.calls)
        await store.delete(info.id)
        assert not store.knows(info.id)
        held.go.set()
        await written
    await eventually(lambda: not store.tier._garbage)
    assert objects_in(tmp_path) == set()
    assert (store.tier.used_bytes, store.tier.arrays) == (0, 0)


async def test_a_write_that_fails_counts_once(make_store, tiered, eventually, monkeypatch):
    store = await make_store(tiered(tier_high_water=1.0))
    await eventually(lambda: store.tier._claimed is True)
    for seed in range(4):
        await store_array(store, matrix(seed))
    calls = itertools.count()
    monkeypatch.setattr(Objects, "put", lambda *_, **__: _unreachable(next(calls)))
    with pytest.raises(TierUnavailable, match="nothing answers"):
        await store.make_room(NBYTES, "")
    await eventually(lambda: not store.tier._leaving)
    assert store.tier.failures == next(calls)


async def test_a_disk_that_is_full_is_not_the_tiers_fault(make_store, tiered, eventually, monkeypatch):
    store = await make_store(tiered())
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    with monkeypatch.context() as patch:

        def full(nbytes):
            raise StoreFull(f"no room for {nbytes} bytes on the disk")

        patch.setattr(store, "take_extent", full)
        with pytest.raises(StoreFull, match="on the disk"):
            await read(store, info.id)
    assert store.tier.failures == 0
    assert store.tier.error is None  # so arrays may leave, and there is room
    np.testing.assert_array_equal(await read(store, info.id), matrix(0))


async def test_one_array_that_does_not_come_back_is_told_though_another_took_longer(
    make_store, tiered, eventually, monkeypatch
):
    store = await make_store(tiered())
    infos = [await store_array(store, matrix(seed)) for seed in range(2)]
    for info in infos:
        await out(store, eventually, info.id)
    failed, real = threading.Event(), Objects.read

    def read_one(self, array_id, *args):
        if array_id == infos[1].id:
            _unreachable()
        assert failed.wait(60.0)
        return real(self, array_id, *args)

    monkeypatch.setattr(Objects, "read", read_one)
    pins = [store.pin(info.id) for info in infos]
    with pins[0], pins[1]:
        back = asyncio.ensure_future(store.bring_back(pins, 60.0))
        await eventually(lambda: store.tier.failures)
        failed.set()
        with pytest.raises(TierUnavailable, match="nothing answers"):
            await back


# -- a tier that is not what it was ------------------------------------------------------------------------------------


async def both(make_store, settings, eventually):
    """Return the id of an array of an ended store that is in a file and in an object."""
    store = await make_store(settings)
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    with store.pin(info.id) as pinned:
        await store.bring_back([pinned], 60.0)
        assert pinned.view
        await store.stop()
    assert not is_cold(store, info.id)
    return info.id


async def test_an_unmounted_tier_is_not_an_empty_one(make_store, tiered, eventually, tmp_path):
    settings = tiered()
    store = await make_store(settings)
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    await store.stop()
    (tmp_path / "tier").rename(tmp_path / "not mounted")
    blind = await make_store(settings)
    await eventually(lambda: blind.tier.error)
    assert "mounted" in blind.tier.error
    with pytest.raises(TierUnavailable):
        await read(blind, info.id)
    await blind.stop()
    assert list((tmp_path / "tier").iterdir()) == []
    (tmp_path / "tier").rmdir()
    (tmp_path / "not mounted").rename(tmp_path / "tier")
    np.testing.assert_array_equal(await read(await make_store(settings), info.id), matrix(0))


@pytest.mark.parametrize("answers", [False, True])
async def test_a_file_stays_while_its_object_may_be_gone(
    answers, make_store, tiered, eventually, tmp_path, monkeypatch
):
    settings = tiered()
    array_id = await both(make_store, settings, eventually)
    shutil.rmtree(tmp_path / "tier")
    if not answers:
        monkeypatch.setattr(Objects, "claim", _unreachable)
    store = await make_store(settings)
    await eventually(lambda: store.tier.error)
    with pytest.raises(TierUnavailable):
        await store.make_room(ROOM, "")
    np.testing.assert_array_equal(await read(store, array_id), matrix(0))


async def test_of_another_servers_tier_arrays_that_were_read_leave_again(make_store, tiered, eventually):
    settings = tiered()
    store = await make_store(settings)
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    for seed in range(1, 4):
        await store_array(store, matrix(seed))
    await store.stop()
    Objects(settings.tier).claim("other", adopt=True)
    later = await make_store(settings)
    await eventually(lambda: later.tier.error)
    np.testing.assert_array_equal(await read(later, info.id), matrix(0))
    assert later.tier.bytes_in == NBYTES
    with pytest.raises(TierUnavailable, match="another data directory"):
        await later.make_room(ROOM, "")
    await eventually(lambda: not later.tier._leaving)
    assert is_cold(later, info.id)
    assert later.tier.bytes_out == 0


async def test_of_a_tier_that_answers_late_nothing_is_kept_in_mind(make_store, tiered, eventually, monkeypatch):
    settings = tiered()
    store = await make_store(settings)
    info = await store_array(store, matrix(0))
    await out(store, eventually, info.id)
    await store.stop()
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "claim", _unreachable)
        later = await make_store(settings)
        await eventually(lambda: later.tier.error)
        np.testing.assert_array_equal(await read(later, info.id), matrix(0))
        assert later.tier._confirmed == {info.id}
    await eventually(lambda: later.tier._claimed is True)
    assert later.tier._confirmed == set()


async def test_adopting_an_empty_tier_keeps_what_is_in_files(make_store, tiered, eventually, tmp_path):
    array_id = await both(make_store, tiered(), eventually)
    shutil.rmtree(tmp_path / "tier")
    store = await make_store(tiered(tier_adopt=True, tier_high_water=0.1))
    await eventually(lambda: all(record.cold for record in store.records()))
    assert array_id in objects_in(tmp_path)
    there = len([path for path in (tmp_path / "tier" / "arrays").iterdir() if path.suffix == ".json"])
    lost = sum(record.tier is not None and record.info.id not in objects_in(tmp_path) for record in store.records())
    assert store.tier.arrays == there + lost
    np.testing.assert_array_equal(await read(store, array_id), matrix(0))


async def test_adopting_deletes_nothing_that_it_could_not_adopt(make_store, tiered, eventually, tmp_path):
    store = await make_store(tiered(durability="replicated"))
    info = await store_array_when_claimed(store, matrix(0))
    await store.stop()
    strange = "arr_0000000000" + "0" * 16
    for name in (strange, f"{strange}.json"):
        (tmp_path / "tier" / "arrays" / name).write_bytes(b"{}")
    adopting = await make_store(tiered(tier_adopt=True))
    await adopting.delete(info.id)
    await eventually(lambda: not adopting.tier._garbage)
    assert objects_in(tmp_path) == {strange}


async def test_a_collection_that_failed_is_tried_again(make_store, tiered, eventually, tmp_path, monkeypatch):
    settings = tiered()
    store = await make_store(settings)
    await eventually(lambda: store.tier._collected)
    await store.stop()
    orphan = "arr_0000000000" + "0" * 16
    (tmp_path / "tier" / "arrays").mkdir()
    (tmp_path / "tier" / "arrays" / orphan).write_bytes(b"abc")
    answers, ids = [_unreachable, Objects.ids], Objects.ids

    def listed(self):
        return (answers.pop(0) if answers else ids)(self)

    monkeypatch.setattr(Objects, "ids", listed)
    monkeypatch.setattr(tier_module, "_MIN_RETRY_S", 0.01)
    later = await make_store(settings)
    await eventually(lambda: orphan not in objects_in(tmp_path))
    assert (later.tier.failures, answers) == (1, [])


async def test_without_the_setting_nothing_of_it_is_imported():
    code = (
        "import sys, gemmserve_service.processes.front, gemmserve_service.store.array_store as s\n"
        "assert not {'obstore', 'gemmserve_service.store.tier.tier'} & set(sys.modules)"
    )
    done = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await done.wait() == 0


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
    for name in ("notes.txt", "arr_notes"):
        (folder / name).write_bytes(b"an operator's")
    later = await make_store(settings)
    await eventually(lambda: orphan not in objects_in(tmp_path))
    assert {info.id, "notes.txt", "arr_notes"} <= objects_in(tmp_path)
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
    assert store.tier.failures == 1
    assert "nothing answers" in store.tier.error


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
