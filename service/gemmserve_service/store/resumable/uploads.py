"""Uploads in parts: begun, filled by parts in any order, completed to an array, cancelled, or given up when idle.

What a part's answer has acknowledged is on record and survives the process; an upload that nobody goes on with holds
its space for `upload_idle_s`. A row goes before its extent does, so that no row ever names bytes of another array.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from gemmserve.wire import NPY, NpyError
from gemmserve_service.errors import (
    BodyTooLong,
    BodyTooShort,
    CompletedUpload,
    DigestMismatch,
    Gone,
    NotFound,
    QuotaExceeded,
    StoreFull,
    UploadIncomplete,
    UploadSuperseded,
)
from gemmserve_service.runtime import clock
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.store.database.database import load_sql
from gemmserve_service.store.declared import read_npy_head
from gemmserve_service.store.record import NO_TAGS, ArraySpec, Tags
from gemmserve_service.store.resumable.byte_ranges import Spans

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Coroutine

    from gemmserve_service.schemas import ArrayInfo
    from gemmserve_service.settings import Settings
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.database.database import Database
    from gemmserve_service.store.declared import Declared
    from gemmserve_service.store.quotas import Quotas
    from gemmserve_service.store.upload import Body, Upload

_SQL: Final = load_sql("uploads")
_MAX_HOLES: Final = 100  # that a refusal names
_MAX_TOMBSTONES: Final = 10_000
_SWEEPS_PER_LIFE: Final = 20
_MAX_SWEEP_PAUSE_S: Final = 30.0
_RETRY_AFTER_S: Final = 60.0

log = logging.getLogger(__name__)


class Part:
    """One request that brings bytes [start, end) of the body."""

    def __init__(self, start: int, end: int, *, unchecked: bool) -> None:
        self.start = start
        self.end = end
        self.unchecked = unchecked
        """Whether it may be writing bytes whose digest is yet to be checked."""
        self.received = start
        """Up to where its bytes have come."""
        self.over = asyncio.Event()
        """Set once it writes no more, and what came of it is on record."""
        self._task: asyncio.Task[None] | None = None
        self._superseded = asyncio.Event()

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work`. Raises UploadSuperseded when `supersede` was called before or meanwhile."""
        if self._superseded.is_set():
            work.close()
            raise UploadSuperseded("a later request for this upload took this one's place")
        self._task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([self._task])
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._superseded.is_set() and self._task.cancelled():
            raise UploadSuperseded("a later request for this upload took this one's place")
        self._task.result()

    async def supersede(self) -> None:
        """Stop it, and wait until it writes no more."""
        self._superseded.set()
        if self._task is not None:
            self._task.cancel()
        await self.over.wait()


@dataclass(eq=False)
class ResumableUpload:
    """An upload in parts. Offsets are those of the body, .npy header included where it has one."""

    id: str
    owner: str
    media_type: str
    ttl_s: float | None
    """Seconds to live as asked for: None is the server's default."""
    created_at: float
    touched: float
    """Time at which it was heard of last, by time.monotonic."""
    length: int | None = None
    """Bytes of the whole body, once shape and dtype are known."""
    head: bytes = b""
    """The .npy header, once it has come."""
    upload: Upload | None = None
    """The reservation, once shape and dtype are known; None again once it is an array."""
    received: Spans = field(default_factory=Spans)
    array: ArrayInfo | None = None
    """Array that it became, unless that is gone already."""
    array_id: str | None = None
    stale: Upload | None = None
    """A reservation that is to be given back."""
    complete: bool = False
    gone: bool = False
    """Cancelled, expired or failed."""
    tags: Tags = NO_TAGS
    """Name and labels of the array to be."""
    parts: set[Part] = field(default_factory=set)
    """Those under way."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def reserved(self, upload: Upload, head: bytes = b"") -> None:
        """Take the reservation of the array that it will be."""
        self.upload = upload
        self.array_id = upload.spec.id
        self.head, self.length = head, len(head) + upload.nbytes

    def check_end(self, end: int) -> None:
        """Raise BodyTooLong if the body ends before `end`."""
        if self.length is not None and end > self.length:
            raise BodyTooLong(f"bytes up to {end} of an upload that has {self.length}")

    async def supersede(self, start: int = 0, end: float = math.inf) -> None:
        """End the parts under way that write some of [start, end)."""
        for part in list(self.parts):
            if part.start < end and start < part.end:
                await part.supersede()

    def check_whole(self) -> None:
        """Raise UploadIncomplete, with what is missing, unless every byte has come."""
        if self.upload is None or self.length is None:
            raise UploadIncomplete("the .npy header has not come yet", missing=[])
        if missing := self.received.missing(self.length):
            count = sum(end - start for start, end in missing)
            raise UploadIncomplete(
                f"{count} of {self.length} bytes have not come", missing=[list(hole) for hole in missing[:_MAX_HOLES]]
            )

    async def receive(self, body: Body, part: Part, expected: bytes | None, store: ArrayStore) -> None:
        """Take the bytes of `part` in. `expected`: their SHA-256. Raises what is wrong with them.

        What came of a part that broke off stays, unless a digest was to be checked: then none of it does, nor does the
        header that it began with.
        """
        without_head = self.upload is None
        try:
            await self._receive(body, part, expected, store)
        except BaseException:
            if expected is None:
                self.received.add(part.start, part.received)
            else:
                self.received.remove(part.start, part.received)
                if without_head and self.parts == {part} and not len(self.received):
                    self._forget_head()
            raise
        self.received.add(part.start, part.end)

    async def _receive(self, body: Body, part: Part, expected: bytes | None, store: ArrayStore) -> None:
        head = b""
        if self.media_type == NPY:
            head = await (self._take_head(body, part, store) if self.upload is None else self._skip_head(body, part))
        assert self.upload is not None
        first, last = (max(0, position - len(self.head)) for position in (part.start, part.end))

        def advance(count: int) -> None:
            part.received += count

        view = self.upload.view[first:last]
        if first < last:
            await body.fill(view, advance, self.upload.place(first))
        if part.received < part.end:
            raise BodyTooShort(f"the part ended after {part.received - part.start} bytes")
        if expected is not None and (await store.digests.sha256(view, (head,))) != [expected]:
            raise DigestMismatch(f"Content-Digest names sha-256 {expected.hex()}, the part has another")

    async def _take_head(self, body: Body, part: Part, store: ArrayStore) -> bytes:
        """Read the .npy header and reserve the array's space. Returns the header."""
        if part.start:
            raise UploadIncomplete("the part at offset 0, with the .npy header, comes first", missing=[])
        declared, data = await read_npy_head(body)
        length = len(declared.header) + declared.nbytes
        if part.end > length:
            raise BodyTooLong(f"{part.end} bytes, and by its header the .npy file has {length}")
        await store.make_room(declared.nbytes, self.owner)
        self.reserved(declared.reserve(store, ttl_s=self.ttl_s, owner=self.owner, tags=self.tags), declared.header)
        part.received = len(self.head)
        body.unread(data)
        return self.head

    def _forget_head(self) -> None:
        """Take back what the header said, which may be damaged; `stale` goes once no row names its space any more."""
        self.stale = self.upload
        self.upload, self.array_id, self.head, self.length = None, None, b"", None

    async def _skip_head(self, body: Body, part: Part) -> bytes:
        """Pass over what of the header comes again, and return it. Raises NpyError where it is another."""
        again = bytearray(max(0, min(part.end, len(self.head)) - part.start))

        def advance(count: int) -> None:
            part.received += count

        if again:
            await body.fill(memoryview(again), advance)
        came = bytes(again[: part.received - part.start])
        if came != self.head[part.start : part.start + len(came)]:
            raise NpyError("this .npy header is not the one that came before")
        return came

    # -- as a row of the table `uploads` -------------------------------------------------------------------------------

    def to_row(self) -> dict[str, Any]:
        """Return the parameters of the statement `put` of sql/uploads.sql."""
        upload = self.upload
        spec = None if upload is None else upload.spec
        received = Spans(self.received)
        for part in self.parts:
            if part.unchecked:  # nor are they, should the process be killed meanwhile
                received.remove(part.start, part.end)
        return {
            "id": self.id,
            "owner": self.owner,
            "state": "complete" if self.complete else "open",
            "media_type": self.media_type,
            "length": self.length,
            "head": self.head,
            "received": json.dumps(list(received)),
            "created_at": self.created_at,
            "ttl_s": self.ttl_s,
            "array_id": self.array_id,
            "dtype": spec and spec.dtype,
            "shape": spec and json.dumps(spec.shape),
            "memory_order": spec and spec.order,
            "nbytes": spec and spec.nbytes,
            "byteswap": upload and upload.byteswap,
            "kept_s": spec and spec.ttl_s,
            "extent": None if upload is None or upload.extent is None else upload.extent.name,
            "name": self.tags.name,
            "labels": json.dumps(self.tags.labels) if self.tags.labels else None,
        }


def _spec_of(row: sqlite3.Row) -> ArraySpec:
    """The reservation that a row describes."""
    shape = tuple(json.loads(row["shape"]))
    dtype = np.dtype(row["dtype"]).name
    return ArraySpec(
        row["array_id"], dtype, shape, row["memory_order"], row["nbytes"], row["kept_s"], False, row["owner"],
        tags=_tags_of(row),
    )  # fmt: skip


def _tags_of(row: sqlite3.Row) -> Tags:
    """Name and labels of the array that the upload in a row is to be."""
    return Tags(row["name"], json.loads(row["labels"] or "{}"))


def _from_row(row: sqlite3.Row, touched: float) -> ResumableUpload:
    """The upload in a row, without its reservation."""
    known = row["dtype"] is not None  # else a part of a .npy header came, as older versions took it
    return ResumableUpload(
        id=row["id"],
        owner=row["owner"],
        media_type=row["media_type"],
        ttl_s=row["ttl_s"],
        created_at=row["created_at"],
        touched=touched,
        length=row["length"],
        head=bytes(row["head"]) if known else b"",
        received=Spans(tuple(span) for span in json.loads(row["received"]) if known),
        array_id=row["array_id"],
        complete=row["state"] == "complete",
        tags=_tags_of(row),
    )


class ResumableUploads:
    """The uploads in parts of one data directory; belongs to the event loop's thread."""

    def __init__(self, settings: Settings, store: ArrayStore, database: Database, quotas: Quotas) -> None:
        self.settings = settings
        self._store = store
        self._database = database
        self._quotas = quotas
        self._uploads: dict[str, ResumableUpload] = {}
        self._expired: OrderedDict[str, str] = OrderedDict()
        self._rows: list[sqlite3.Row] = []
        self._sweeper: asyncio.Task[None] | None = None

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def load(self) -> list[str]:
        """Read the records; return the names of the extents that `start` will adopt."""
        self._rows = await self._database.read(lambda db: db.execute(_SQL["load"]).fetchall())
        return [row["extent"] for row in self._rows if row["extent"] is not None]

    async def start(self) -> None:
        """Take up what an earlier process had begun, once the store knows its arrays; from here on uploads expire."""
        touched = time.monotonic()
        lost = []
        adopted: set[str] = set()
        for row in reversed(self._rows):  # of two that name the same extent, the later has it
            record = _from_row(row, touched)
            usable = row["state"] != "sealed" and row["extent"] not in adopted
            if record.complete:
                with contextlib.suppress(NotFound, Gone):
                    record.array = await self._store.info(row["array_id"])
                usable = record.array is not None
            elif usable and row["dtype"] is not None:
                record.upload = self._store.adopt(_spec_of(row), row["extent"], byteswap=bool(row["byteswap"]))
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
        """Stop the sweeper; uploads stay on record."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)

    # -- the facade -------------------------------------------------------------------------------------------------

    def get(self, upload_id: str, owner: str) -> ResumableUpload:
        """Return an upload of `owner` ("": anybody's). Raises NotFound, Gone."""
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

    def remaining_s(self, record: ResumableUpload) -> int:
        """Return for how many seconds it is kept without a word from the client."""
        silent = time.monotonic() - record.touched
        return max(0, int(self.settings.upload_idle_s - silent))

    async def create(
        self,
        owner: str,
        media_type: str,
        declared: Declared | None,
        *,
        ttl_s: float | None,
        tags: Tags = NO_TAGS,
    ) -> ResumableUpload:
        """Begin an upload; `declared` where shape and dtype are known already: then the space is reserved. `tags` will
        be those of the array.

        Raises TooLarge, StoreFull, QuotaExceeded.
        """
        if declared is not None:
            await self._store.make_room(declared.nbytes, owner)
        mine = sum(one.owner == owner and not one.complete for one in self._uploads.values())
        if mine >= self.settings.max_uploads:
            raise QuotaExceeded(
                f"{mine} uploads in parts are open; complete or cancel some",
                retry_after_s=_RETRY_AFTER_S,
                quota="uploads",
                limit=self.settings.max_uploads,
                used=mine,
            )
        upload_id = new_id("upl", self.settings.cell)
        record = ResumableUpload(upload_id, owner, media_type, ttl_s, clock.time(), time.monotonic(), tags=tags)
        if declared is not None:
            record.reserved(declared.reserve(self._store, ttl_s=ttl_s, owner=owner, tags=tags))
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
        self, record: ResumableUpload, body: Body, start: int, count: int, expected: bytes | None
    ) -> None:
        """Take `count` bytes at `start` in; they are on record when this returns. `expected`: their SHA-256.

        An earlier request that still writes some of these bytes is ended. Raises NotFound, CompletedUpload,
        BodyTooLong, BodyTooShort, UploadIncomplete, UploadSuperseded, DigestMismatch, NpyError, ClientDisconnect.
        """
        part = Part(start, start + count, unchecked=expected is not None)
        async with record.lock:
            self._check_open(record)
            record.check_end(part.end)  # what is refused ends no other
            await record.supersede(part.start, part.end)
            self._check_open(record)
            record.check_end(part.end)
            record.parts.add(part)
        try:
            if part.unchecked and record.received.meets(part.start, part.end):
                await self._put(record)  # before what is on record is written over
            with self._quotas.in_flight(record.owner, count):
                await part.run(record.receive(body, part, expected, self._store))
        finally:
            part.unchecked = False  # `received` says what came of it
            try:
                record.touched = time.monotonic()
                if not record.gone:
                    await asyncio.shield(self._put(record))
            finally:
                stale, record.stale = record.stale, None
                if stale is not None:
                    stale.discard()  # the row may still name its space: it serves no other array
                record.parts.discard(part)
                part.over.set()

    async def complete(self, record: ResumableUpload, expected: bytes | None) -> ArrayInfo:
        """Make an upload whose bytes have all come an array; again, return the same array. `expected`: SHA-256 of
        the whole body.

        Raises UploadIncomplete, CompletedUpload (the array is gone), and DigestMismatch, after which the upload is
        gone.
        """
        async with record.lock:
            if record.array is not None:
                return record.array
            await record.supersede()
            self._check_open(record)
            record.check_whole()
            assert record.upload is not None
            if record.upload.byteswap:
                await self._database.write(lambda db: db.execute(_SQL["seal"], {"id": record.id}))
            upload, record.upload = record.upload, None
            upload.filled = upload.nbytes
            upload.named = True
            upload.on_insert = lambda db: db.execute(_SQL["complete"], {"id": record.id})
            try:
                record.array = cast("ArrayInfo", await upload.commit(expected, prefix=record.head))
            except BaseException:
                record.gone = True  # and with it the reservation
                with contextlib.suppress(StoreFull):  # the row stays; nothing is adopted that is another's by then
                    await asyncio.shield(self._drop(record))
                raise
            record.complete = True
            record.touched = time.monotonic()
            return record.array

    async def cancel(self, record: ResumableUpload) -> None:
        """End what is under way and give the space back; of a complete one forget the upload, not the array."""
        record.gone = True
        await record.supersede()
        async with record.lock:
            await self._drop(record)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check_open(self, record: ResumableUpload) -> None:
        if record.gone or record.id not in self._uploads:
            raise NotFound(f"no upload {record.id}")
        if record.complete:
            raise CompletedUpload(f"upload {record.id} is array {record.array_id}")

    async def _put(self, record: ResumableUpload) -> None:
        if record.upload is not None:
            await self._store.secure(record.upload)
        row = record.to_row()
        await self._database.write(lambda db: db.execute(_SQL["put"], row))

    async def _drop(self, record: ResumableUpload) -> None:
        """The row first, then the space."""
        await self._database.write(partial(_remove, record.id))
        record.gone = True
        self._uploads.pop(record.id, None)
        upload, record.upload = record.upload, None
        if upload is not None:
            upload.abort()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_MAX_SWEEP_PAUSE_S, self.settings.upload_idle_s / _SWEEPS_PER_LIFE))
            oldest = time.monotonic() - self.settings.upload_idle_s
            for record in [one for one in self._uploads.values() if one.touched < oldest and not one.parts]:
                if record.lock.locked() or record.parts or record.touched >= oldest:  # since we looked
                    continue
                try:
                    async with record.lock:  # what comes meanwhile finds it gone
                        await self._drop(record)
                except Exception:  # a full disk, say: the row stays, and so does the space, until the next round
                    log.exception("an idle upload could not be removed")
                    continue
                if not record.complete:
                    self._expired[record.id] = record.owner
                    if len(self._expired) > _MAX_TOMBSTONES:
                        self._expired.popitem(last=False)


def _remove(upload_id: str, db: sqlite3.Connection) -> None:
    db.execute(_SQL["remove"], {"id": upload_id})
