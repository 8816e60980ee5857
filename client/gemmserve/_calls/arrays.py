"""Flows of arrays: put, fetched, shown, deleted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from gemmserve import _errors, wire
from gemmserve._calls import requests
from gemmserve._calls.exchanges import CLEANUP_LIMIT_S, Exchanges, pause_after
from gemmserve._calls.places import by_cell
from gemmserve._calls.requests import Request, Together, Work
from gemmserve._transfer.parts import PART, PARTS_FROM, Download, Span, Stretch, divisible, flat, spans
from gemmserve._transport.content_coding import compressed
from gemmserve._transport.retry import may_be_done

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gemmserve._calls.exchanges import Flow
    from gemmserve._handles.view import Base, View
    from gemmserve._model import ArrayInfo
    from gemmserve._transfer.arrays import AnyArray

T = TypeVar("T")

INLINE: Final = 1 << 18
"""Bytes that are hashed sooner than a thread is woken."""

UNSUPPORTED: Final = 415
"""Status of an answer to a coding that the server does not read."""

SPARSE: Final = 2
"""Elements, for each that a view shows, between its first and its last, up to which they are all fetched: more than
twice the bytes cost more than an exchange that has the server gather them."""

SMALL_SPAN: Final = 1 << 18
"""Bytes between a view's first and last that are fetched whatever it shows of them: less time than another exchange
(2 ms at 1 Gbit/s)."""

LOOK_LIMIT_S: Final = 2.0
"""Seconds of silence after which a picture is given up: somebody waits for the next line of a notebook."""


class ArrayFlows(Exchanges):
    """Flows whose requests are of arrays alone."""

    def put(
        self,
        array: AnyArray,
        *,
        ttl_s: float | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        digest: bool = False,
        label: str = "put",
    ) -> Flow[ArrayInfo]:
        """Stores an array; a large one in parts, each of which goes on where its connection broke."""
        query = requests.kept(ttl_s=ttl_s, name=name, labels=labels)
        digest = digest or self.digests == "always"
        if self.compression:
            body = yield Work(partial(compressed, array))
            if body is not None:
                try:
                    request = requests.put_array(array, query=query, digest=digest, label=label, compressed=body)
                    return (yield from self.call(request))
                except _errors.APIError as error:
                    if error.status != UNSUPPORTED:  # else a server that does not know it takes the array as it is
                        raise
        if self.connections and array.nbytes >= PARTS_FROM and divisible(array) and not self.goes_whole(array):
            for last in (False, True):
                try:
                    return (yield from self._put_in_parts(array, query, digest=digest, label=label))
                except (_errors.NotFound, _errors.Gone):
                    # The server lost the upload, or gave it up; or it is one that has none.
                    if last:
                        break
        return (yield from self.call(requests.put_array(array, query=query, digest=digest, label=label)))

    def _put_in_parts(self, array: AnyArray, query: requests.Query, *, digest: bool, label: str) -> Flow[ArrayInfo]:
        begun = yield from self.call(requests.begin_upload(array, query=query))
        data = flat(array)
        parts = [
            self._send_part(begun.id, data, start, end, digest=digest, label=label)
            for start, end in spans(0, len(data), begun.part)
        ]
        try:
            yield Together(parts, self.connections, f"sending {label}", len(data))
            return (yield from self.call(requests.complete_upload(begun.id)))
        except GeneratorExit:
            raise
        except BaseException:
            yield from self.attempt(requests.cancel_upload(begun.id, limit_s=CLEANUP_LIMIT_S))
            raise

    def _send_part(
        self, upload_id: str, data: memoryview, start: int, end: int, *, digest: bool, label: str
    ) -> Flow[None]:
        attempts = self.attempts()
        while start < end:
            try:
                yield requests.send_part(upload_id, start, data[start:end], digest=digest, label=label)
            except _errors.GemmserveError as error:
                yield from pause_after(attempts, error)
            else:
                return
            if not digest:  # else the part is checked whole, and comes whole
                known = yield from self.call(requests.upload_info(upload_id))
                reached = max([start, *(high for low, high in known.received if low <= start)])
                if reached > start:
                    attempts = self.attempts()
                start = reached

    def download(self, array_id: str, *, nbytes: int = 0, out: AnyArray | None = None) -> Flow[Any]:
        """An array's elements; `nbytes` where they are known: many are fetched over several connections. `out`: an
        array of the same shape and dtype that they may be received into.
        """
        if not self.connections or self.compression or self.comes_whole(nbytes):
            request = requests.array_data(array_id, nbytes=nbytes, compression=self.compression)
            return (yield from self.call(request))
        attempts = self.attempts()
        while True:
            try:
                return (yield from self._download(array_id, nbytes, out))
            except _errors.CorruptAnswer as error:
                yield from pause_after(attempts, error)

    def _download(self, array_id: str, nbytes: int, out: AnyArray | None) -> Flow[Any]:
        download = Download(out)
        first = Span(download, 0, PART if nbytes >= PARTS_FROM else None)
        reached = yield from self._fetch(array_id, first)
        if download.total is not None and reached < download.total:
            rest = [
                self._fetch(array_id, Span(download, low, high)) for low, high in spans(reached, download.total, PART)
            ]
            yield Together(rest, self.connections, "receiving get", download.total - reached)
        if download.sha256 is None and self.digests == "always":
            raise _errors.ProtocolError('the download has no Repr-Digest, and digests="always" wants one')
        if download.sha256 is not None and self.digests != "never":
            download.check()
        return download.result()

    def _fetch(self, array_id: str, span: Span) -> Flow[int]:
        """A span of an array's file; returns where it ends."""
        start = span.position
        reached = yield from self._received(span, partial(requests.array_part, array_id, span))
        if span.download.sha256 is not None and self.digests != "never":
            hashing = partial(span.download.came, start, reached)
            if reached - start < INLINE:
                hashing()
            else:
                yield Work(hashing)
        return reached

    def _received(self, place: Span | Stretch, request: Callable[[], Request[int]]) -> Flow[int]:
        """Where what `request` asks for ends; it is asked again from where an answer broke off, and attempts count anew
        whenever bytes have come.
        """
        attempts = self.attempts()
        while True:
            began = place.position
            try:
                reached: int = yield request()
            except _errors.GemmserveError as error:
                if place.position > began:
                    attempts = self.attempts()
                yield from pause_after(attempts, error)
            else:
                return reached

    def download_view(self, array_id: str, base: Base, view: View) -> Flow[AnyArray | None]:
        """The elements of a view; None where they lie so sparsely in their array that the server should gather them.

        The stretch of the array from the first to the last of them is fetched. It has no digest of its own, so with
        digests="always" only whole arrays are fetched.
        """
        size = base.dtype.itemsize
        if view.size == 0:
            yield from self.call(requests.array_info(array_id))  # whether it is there
            return np.empty(view.shape, view.dtype(base.dtype))
        low, high = view.span()
        whole = high - low == base.size
        shown = view.size * view.dtype(base.dtype).itemsize
        sparse = (high - low) * size > max(SPARSE * shown, SMALL_SPAN)
        if sparse or (self.digests == "always" and not whole):
            return None
        if whole:
            found = yield from self.download(array_id, nbytes=base.size * size)
            return view.show(requests.single_array(found).reshape(-1, order="F" if base.order == "F" else "C"))
        memory = np.empty(high - low, base.dtype.newbyteorder("<"))
        data = flat(memory)
        part = PART if self.connections and len(data) >= PARTS_FROM else len(data)
        parts = [
            self._fetch_stretch(array_id, Stretch(data[start:stop], low * size + start))
            for start, stop in spans(0, len(data), part)
        ]
        if len(parts) == 1:
            yield from parts[0]
        else:
            yield Together(parts, self.connections, "receiving get", len(data))
        return view.show(memory.astype(base.dtype, copy=False), low)

    def _fetch_stretch(self, array_id: str, stretch: Stretch) -> Flow[int]:
        """A stretch of an array's data; returns where it ends."""
        return self._received(stretch, partial(requests.array_stretch, array_id, stretch))

    def delete_all(self, ids: list[str]) -> Flow[None]:
        """Deletes temporaries; whatever fails is left to their time to live."""
        for array_id in ids:
            yield from self.attempt(requests.delete_array(array_id))

    def delete_one(self, array_id: str) -> Flow[None]:
        """Deletes an array. Raises NotFound where there is none, unless an attempt before may have deleted it."""
        attempts = self.attempts()
        done = False
        while True:
            try:
                yield requests.delete_array(array_id)
            except _errors.NotFound:
                if not done:
                    raise
                return
            except _errors.GemmserveError as error:
                done = done or may_be_done(error)
                yield from pause_after(attempts, error)
            else:
                return

    def delete(self, ids: Sequence[str]) -> Flow[int]:
        """Deletes arrays, many by each exchange, those of each cell by themselves; those that are gone already are
        passed over. Returns how many went. Where a cell fails the others' arrays go all the same; its error is raised
        in the end.
        """
        count = 0
        failed: _errors.GemmserveError | None = None
        for own in by_cell(map(requests.segment, ids)):
            try:
                for low in range(0, len(own), wire.MAX_DELETED):
                    some = own[low : low + wire.MAX_DELETED]
                    deleted = yield from self.call(requests.delete_arrays({"ids": some}))
                    count += deleted.count
            except _errors.GemmserveError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return count

    def delete_chosen(
        self,
        name: str | None,
        labels: Mapping[str, str] | None,
        older_than_s: float | None,
        *,
        dry_run: bool,
    ) -> Flow[int]:
        """Deletes the arrays that all of what is given chooses, the oldest first; returns how many, or would."""
        choice: dict[str, Any] = {"name": name, "older_than_s": older_than_s, "dry_run": dry_run or None}
        choice = {field: value for field, value in choice.items() if value is not None}
        if labels:
            choice["labels"] = requests.texts(labels)
        count, more = 0, True
        while more:
            deleted = yield from self.call(requests.delete_arrays(choice))
            count, more = count + deleted.count, deleted.more
        return count

    def with_temporaries(self, make: Callable[[list[str]], Flow[T]]) -> Flow[T]:
        """Return what `make` does; arrays whose ids it notes in its list are deleted in the end, however it ends."""
        temporaries: list[str] = []
        try:
            value = yield from make(temporaries)
        except GeneratorExit:
            raise
        except BaseException:
            yield from self.delete_all(temporaries)
            raise
        yield from self.delete_all(temporaries)
        return value

    def look(self, array_id: str, info: ArrayInfo | None) -> Flow[tuple[ArrayInfo, AnyArray | None]]:
        """(Metadata of an array, some of its elements if they can be had at once), asked for once and not for long."""
        if info is None:
            info = yield requests.array_info(array_id, limit_s=LOOK_LIMIT_S)
        sample = yield requests.array_sample(array_id, limit_s=LOOK_LIMIT_S)
        return info, sample
