"""One upload in parts: what was declared, what has come, and what is coming just now."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve.wire import NPY
from gemmserve_service.errors import (
    BodyTooShort,
    DigestMismatch,
    InconsistentUploadLength,
    UploadIncomplete,
    UploadSuperseded,
)
from gemmserve_service.store.declared import NpyHead
from gemmserve_service.store.hashing.running_hash import RunningHash
from gemmserve_service.store.resumable.byte_ranges import Spans
from gemmserve_service.store.upload import ArraySpec

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Awaitable, Callable, Coroutine
    from concurrent.futures import ThreadPoolExecutor

    from gemmserve_service.http.requests.body import RequestBody
    from gemmserve_service.schemas import ArrayInfo
    from gemmserve_service.store.declared import Declared
    from gemmserve_service.store.upload import Upload

    Reserve = Callable[[Declared], Awaitable[Upload]]

_HOLES_NAMED: Final = 100


class Transfer:
    """One request that brings bytes [start, end) of the body. `append`: in the draft's way, one at a time."""

    def __init__(self, start: int, end: int, *, append: bool, unchecked: bool = False) -> None:
        self.start = start
        self.end = end
        self.append = append
        self.unchecked = unchecked
        """Whether it may be writing bytes whose digest is yet to be checked."""
        self.landed = start
        """Up to where its bytes have come."""
        self.over = asyncio.Event()
        """It writes no more, and what came of it is on record."""
        self._task: asyncio.Task[None] | None = None
        self._superseded = False

    def meets(self, start: int, end: int) -> bool:
        """Whether it writes some of these bytes."""
        return self.start < end and start < self.end

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Waits for `work`. Raises UploadSuperseded when `end_early` was called meanwhile."""
        self._task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([self._task])
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._superseded and self._task.cancelled():
            raise UploadSuperseded("a later request for this upload took this one's place")
        self._task.result()

    async def end_early(self) -> None:
        """Stops it, and waits until it writes no more."""
        self._superseded = True
        if self._task is not None:
            self._task.cancel()
        await self.over.wait()


@dataclass(eq=False)
class PartialUpload:
    """An upload resource. Offsets are those of the body, .npy header included where it has one."""

    id: str
    owner: str
    media_type: str
    ttl_s: float | None
    """As it was asked for: None is the server's default."""
    created_at: float
    touched: float
    """When it was heard of last, by time.monotonic."""
    length: int | None = None
    """Bytes of the whole body, once known."""
    head: bytes = b""
    """What has come of the .npy header."""
    upload: Upload | None = None
    """The reservation, once shape and dtype are known; None again once it is an array."""
    received: Spans = field(default_factory=Spans)
    array: ArrayInfo | None = None
    """What it became, unless that is gone already."""
    array_id: str | None = None
    complete: bool = False
    gone: bool = False
    """Cancelled, expired or failed."""
    transfers: set[Transfer] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def offset(self) -> int:
        """Where the first missing byte is."""
        return (self.length or 0) if self.complete else self.received.prefix

    def check_length(self, said: int | None) -> None:
        """What a request says of the whole body's length, if anything. Raises InconsistentUploadLength."""
        if self.length is None:
            self.length = said
        elif said not in {None, self.length}:
            raise InconsistentUploadLength(f"a length of {said} bytes, and the upload has {self.length}")

    def check_end(self, end: int) -> None:
        """Whether bytes up to `end` belong to it. Raises InconsistentUploadLength."""
        if self.length is not None and end > self.length:
            raise InconsistentUploadLength(f"bytes up to {end} of an upload that has {self.length}")

    async def stop(self, *, appends: bool = True, span: tuple[int, int] | None = None) -> None:
        """Ends requests that are under way: all, or those that meet `span`, and with `appends` the draft's."""
        for transfer in list(self.transfers):
            if span is None or transfer.meets(*span) or (appends and transfer.append):
                await transfer.end_early()

    def holes(self) -> UploadIncomplete | None:
        """What is missing, as the error to raise."""
        if self.upload is None or self.length is None:
            return UploadIncomplete("the .npy header has not come yet", missing=[])
        missing = self.received.missing(self.length)
        if not missing:
            return None
        count = sum(end - start for start, end in missing)
        return UploadIncomplete(
            f"{count} of {self.length} bytes have not come",
            missing=[list(hole) for hole in missing[:_HOLES_NAMED]],
        )

    async def receive(
        self, body: RequestBody, transfer: Transfer, expected: bytes | None, pool: ThreadPoolExecutor, reserve: Reserve
    ) -> None:
        """Takes the bytes of `transfer` in. `expected`: their SHA-256. Raises what is wrong with them.

        What came of a transfer that broke off stays, unless a digest was to be checked: then none of it does.
        """
        try:
            await self._receive(body, transfer, expected, pool, reserve)
        except BaseException:
            if expected is None:
                self.received.add(transfer.start, transfer.landed)
            else:
                self.received.remove(transfer.start, transfer.landed)
                if self.upload is None:
                    self.head = self.head[: transfer.start]
            raise
        self.received.add(transfer.start, transfer.end)

    async def _receive(
        self, body: RequestBody, transfer: Transfer, expected: bytes | None, pool: ThreadPoolExecutor, reserve: Reserve
    ) -> None:
        said = b""
        if self.media_type == NPY:
            if self.upload is None:
                said = await self._take_head(body, transfer, reserve)
            elif transfer.start < len(self.head):
                said = await self._skip_head(body, transfer)
        upload = self.upload
        first, last = transfer.landed - len(self.head), transfer.end - len(self.head)
        running = None
        if upload is not None and first < last:
            view = upload.view[first:last]
            if expected is not None:
                running = RunningHash(pool, view, said)

            def advance(count: int) -> None:
                transfer.landed += count
                upload.moved(count)
                if running is not None:
                    running.advance(transfer.landed - len(self.head) - first)

            await body.fill(view, advance, upload.place(first))
        if transfer.landed < transfer.end:
            raise BodyTooShort(f"the part ended after {transfer.landed - transfer.start} bytes")
        if expected is not None:
            if running is None:
                running = RunningHash(pool, memoryview(said))
                running.advance(len(said))
            try:
                await running.finish()
            finally:
                running.cancel()
            if running.body_digest() != expected:
                raise DigestMismatch(f"Content-Digest names sha-256 {expected.hex()}, the part has another")

    async def _take_head(self, body: RequestBody, transfer: Transfer, reserve: Reserve) -> bytes:
        """Reads on in the .npy header; reserves the array's space once it is whole. Returns what of it came."""
        if transfer.start != len(self.head):
            raise UploadIncomplete(f"the .npy header comes first, and goes on at {len(self.head)}", missing=[])
        known = self.head
        while self.upload is None and (piece := await body.piece()):
            reader = NpyHead()
            found = reader.feed(self.head + bytes(piece))
            if found is None:
                self.head += piece
                transfer.landed += len(piece)
                continue
            declared, data = found
            length = len(declared.header) + declared.nbytes
            if self.length not in {None, length}:
                raise InconsistentUploadLength(
                    f"Upload-Length is {self.length}, and by its header the .npy file has {length} bytes"
                )
            if transfer.end > length:
                raise InconsistentUploadLength(f"{transfer.end} bytes, and by its header the .npy file has {length}")
            self.upload = await reserve(declared)
            self.array_id = self.upload.spec.id
            self.head, self.length = declared.header, length
            transfer.landed = len(self.head)
            body.unread(data)
        return self.head[len(known) :]

    async def _skip_head(self, body: RequestBody, transfer: Transfer) -> bytes:
        """Passes over the part of the header that comes again."""
        end = min(transfer.end, len(self.head))
        again = bytearray(end - transfer.start)

        def advance(count: int) -> None:
            transfer.landed += count

        await body.fill(memoryview(again), advance)
        if transfer.landed == end and bytes(again) != self.head[transfer.start : end]:
            raise InconsistentUploadLength("this .npy header is not the one that came before")
        return bytes(again)

    # -- as a row of the table `uploads` -------------------------------------------------------------------------------

    def to_row(self) -> dict[str, Any]:
        """The parameters of the statement `put` of sql/uploads.sql."""
        upload = self.upload
        spec = None if upload is None else upload.spec
        received = Spans(self.received)
        for transfer in self.transfers:
            if transfer.unchecked:  # nor are they, should the process be killed meanwhile
                received.remove(transfer.start, transfer.end)
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
        }


def spec_of(row: sqlite3.Row) -> ArraySpec:
    """The reservation that a row describes."""
    shape = tuple(json.loads(row["shape"]))
    dtype = np.dtype(row["dtype"]).name
    return ArraySpec(
        row["array_id"], dtype, shape, row["memory_order"], row["nbytes"], row["kept_s"], False, row["owner"]
    )


def from_row(row: sqlite3.Row, touched: float) -> PartialUpload:
    """The upload in a row, without its reservation."""
    return PartialUpload(
        id=row["id"],
        owner=row["owner"],
        media_type=row["media_type"],
        ttl_s=row["ttl_s"],
        created_at=row["created_at"],
        touched=touched,
        length=row["length"],
        head=bytes(row["head"]),
        received=Spans(tuple(span) for span in json.loads(row["received"])),
        array_id=row["array_id"],
        complete=row["state"] == "complete",
    )
