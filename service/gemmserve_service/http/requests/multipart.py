"""multipart/form-data for the one-shot routes: .npy parts go straight into scratch extents, `params` is small JSON.

python-multipart finds the boundaries; its callbacks are gathered for one piece of the body at a time, because space is
reserved with an await between a part's header and its data. Nothing is kept of a piece but copies in the extents.

How many bytes a .npy part has its header says, so once that is known the rest of its data lands in its extent without
being looked at; the search goes on behind it. Only when what follows there is no boundary is it searched for in what
landed, to say what was wrong.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gemmserve.wire import DATA_HEADER, NPY_HEADER, NpyError
from gemmserve_service.errors import (
    BodyTooLong,
    BodyTooShort,
    DescriptorRefused,
    InvalidNpy,
    InvalidParameters,
    TooLarge,
    UnsupportedMediaType,
)
from gemmserve_service.http.problems import MalformedMultipart
from gemmserve_service.http.requests.body import RequestBody
from gemmserve_service.http.requests.ingest import content_length
from gemmserve_service.http.requests.shared_memory import receive_shared
from gemmserve_service.store.declared import NpyHead

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from gemmserve_service.http.requests.shared_memory import SharedRequest
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.declared import Declared
    from gemmserve_service.store.upload import Upload

MAX_PARAMS: Final = 1 << 13
MAX_PART_HEADERS: Final = 8
MAX_PART_HEADER_BYTES: Final = 4096
_LAND_FROM: Final = 1 << 16  # bytes of a part that are worth leaving the parser for
_SEARCH_STEP: Final = 1 << 20

Event = tuple[str, memoryview]


class OneShotForm:
    """The parts of one request: `operands` in scratch extents and the bytes of `params`.

    `names` are the operand parts that the route knows; a and b must come, c may. `check` is called after each array
    header once `params` is known, so that what cannot work is refused before its data are sent.
    """

    def __init__(
        self,
        store: ArrayStore,
        *,
        names: tuple[str, ...],
        check: Callable[[bytes, dict[str, Declared]], None],
        owner: str = "",
        shared: SharedRequest | None = None,
    ) -> None:
        self._shared = shared
        self._store = store
        self._owner = owner
        self._names = names
        self._check = check
        self.operands: dict[str, Upload] = {}
        self.declared: dict[str, Declared] = {}
        self.params: bytes | None = None
        self._events: list[Event] = []
        self._part: _Part | None = None
        self._seen: set[str] = set()
        self._budget = 0
        self._ended = False
        self._boundary = b""
        self._piece = b""
        self._within_data = False
        self._landed: tuple[str, Upload, int] | None = None
        self._behind = b""
        self._handlers: dict[str, Callable[[memoryview], Awaitable[None] | None]] = {
            "begin": self._begin,
            "field": self._field,
            "value": self._value,
            "headers": self._headers,
            "data": self._data,
            "part_end": self._part_end,
            "end": self._end,
        }

    async def read(self, request: Request) -> None:
        """Reads the whole body. Raises MalformedMultipart, InvalidParameters, NpyError, TooLarge, StoreFull...

        The caller aborts in any case (`abort` is idempotent).
        """
        parser = self._parser(request)
        self._budget = content_length(request)
        try:
            await self._read_parts(parser, RequestBody(request))
        except (BodyTooLong, MalformedMultipart) as error:
            await self._look_for_lost_boundary(error)
            raise
        missing = [name for name in ("a", "b") if name not in self.operands]
        if missing:
            raise InvalidParameters(f"part {' and '.join(missing)} missing: send .npy files as parts a and b")

    async def _read_parts(self, parser: MultipartParser, body: RequestBody) -> None:
        try:
            while piece := bytes(await body.piece()):
                self._piece = piece
                self._behind = self._behind or piece
                parser.write(piece)
                for kind, data in self._events:
                    handled = self._handlers[kind](data)
                    if handled is not None:
                        await handled
                self._events.clear()
                await self._land(body)
            parser.finalize()
        except FormParserError as error:
            raise MalformedMultipart(f"the multipart body cannot be read: {error}") from error
        if not self._ended:
            raise MalformedMultipart("the multipart body breaks off before its closing boundary")

    async def _land(self, body: RequestBody) -> None:
        """Reads the rest of a large part's data past the parser, which is within these data now."""
        upload = None if self._part is None else self._part.upload
        if upload is None or not self._within_data or upload.nbytes - upload.filled < _LAND_FROM:
            return
        self._landed, self._behind = (self._current.name, upload, upload.filled), b""
        await body.fill(upload.view[upload.filled :], upload.advance, upload.place(upload.filled))

    async def _look_for_lost_boundary(self, error: Exception) -> None:
        """Raises BodyTooShort if the boundary lies within what landed last: its header had promised too much."""
        if self._landed is None:
            return
        name, upload, start = self._landed
        landed = upload.view[start : upload.filled]
        found = await asyncio.to_thread(_find, landed, self._behind, b"\r\n--" + self._boundary)
        if found is not None:
            raise BodyTooShort(
                f"part {name}: its header says {upload.nbytes} bytes of data, {start + found} came"
            ) from error

    def abort(self) -> None:
        """Gives back every extent."""
        for upload in self.operands.values():
            upload.abort()

    def _parser(self, request: Request) -> MultipartParser:
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data":
            raise UnsupportedMediaType(
                f"Content-Type is {kind.decode('latin-1') or 'missing'}; send multipart/form-data "
                "(curl -F a=@a.npy -F b=@b.npy)"
            )
        boundary = options.get(b"boundary", b"")
        # RFC 2046, section 5.1.1: 1 to 70 characters.
        if not 1 <= len(boundary) <= 70:
            raise MalformedMultipart("Content-Type names no boundary of 1 to 70 characters")
        self._boundary = boundary

        def note(kind: str) -> Callable[[], None]:
            def callback() -> None:
                self._within_data = False
                self._events.append((kind, memoryview(b"")))

            return callback

        def gather(kind: str) -> Callable[[bytes, int, int], None]:
            def callback(data: bytes, start: int, end: int) -> None:
                # To the piece's last byte: the parser holds back nothing that could be the start of a boundary.
                self._within_data = kind == "data" and data is self._piece and end == len(data)
                self._events.append((kind, memoryview(data)[start:end]))

            return callback

        return MultipartParser(
            boundary,
            {
                "on_part_begin": note("begin"),
                "on_header_field": gather("field"),
                "on_header_value": gather("value"),
                "on_headers_finished": note("headers"),
                "on_part_data": gather("data"),
                "on_part_end": note("part_end"),
                "on_end": note("end"),
            },
            max_header_count=MAX_PART_HEADERS,
            max_header_size=MAX_PART_HEADER_BYTES,
        )

    def _begin(self, _: memoryview) -> None:
        if len(self._seen) > len(self._names):
            raise InvalidParameters(f"too many parts: {', '.join(self._names)} and params are read")
        self._part = _Part()

    def _field(self, data: memoryview) -> None:
        self._current.field(bytes(data))

    def _value(self, data: memoryview) -> None:
        self._current.value += bytes(data)

    def _headers(self, _: memoryview) -> None:
        part = self._current
        part.name = part.disposition_name()
        if part.name not in {*self._names, "params"}:
            raise InvalidParameters(
                f"unknown part {part.name[:40]!r}; the parts are {', '.join(self._names)} and params"
            )
        if part.name in self._seen:
            raise InvalidParameters(f"part {part.name} is sent twice")
        self._seen.add(part.name)
        part.shared = part.shared_number()

    async def _data(self, data: memoryview) -> None:
        part = self._current
        if part.name == "params":
            if len(part.text) + len(data) > MAX_PARAMS:
                raise TooLarge(f"params has more than {MAX_PARAMS} bytes")
            part.text += data
        elif part.upload is None:
            await self._npy_head(part, data)
        else:
            _write(part, data)

    async def _npy_head(self, part: _Part, data: memoryview) -> None:
        try:
            found = part.head.feed(data)
        except NpyError as error:
            raise type(error)(f"part {part.name}: {error}") from error
        if found is None:
            return
        declared, first = found
        if part.shared is not None:
            await self._take_shared(part, declared, first)
            return
        # Together the parts cannot hold more than the body: reserve no byte that is not being sent.
        if declared.nbytes > self._budget:
            raise BodyTooShort(
                f"part {part.name}: {declared.dtype.name} of shape {declared.shape} needs {declared.nbytes} bytes, "
                "more than the whole body has left"
            )
        self._budget -= declared.nbytes
        self.declared[part.name] = declared
        if self.params is not None:
            self._check(self.params, self.declared)
        part.upload = await declared.reserve(self._store, scratch=True, owner=self._owner)
        self.operands[part.name] = part.upload
        _write(part, memoryview(first))

    async def _take_shared(self, part: _Part, declared: Declared, first: bytes) -> None:
        """An operand of which the body has the header alone."""
        if first:
            raise BodyTooLong(f"part {part.name}: {NPY_HEADER} is a header alone, its data are in shared memory")
        if self._shared is None:
            raise DescriptorRefused("this request has no shared memory")
        self.declared[part.name] = declared
        if self.params is not None:
            self._check(self.params, self.declared)
        memory = self._shared.take(part.shared)
        part.upload = await receive_shared(memory, declared, self._store, scratch=True, owner=self._owner)
        self.operands[part.name] = part.upload

    def _part_end(self, _: memoryview) -> None:
        part = self._current
        if part.name == "params":
            self.params = bytes(part.text)
        elif part.upload is None:
            try:
                part.head.close()
            except NpyError as error:
                raise InvalidNpy(f"part {part.name}: {error}") from error
        elif part.upload.filled < part.upload.nbytes:
            raise BodyTooShort(
                f"part {part.name}: its header says {part.upload.nbytes} bytes of data, {part.upload.filled} came"
            )
        self._part = self._landed = None

    def _end(self, _: memoryview) -> None:
        self._ended = True

    @property
    def _current(self) -> _Part:
        if self._part is None:
            raise MalformedMultipart("data outside any part")
        return self._part


class _Part:
    """One part while it is being read."""

    def __init__(self) -> None:
        self.name = ""
        self.value = b""
        self.head = NpyHead()
        self.upload: Upload | None = None
        self.shared: str | None = None
        self.text = bytearray()
        self._field = b""
        self._headers: dict[bytes, bytes] = {}

    def field(self, data: bytes) -> None:
        """A (piece of a) header name: the value so far belongs to the name before."""
        if self.value:
            self._store_header()
        self._field += data

    def _store_header(self) -> None:
        self._headers[self._field.strip().lower()] = self.value
        self._field, self.value = b"", b""

    def disposition_name(self) -> str:
        """The name in Content-Disposition. Raises MalformedMultipart."""
        self._store_header()
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name")
        if kind != b"form-data" or not name:
            raise MalformedMultipart("a part lacks Content-Disposition: form-data; name=...")
        return bytes(name).decode("utf-8", "backslashreplace")

    def shared_number(self) -> str | None:
        """The number of the shared memory that holds the data; None: they follow. Known after `disposition_name`."""
        kind = self._headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != NPY_HEADER.encode():
            return None
        return self._headers.get(DATA_HEADER.lower().encode(), b"").decode("latin-1")


def _write(part: _Part, data: memoryview) -> None:
    upload = part.upload
    assert upload is not None
    if len(data) > upload.nbytes - upload.filled:
        raise BodyTooLong(f"part {part.name} goes on past the {upload.nbytes} bytes that its header says")
    upload.write(data)


def _find(view: memoryview, behind: bytes, wanted: bytes) -> int | None:
    """Where `wanted` first begins in `view`, which `behind` follows."""
    reach = len(wanted) - 1
    for start in range(0, len(view), _SEARCH_STEP):
        piece = bytes(view[start : start + _SEARCH_STEP + reach])
        if start + _SEARCH_STEP + reach > len(view):
            piece += behind[:reach]
        found = piece.find(wanted)
        if found >= 0:
            return start + found
    return None
