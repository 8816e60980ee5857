"""multipart/form-data for the one-shot routes: .npy parts go straight into scratch extents, `params` is small JSON.

How many bytes a .npy part has its header says, so once that is known the rest of its data is received in its extent
without being looked at; the search goes on behind it. Only when what follows there is no boundary is it searched for in
what was received so, to say what was wrong.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gemmserve.wire import NPY_HEADER, NpyError
from gemmserve_service.errors import (
    BodyTooLong,
    BodyTooShort,
    DescriptorRefused,
    InvalidNpy,
    InvalidParameters,
    TooLarge,
)
from gemmserve_service.http.problems import MalformedMultipart
from gemmserve_service.http.requests.body import RequestBody
from gemmserve_service.http.requests.ingest import content_length
from gemmserve_service.http.requests.multipart_decoder import END, NEED_DATA, MultipartDecoder, Part, boundary_of
from gemmserve_service.http.requests.shared_memory import receive_shared
from gemmserve_service.store.declared import NpyHead

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from gemmserve_service.http.requests.shared_memory import SharedRequest
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.declared import Declared
    from gemmserve_service.store.upload import Upload

MAX_PARAMS: Final = 1 << 13
_DIRECT_FROM: Final = 1 << 16  # bytes of a part that are worth leaving the decoder for
_SEARCH_STEP: Final = 1 << 20


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
        self._part: _Part | None = None
        self._seen: set[str] = set()
        self._budget = 0
        self._boundary = b""
        self._direct: tuple[str, Upload, int] | None = None  # what was received past the decoder last
        self._behind = b""  # what came behind that

    async def read(self, request: Request) -> None:
        """Reads the whole body. Raises MalformedMultipart, InvalidParameters, NpyError, TooLarge, StoreFull...

        The caller aborts in any case (`abort` is idempotent).
        """
        hint = "send multipart/form-data (curl -F a=@a.npy -F b=@b.npy)"
        self._boundary = boundary_of(request.headers.get("content-type", ""), hint)
        self._budget = content_length(request)
        try:
            await self._read_parts(RequestBody(request))
        except (BodyTooLong, MalformedMultipart) as error:
            await self._look_for_lost_boundary(error)
            raise
        missing = [name for name in ("a", "b") if name not in self.operands]
        if missing:
            raise InvalidParameters(f"part {' and '.join(missing)} missing: send .npy files as parts a and b")

    async def _read_parts(self, body: RequestBody) -> None:
        decoder, ended = MultipartDecoder(self._boundary), False
        while piece := bytes(await body.piece()):
            self._behind = self._behind or piece
            decoder.feed(piece)
            while (event := decoder.next_event()) is not NEED_DATA:
                if isinstance(event, memoryview):
                    await self._data(event)
                    continue
                self._part_end()
                if isinstance(event, Part):
                    self._part_begin(event)
                ended = event is END
            if decoder.skippable:
                decoder.skip(await self._receive_directly(body))
        if not ended:
            raise MalformedMultipart("the multipart body breaks off before its closing boundary")

    async def _receive_directly(self, body: RequestBody) -> int:
        """Receives the rest of a large part's data in its place; returns how many bytes came."""
        upload = None if self._part is None else self._part.upload
        if upload is None or self._part is None or upload.nbytes - upload.filled < _DIRECT_FROM:
            return 0
        start = upload.filled
        self._direct, self._behind = (self._part.name, upload, start), b""
        await body.fill(upload.view[start:], upload.advance, upload.place(start))
        return upload.filled - start

    async def _look_for_lost_boundary(self, error: Exception) -> None:
        """Raises BodyTooShort if the boundary lies within what was received past the decoder: its header was wrong."""
        if self._direct is None:
            return
        name, upload, start = self._direct
        received = upload.view[start : upload.filled]
        found = await asyncio.to_thread(_find, received, self._behind, b"\r\n--" + self._boundary)
        if found is not None:
            raise BodyTooShort(
                f"part {name}: its header says {upload.nbytes} bytes of data, {start + found} came"
            ) from error

    def abort(self) -> None:
        """Gives back every extent."""
        for upload in self.operands.values():
            upload.abort()

    def _part_begin(self, found: Part) -> None:
        if len(self._seen) > len(self._names):
            raise InvalidParameters(f"too many parts: {', '.join(self._names)} and params are read")
        if found.name not in {*self._names, "params"}:
            raise InvalidParameters(
                f"unknown part {found.name[:40]!r}; the parts are {', '.join(self._names)} and params"
            )
        if found.name in self._seen:
            raise InvalidParameters(f"part {found.name} is sent twice")
        self._seen.add(found.name)
        self._part = _Part(found)

    async def _data(self, data: memoryview) -> None:
        part = self._part
        assert part is not None  # the decoder gives data of parts alone
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
        part.upload = declared.reserve(self._store, scratch=True, owner=self._owner)
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

    def _part_end(self) -> None:
        part = self._part
        if part is None:
            return
        if part.name == "params":
            self.params = bytes(part.text)
        elif part.upload is None:
            raise InvalidNpy(f"part {part.name}: {part.head.cut_short()}")
        elif part.upload.filled < part.upload.nbytes:
            raise BodyTooShort(
                f"part {part.name}: its header says {part.upload.nbytes} bytes of data, {part.upload.filled} came"
            )
        self._part = self._direct = None


class _Part:
    """One part while it is being read."""

    def __init__(self, found: Part) -> None:
        self.name, self.shared = found.name, found.shared
        self.head = NpyHead()
        self.upload: Upload | None = None
        self.text = bytearray()


def _write(part: _Part, data: memoryview) -> None:
    upload = part.upload
    assert upload is not None
    if len(data) > upload.nbytes - upload.filled:
        raise BodyTooLong(f"part {part.name} goes on past the {upload.nbytes} bytes that its header says")
    upload.write(data)


def _find(view: memoryview, behind: bytes, wanted: bytes) -> int | None:
    """Offset at which `wanted` first begins in `view`, which `behind` follows."""
    reach = len(wanted) - 1
    for start in range(0, len(view), _SEARCH_STEP):
        piece = bytes(view[start : start + _SEARCH_STEP + reach])
        if start + _SEARCH_STEP + reach > len(view):
            piece += behind[:reach]
        found = piece.find(wanted)
        if found >= 0:
            return start + found
    return None
