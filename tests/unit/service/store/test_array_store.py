"""ArrayStore: what can be seen, what is held, and what comes back after a restart."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest

from gemmserve_service.errors import Gone, NotFound, StoreFull, TooLarge
from gemmserve_service.store.array_store import ArrayStore
from gemmserve_service.store.database.database import Database
from gemmserve_service.store.extents.extents import size_class
from gemmserve_service.store.record import Reservation, Tags

ARRAY = np.arange(10_000, dtype="c8")
MIB = 1 << 20


def extents(settings):
    return sorted(path.name for path in (settings.data_dir / "extents").iterdir())


async def rows(database, columns="id, state, extent"):
    await database.write(lambda _: None)
    found = await database.read(lambda db: db.execute(f"SELECT {columns} FROM arrays").fetchall())
    return [tuple(row) for row in found]


async def test_what_goes_in_comes_out(store, put, fetch):
    info = await put(store, ARRAY)
    fortran = await put(store, np.asfortranarray(np.arange(12.0).reshape(3, 4)))
    np.testing.assert_array_equal(fetch(store, info.id), ARRAY)
    assert fortran.order == "F"
    np.testing.assert_array_equal(fetch(store, fortran.id), np.arange(12.0).reshape(3, 4))
    assert await store.info(info.id) == info
    assert store.used_bytes == info.nbytes + fortran.nbytes


async def test_views_cannot_be_written_to(store, put):
    info = await put(store, ARRAY)
    with store.pin(info) as pinned, pytest.raises(TypeError):
        pinned.view[0] = 1


async def test_deleted_at_once_and_freed_with_the_last_pin(store, put, database):
    info = await put(store, ARRAY)
    first, second = store.pin(info.id), store.pin(info.id)
    third = second.share()
    await store.delete(info.id)
    for call in (store.info(info.id), store.delete(info.id)):
        with pytest.raises(NotFound):
            await call
    with pytest.raises(NotFound):
        store.pin(info.id)
    assert bytes(first.view[:8]) == ARRAY.tobytes()[:8]
    for pin in (first, first, second):  # releasing twice counts once
        pin.release()
        assert store.used_bytes == info.nbytes
    assert [state for _, state, _ in await rows(database)] == ["deleted"]
    third.release()
    assert store.used_bytes == 0
    assert await rows(database) == []
    with pytest.raises(ValueError, match="released"):
        third.share()


async def test_a_delete_that_cannot_be_recorded_did_not_happen(store, put, database, fetch):
    info = await put(store, ARRAY)
    await database.write(lambda db: db.execute("ALTER TABLE arrays RENAME TO away"))
    with pytest.raises(Exception, match="no such table"):
        await store.delete(info.id)
    np.testing.assert_array_equal(fetch(store, info.id), ARRAY)
    assert store.count == 1
    await database.write(lambda db: db.execute("ALTER TABLE away RENAME TO arrays"))


async def test_what_nobody_holds_is_deleted_by_one_write(store, put, database, monkeypatch):
    one, held = await put(store, ARRAY), await put(store, ARRAY)
    pin = store.pin(held)
    writes = []
    write_soon = database.write_soon
    monkeypatch.setattr(database, "write_soon", lambda fn, **options: (writes.append(fn), write_soon(fn, **options))[1])
    await store.delete_all([one.id, held.id])
    assert len(writes) == 1
    assert [(name, state) for name, state, _ in await rows(database)] == [(held.id, "deleted")]
    assert store.used_bytes == held.nbytes
    writes.clear()
    pin.release()
    assert len(writes) == 1
    assert await rows(database) == []
    assert store.used_bytes == 0


async def test_a_client_that_hangs_up_during_a_delete_deletes_all_the_same(store, put, database, eventually):
    info = await put(store, ARRAY)
    task = asyncio.create_task(store.delete(info.id))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: store.used_bytes == 0)
    assert await rows(database) == []
    with pytest.raises(NotFound):
        store.pin(info.id)


async def test_expiry_is_gone_not_unknown(store, put, eventually, database, later):
    info = await put(store, ARRAY, ttl_s=3600)
    kept = await put(store, ARRAY)
    pin = store.pin(info.id)
    later(3600)
    store.expiry.wake()
    await eventually(lambda: store.count == 1)
    with pytest.raises(Gone):
        await store.info(info.id)
    with pytest.raises(Gone):
        await store.delete(info.id)
    await eventually(lambda: store._catalog.get(info.id).hidden)
    assert store.used_bytes == 2 * info.nbytes  # pinned
    pin.release()
    assert store.used_bytes == info.nbytes
    states = {row[0]: row[1:] for row in await rows(database)}
    assert states[info.id] == ("expired", None)
    assert states[kept.id][0] == "live"


async def test_an_expired_array_is_gone_before_the_sweeper_has_seen_it(store, put, monkeypatch):
    info = await put(store, ARRAY, ttl_s=3600)
    monkeypatch.setattr("gemmserve_service.runtime.clock.time", lambda: info.expires_at.timestamp() + 1)
    with pytest.raises(Gone):
        store.pin(info.id)
    assert await store.list(limit=10, cursor=None) == ([], None)


async def test_the_default_life_and_for_ever(make_store, make_settings, put):
    store = await make_store(make_settings(default_ttl_s=1000))
    assert (await put(store, ARRAY)).expires_at is not None
    assert (await put(store, ARRAY, ttl_s=math.inf)).expires_at is None


async def test_listing_pages_newest_first_and_skips_what_is_gone(store, put):
    infos = [await put(store, ARRAY) for _ in range(7)]
    ids = sorted((info.id for info in infos), reverse=True)
    await store.delete(ids[2])
    del ids[2]
    seen, cursor = [], None
    while True:
        page, cursor = await store.list(limit=2, cursor=cursor)
        seen += [info.id for info in page]
        if cursor is None:
            break
        if len(seen) == 2:  # the cursor's own array may go between two pages
            await store.delete(ids[1])
    assert seen == ids


async def test_limits(make_store, make_settings):
    store = await make_store(make_settings(max_array_bytes=1000, max_store_bytes=1500))
    with pytest.raises(TooLarge):
        store.allocate(np.dtype("u1"), (1001,), "C", ttl_s=None)
    with pytest.raises(TooLarge):
        store.allocate(np.dtype("u1"), (1 << 40, 1 << 40), "C", ttl_s=None)
    first = store.allocate(np.dtype("u1"), (1000,), "C", ttl_s=None)
    with pytest.raises(StoreFull):
        store.allocate(np.dtype("u1"), (501,), "C", ttl_s=None)
    first.abort()
    store.allocate(np.dtype("u1"), (1000,), "C", ttl_s=None)


async def test_scratch_that_spills_to_files_is_bounded_as_they_are(make_store, make_settings, put):
    """The result of a request of 459 bytes took 8.7 GB of the disk, whatever the store's bound."""
    store = await make_store(make_settings(max_scratch_bytes=1 << 20, max_store_bytes=3 << 20, recycle_bytes=0))
    held = [await put(store, np.zeros(1 << 20, np.uint8), scratch=True) for _ in range(4)]
    with pytest.raises(StoreFull, match="3145728 of 3145728 are taken"):
        store.allocate(np.dtype("u1"), (1 << 20,), "C", ttl_s=None, scratch=True)
    assert len(held) == 4


async def test_scratch_lives_in_memory_and_spills_to_files(make_store, make_settings, put):
    store = await make_store(make_settings(max_scratch_bytes=1 << 20, recycle_bytes=0))
    first = await put(store, np.zeros(1 << 20, np.uint8), scratch=True)
    second = await put(store, np.ones(1 << 20, np.uint8), scratch=True)
    assert (store.scratch_bytes, store.used_bytes) == (1 << 20, 1 << 20)
    pins = []
    for upload in (first, second):
        await upload.commit()
        pins.append(store.pin_upload(upload))
        upload.abort()  # the store has it now
    assert bytes(pins[1].view[:3]) == b"\1\1\1"
    for pin in pins:
        pin.release()
    assert (store.scratch_bytes, store.used_bytes, store.count) == (0, 0, 0)


async def test_destroyed_extents_are_announced(make_store, make_settings, put):
    store = await make_store(make_settings(recycle_bytes=0))
    gone = []
    store.on_extent_destroyed(gone.append)
    info = await put(store, ARRAY)
    (name,) = extents(store.settings)
    await store.delete(info.id)
    assert gone == [name]
    assert extents(store.settings) == []


# -- restart --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def reopen(settings):
    """A store as the next process finds it; `crash` leaves the last one without a word."""
    opened = []

    async def open_(*, crash=False):
        if opened:
            store, database = opened[-1]
            if crash:
                for task in list(store._background._tasks):
                    task.cancel()
            else:
                await store.stop()
            await database.stop()
        database = Database(settings.data_dir / "gemmserve.sqlite")
        await database.start()
        store = ArrayStore(settings, database)
        await store.start()
        opened.append((store, database))
        return store

    yield open_
    for store, database in opened:
        await store.stop()
        await database.stop()


async def test_a_restart_brings_everything_back(reopen, put, fetch, settings):
    store = await reopen()
    store.finish_recovery()
    kept, gone = await put(store, ARRAY), await put(store, ARRAY)
    timed = await put(store, ARRAY, ttl_s=1000)
    await store.delete(gone.id)
    half = store.allocate(np.dtype("u1"), (5000,), "C", ttl_s=None)  # an upload that never ends
    half.write(b"abc")
    store = await reopen(crash=True)
    store.finish_recovery()
    np.testing.assert_array_equal(fetch(store, kept.id), ARRAY)
    assert (await store.info(timed.id)).expires_at == timed.expires_at
    with pytest.raises(NotFound):
        store.pin(gone.id)
    assert store.used_bytes == kept.nbytes + timed.nbytes
    assert len(extents(settings)) == 2


async def test_names_and_labels_come_back(reopen, put):
    store = await reopen()
    tags = Tags("weights", {"run": "7"})
    named, plain = await put(store, ARRAY, tags=tags), await put(store, ARRAY)
    assert Tags(named.name, named.labels) == tags
    store = await reopen(crash=True)
    assert await store.info(named.id) == named
    assert await store.info(plain.id) == plain
    assert (await store.list(limit=9, cursor=None, tags=tags))[0] == [named]


async def test_many_are_deleted_by_one_transaction_or_none(store, put, database, fetch):
    infos = [await put(store, ARRAY, tags=Tags("a")) for _ in range(3)]
    infos.sort(key=lambda info: info.id)  # which is chance within a millisecond
    ids = [info.id for info in infos]
    await database.write(lambda db: db.execute("ALTER TABLE arrays RENAME TO away"))
    with pytest.raises(Exception, match="no such table"):
        await store.delete_all(ids)
    await database.write(lambda db: db.execute("ALTER TABLE away RENAME TO arrays"))
    assert await store.select(tags=Tags("a")) == infos
    np.testing.assert_array_equal(fetch(store, ids[0]), ARRAY)
    pin = store.pin(ids[0])
    assert await store.delete_all([*ids, "arr_x"]) == (infos, ["arr_x"])
    assert store.used_bytes == infos[0].nbytes
    assert await store.select(tags=Tags("a")) == []
    pin.release()
    assert await rows(database) == []


async def test_hidden_arrays_survive_until_jobs_have_pinned_them(reopen, put, later, eventually):
    store = await reopen()
    store.finish_recovery()
    deleted = await put(store, ARRAY)
    expiring = await put(store, ARRAY, ttl_s=3600)
    nothing = await put(store, np.zeros((0, 3), "c8"))
    pins = [store.pin(array) for array in (deleted, expiring, nothing)]
    await store.delete(deleted.id)
    await store.delete(nothing.id)
    later(3600)
    store.expiry.wake()
    await eventually(lambda: store._catalog.get(expiring.id).hidden)
    del pins  # the process dies with its pins held
    store = await reopen(crash=True)
    await asyncio.sleep(0.05)  # whatever runs by itself may run now
    pins = [store.pin(array.id, hidden=True) for array in (deleted, expiring, nothing)]
    store.finish_recovery()
    await eventually(lambda: store.count == 0)
    assert bytes(pins[0].view) == bytes(pins[1].view) == ARRAY.tobytes()
    with pytest.raises(NotFound):
        store.pin(deleted.id)
    with pytest.raises(Gone):
        store.pin(expiring.id)
    for pin in pins:
        pin.release()
    assert store.used_bytes == 0
    store = await reopen()
    store.finish_recovery()
    assert await rows(store.database) == [(expiring.id, "expired", None)]
    with pytest.raises(Gone):
        await store.info(expiring.id)


async def test_rows_whose_bytes_are_missing_are_dropped(reopen, put, settings, caplog):
    store = await reopen()
    store.finish_recovery()
    lost, cut, kept = [await put(store, ARRAY) for _ in range(3)]
    names = {array_id: name for array_id, _, name in await rows(store.database)}
    (settings.data_dir / "extents" / names[lost.id]).unlink()
    os.truncate(settings.data_dir / "extents" / names[cut.id], 100)
    store = await reopen(crash=True)
    assert "2 rows without their bytes" in caplog.text
    assert [info.id for info in (await store.list(limit=10, cursor=None))[0]] == [kept.id]
    assert [row[0] for row in await rows(store.database)] == [kept.id]
    assert extents(settings) == [names[kept.id]]


async def test_expiries_that_could_not_be_recorded_are_tried_again(reopen, put, eventually, monkeypatch, caplog, later):
    monkeypatch.setattr("gemmserve_service.store.expiry._RETRY_S", 0.02)
    store = await reopen()
    store.finish_recovery()
    info = await put(store, ARRAY, ttl_s=3600)
    await store.database.write(lambda db: db.execute("ALTER TABLE arrays RENAME TO away"))
    later(3600)
    store.expiry.wake()
    await eventually(lambda: "could not record expiries" in caplog.text)
    assert store.used_bytes == info.nbytes  # its row still names the extent
    await store.database.write(lambda db: db.execute("ALTER TABLE away RENAME TO arrays"))
    await eventually(lambda: store.used_bytes == 0)


async def test_a_pin_may_outlive_the_store(reopen, put):
    store = await reopen()
    store.finish_recovery()
    info = await put(store, ARRAY)
    pin = store.pin(info)
    await store.delete(info.id)
    await store.stop()
    await store.database.stop()
    pin.release()  # a download that ends after the server did


def fills_up(monkeypatch, database):
    """Takes one more write, then no more."""
    real, count = database.write_soon, itertools.count()

    def write(fn, **options):
        if next(count) == 0:
            return real(fn, **options)
        failing = asyncio.get_running_loop().create_future()
        failing.set_exception(StoreFull("the disk is full"))
        return failing

    monkeypatch.setattr(database, "write_soon", write)


async def test_space_whose_row_could_not_be_removed_serves_nobody_else(reopen, monkeypatch, eventually):
    """The client hangs up while its array is recorded."""
    store = await reopen()
    store.finish_recovery()
    upload = store.allocate(ARRAY.dtype, ARRAY.shape, "C", ttl_s=None, owner="alice")
    upload.write(ARRAY.tobytes())
    fills_up(monkeypatch, store.database)
    commit = asyncio.ensure_future(upload.commit())
    await asyncio.sleep(0)
    commit.cancel()
    await asyncio.wait([commit])
    await eventually(lambda: store.used_bytes == 0)
    monkeypatch.undo()
    assert [row[2] for row in await rows(store.database)] == [upload.extent.name]
    others = store.allocate(ARRAY.dtype, ARRAY.shape, "C", ttl_s=None, owner="bob")
    others.write(b"secret" * 100)
    store = await reopen(crash=True)
    store.finish_recovery()
    assert store.count == 0
    assert await rows(store.database) == []


async def test_a_row_that_could_not_be_removed_does_not_free_its_successor_s_space(
    reopen, put, fetch, monkeypatch, eventually
):
    store = await reopen()
    store.finish_recovery()
    old = await put(store, ARRAY)
    record = store._catalog.get(old.id)
    fills_up(monkeypatch, store.database)
    await store.delete(old.id)  # which is recorded, and the row's removal is not
    monkeypatch.undo()
    new = await put(store, ARRAY * 2)
    assert store._catalog.get(new.id).extent is record.extent
    store = await reopen(crash=True)
    store.finish_recovery()
    upload = store.allocate(ARRAY.dtype, ARRAY.shape, "C", ttl_s=None)
    upload.write(bytes(ARRAY.nbytes))
    np.testing.assert_array_equal(fetch(store, new.id), ARRAY * 2)
    assert store.used_bytes == 2 * ARRAY.nbytes
    assert [row[0] for row in await rows(store.database)] == [new.id]


async def test_what_was_deleted_meanwhile_is_not_secured(make_store, make_settings, put):
    """Its extent's file may be gone, and those of the same job are to be put on record all the same."""
    store = await make_store(make_settings(durability="power"))
    kept, gone = [await put(store, np.ones((1 << 9, 1 << 9), "c8")) for _ in range(2)]
    records = [store._catalog.get(info.id) for info in (gone, kept)]
    await store.delete(gone.id)
    await asyncio.to_thread(Path(records[0].extent.path).unlink, missing_ok=True)
    await store.secure_all(records)


def reservations(*lengths):
    return [Reservation("uint8", (length,), "C", length, size_class(length) if length else 0) for length in lengths]


@pytest.mark.parametrize("deferred", [False, True])
async def test_several_are_reserved_like_one_after_the_other(store, deferred):
    uploads = store.allocate_all(reservations(5000, 0, 70_000, 5000), owner="me", ttl_s=60.0, deferred=deferred)
    one = [
        store.allocate(np.dtype("u1"), (length,), "C", ttl_s=60.0, owner="me", deferred=deferred)
        for length in (5000, 0, 70_000, 5000)
    ]
    for upload, other in zip(uploads, one, strict=True):
        assert upload.spec._replace(id="") == other.spec._replace(id="")
        assert (upload.extent is None) == (other.extent is None)
    assert len({upload.spec.id for upload in uploads}) == 4
    assert store.used_bytes == store.quotas.stored_bytes("me") == 2 * 80_000
    assert store._space.unplaced_bytes == 2 * deferred * sum(each.capacity for each in reservations(5000, 70_000, 5000))
    for upload in [*uploads, *one]:
        upload.abort()
    assert (store.used_bytes, store.quotas.stored_bytes("me"), store._space.unplaced_bytes) == (0, 0, 0)


async def test_of_several_all_are_reserved_or_none(make_store, make_settings, own_files, full_disk):
    store = await make_store(make_settings(max_store_bytes=10_000, max_array_bytes=6000))
    for lengths, error in (((5000, 5001), StoreFull), ((1, 6001), TooLarge)):
        with pytest.raises(error):
            store.allocate_all(reservations(*lengths), owner="me", ttl_s=None, deferred=False)
        assert (store.used_bytes, store.quotas.stored_bytes("me"), store._space.files.live) == (0, 0, 0)
    full_disk(True)
    with pytest.raises(StoreFull):
        store.allocate_all(reservations(5000, 5000), owner="me", ttl_s=None, deferred=False)
    full_disk(False)
    assert (store.used_bytes, store.quotas.stored_bytes("me"), store._space.files.live) == (0, 0, 0)
    for upload in store.allocate_all(reservations(5000, 5000), owner="me", ttl_s=None, deferred=False):
        upload.abort()
    assert store.used_bytes == 0


async def test_room_for_a_large_array_is_made_beside_the_event_loop(make_store, make_settings, monkeypatch):
    """Where that takes long; and none for what would be refused, or is written later."""
    store = await make_store(make_settings(max_array_bytes=4 * MIB))
    made = []

    async def stock(nbytes):
        made.append(nbytes)

    monkeypatch.setattr(store._space.files, "brief", lambda nbytes: nbytes < MIB)
    monkeypatch.setattr(store._space.files, "stock", stock)
    await store.make_room(2 * MIB, "")
    await store.make_room(1000, "")
    await store.make_room(0, "")
    await store.make_room(2 * MIB, "", deferred=True)
    with pytest.raises(TooLarge):
        await store.make_room(8 * MIB, "")
    await store.stock(3 * MIB)
    await store.stock(0)
    assert made == [2 * MIB, 3 * MIB]
