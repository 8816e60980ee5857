"""Every upload in parts: begun, on record, completed to an array, cancelled, or given up after a silence.

What a part's answer has acknowledged is on record and survives the process; an upload that nobody goes on with holds
its space for `upload_idle_s`. A row goes before its extent does, so that no row ever names bytes of another array.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import (
    CompletedUpload,
    Gone,
    InconsistentUploadLength,
    MismatchingUploadOffset,
    NotFound,
    QuotaExceeded,
    StoreFull,
)
from gemmserve_service.runtime import clock
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.store.database.database import load_sql
from gemmserve_service.store.resumable.upload_resource import PartialUpload, Transfer, from_row, spec_of

if TYPE_CHECKING:
    import sqlite3

    from gemmserve_service.http.requests.body import RequestBody
    from gemmserve_service.schemas import ArrayInfo
    from gemmserve_service.settings import Settings
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.database.database import Database
    from gemmserve_service.store.declared import Declared
    from gemmserve_service.store.quotas import Quotas
    from gemmserve_service.store.upload import Upload

_SQL: Final = load_sql("uploads")
_MOST_TOMBSTONES: Final = 10_000
_SWEEPS_PER_LIFE: Final = 20
_SWEEP_AT_MOST_S: Final = 30.0
_RETRY_AFTER_S: Final = 60.0

log = logging.getLogger(__name__)


class PartialUploads:
    """The upload resources of one data directory; belongs to the event loop's thread."""

    def __init__(self, settings: Settings, store: ArrayStore, database: Database, quotas: Quotas) -> None:
        self.settings = settings
        self._store = store
        self._database = database
        self._quotas = quotas
        self._uploads: dict[str, PartialUpload] = {}
        self._expired: OrderedDict[str, str] = OrderedDict()
        self._rows: list[sqlite3.Row] = []
        self._sweeper: asyncio.Task[None] | None = None

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def load(self) -> list[str]:
        """Reads the records; returns the names of the extents that `start` will adopt."""
        self._rows = await self._database.read(lambda db: db.execute(_SQL["load"]).fetchall())
        return [row["extent"] for row in self._rows if row["extent"] is not None]

    async def start(self) -> None:
        """Takes up what an earlier process had begun, once the store knows its arrays; from here on uploads expire."""
        touched = time.monotonic()
        lost = []
        adopted: set[str] = set()
        for row in reversed(self._rows):  # of two that name the same extent, the later has it
            record = from_row(row, touched)
            usable = row["state"] != "sealed" and row["extent"] not in adopted
            if record.complete:
                with contextlib.suppress(NotFound, Gone):
                    record.array = await self._store.info(row["array_id"])
                usable = record.array is not None
            elif usable and row["dtype"] is not None:
                record.upload = self._store.adopt(spec_of(row), row["extent"], byteswap=bool(row["byteswap"]))
                usable = record.upload is not None
                adopted |= {row["extent"]} - {None}
            if usable:
                self._uploads[record.id] = record
            else:
                lost.append(row["id"])
        self._rows = []
        for upload_id in lost:
            await self._database.write(partial(_remove, upload_id))
        if lost:
            log.warning("recovery: %d uploads in parts could not be taken up", len(lost))
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def stop(self) -> None:
        """Stops the sweeper; uploads stay on record."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)

    # -- the facade -------------------------------------------------------------------------------------------------

    def get(self, upload_id: str, owner: str) -> PartialUpload:
        """An upload of `owner` ("": anybody's). Raises NotFound, Gone."""
        record = self._uploads.get(upload_id)
        if record is None:
            known = self._expired.get(upload_id)
            if known is not None and owner in {"", known}:
                raise Gone(f"upload {upload_id} was given up: nothing was heard of it")
            raise NotFound(f"no upload {upload_id}")
        if owner and record.owner != owner:
            raise NotFound(f"no upload {upload_id}")
        record.touched = time.monotonic()
        return record

    def max_age(self, record: PartialUpload) -> int:
        """Seconds for which it is kept without a word from the client."""
        silent = time.monotonic() - record.touched
        return max(0, int(self.settings.upload_idle_s - silent))

    async def create(
        self, owner: str, media_type: str, declared: Declared | None, *, length: int | None, ttl_s: float | None
    ) -> PartialUpload:
        """A new upload; `declared` where shape and dtype are known already: then the space is reserved.

        Raises TooLarge, StoreFull, QuotaExceeded, InconsistentUploadLength.
        """
        mine = sum(one.owner == owner and not one.complete for one in self._uploads.values())
        if mine >= self.settings.max_uploads:
            raise QuotaExceeded(
                f"{mine} uploads in parts are open; complete or cancel some",
                retry_after_s=_RETRY_AFTER_S,
                quota="uploads",
                limit=self.settings.max_uploads,
                used=mine,
            )
        if declared is not None:
            if length not in {None, declared.nbytes}:
                raise InconsistentUploadLength(
                    f"Upload-Length is {length}, and {declared.dtype.name} of shape {declared.shape} needs "
                    f"{declared.nbytes} bytes"
                )
            length = declared.nbytes
        record = PartialUpload(new_id("upl"), owner, media_type, ttl_s, clock.time(), time.monotonic(), length)
        if declared is not None:
            record.upload = await self._reserve(record, declared)
            record.array_id = record.upload.spec.id
        self._uploads[record.id] = record
        try:
            await self._put(record)
        except StoreFull:  # there is no row
            del self._uploads[record.id]
            if record.upload is not None:
                record.upload.abort()
            raise
        except BaseException:
            await asyncio.shield(self._drop(record))
            raise
        return record

    async def receive(
        self, record: PartialUpload, body: RequestBody, start: int, count: int, expected: bytes | None, *, append: bool
    ) -> None:
        """Takes `count` bytes at `start` in; they are on record when this returns. `append`: at the offset only.

        An earlier request that still writes some of these bytes is ended. Raises MismatchingUploadOffset,
        InconsistentUploadLength, CompletedUpload, UploadSuperseded, DigestMismatch, ClientDisconnect.
        """
        transfer = Transfer(start, start + count, append=append, unchecked=expected is not None)
        async with record.lock:
            record.check_end(transfer.end)  # what is refused ends no other
            await record.stop(appends=append, span=(start, transfer.end))
            self._check_open(record, count)
            if append and start != record.offset:
                raise MismatchingUploadOffset(
                    f"the upload goes on at {record.offset}, not at {start}",
                    **{"expected-offset": record.offset, "provided-offset": start},
                )
            record.check_end(transfer.end)
            record.transfers.add(transfer)
        reserve = partial(self._reserve, record)
        try:
            if transfer.unchecked and record.received.meets(start, transfer.end):
                await self._put(record)  # before what is on record is written over
            with self._quotas.moving(record.owner, count):
                await transfer.run(record.receive(body, transfer, expected, self._store.hash_pool, reserve))
        finally:
            transfer.unchecked = False  # `received` says what came of it
            try:
                record.touched = time.monotonic()
                if not record.gone:
                    await asyncio.shield(self._put(record))
            finally:
                record.transfers.discard(transfer)
                transfer.over.set()

    async def complete(self, record: PartialUpload, expected: bytes | None) -> ArrayInfo:
        """Makes an upload whose bytes have all come an array; again, answers the same array. `expected`: SHA-256 of
        the whole body.

        Raises UploadIncomplete, and DigestMismatch, after which the upload is gone.
        """
        async with record.lock:
            if record.array is not None:
                return record.array
            await record.stop()
            self._check_open(record, 0)
            if (holes := record.holes()) is not None:
                raise holes
            assert record.upload is not None
            if record.upload.byteswap:
                await self._database.write(lambda db: db.execute(_SQL["seal"], {"id": record.id}))
            upload, record.upload = record.upload, None
            try:
                record.array = await upload.commit_parts(expected, record.head, partial(_complete, record.id))
            except BaseException:
                record.gone = True  # and with it the reservation
                with contextlib.suppress(StoreFull):  # the row stays; nothing is adopted that is another's by then
                    await asyncio.shield(self._drop(record))
                raise
            record.complete = True
            record.touched = time.monotonic()
            return record.array

    async def cancel(self, record: PartialUpload) -> None:
        """Ends what is under way and gives the space back; of a complete one forgets the upload, not the array."""
        record.gone = True
        await record.stop()
        async with record.lock:
            await self._drop(record)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check_open(self, record: PartialUpload, count: int) -> None:
        if record.gone or record.id not in self._uploads:
            raise NotFound(f"no upload {record.id}")
        if record.complete:
            if count:
                raise InconsistentUploadLength("the upload is complete, and takes no more bytes")
            raise CompletedUpload(f"upload {record.id} is array {record.array_id}")

    async def _reserve(self, record: PartialUpload, declared: Declared) -> Upload:
        return await declared.reserve(self._store, ttl_s=record.ttl_s, owner=record.owner)

    async def _put(self, record: PartialUpload) -> None:
        if record.upload is not None:
            await self._store.secure(record.upload)
        row = record.to_row()
        await self._database.write(lambda db: db.execute(_SQL["put"], row))

    async def _drop(self, record: PartialUpload) -> None:
        """The row first, then the space."""
        await self._database.write(partial(_remove, record.id))
        record.gone = True
        self._uploads.pop(record.id, None)
        upload, record.upload = record.upload, None
        if upload is not None:
            upload.abort()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_AT_MOST_S, self.settings.upload_idle_s / _SWEEPS_PER_LIFE))
            oldest = time.monotonic() - self.settings.upload_idle_s
            for record in [one for one in self._uploads.values() if one.touched < oldest and not one.transfers]:
                if record.lock.locked() or record.transfers or record.touched >= oldest:  # since we looked
                    continue
                try:
                    async with record.lock:  # what comes meanwhile finds it gone
                        await self._drop(record)
                except StoreFull:  # the row stays, and so does the space
                    log.exception("an upload that nobody goes on with could not be removed")
                    continue
                if not record.complete:
                    self._expired[record.id] = record.owner
                    if len(self._expired) > _MOST_TOMBSTONES:
                        self._expired.popitem(last=False)


def _remove(upload_id: str, db: sqlite3.Connection) -> None:
    db.execute(_SQL["remove"], {"id": upload_id})


def _complete(upload_id: str, db: sqlite3.Connection) -> None:
    db.execute(_SQL["complete"], {"id": upload_id})
