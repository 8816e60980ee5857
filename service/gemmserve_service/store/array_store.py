"""ArrayStore: immutable arrays, their metadata and their extents.

The index is held in memory, SQLite holds it across restarts. An extent goes back to the pool only after the row that
named it has been committed as hidden and the last pin is gone, so that no row ever names bytes of another array.
"""

from __future__ import annotations

import asyncio
import logging
import math
from datetime import timedelta
from functools import lru_cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.errors import Gone, NotFound, TierUnavailable
from gemmserve_service.runtime.background import Background, report
from gemmserve_service.runtime.clock import now
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.store import recovery
from gemmserve_service.store.catalog import Catalog, to_row
from gemmserve_service.store.database.database import insert_rows, load_sql
from gemmserve_service.store.digests import Digests
from gemmserve_service.store.expiry import Expiry
from gemmserve_service.store.extents.space import Room, Space
from gemmserve_service.store.pending import UNNAMED
from gemmserve_service.store.pin import Pinned
from gemmserve_service.store.quotas import Quotas
from gemmserve_service.store.record import NO_TAGS, ArraySpec, Record
from gemmserve_service.store.tier.cold import Cold
from gemmserve_service.store.upload import Upload

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Collection, Iterable, Sequence
    from datetime import datetime

    import numpy as np

    from gemmserve_service.settings import Settings
    from gemmserve_service.store.database.database import Database
    from gemmserve_service.store.extents.arena import Arena
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.extents.shared_memory import Memory
    from gemmserve_service.store.pending import PendingResults
    from gemmserve_service.store.record import Reservation, Tags
    from gemmserve_service.store.tier.tier import Tier

_SQL: Final = load_sql("arrays")
_TIER: Final = load_sql("tier")

log = logging.getLogger(__name__)


class ArrayStore:
    """All arrays of one data directory. Its methods belong to the event loop's thread."""

    def __init__(
        self, settings: Settings, database: Database, quotas: Quotas | None = None, arena: Arena | None = None
    ) -> None:
        """`arena`: host memory that results come to before they go to files, where there is any."""
        self.settings = settings
        self.database = database
        self.quotas = quotas or Quotas()
        self.found_pending: dict[str, PendingResults] = {}
        """Pending results that an earlier process left, by job."""
        self._catalog = Catalog()
        self.digests = Digests(self._catalog, database)
        self.expiry = Expiry(self._catalog, database, self.settle, history_s=settings.job_history_s)
        self._background = Background()
        self._destroyed: list[Callable[[str], None]] = []
        self._gone: list[Callable[[str], None]] = []
        self._pending_released: list[Callable[[PendingResults], None]] = []
        self.arena = arena
        self._space = Space(settings, self.quotas, self._destroyed, arena)
        self.tier: Tier | None = None
        """Tier that cold arrays go to, where settings name one; there from `start` on."""
        self.began = new_id("arr")
        """Id before those of all arrays that this process makes."""
        self._files, self._memory = self._space.files, self._space.memory

    # -- life cycle -------------------------------------------------------------------------------------------------

    def open_tier(self) -> None:
        """Open the tier that settings name, if they do: nothing is asked of it yet. Raises TierUnusableError."""
        if self.settings.tier is not None and self.tier is None:
            from gemmserve_service.store.tier.objects import Objects
            from gemmserve_service.store.tier.tier import Tier

            self.tier = Tier(self, Objects(self.settings.tier))

    async def start(self, keep: Iterable[str] = ()) -> None:
        """Brings back what an earlier process stored. `finish_recovery` follows when jobs have pinned operands.

        `keep`: names of extents that `adopt` will be asked for; others that no array has are deleted.
        """
        folder = self.settings.data_dir / "extents"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.found_pending = await recovery.take(self.database, self._catalog, self._space, keep)
        self.open_tier()
        if self.tier is not None:
            for record in self._catalog:
                self.tier.add(record, found=True)
            await self.tier.start()
        else:
            for record in self._catalog:
                if record.cold is not None:
                    record.cold.error = _without_tier()

    def finish_recovery(self) -> None:
        """Frees hidden arrays that no job needs any more; from here on arrays expire."""
        for record in self._catalog:
            self.settle(record)
        self._background.spawn(self.expiry.run())

    async def stop(self) -> None:
        """Stops the sweeper, the tier and the hash threads; arrays stay where they are."""
        if self.tier is not None:
            await self.tier.stop()
        await self._background.stop()
        await self.digests.stop()
        self.trim()

    def trim(self) -> None:
        """Gives files and memory that are kept for new arrays back to the system."""
        self._space.trim()

    def on_array_gone(self, callback: Callable[[str], None]) -> None:
        """`callback(id)` runs when nobody can see or uses an array any more."""
        self._gone.append(callback)

    def on_pending_released(self, callback: Callable[[PendingResults], None]) -> None:
        """`callback(results)` runs when one of some pending results is hidden, and pinned by fewer than before."""
        self._pending_released.append(callback)

    def on_extent_destroyed(self, callback: Callable[[str], None]) -> None:
        """`callback(name)` runs whenever an extent is given back to the system."""
        self._destroyed.append(callback)

    # -- the facade -------------------------------------------------------------------------------------------------

    def allocate(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        order: str,
        *,
        ttl_s: float | None,
        byteswap: bool = False,
        scratch: bool = False,
        owner: str = "",
        granted: bool = False,
        memory: Memory | None = None,
        deferred: bool = False,
        tags: Tags = NO_TAGS,
    ) -> Upload:
        """Reserve space for an array; costs no memory, however large. Raises TooLarge, StoreFull, QuotaExceeded.

        `ttl_s`: None takes the server's default. `byteswap`: the bytes come big-endian. `owner`: whose array it will be
        (the id of an API key). `granted`: a recovered job's result, whose limits were asked. `memory`: a client's,
        sealed, that holds the scratch array already. `deferred`: a result that may be written long after its making:
        it has a place on the disk from `Upload.take_place` on, or when it is written. `tags`: its name and labels.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if not granted:
            self.check_size(nbytes, scratch=scratch, owner=owner)
        extent = None
        if deferred and nbytes:
            if not granted:
                self._space.check_disk(nbytes)
            self._space.promise(nbytes)
        elif memory is None:
            extent = self._space.take(nbytes, scratch=scratch) if nbytes else None
        else:
            assert self._memory is not None  # systems without have no client's memory either
            extent = self._memory.lend(memory, nbytes)
        self.quotas.charge_bytes(owner, nbytes, scratch=scratch)
        array_id = new_id("arr", self.settings.cell)
        spec = ArraySpec(
            array_id, _name_of(dtype), tuple(shape), order, nbytes, self._life(ttl_s), scratch, owner, tags=tags
        )
        return Upload(self, spec, extent, byteswap=byteswap)

    def allocate_all(
        self, wanted: Sequence[Reservation], *, owner: str, ttl_s: float | None, deferred: bool
    ) -> list[Upload]:
        """`allocate` for several stored arrays, whose limits are asked once for all. Raises what it raises; then none
        is reserved, and some of them may have room.
        """
        nbytes = capacity = largest = 0
        for each in wanted:
            nbytes += each.nbytes
            capacity += each.capacity
            largest = max(largest, each.nbytes)
        self._space.check_all(nbytes, capacity, largest=largest, owner=owner, deferred=deferred)
        extents: list[Extent | None] = [None] * len(wanted)
        if not deferred:
            try:
                for place, each in enumerate(wanted):
                    extents[place] = self._space.take_file(each.nbytes) if each.nbytes else None
            except BaseException:
                for extent, each in zip(extents, wanted, strict=True):
                    if extent is not None:
                        self._space.give_up(extent, each.nbytes)
                raise
        else:
            self._space.promise_all(nbytes, capacity)
        self.quotas.charge_bytes(owner, nbytes, scratch=False)
        cell, life_s = self.settings.cell, self._life(ttl_s)
        return [
            Upload(self, each.spec(new_id("arr", cell), life_s, owner), extent, byteswap=False)
            for each, extent in zip(wanted, extents, strict=True)
        ]

    def _life(self, ttl_s: float | None) -> float | None:
        """Seconds of an array's life, None for ever; `ttl_s` as `allocate` is given it."""
        if ttl_s is None:
            return self.settings.default_ttl_s
        return None if ttl_s == math.inf else ttl_s

    def adopt(self, spec: ArraySpec, extent_name: str | None, *, byteswap: bool) -> Upload | None:
        """The upload that an earlier process had reserved. None: its bytes are missing, or an array's."""
        extent = None
        if spec.nbytes:
            taken = {record.extent.name for record in self._catalog if record.extent is not None}
            if extent_name is None or extent_name in taken:
                return None
            extent = self._space.adopt(extent_name, spec.nbytes, spec.owner)
            if extent is None:
                return None
        return Upload(self, spec, extent, byteswap=byteswap)

    def place(self, nbytes: int) -> Extent:
        """Return a file for an array of `nbytes` > 0 that was `deferred`. Raises StoreFull, OSError."""
        return self._space.place(nbytes)

    def displace(self, extent: Extent, nbytes: int, *, reusable: bool = True) -> None:
        """Take such a file back: the array has none again. Not `reusable`: somebody may still write to it."""
        self._space.displace(extent, nbytes, reusable=reusable)

    def replace_failed(self, array: Record | Upload) -> None:
        """Have an array that was `deferred`, or is to be written late after all, take another file in the place of one
        that the disk did not take, which nobody reads.
        """
        extent = array.extent
        if extent is not None and extent.failed:
            array.extent = None
            self.displace(extent, (array.spec if isinstance(array, Upload) else array.info).nbytes, reusable=False)

    def move(self, record: Record, place: Extent) -> None:
        """Have an array's bytes, which are in `place` too now, read there instead of in the host arena."""
        former, record.extent = record.extent, place
        assert self.arena is not None
        assert former is not None
        self.arena.free(former)

    def room(self, nbytes: int, *, largest: int, owner: str) -> Room:
        """Memory for `nbytes` > 0 of one request, arrays of at most `largest` among them; costs little to take and to
        give back. Raises TooLarge, StoreFull, QuotaExceeded.
        """
        if largest > self.settings.max_array_bytes:
            self.check_size(largest, scratch=True, owner=owner)
        self.quotas.check_bytes(owner, nbytes, scratch=True)
        extent = self._space.take(nbytes, scratch=True)
        self.quotas.charge_bytes(owner, nbytes, scratch=True)
        return Room(self._space, extent, nbytes, owner)

    def check_size(self, nbytes: int, *, scratch: bool = False, owner: str = "") -> None:
        """Raises TooLarge, StoreFull or QuotaExceeded if `nbytes` more could not be reserved now."""
        self._space.check(nbytes, scratch=scratch, owner=owner)

    async def make_room(self, nbytes: int, owner: str, *, deferred: bool = False) -> None:
        """Return when there is room for an array of `nbytes` more, if arrays that leave for the tier can make it, in
        the turn of the event loop in which there is; and a file for it, unless it is `deferred`, where it takes long to
        make one. Without a tier, on most disks, at once. Raises StoreFull, TierUnavailable, TooLarge, QuotaExceeded.
        """
        if nbytes and not deferred and not self._space.files.brief(nbytes):
            self._space.check_limits(nbytes, owner=owner)
            if self.tier is None:
                self._space.check(nbytes, owner=owner)
            await self._space.files.stock(nbytes)
        if self.tier is not None:
            self._space.check_limits(nbytes, owner=owner)
            await self.tier.make_room(nbytes)

    def brief(self, nbytes: int) -> bool:
        """Whether `place` of `nbytes` > 0 takes no longer than the event loop may be held up."""
        return self._space.files.brief(nbytes)

    async def stock(self, nbytes: int) -> None:
        """Return when there is a file for `place` of `nbytes`, where it takes long to make one."""
        if nbytes and not self._space.files.brief(nbytes):
            await self._space.files.stock(nbytes)

    async def bring_back(self, pins: Sequence[Pinned], timeout_s: float | None) -> None:
        """Return when the bytes of those of these arrays that are in the tier alone are in files; what the pins hold
        stays there from then on until they are used or released. Raises TierUnavailable, ArrayCorrupt, JobTimeout,
        Draining.
        """
        if not any(pinned.cold is not None for pinned in pins):
            return
        if self.tier is None:
            raise _without_tier()
        await self.tier.bring_back(pins, timeout_s)

    async def info(self, array_id: str, *, owner: str = "") -> ArrayInfo:
        """Metadata. Raises NotFound (also when deleted, or not of `owner`; "" sees everybody's), Gone (expired)."""
        info = self._catalog.live(array_id, owner).info
        assert isinstance(info, ArrayInfo)  # scratch arrays are not in the index
        return info

    async def list(
        self, *, limit: int, cursor: str | None, owner: str = "", tags: Tags = NO_TAGS
    ) -> tuple[list[ArrayInfo], str | None]:
        """A page, newest first, and the cursor of the next one; of one owner, or of all (""), and with these tags."""
        return self._catalog.page(limit, cursor, owner, tags)

    async def delete(self, array_id: str, *, owner: str = "") -> None:
        """Hides the array at once; its bytes go with the last pin. Raises NotFound, Gone."""
        await self._delete([self._catalog.live(array_id, owner)])

    def find(self, array_ids: Iterable[str], *, owner: str = "") -> tuple[Sequence[ArrayInfo], Sequence[str]]:
        """(Infos of those that can be seen, ids of which there is no array that can)."""
        records, missing = self._find(array_ids, owner)
        return [record.info for record in records if isinstance(record.info, ArrayInfo)], missing

    def _find(self, array_ids: Iterable[str], owner: str) -> tuple[Sequence[Record], Sequence[str]]:
        found = []
        missing = []
        for array_id in dict.fromkeys(array_ids):
            try:
                found.append(self._catalog.live(array_id, owner))
            except (NotFound, Gone):
                missing.append(array_id)
        return found, missing

    async def delete_all(
        self, array_ids: Iterable[str], *, owner: str = ""
    ) -> tuple[Sequence[ArrayInfo], Sequence[str]]:
        """Delete arrays by one transaction: (those that were there, ids of which there is no array that can be seen).

        Raises StoreFull; then none is deleted.
        """
        records, missing = self._find(array_ids, owner)
        if records:
            await self._delete(records)
        return [record.info for record in records if isinstance(record.info, ArrayInfo)], missing

    async def _delete(self, records: Sequence[Record]) -> None:
        held: list[Record] = []
        unused: list[Record] = []
        together = {record.info.id for record in records}
        for record in records:
            self._catalog.hide(record, "deleted")
        for record in records:
            # Whoever may look at a hidden array has a pin of it by now: without one its row can go at once.
            needed = record.pins or self._is_tiered(record) or not self._goes_whole(record, together)
            (held if needed else unused).append(record)

        def write_deleted(db: sqlite3.Connection) -> None:
            if held:
                db.executemany(_SQL["set_state"], [{"id": record.info.id, "state": "deleted"} for record in held])
            if unused:
                db.executemany(_SQL["remove"], [{"id": record.info.id} for record in unused])

        def deleted(done: asyncio.Future[Any]) -> None:
            failed = done.cancelled() or done.exception() is not None
            for record in unused:
                record.recorded = failed
            for record in records:
                if failed:
                    self._catalog.show(record)
                else:
                    record.hidden = True
                    self.settle(record)

        # By callback, so that a client that hangs up meanwhile leaves memory and database in step.
        write = self.database.write_soon(write_deleted, rows=len(records))
        write.add_done_callback(deleted)
        await asyncio.shield(write)

    async def select(
        self, *, owner: str = "", tags: Tags = NO_TAGS, created_before: datetime | None = None, limit: int | None = None
    ) -> Sequence[ArrayInfo]:
        """Return arrays that can be seen, oldest first: those with these tags, made before then; `limit` at most.

        Others have their turns meanwhile.
        """
        found = []
        async for ids in Turns().slices(self._catalog.ids(owner, tags)):
            for array_id in ids:
                info = self._catalog.matching(array_id, tags)
                if info is not None and (created_before is None or info.created_at < created_before):
                    found.append(info)
            if limit is not None and len(found) >= limit:
                return found[:limit]
        return found

    def pin(self, array: str | ArrayInfo, *, hidden: bool = False, owner: str = "") -> Pinned:
        """Holds an array's bytes, wherever they are (`Pinned.pending`). Raises NotFound, Gone, ArrayLost.

        `hidden`: also one that was deleted (a recovered job's).
        """
        array_id = array if isinstance(array, str) else array.id
        record = self._catalog.get(array_id) if hidden else self._catalog.live(array_id, owner)
        if record is None:
            raise NotFound(f"no array {array_id}")
        if record.pending is not None and record.pending.error is not None:
            raise record.pending.error
        return Pinned(self, record)

    def pin_upload(self, upload: Upload) -> Pinned:
        """Takes a committed scratch upload over: its bytes go when this pin (and others) are released."""
        upload.seal()
        return Pinned(self, Record(upload.info, upload.extent, state="deleted", hidden=True))

    def owners(self) -> set[str]:
        """Return the owners of arrays that can be seen."""
        return self._catalog.owners()

    def count_of(self, owner: str) -> int:
        """One owner's arrays that can be seen."""
        return self._catalog.count(owner)

    @property
    def count(self) -> int:
        """Arrays that can be seen."""
        return len(self._catalog)

    @property
    def used_bytes(self) -> int:
        """Bytes of stored arrays, of reservations for them, and of scratch arrays that went to files."""
        return self._space.used_bytes

    @property
    def scratch_bytes(self) -> int:
        """Memory in use for scratch arrays."""
        return self._space.scratch_bytes

    @property
    def recycled_bytes(self) -> int:
        """Freed extents kept for reuse."""
        return self._space.recycled_bytes

    # -- for uploads, jobs and pins ---------------------------------------------------------------------------------

    async def publish(self, upload: Upload) -> ArrayInfo | ArraySpec:
        """Makes a full upload an array: `Upload.commit`'s last step."""
        spec = upload.spec
        if spec.scratch:
            return spec
        await self.secure(upload)
        info = self.describe(upload)
        row = to_row(info, upload.extent, tier=upload.tier)

        def write(db: sqlite3.Connection) -> None:
            self.insert_rows(db, [row])
            upload.on_insert(db)

        insert = self.database.write_soon(write, rows=2)
        try:
            await asyncio.shield(insert)
        except asyncio.CancelledError:
            # The row may be committed all the same. Nobody learned the id, so it goes again, and the extent after it.
            upload.seal()
            remove = self.database.write_soon(partial(recovery.remove, info.id))
            remove.add_done_callback(report)
            remove.add_done_callback(lambda done: self.release(upload, reusable=_succeeded(done) and not upload.named))
            raise
        self.index(info, upload)
        return info

    @property
    def secures(self) -> bool:
        """Whether settings ask for bytes on the disk before the row that names them: `secure` takes its time."""
        return self.settings.durability != "process"

    async def secure(self, upload: Upload) -> None:
        """Put the bytes on the disk before the row that names them, where settings ask for that. Raises OSError; after
        that they have to be written anew where the extent has `failed`.
        """
        if self.secures and upload.extent is not None:
            await asyncio.to_thread(upload.extent.flush)
        await self.replicate((upload,))

    async def replicate(self, arrays: Iterable[Record | Upload], views: Iterable[memoryview] = ()) -> None:
        """Have the tier take arrays, where settings ask for that. `views`: their bytes, where they are in no file of
        theirs. Raises TierUnavailable, StoreFull.
        """
        if self.settings.durability == "replicated" and self.tier is not None:
            for array, view in zip_longest(arrays, views):
                if not (isinstance(array, Record) and array.freed):
                    await self.tier.replicate(array, view)

    async def secure_all(self, records: Iterable[Record]) -> None:
        """`secure`, for arrays whose bytes came after their row. Raises OSError likewise."""
        if self.secures:
            for record in records:
                if record.extent is not None and not record.freed:  # what is deleted meanwhile has no bytes to secure
                    await asyncio.to_thread(record.extent.flush)
                    await self.replicate((record,))

    def set_written(self, records: Iterable[Record], written: int) -> asyncio.Future[Any]:
        """Puts on record that arrays' bytes are in the store (1), or lost for good (-1)."""
        rows = [
            {
                "id": record.info.id,
                "written": written,
                "extent": None if record.extent is None or written < 1 else record.extent.name,
                "tier": record.tier,
            }
            for record in records
        ]
        return self.database.write_soon(lambda db: db.executemany(_SQL["set_written"], rows), rows=len(rows))

    def describe(self, upload: Upload, created: datetime | None = None) -> ArrayInfo:
        """The info of an upload that becomes an array now, or at the moment `created`; `index` follows."""
        spec = upload.spec
        dtype: Any = spec.dtype
        order: Any = spec.order
        upload.jumped_s = self.expiry.jumped_s
        if created is None:
            created = now()
        return ArrayInfo(
            id=spec.id,
            dtype=dtype,
            shape=spec.shape,
            order=order,
            nbytes=spec.nbytes,
            sha256=None,
            created_at=created,
            expires_at=None if spec.ttl_s is None else created + timedelta(seconds=spec.ttl_s),
            name=spec.tags.name,
            labels=spec.tags.labels,
            owner=spec.owner,
        )

    @staticmethod
    def insert_rows(db: sqlite3.Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows that `catalog.to_row` made, inside a transaction of the caller's."""
        insert_rows(db, _SQL["insert"], rows)

    def index(self, info: ArrayInfo, upload: Upload) -> Record:
        """Shows an array whose row is committed."""
        record = Record(self.expiry.commit(info, upload.jumped_s), upload.extent)
        record.tier = upload.tier
        self._catalog.add(record)
        if self.tier is not None:
            self.tier.add(record)
        if info.expires_at is not None:
            self.expiry.wake(info.expires_at.timestamp())
        return record

    def release(self, upload: Upload, *, reusable: bool = True) -> None:
        """Gives the space of an upload back that was never published (or was scratch)."""
        if self.tier is not None and not upload.spec.scratch:
            self.tier.forget_upload(upload)
        self._space.free(upload.extent, upload.spec, reusable=reusable)

    def settle(self, record: Record) -> None:
        """Frees a hidden array once nobody holds it, nor will write to it."""
        if record.hidden:
            self.digests.drop(record.info.id)
        if record.hidden and record.pending is not None:
            for released in self._pending_released:
                released(record.pending)  # which settles it when no worker writes to it any more
            return
        if self.tier is not None:
            self.tier.used(record)
        if not record.hidden or record.pins or record.freed:
            return
        info = record.info
        if not self.database.is_open and not isinstance(info, ArraySpec):
            return  # the next start frees it
        record.freed = True
        if isinstance(info, ArraySpec):
            self._space.free(record.extent, info)
            return
        if record.recorded:
            self._forget_row(record)
        self._catalog.remove(record)
        if record.cold is not None:
            self._space.free_elsewhere(info.nbytes, info.owner)
        elif not record.lost:
            self._space.free(record.extent, info, reusable=not record.tainted)
        for callback in self._gone:
            callback(info.id)

    @staticmethod
    def _goes_whole(record: Record, together: Collection[str]) -> bool:
        """Whether no result of the same job is left that would be computed again by the rows of all of them, when
        arrays `together` go; nor a file of theirs that a row may name yet.
        """
        pending = record.pending
        return pending is None or (
            pending.state in UNNAMED
            and all(not each.pins and (each.hidden or each.info.id in together) for each in pending.records)
        )

    def _is_tiered(self, record: Record) -> bool:
        return self.tier is not None or record.tier is not None

    def _forget_row(self, record: Record) -> None:
        statement = _SQL["remove" if record.state == "deleted" else "forget_extent"]
        array_id = record.info.id
        in_tier = record.tier is not None if self.tier is None else self.tier.removed(record)

        def forget(db: sqlite3.Connection) -> None:
            db.execute(statement, {"id": array_id})
            if in_tier:
                db.execute(_TIER["add_garbage"], {"id": array_id})

        self.database.write_soon(forget, rows=2 if in_tier else 1).add_done_callback(report)

    def give_space_back(self, record: Record) -> None:
        """Free the space of an array that is lost for good, and which nobody writes to; its row stays. Idempotent."""
        if not record.lost:
            extent, record.extent, record.lost = record.extent, None, True
            self._space.free(extent, record.info, reusable=not record.tainted)

    # -- for the tier ------------------------------------------------------------------------------------------------

    def knows(self, array_id: str) -> bool:
        """Whether there is a record of an array, hidden or not."""
        return self._catalog.get(array_id) is not None

    def records(self) -> Iterable[Record]:
        """Records of all arrays, hidden or not."""
        return self._catalog

    def is_file(self, extent: Extent) -> bool:
        """Whether an extent is one of the store's files."""
        return extent.fd is None and not (self.arena is not None and self.arena.owns(extent))

    def take_extent(self, nbytes: int) -> Extent:
        """Return a file for an array that comes back. Raises StoreFull, OSError."""
        return self._space.take_file(nbytes)

    def give_extent_back(self, record: Record, extent: Extent) -> None:
        """Take the file of an array back whose bytes are in the tier."""
        self._space.give_up(extent, record.info.nbytes, reusable=not record.tainted)

    async def adopt_cold(self, info: ArrayInfo, digests: bytes) -> None:
        """Take an array in that the tier alone knows."""
        row = to_row(info, None, tier=digests)
        await self.database.write(lambda db: self.insert_rows(db, [row]))
        record = Record(info, None, tier=digests, cold=Cold() if info.nbytes else None)
        self._space.adopt_elsewhere(info.nbytes, info.owner)
        self._catalog.add(record)
        assert self.tier is not None
        self.tier.add(record, found=True)

    def touch(self, extent: Extent) -> None:
        """Marks a file extent's mapping as used."""
        if self.is_file(extent):
            self._files.touch(extent)


@lru_cache(64)
def _name_of(dtype: np.dtype[Any]) -> str:
    """The dtype's name, whatever its byte order: NumPy works it out every time."""
    return dtype.newbyteorder("=").name


def _without_tier() -> TierUnavailable:
    return TierUnavailable("the array's bytes are in a tier, and this server was started without GEMMSERVE_TIER")


def _succeeded(done: asyncio.Future[Any]) -> bool:
    return not done.cancelled() and done.exception() is None
