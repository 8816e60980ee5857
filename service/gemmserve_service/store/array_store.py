"""ArrayStore: immutable arrays, their metadata and their extents.

The index is held in memory, SQLite holds it across restarts. An extent goes back to the pool only after the row that
named it has been committed as hidden and the last pin is gone, so that no row ever names bytes of another array.
"""

from __future__ import annotations

import asyncio
import logging
import math
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from gemmserve_service.errors import NotFound
from gemmserve_service.runtime.background import report
from gemmserve_service.runtime.clock import now
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.store import recovery
from gemmserve_service.store.catalog import Catalog, to_row
from gemmserve_service.store.database.database import load_sql
from gemmserve_service.store.digests import Digests
from gemmserve_service.store.expiry import Expiry
from gemmserve_service.store.extents.space import Room, Space
from gemmserve_service.store.pin import Pinned
from gemmserve_service.store.quotas import Quotas
from gemmserve_service.store.record import ArraySpec, Record, ScratchArray
from gemmserve_service.store.upload import Upload

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable

    import numpy as np

    from gemmserve_service.settings import Settings
    from gemmserve_service.store.database.database import Database
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.extents.shared_memory import Memory
    from gemmserve_service.store.pending import PendingResults

_SQL: Final = load_sql("arrays")

log = logging.getLogger(__name__)


class ArrayStore:
    """All arrays of one data directory. Its methods belong to the event loop's thread."""

    def __init__(self, settings: Settings, database: Database, quotas: Quotas | None = None) -> None:
        self.settings = settings
        self.database = database
        self.quotas = quotas or Quotas()
        self.found_pending: dict[str, PendingResults] = {}
        """Pending results that an earlier process left, by job."""
        self._catalog = Catalog()
        self.digests = Digests(self._catalog, database)
        self.expiry = Expiry(self._catalog, database, self.settle, history_s=settings.job_history_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._destroyed: list[Callable[[str], None]] = []
        self._gone: list[Callable[[str], None]] = []
        self._pending_released: list[Callable[[PendingResults], None]] = []
        self._uploaded: list[Callable[[ArrayInfo, Extent | None], None]] = []
        self._space = Space(settings, self.quotas, self._destroyed)
        self._files, self._memory = self._space.files, self._space.memory

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def start(self, keep: Iterable[str] = ()) -> None:
        """Brings back what an earlier process stored. `finish_recovery` follows when jobs have pinned operands.

        `keep`: names of extents that `adopt` will be asked for; others that no array has are deleted.
        """
        folder = self.settings.data_dir / "extents"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.found_pending = await recovery.take(self.database, self._catalog, self._space, keep)

    def finish_recovery(self) -> None:
        """Frees hidden arrays that no job needs any more; from here on arrays expire."""
        for record in self._catalog:
            self.settle(record)
        self._spawn(self.expiry.run())

    async def stop(self) -> None:
        """Stops the sweeper and the hash threads; arrays stay where they are."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.digests.stop()
        self._space.trim()

    def on_array_gone(self, callback: Callable[[str], None]) -> None:
        """`callback(id)` runs when nobody can see or uses an array any more."""
        self._gone.append(callback)

    def on_pending_released(self, callback: Callable[[PendingResults], None]) -> None:
        """`callback(results)` runs when one of some pending results is hidden, and pinned by fewer than before."""
        self._pending_released.append(callback)

    def on_uploaded(self, callback: Callable[[ArrayInfo, Extent | None], None]) -> None:
        """`callback(info, extent)` runs when an array was uploaded."""
        self._uploaded.append(callback)

    def on_extent_destroyed(self, callback: Callable[[str], None]) -> None:
        """`callback(name)` runs whenever an extent is given back to the system."""
        self._destroyed.append(callback)

    # -- the facade -------------------------------------------------------------------------------------------------

    async def reserve(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], order: str, *, ttl_s: float | None, **options: Any
    ) -> Upload:
        """`allocate`, awaited."""
        return self.allocate(dtype, shape, order, ttl_s=ttl_s, **options)

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
    ) -> Upload:
        """Reserve space for an array; costs no memory, however large. Raises TooLarge, StoreFull, QuotaExceeded.

        `ttl_s`: None takes the server's default. `byteswap`: the bytes come big-endian. `owner`: whose array it will be
        (the id of an API key). `granted`: a recovered job's result, whose limits were asked. `memory`: a client's,
        sealed, that holds the scratch array already.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if not granted:
            self.check_size(nbytes, scratch=scratch, owner=owner)
        if memory is None:
            extent = self._space.take(nbytes, scratch=scratch) if nbytes else None
        else:
            assert self._memory is not None  # systems without have no client's memory either
            extent = self._memory.lend(memory, nbytes)
        self.quotas.charge_bytes(owner, nbytes, scratch=scratch)
        if ttl_s is None:
            ttl_s = self.settings.default_ttl_s
        elif ttl_s == math.inf:
            ttl_s = None
        name = dtype.newbyteorder("=").name
        spec = ArraySpec(new_id("arr"), name, tuple(shape), order, nbytes, ttl_s, scratch, owner)
        return Upload(self, spec, extent, byteswap=byteswap)

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

    async def info(self, array_id: str, *, owner: str = "") -> ArrayInfo:
        """Metadata. Raises NotFound (also when deleted, or not of `owner`; "" sees everybody's), Gone (expired)."""
        info = self._catalog.live(array_id, owner).info
        assert isinstance(info, ArrayInfo)  # scratch arrays are not in the index
        return info

    async def list(self, *, limit: int, cursor: str | None, owner: str = "") -> tuple[list[ArrayInfo], str | None]:
        """A page, newest first, and the cursor of the next one; of one owner, or of all ("")."""
        return self._catalog.page(limit, cursor, owner)

    async def delete(self, array_id: str, *, owner: str = "") -> None:
        """Hides the array at once; its bytes go with the last pin. Raises NotFound, Gone."""
        record = self._catalog.live(array_id, owner)
        self._catalog.hide(record, "deleted")

        def deleted(done: asyncio.Future[Any]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._catalog.show(record)
            else:
                record.hidden = True
                self.settle(record)

        # By callback, so that a client that hangs up meanwhile leaves memory and database in step.
        write = self.database.write_soon(lambda db: db.execute(_SQL["set_state"], {"id": array_id, "state": "deleted"}))
        write.add_done_callback(deleted)
        await asyncio.shield(write)

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

    async def publish(self, upload: Upload) -> ArrayInfo | ScratchArray:
        """Makes a full upload an array: `Upload.commit`'s last step."""
        spec = upload.spec
        if spec.scratch:
            return ScratchArray(spec.id, spec.dtype, spec.shape, spec.order, spec.nbytes, now(), owner=spec.owner)
        await self.secure(upload)
        info = self.describe(upload)
        row = to_row(info, upload.extent)

        def write(db: sqlite3.Connection) -> None:
            self.insert_row(db, row)
            upload.on_insert(db)

        insert = self.database.write_soon(write)
        try:
            await asyncio.shield(insert)
        except asyncio.CancelledError:
            # The row may be committed all the same. Nobody learned the id, so it goes again, and the extent after it.
            upload.seal()
            remove = self.database.write_soon(partial(recovery.remove, info.id))
            remove.add_done_callback(report)
            remove.add_done_callback(lambda done: self.release(upload, reusable=_succeeded(done) and not upload.named))
            raise
        self.index(info, upload.extent)
        for callback in self._uploaded:
            callback(info, upload.extent)
        return info

    async def secure(self, upload: Upload) -> None:
        """Put the bytes on the disk before the row that names them, where settings ask for that."""
        if self.settings.durability == "power" and upload.extent is not None:
            await asyncio.to_thread(upload.extent.flush)

    async def secure_all(self, records: Iterable[Record]) -> None:
        """`secure`, for arrays whose bytes came after their row."""
        if self.settings.durability == "power":
            for record in records:
                if record.extent is not None and not record.freed:  # what is deleted meanwhile has no bytes to secure
                    await asyncio.to_thread(record.extent.flush)

    def set_written(self, records: Iterable[Record], written: int) -> asyncio.Future[Any]:
        """Puts on record that arrays' bytes are in the store (1), or lost for good (-1)."""
        rows = [{"id": record.info.id, "written": written} for record in records]
        return self.database.write_soon(lambda db: db.executemany(_SQL["set_written"], rows))

    def describe(self, upload: Upload) -> ArrayInfo:
        """The info of an upload that becomes an array now."""
        spec = upload.spec
        created = now()
        info = ArrayInfo.model_construct(
            id=spec.id,
            dtype=cast("Any", spec.dtype),
            shape=spec.shape,
            order=cast("Any", spec.order),
            nbytes=spec.nbytes,
            sha256=None,
            created_at=created,
            expires_at=None if spec.ttl_s is None else created + timedelta(seconds=spec.ttl_s),
            owner=spec.owner,
        )
        self.expiry.track(info)
        return info

    @staticmethod
    def insert_row(db: sqlite3.Connection, row: dict[str, Any]) -> None:
        """Insert `catalog.to_row`'s row, inside a transaction of the caller's."""
        db.execute(_SQL["insert"], row)

    def index(self, info: ArrayInfo, extent: Extent | None) -> Record:
        """Shows an array whose row is committed."""
        record = Record(self.expiry.commit(info), extent)
        self._catalog.add(record)
        if info.expires_at is not None:
            self.expiry.wake()
        return record

    def release(self, upload: Upload, *, reusable: bool = True) -> None:
        """Gives the space of an upload back that was never published (or was scratch)."""
        self._space.free(upload.extent, upload.spec, reusable=reusable)

    def settle(self, record: Record) -> None:
        """Frees a hidden array once nobody holds it, nor will write to it."""
        if record.hidden:
            self.digests.drop(record.info.id)
        if record.hidden and record.pending is not None:
            for released in self._pending_released:
                released(record.pending)  # which settles it when no worker writes to it any more
            return
        if not record.hidden or record.pins or record.freed:
            return
        info = record.info
        if not self.database.is_open and not isinstance(info, ScratchArray):
            return  # the next start frees it
        record.freed = True
        if isinstance(info, ScratchArray):
            self._space.free(record.extent, info)
            return
        statement = _SQL["remove" if record.state == "deleted" else "forget_extent"]
        self.database.write_soon(lambda db: db.execute(statement, {"id": info.id})).add_done_callback(report)
        self._catalog.remove(record)
        self._space.free(record.extent, info, reusable=not record.tainted)
        for callback in self._gone:
            callback(info.id)

    def touch(self, extent: Extent) -> None:
        """Marks a file extent's mapping as used."""
        if extent.fd is None:
            self._files.touch(extent)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(report)


def _succeeded(done: asyncio.Future[Any]) -> bool:
    return not done.cancelled() and done.exception() is None
