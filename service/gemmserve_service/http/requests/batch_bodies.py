"""Operands of a batch in one body: received whole in an extent, and used where they lie.

A part a, b or c is a .npy file, or several one behind the other, as `numpy.save` writes them into one open file. One
file of three dimensions or more is a stack along its first axis; one matrix is used by every product.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve.wire import NpyError, NpyHeader, parse_npy_header
from gemmserve_service.errors import BodyTooShort, InvalidNpy, InvalidParameters, TooLarge, UnsupportedMediaType
from gemmserve_service.http.problems import MalformedMultipart
from gemmserve_service.http.requests.body import RequestBody
from gemmserve_service.http.requests.ingest import content_length
from gemmserve_service.http.requests.multipart import MAX_PARAMS
from gemmserve_service.http.requests.multipart_decoder import END, NEED_DATA, MultipartDecoder, Part
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
_MAX_NPY_HEAD: Final = (1 << 16) + 12


@dataclass(frozen=True, slots=True)
class Found:
    """An array in the body."""

    header: NpyHeader
    offset: int
    """Offset of its data, bytes."""


async def receive_whole(request: Request, store: ArrayStore, settings: Settings, owner: str) -> Upload:
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


async def cut(body: memoryview, boundary: bytes, most: int) -> tuple[bytes | None, dict[str, list[Found]]]:
    """The params part, and the arrays of a, b and c. Others have their turns meanwhile.


    Raises MalformedMultipart, InvalidParameters, NpyError, TooLarge, UnsupportedMediaType.
    """
    decoder = MultipartDecoder(boundary, body)
    params: bytes | None = None
    arrays: dict[str, list[Found]] = {}
    turns = Turns()
    parts = 0
    while (event := decoder.next_event()) is not END:
        if event is NEED_DATA:
            raise MalformedMultipart("the body breaks off before its closing boundary")
        if not isinstance(event, Part):  # of params: what other parts hold is skipped
            assert params is not None
            params += bytes(event)
            if len(params) > MAX_PARAMS:
                raise TooLarge(f"params has more than {MAX_PARAMS} bytes, or does not end")
            continue
        parts += 1
        if parts > _PARTS * most + 1:
            raise TooLarge(f"the body has more than {_PARTS * most + 1} parts")
        if event.name not in {"a", "b", "c", "params"}:
            raise InvalidParameters(f"unknown part {event.name[:40]!r}; the parts are a, b, c and params")
        if event.shared is not None:
            raise UnsupportedMediaType("operands of a batch are not taken from shared memory")
        if event.name != "params":
            await _files(event.name, body, decoder, arrays.setdefault(event.name, []), most, turns)
        elif params is not None:
            raise InvalidParameters("part params is sent twice")
        else:
            params = b""
        await turns.pause()
    return params, arrays


async def _files(
    name: str, body: memoryview, decoder: MultipartDecoder, found: list[Found], most: int, turns: Turns
) -> None:
    """Notes the .npy files of a part, to its end."""
    while not decoder.at_delimiter():
        await turns.pause()
        if len(found) >= most:
            raise TooLarge(f"part {name} has more than {most} arrays")
        try:
            header = _header(body, decoder.position)
        except NpyError as error:
            raise type(error)(f"part {name}, array {len(found)}: {error}") from error
        start = decoder.position + header.data_offset
        if header.nbytes > len(body) - start:
            raise BodyTooShort(
                f"part {name}, array {len(found)}: its header says {header.nbytes} bytes of data, the body has "
                f"{len(body) - start} left"
            )
        found.append(Found(header, start))
        decoder.skip(header.data_offset + header.nbytes)


def _header(body: memoryview, position: int) -> NpyHeader:
    prefix = 10 if bytes(body[position + 6 : position + 7]) == b"\x01" else 12
    length = int.from_bytes(body[position + 8 : position + prefix], "little")
    header = _parsed(bytes(body[position : position + min(prefix + length, _MAX_NPY_HEAD)]))
    if header is None:
        raise InvalidNpy("the body ends within the .npy header")
    return header


@lru_cache(1024)
def _parsed(head: bytes) -> NpyHeader | None:
    return parse_npy_header(head)


@lru_cache(64)
def _name_of(dtype: np.dtype) -> str:
    """Name of a dtype without the order of its bytes."""
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
    # The thread's own: as long as it has the view, no other array gets the extent, whoever is cancelled meanwhile, and
    # however often (`Extent.quiescent`).
    view = upload.view

    def work() -> None:
        for name, index in jobs:
            moved[name][index] = _align(view, moved[name][index])

    total = sum(arrays[name][index].header.nbytes for name, index in jobs)
    if total < _THREAD_FROM:
        turns = Turns()
        for name, index in jobs:
            moved[name][index] = _align(view, moved[name][index])
            await turns.pause()
    else:
        await asyncio.to_thread(work)
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
    """Number of products, and of every operand the one of each product. Raises InvalidParameters, TooLarge."""
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
