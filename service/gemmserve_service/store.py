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

from gemmserve_service.catalog import Catalog, Record, from_row, to_row
from gemmserve_service.database import load_sql
from gemmserve_service.errors import NotFound, StoreFull, TooLarge
from gemmserve_service.expiry import Expiry
from gemmserve_service.extents import Extent, ExtentPool, memory_extents_supported
from gemmserve_service.hashing import RunningHash, hash_pool
from gemmserve_service.ids import new_id
from gemmserve_service.pins import Pinned
from gemmserve_service.quotas import Quotas
from gemmserve_service.runtime import host_memory
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.uploads import ArraySpec, ScratchArray, Upload, now

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable

    import numpy as np

    from gemmserve_service.database import Database
    from gemmserve_service.settings import Settings
    from gemmserve_service.shared_memory import Memory

_SQL: Final = load_sql("arrays")

log = logging.getLogger(__name__)


class ArrayStore:
    """All arrays of one data directory. Its methods belong to the event loop's thread."""

    def __init__(self, settings: Settings, database: Database, quotas: Quotas | None = None) -> None:
        self.settings = settings
        self.database = database
        self.quotas = quotas or Quotas()
        self.hash_pool = hash_pool()
        self.used_bytes = 0
        """Bytes of stored arrays, of reservations for them, and of scratch arrays that went to files."""
        self._catalog = Catalog()
        self.expiry = Expiry(self._catalog, database, self.settle, history_s=settings.job_history_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._destroyed: list[Callable[[str], None]] = []
        self._gone: list[Callable[[str], None]] = []
        self._files = ExtentPool(
            settings.data_dir / "extents", keep_bytes=settings.recycle_bytes, on_destroy=self._on_destroy
        )
        limit = settings.max_scratch_bytes
        if limit is None:
            limit = host_memory() // 4
        self._memory = (
            ExtentPool(None, keep_bytes=min(settings.recycle_bytes, limit), limit=limit, on_destroy=self._on_destroy)
            if memory_extents_supported()
            else None
        )

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def start(self, keep: Iterable[str] = ()) -> None:
        """Brings back what an earlier process stored. `finish_recovery` follows when jobs have pinned operands.

        `keep`: names of extents that `adopt` will be asked for; others that no array has are deleted.
        """
        folder = self.settings.data_dir / "extents"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        rows = await self.database.read(lambda db: db.execute(_SQL["load"]).fetchall())
        lost = []
        live = {row["extent"] for row in rows if row["state"] == "live"} - {None}
        for row in rows:
            if row["state"] == "expired":
                self._catalog.bury(row["id"], row["owner"])
            # Where the disk was too full for a row to go, its space may have become another array's.
            outlived = row["state"] != "live" and row["extent"] in live
            if outlived or not self._recover(row):
                lost.append(row["id"])
        for array_id in lost:
            await self.database.write(partial(_remove, array_id))
        stored = (record.extent.name for record in self._catalog if record.extent is not None)
        orphans = self._files.sweep([*stored, *keep])
        if orphans or lost:
            log.warning("recovery: removed %d orphaned extents, %d rows without their bytes", orphans, len(lost))

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
        self.hash_pool.shutdown(wait=False, cancel_futures=True)
        self._files.trim()
        if self._memory is not None:
            self._memory.trim()

    def on_array_gone(self, callback: Callable[[str], None]) -> None:
        """`callback(id)` runs when nobody can see or uses an array any more."""
        self._gone.append(callback)

    def on_extent_destroyed(self, callback: Callable[[str], None]) -> None:
        """`callback(name)` runs whenever an extent is given back to the system."""
        self._destroyed.append(callback)

    # -- the facade -------------------------------------------------------------------------------------------------

    async def reserve(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        order: str,
        *,
        ttl_s: float | None,
        byteswap: bool = False,
        scratch: bool = False,
        digest_prefix: bytes | None = None,
        owner: str = "",
    ) -> Upload:
        """Space for an array; costs no memory, however large. Raises TooLarge, StoreFull, QuotaExceeded.

        `ttl_s`: None takes the server's default. `byteswap`: the bytes come big-endian. `digest_prefix`: what preceded
        the data in the body (b"" if nothing), given when `commit` will be told a digest of the whole body.
        `owner`: whose array it will be (the id of an API key).
        """
        return self.allocate(
            dtype,
            shape,
            order,
            ttl_s=ttl_s,
            byteswap=byteswap,
            scratch=scratch,
            digest_prefix=digest_prefix,
            owner=owner,
        )

    def allocate(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        order: str,
        *,
        ttl_s: float | None,
        byteswap: bool = False,
        scratch: bool = False,
        digest_prefix: bytes | None = None,
        owner: str = "",
        granted: bool = False,
        memory: Memory | None = None,
    ) -> Upload:
        """`reserve`, for callers that cannot await. `granted`: a recovered job's result, whose limits were asked.
        `memory`: a client's, sealed, that holds the scratch array already.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if not granted:
            self.check_size(nbytes, scratch=scratch, owner=owner)
        if memory is None:
            extent = self._take(nbytes, scratch=scratch) if nbytes else None
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
        return Upload(self, spec, extent, byteswap=byteswap, digest_prefix=digest_prefix)

    def adopt(self, spec: ArraySpec, extent_name: str | None, *, byteswap: bool) -> Upload | None:
        """The upload that an earlier process had reserved. None: its bytes are missing, or an array's."""
        extent = None
        if spec.nbytes:
            taken = (record.extent.name for record in self._catalog if record.extent is not None)
            if extent_name is None or extent_name in taken:
                return None
            try:
                capacity = (self.settings.data_dir / "extents" / extent_name).stat().st_size
            except FileNotFoundError:
                return None
            if capacity < spec.nbytes:
                return None
            extent = self._files.adopt(extent_name, capacity)
            self.used_bytes += spec.nbytes
            self.quotas.charge_bytes(spec.owner, spec.nbytes, scratch=False)
        return Upload(self, spec, extent, byteswap=byteswap, digest_prefix=None)

    def check_size(self, nbytes: int, *, scratch: bool = False, owner: str = "") -> None:
        """Raises TooLarge, StoreFull or QuotaExceeded if `nbytes` more could not be reserved now."""
        if nbytes > self.settings.max_array_bytes:
            raise TooLarge(f"an array of {nbytes} bytes; this server takes at most {self.settings.max_array_bytes}")
        limit = self.settings.max_store_bytes
        if not scratch and limit is not None and self.used_bytes + nbytes > limit:
            raise StoreFull(f"{nbytes} bytes do not fit: {self.used_bytes} of {limit} are taken")
        self.quotas.check_bytes(owner, nbytes, scratch=scratch)

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
        """Holds an array's bytes. Raises NotFound, Gone. `hidden`: also one that was deleted (a recovered job's)."""
        array_id = array if isinstance(array, str) else array.id
        if hidden:
            record = self._catalog.get(array_id)
            if record is None:
                raise NotFound(f"no array {array_id}")
            return Pinned(self, record)
        return Pinned(self, self._catalog.live(array_id, owner))

    def pin_upload(self, upload: Upload) -> Pinned:
        """Takes a committed scratch upload over: its bytes go when this pin (and others) are released."""
        upload.seal()
        return Pinned(self, Record(upload.info, upload.extent, state="deleted", hidden=True))

    def owners(self) -> set[str]:
        """Everybody who has an array that can be seen."""
        return self._catalog.owners()

    def count_of(self, owner: str) -> int:
        """One owner's arrays that can be seen."""
        return self._catalog.count(owner)

    @property
    def count(self) -> int:
        """Arrays that can be seen."""
        return len(self._catalog)

    @property
    def scratch_bytes(self) -> int:
        """Memory in use for scratch arrays."""
        return self._memory.live_bytes if self._memory is not None else 0

    @property
    def recycled_bytes(self) -> int:
        """Freed extents kept for reuse."""
        return self._files.free_bytes + (self._memory.free_bytes if self._memory is not None else 0)

    # -- for uploads, jobs and pins ---------------------------------------------------------------------------------

    async def publish(self, upload: Upload, running: RunningHash | None) -> ArrayInfo | ScratchArray:
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
            remove = self.database.write_soon(partial(_remove, info.id))
            remove.add_done_callback(_report)
            remove.add_done_callback(lambda done: self.release(upload, reusable=_succeeded(done) and not upload.named))
            raise
        self.index(info, upload.extent)
        if running is not None:
            self._spawn(self._record_hash(info.id, running))
        return info

    async def secure(self, upload: Upload) -> None:
        """Has the bytes on the disk before the row that names them, where settings ask for that."""
        if self.settings.durability == "power" and upload.extent is not None:
            await asyncio.to_thread(upload.extent.flush)

    def describe(self, upload: Upload) -> ArrayInfo:
        """The info of an upload that becomes an array now."""
        spec = upload.spec
        created = now()
        return ArrayInfo.model_construct(
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

    @staticmethod
    def insert_row(db: sqlite3.Connection, row: dict[str, Any]) -> None:
        """For `catalog.to_row`'s row, inside a transaction of the caller's."""
        db.execute(_SQL["insert"], row)

    def index(self, info: ArrayInfo, extent: Extent | None) -> None:
        """Shows an array whose row is committed."""
        self._catalog.add(Record(info, extent))
        if info.expires_at is not None:
            self.expiry.wake()

    def release(self, upload: Upload, *, reusable: bool = True) -> None:
        """Gives the space of an upload back that was never published (or was scratch)."""
        self._free(upload.extent, upload.spec, reusable=reusable)

    def settle(self, record: Record) -> None:
        """Frees a hidden array once nobody holds it."""
        if not record.hidden or record.pins or record.freed:
            return
        info = record.info
        if not self.database.is_open and not isinstance(info, ScratchArray):
            return  # the next start frees it
        record.freed = True
        if isinstance(info, ScratchArray):
            self._free(record.extent, info)
            return
        statement = _SQL["remove" if record.state == "deleted" else "forget_extent"]
        self.database.write_soon(lambda db: db.execute(statement, {"id": info.id})).add_done_callback(_report)
        self._catalog.remove(record)
        self._free(record.extent, info)
        for callback in self._gone:
            callback(info.id)

    def touch(self, extent: Extent) -> None:
        """Marks a file extent's mapping as used."""
        if extent.fd is None:
            self._files.touch(extent)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _take(self, nbytes: int, *, scratch: bool) -> Extent:
        if scratch and self._memory is not None:
            try:
                return self._memory.take(nbytes)
            except (StoreFull, OSError) as error:  # OSError: out of file descriptors or of memory for the mapping
                log.info("scratch goes to a file: %s", error)
        extent = self._files.take(nbytes)
        self.used_bytes += nbytes
        return extent

    def _free(
        self, extent: Extent | None, array: ArrayInfo | ScratchArray | ArraySpec, *, reusable: bool = True
    ) -> None:
        if extent is None:
            return
        self.quotas.charge_bytes(array.owner, -array.nbytes, scratch=not isinstance(array, ArrayInfo) and array.scratch)
        if extent.fd is not None:
            assert self._memory is not None  # it came from there
            self._memory.give(extent, reusable=reusable)
            return
        self.used_bytes -= array.nbytes
        self._files.give(extent, reusable=reusable)

    def _on_destroy(self, name: str) -> None:
        for callback in self._destroyed:
            callback(name)

    def _recover(self, row: sqlite3.Row) -> bool:
        """Takes one row in. False: its bytes are missing or cut short."""
        if row["state"] != "live" and row["extent"] is None and row["nbytes"]:
            return bool(row["state"] == "expired")
        extent = None
        if row["extent"] is not None:
            try:
                capacity = (self.settings.data_dir / "extents" / row["extent"]).stat().st_size
            except FileNotFoundError:
                return False
            if capacity < row["nbytes"]:
                return False
            extent = self._files.adopt(row["extent"], capacity)
            self.used_bytes += row["nbytes"]
            self.quotas.charge_bytes(row["owner"], row["nbytes"], scratch=False)
        self._catalog.add(Record(from_row(row), extent, state=row["state"], hidden=row["state"] != "live"))
        return True

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_report)

    async def _record_hash(self, array_id: str, running: RunningHash) -> None:
        await running.finish()
        digest = running.data_digest().hex()
        del running  # holds a view of the extent
        record = self._catalog.get(array_id)
        if record is None or not isinstance(record.info, ArrayInfo):
            return
        record.info = record.info.model_copy(update={"sha256": digest})
        await self.database.write(lambda db: db.execute(_SQL["set_sha256"], {"id": array_id, "sha256": digest}))


def _remove(array_id: str, db: sqlite3.Connection) -> None:
    db.execute(_SQL["remove"], {"id": array_id})


def _succeeded(done: asyncio.Future[Any]) -> bool:
    return not done.cancelled() and done.exception() is None


def _report(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.error("background write failed", exc_info=done.exception())
