"""ArrayStore: immutable arrays, their metadata and their extents.

The index is held in memory, SQLite holds it across restarts. An extent goes back to the pool only after the row that
named it has been committed as hidden and the last pin is gone, so that no row ever names bytes of another array.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import json
import logging
import math
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from gemmserve_service.database import load_sql
from gemmserve_service.errors import Gone, NotFound, StoreFull, TooLarge
from gemmserve_service.extents import Extent, ExtentPool, memory_extents_supported
from gemmserve_service.hashing import RunningHash, hash_pool
from gemmserve_service.ids import new_id
from gemmserve_service.runtime import host_memory
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.uploads import ArraySpec, ScratchArray, Upload, now

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from types import TracebackType

    from gemmserve_service.database import Database
    from gemmserve_service.settings import Settings

_SQL: Final = load_sql("arrays")
_LIVE, _DELETED, _EXPIRED = "live", "deleted", "expired"
_MOST_TOMBSTONES: Final = 100_000  # expired ids remembered in memory, about 10 MB
_SWEEP_AT_LEAST_S: Final = 60.0  # the sweeper looks at the clock at least this often: clocks jump

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Record:
    info: ArrayInfo | ScratchArray
    extent: Extent | None
    state: str = _LIVE
    pins: int = 0
    hidden: bool = False
    """Committed as deleted or expired: the extent may go with the last pin."""
    freed: bool = False


class Pinned:
    """Keeps an array's bytes alive and unchanged until released; a context manager."""

    __slots__ = ("_record", "_store", "_view", "info")

    def __init__(self, store: ArrayStore, record: _Record) -> None:
        self.info = record.info
        self._store = store
        self._record: _Record | None = record
        self._view: memoryview | None = None
        record.pins += 1

    @property
    def extent(self) -> Extent | None:
        """Where the bytes are; None for an array of zero bytes."""
        if self._record is None:
            raise ValueError("the pin is released")
        return self._record.extent

    @property
    def view(self) -> memoryview:
        """The bytes: read-only, little-endian, in `info.order`."""
        if self._view is None:
            extent = self.extent
            if extent is None:
                self._view = memoryview(b"")
            else:
                self._store.touch(extent)
                self._view = extent.view(self.info.nbytes).toreadonly()
        return self._view

    def release(self) -> None:
        """Lets go; idempotent. Views that are still around stay valid, their extent is not reused before they go."""
        record, self._record = self._record, None
        self._view = None
        if record is not None:
            record.pins -= 1
            self._store.settle(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object, __: TracebackType | None = None) -> None:
        self.release()


class ArrayStore:
    """All arrays of one data directory. Its methods belong to the event loop's thread."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings = settings
        self.database = database
        self.hash_pool = hash_pool()
        self.used_bytes = 0
        """Bytes of stored arrays, of reservations for them, and of scratch arrays that went to files."""
        self._records: dict[str, _Record] = {}
        self._ids: list[str] = []
        self._tombstones: OrderedDict[str, None] = OrderedDict()
        self._expiries: list[tuple[float, str]] = []
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._destroyed: list[Callable[[str], None]] = []
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

    async def start(self) -> None:
        """Brings back what an earlier process stored. `finish_recovery` follows once jobs have pinned their operands."""
        folder = self.settings.data_dir / "extents"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        rows = await self.database.read(lambda db: db.execute(_SQL["load"]).fetchall())
        lost = []
        for row in rows:
            if row["state"] == _EXPIRED:
                self._bury(row["id"])
            if not self._recover(row):
                lost.append(row["id"])
        for array_id in lost:
            await self.database.write(lambda db, id_=array_id: db.execute(_SQL["remove"], {"id": id_}))
        orphans = self._files.sweep(r.extent.name for r in self._records.values() if r.extent is not None)
        if orphans or lost:
            log.warning("recovery: removed %d orphaned extents, %d rows without their bytes", orphans, len(lost))
        self._spawn(self._sweep())

    def finish_recovery(self) -> None:
        """Frees hidden arrays that no job needs any more."""
        for record in list(self._records.values()):
            self.settle(record)

    async def stop(self) -> None:
        """Stops the sweeper and the hash threads; arrays stay where they are."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.hash_pool.shutdown(wait=False, cancel_futures=True)
        self._files.trim()
        if self._memory is not None:
            self._memory.trim()

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
    ) -> Upload:
        """Space for an array; costs no memory, however large. Raises TooLarge, StoreFull.

        `ttl_s`: None takes the server's default. `byteswap`: the bytes come big-endian. `digest_prefix`: what preceded
        the data in the body (b"" if nothing), given when `commit` will be told a digest of the whole body.
        """
        return self.allocate(
            dtype, shape, order, ttl_s=ttl_s, byteswap=byteswap, scratch=scratch, digest_prefix=digest_prefix
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
    ) -> Upload:
        """`reserve`, for callers that cannot await."""
        nbytes = math.prod(shape) * dtype.itemsize
        self.check_size(nbytes, scratch=scratch)
        extent = self._take(nbytes, scratch=scratch) if nbytes else None
        if ttl_s is None:
            ttl_s = self.settings.default_ttl_s
        elif ttl_s == math.inf:
            ttl_s = None
        name = dtype.newbyteorder("=").name
        spec = ArraySpec(new_id("arr"), name, tuple(shape), order, nbytes, ttl_s, scratch)
        return Upload(self, spec, extent, byteswap=byteswap, digest_prefix=digest_prefix)

    def check_size(self, nbytes: int, *, scratch: bool = False) -> None:
        """Raises TooLarge or StoreFull if `nbytes` more could not be reserved now."""
        if nbytes > self.settings.max_array_bytes:
            raise TooLarge(f"an array of {nbytes} bytes; this server takes at most {self.settings.max_array_bytes}")
        limit = self.settings.max_store_bytes
        if not scratch and limit is not None and self.used_bytes + nbytes > limit:
            raise StoreFull(f"{nbytes} bytes do not fit: {self.used_bytes} of {limit} are taken")

    async def info(self, array_id: str) -> ArrayInfo:
        """Metadata. Raises NotFound (also when deleted), Gone (expired)."""
        info = self._live(array_id).info
        assert isinstance(info, ArrayInfo)  # scratch arrays are not in the index
        return info

    async def list(self, *, limit: int, cursor: str | None) -> tuple[list[ArrayInfo], str | None]:
        """A page, newest first, and the cursor of the next one."""
        end = len(self._ids) if cursor is None else bisect.bisect_left(self._ids, cursor)
        page: list[ArrayInfo] = []
        clock = time.time()
        while end > 0 and len(page) < limit:
            end -= 1
            record = self._records[self._ids[end]]
            if not _expired(record, clock) and isinstance(record.info, ArrayInfo):
                page.append(record.info)
        return page, (page[-1].id if end > 0 and page else None)

    async def delete(self, array_id: str) -> None:
        """Hides the array at once; its bytes go with the last pin. Raises NotFound, Gone."""
        record = self._live(array_id)
        self._hide(record, _DELETED)
        try:
            await self.database.write(lambda db: db.execute(_SQL["set_state"], {"id": array_id, "state": _DELETED}))
        except BaseException:
            self._show(record)
            raise
        record.hidden = True
        self.settle(record)

    def pin(self, array: str | ArrayInfo, *, hidden: bool = False) -> Pinned:
        """Holds an array's bytes. Raises NotFound, Gone. `hidden`: also one that was deleted (a recovered job's)."""
        array_id = array if isinstance(array, str) else array.id
        if hidden:
            record = self._records.get(array_id)
            if record is None:
                raise NotFound(f"no array {array_id}")
            return Pinned(self, record)
        return Pinned(self, self._live(array_id))

    def pin_upload(self, upload: Upload) -> Pinned:
        """Takes a committed scratch upload over: its bytes go when this pin (and others) are released."""
        upload.seal()
        return Pinned(self, _Record(upload.info, upload.extent, state=_DELETED, hidden=True))

    @property
    def count(self) -> int:
        """Arrays that can be seen."""
        return len(self._ids)

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
            return ScratchArray(spec.id, spec.dtype, spec.shape, spec.order, spec.nbytes, now())
        if self.settings.durability == "power" and upload.extent is not None:
            await asyncio.to_thread(upload.extent.flush)
        info = self.describe(upload)
        row = self.row(info, upload.extent)
        insert = self.database.write_soon(lambda db: db.execute(_SQL["insert"], row))
        try:
            await asyncio.shield(insert)
        except asyncio.CancelledError:
            # The row may still be committed. Nobody learned the id, so it goes again.
            self.database.write_soon(lambda db: db.execute(_SQL["remove"], {"id": info.id}))
            raise
        self.index(info, upload.extent)
        if running is not None:
            self._spawn(self._record_hash(info.id, running))
        return info

    def describe(self, upload: Upload) -> ArrayInfo:
        """The info of an upload that becomes an array now."""
        spec = upload.spec
        created = now()
        return ArrayInfo.model_construct(
            id=spec.id,
            dtype=spec.dtype,
            shape=spec.shape,
            order=spec.order,
            nbytes=spec.nbytes,
            sha256=None,
            created_at=created,
            expires_at=None if spec.ttl_s is None else created + timedelta(seconds=spec.ttl_s),
        )

    @staticmethod
    def row(info: ArrayInfo, extent: Extent | None) -> dict[str, Any]:
        """The parameters of `insert_row`."""
        return {
            "id": info.id,
            "dtype": info.dtype,
            "shape": json.dumps(info.shape),
            "memory_order": info.order,
            "nbytes": info.nbytes,
            "sha256": info.sha256,
            "created_at": info.created_at.timestamp(),
            "expires_at": None if info.expires_at is None else info.expires_at.timestamp(),
            "extent": None if extent is None else extent.name,
        }

    @staticmethod
    def insert_row(db: sqlite3.Connection, row: dict[str, Any]) -> None:
        """Runs inside a transaction of the caller's."""
        db.execute(_SQL["insert"], row)

    def index(self, info: ArrayInfo, extent: Extent | None) -> None:
        """Shows an array whose row is committed."""
        record = _Record(info, extent)
        self._records[info.id] = record
        self._show(record)

    def release(self, upload: Upload, *, reusable: bool = True) -> None:
        """Gives the space of an upload back that was never published (or was scratch)."""
        self._free(upload.extent, upload.spec.nbytes, scratch=upload.spec.scratch, reusable=reusable)

    def settle(self, record: _Record) -> None:
        """Frees a hidden array once nobody holds it."""
        if not record.hidden or record.pins or record.freed:
            return
        record.freed = True
        info = record.info
        if isinstance(info, ScratchArray):
            self._free(record.extent, info.nbytes, scratch=True)
            return
        statement = _SQL["remove" if record.state == _DELETED else "forget_extent"]
        self.database.write_soon(lambda db: db.execute(statement, {"id": info.id})).add_done_callback(_report)
        del self._records[info.id]
        self._free(record.extent, info.nbytes, scratch=False)

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

    def _free(self, extent: Extent | None, nbytes: int, *, scratch: bool, reusable: bool = True) -> None:
        if extent is None:
            return
        if extent.fd is not None:
            assert scratch and self._memory is not None
            self._memory.give(extent, reusable=reusable)
            return
        self.used_bytes -= nbytes
        self._files.give(extent, reusable=reusable)

    def _on_destroy(self, name: str) -> None:
        for callback in self._destroyed:
            callback(name)

    def _live(self, array_id: str) -> _Record:
        record = self._records.get(array_id)
        if array_id in self._tombstones or (
            record is not None and (record.state == _EXPIRED or (record.state == _LIVE and _expired(record)))
        ):
            raise Gone(f"array {array_id} has expired")
        if record is None or record.state != _LIVE:
            raise NotFound(f"no array {array_id}")
        return record

    def _show(self, record: _Record) -> None:
        record.state = _LIVE
        bisect.insort(self._ids, record.info.id)
        if record.info.expires_at is not None:
            heapq.heappush(self._expiries, (record.info.expires_at.timestamp(), record.info.id))
            self._wake.set()

    def _hide(self, record: _Record, state: str) -> None:
        record.state = state
        index = bisect.bisect_left(self._ids, record.info.id)
        if index < len(self._ids) and self._ids[index] == record.info.id:
            del self._ids[index]

    def _bury(self, array_id: str) -> None:
        self._tombstones[array_id] = None
        if len(self._tombstones) > _MOST_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _recover(self, row: sqlite3.Row) -> bool:
        """Takes one row in. False: its bytes are missing or cut short."""
        if row["state"] != _LIVE and row["extent"] is None:
            return row["state"] == _EXPIRED
        extent = None
        if row["extent"] is not None:
            try:
                capacity = os.stat(self.settings.data_dir / "extents" / row["extent"]).st_size
            except FileNotFoundError:
                return False
            if capacity < row["nbytes"]:
                return False
            extent = self._files.adopt(row["extent"], capacity)
            self.used_bytes += row["nbytes"]
        info = ArrayInfo.model_construct(
            id=row["id"],
            dtype=row["dtype"],
            shape=tuple(json.loads(row["shape"])),
            order=row["memory_order"],
            nbytes=row["nbytes"],
            sha256=row["sha256"],
            created_at=datetime.fromtimestamp(row["created_at"], UTC),
            expires_at=None if row["expires_at"] is None else datetime.fromtimestamp(row["expires_at"], UTC),
        )
        record = _Record(info, extent, state=row["state"], hidden=row["state"] != _LIVE)
        self._records[info.id] = record
        if not record.hidden:
            self._show(record)
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
        record = self._records.get(array_id)
        if record is None or not isinstance(record.info, ArrayInfo):
            return
        record.info = record.info.model_copy(update={"sha256": digest})
        await self.database.write(lambda db: db.execute(_SQL["set_sha256"], {"id": array_id, "sha256": digest}))

    async def _sweep(self) -> None:
        """Hides arrays as they expire."""
        while True:
            self._wake.clear()
            delay = _SWEEP_AT_LEAST_S
            if self._expiries:
                delay = min(delay, max(self._expiries[0][0] - time.time(), 0.0))
            if delay > 0:
                try:
                    # Not wait_for: before Python 3.12 it swallows a cancellation that comes with the wake-up.
                    async with asyncio.timeout(delay):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            try:
                await self._expire_due()
            except StoreFull:  # the disk is full: the arrays are hidden already, their rows follow later
                log.exception("could not record expiries")
                await asyncio.sleep(1)

    async def _expire_due(self) -> None:
        due: list[_Record] = []
        clock = time.time()
        while self._expiries and self._expiries[0][0] <= clock:
            record = self._records.get(heapq.heappop(self._expiries)[1])
            if record is not None and record.state == _LIVE:
                self._hide(record, _EXPIRED)
                self._bury(record.info.id)
                due.append(record)
        if not due:
            return
        rows = [{"id": record.info.id, "state": _EXPIRED} for record in due]
        before = clock - self.settings.job_history_s

        def expire(db: sqlite3.Connection) -> None:
            db.executemany(_SQL["set_state"], rows)
            db.execute(_SQL["purge_expired"], {"before": before})

        await self.database.write(expire)
        for record in due:
            record.hidden = True
            self.settle(record)


def _expired(record: _Record, clock: float | None = None) -> bool:
    expires = record.info.expires_at
    return expires is not None and expires.timestamp() <= (time.time() if clock is None else clock)


def _report(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.error("background write failed", exc_info=done.exception())
