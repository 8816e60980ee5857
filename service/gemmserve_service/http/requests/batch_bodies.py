"""Operands of a batch in one body: landed whole in an extent, and used where they lie.

A part a, b or c is a .npy file, or several one behind the other, as `numpy.save` writes them into one open file. One
file of three dimensions or more is a stack along its first axis; one matrix is used by every product.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from python_multipart.multipart import parse_options_header

from gemmserve.wire import NPY_HEADER, NpyError, NpyHeader, parse_npy_header
from gemmserve_service.errors import BodyTooShort, InvalidNpy, InvalidParameters, TooLarge, UnsupportedMediaType
from gemmserve_service.http.problems import MalformedMultipart
from gemmserve_service.http.requests.body import RequestBody
from gemmserve_service.http.requests.ingest import content_length
from gemmserve_service.http.requests.multipart import MAX_PARAMS, MAX_PART_HEADER_BYTES
from gemmserve_service.jobs.batch.task import Placed
from gemmserve_service.jobs.small.bundles import reserve
from gemmserve_service.runtime.yielding import Turns

if TYPE_CHECKING:
    from starlette.requests import Request

    from gemmserve_service.settings import Settings
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.upload import Upload

_THREAD_FROM: Final = 1 << 20  # bytes that are moved or swapped in a thread
_PARTS: Final = 3  # a, b and c, of which each product may come in parts of its own
_MOST_NPY_HEAD: Final = (1 << 16) + 12


@dataclass(frozen=True, slots=True)
class Found:
    """An array in the body."""

    header: NpyHeader
    offset: int
    """Of its data."""


async def land(request: Request, store: ArrayStore, settings: Settings, owner: str) -> Upload:
    """The whole body, in an extent. Raises LengthRequired, TooLarge, StoreFull, QuotaExceeded, ClientDisconnect."""
    length = content_length(request)
    if length > settings.max_batch_bytes:
        raise TooLarge(f"the body has {length} bytes, a batch at most {settings.max_batch_bytes}")
    if not length:
        raise MalformedMultipart("the body is empty")
    upload = reserve(store, length, largest=0, owner=owner)
    try:
        whole = await RequestBody(request).fill(upload.view, upload.advance, upload.place(0))
    except BaseException:
        upload.abort()
        raise
    if not whole:
        upload.abort()
        raise BodyTooShort(f"the body ended before its {length} bytes")
    return upload


def boundary_of(request: Request) -> bytes:
    """From the Content-Type. Raises UnsupportedMediaType, MalformedMultipart."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data":
        raise UnsupportedMediaType(
            f"Content-Type is {kind.decode('latin-1') or 'missing'}; a batch is application/json or multipart/form-data"
        )
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:  # RFC 2046, section 5.1.1
        raise MalformedMultipart("Content-Type names no boundary of 1 to 70 characters")
    return bytes(boundary)


async def cut(body: memoryview, boundary: bytes, most: int) -> tuple[bytes | None, dict[str, list[Found]]]:
    """The params part, and the arrays of a, b and c. Others have their turns meanwhile.


    Raises MalformedMultipart, InvalidParameters, NpyError, TooLarge, UnsupportedMediaType.
    """
    delimiter = b"\r\n--" + boundary
    if body[: len(delimiter) - 2] != delimiter[2:]:
        raise MalformedMultipart("the body does not begin with its boundary")
    params: bytes | None = None
    arrays: dict[str, list[Found]] = {}
    position = len(delimiter) - 2
    turns = Turns()
    parts = 0
    while (follows := bytes(body[position : position + 2])) != b"--":
        if follows != b"\r\n":
            raise MalformedMultipart("the body breaks off before its closing boundary")
        parts += 1
        if parts > _PARTS * most + 1:
            raise TooLarge(f"the body has more than {_PARTS * most + 1} parts")
        head = bytes(body[position : position + MAX_PART_HEADER_BYTES])
        length = head.find(b"\r\n\r\n")
        if length < 0:
            raise MalformedMultipart(f"a part's headers do not end within {MAX_PART_HEADER_BYTES} bytes")
        name = _name(head[:length])
        position += length + 4
        if name == "params":
            if params is not None:
                raise InvalidParameters("part params is sent twice")
            text = bytes(body[position : position + MAX_PARAMS + len(delimiter)])
            end = text.find(delimiter)
            if end < 0:
                raise TooLarge(f"params has more than {MAX_PARAMS} bytes, or does not end")
            params = text[:end]
            position += end
        else:
            position = await _files(name, body, position, delimiter, arrays.setdefault(name, []), most, turns)
        await turns.pause()
        position += len(delimiter)
    return params, arrays


def _name(head: bytes) -> str:
    fields: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        field, colon, value = line.partition(b":")
        if colon:
            fields[field.strip().lower()] = value.strip()
    kind, options = parse_options_header(fields.get(b"content-disposition", b""))
    name = bytes(options.get(b"name", b"")).decode("utf-8", "backslashreplace")
    if kind != b"form-data" or not name:
        raise MalformedMultipart("a part lacks Content-Disposition: form-data; name=...")
    if name not in {"a", "b", "c", "params"}:
        raise InvalidParameters(f"unknown part {name[:40]!r}; the parts are a, b, c and params")
    if fields.get(b"content-type", b"").lower().startswith(NPY_HEADER.encode()):
        raise UnsupportedMediaType("operands of a batch are not taken from shared memory")
    return name


async def _files(
    name: str, body: memoryview, position: int, delimiter: bytes, found: list[Found], most: int, turns: Turns
) -> int:
    """Notes the .npy files from `position` on; returns where the part ends."""
    while body[position : position + len(delimiter)] != delimiter:
        await turns.pause()
        if len(found) >= most:
            raise TooLarge(f"part {name} has more than {most} arrays")
        try:
            header = _header(body, position)
        except NpyError as error:
            raise type(error)(f"part {name}, array {len(found)}: {error}") from error
        start = position + header.data_offset
        if header.nbytes > len(body) - start:
            raise BodyTooShort(
                f"part {name}, array {len(found)}: its header says {header.nbytes} bytes of data, the body has "
                f"{len(body) - start} left"
            )
        found.append(Found(header, start))
        position = start + header.nbytes
    return position


def _header(body: memoryview, position: int) -> NpyHeader:
    prefix = 10 if bytes(body[position + 6 : position + 7]) == b"\x01" else 12
    length = int.from_bytes(body[position + 8 : position + prefix], "little")
    header = _parsed(bytes(body[position : position + min(prefix + length, _MOST_NPY_HEAD)]))
    if header is None:
        raise InvalidNpy("the body ends within the .npy header")
    return header


@lru_cache(1024)
def _parsed(head: bytes) -> NpyHeader | None:
    return parse_npy_header(head)


@lru_cache(64)
def _name_of(dtype: np.dtype) -> str:
    """Without the order of its bytes."""
    return str(dtype.newbyteorder("=").name)


async def align(upload: Upload, arrays: dict[str, list[Found]]) -> dict[str, list[Found]]:
    """Moves data that do not lie at multiples of their element's size, and swaps big-endian ones. In place."""
    jobs = [
        (name, index)
        for name, found in arrays.items()
        for index, each in enumerate(found)
        if each.header.nbytes and (each.offset % each.header.dtype.itemsize or _swapped(each.header.dtype))
    ]
    if not jobs:
        return arrays
    moved = {name: list(found) for name, found in arrays.items()}

    def work() -> None:
        for name, index in jobs:
            moved[name][index] = _align(upload.view, moved[name][index])

    total = sum(arrays[name][index].header.nbytes for name, index in jobs)
    if total < _THREAD_FROM:
        turns = Turns()
        for name, index in jobs:
            moved[name][index] = _align(upload.view, moved[name][index])
            await turns.pause()
        return moved
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await task  # the extent must not be given back while the thread is at it
        raise
    return moved


def _align(view: memoryview, found: Found) -> Found:
    header, offset = found.header, found.offset
    # Towards the header, which is longer than an element and needed no more.
    start = offset - offset % header.dtype.itemsize
    if start != offset:
        view[start : start + header.nbytes] = view[offset : offset + header.nbytes]
    if _swapped(header.dtype):
        width = header.dtype.itemsize // (2 if header.dtype.kind == "c" else 1)
        np.frombuffer(view[start : start + header.nbytes], f"u{width}").byteswap(inplace=True)
    return Found(header, start)


def _swapped(dtype: np.dtype) -> bool:
    return dtype.newbyteorder("<") != dtype


def operands(
    upload: Upload, arrays: dict[str, list[Found]], *, planar: bool, most: int
) -> tuple[int, dict[str, list[Placed]]]:
    """How many products there are, and of every operand the one of each. Raises InvalidParameters, TooLarge."""
    missing = [name for name in ("a", "b") if not arrays.get(name)]
    if missing:
        raise InvalidParameters(f"part {' and '.join(missing)} missing: send .npy files as parts a and b")
    stacked = {name for name, found in arrays.items() if len(found) > 1 or _is_stack(found, planar=planar)}
    counts = {name: len(arrays[name]) if len(arrays[name]) > 1 else arrays[name][0].header.shape[0] for name in stacked}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} has {count}" for name, count in sorted(counts.items()))
        raise InvalidParameters(f"the parts hold different numbers of arrays: {said}")
    count = next(iter(counts.values()), 1)
    if count > most:
        raise TooLarge(f"a batch of {count} products; this server takes at most {most}")
    listed = {name: _unstack(name, upload, found, planar=planar) for name, found in arrays.items() if found}
    return count, {name: each if name in stacked else each * count for name, each in listed.items()}


def _is_stack(found: list[Found], *, planar: bool) -> bool:
    return len(found) == 1 and len(found[0].header.shape) > (3 if planar else 2)


def _unstack(name: str, upload: Upload, found: list[Found], *, planar: bool) -> list[Placed]:
    if not _is_stack(found, planar=planar):
        return [_placed(upload, each.header, each.header.shape, each.offset) for each in found]
    (only,) = found
    if only.header.fortran_order:
        raise InvalidParameters(f"part {name}: a stack of matrices must be in C order")
    count, *shape = only.header.shape
    step = only.header.nbytes // count if count else 0
    return [_placed(upload, only.header, tuple(shape), only.offset + i * step) for i in range(count)]


def _placed(upload: Upload, header: NpyHeader, shape: tuple[int, ...], offset: int) -> Placed:
    kind = (_name_of(header.dtype), shape, header.order)
    return Placed(kind, upload.extent if header.nbytes else None, offset)
