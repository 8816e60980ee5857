"""One array's bytes from the socket into its final place: header first, then space, then the body, then the digest."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

from gemmserve.wire import (
    DATA_HEADER,
    NPY,
    NPY_HEADER,
    OCTET_STREAM,
    parse_dtype,
    parse_shape,
)
from gemmserve_service.errors import (
    BodyTooLong,
    BodyTooShort,
    InvalidParameters,
    InvalidRequest,
    LengthRequired,
    UnsupportedMediaType,
)
from gemmserve_service.http.headers.content_coding import ZSTD, coding_of, refuse_coding
from gemmserve_service.http.headers.digests import parse_content_digest
from gemmserve_service.http.requests.body import RequestBody, media_type_of
from gemmserve_service.http.requests.coded_body import CodedBody, check_coded_length, decoding
from gemmserve_service.http.requests.shared_memory import SharedRequest, receive_shared
from gemmserve_service.store.declared import Declared, read_npy_head
from gemmserve_service.store.record import NO_TAGS

if TYPE_CHECKING:
    from starlette.requests import Request

    from gemmserve_kernels.problem.vocabulary import Order
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.schemas import ArrayInfo
    from gemmserve_service.store.record import Tags


def content_length(request: Request) -> int:
    """Bytes of the body, from the header. Raises LengthRequired, InvalidRequest."""
    value = request.headers.get("content-length")
    if value is None:
        raise LengthRequired(
            "send Content-Length: a body of unknown size (chunked transfer coding) is not accepted, "
            "since its space is reserved before it is read"
        )
    if not (value.isascii() and value.isdigit()) or len(value) > 19:
        raise InvalidRequest(f"Content-Length {value[:40]!r} is not a number of bytes")
    return int(value)


async def receive_array(
    request: Request,
    core: Core,
    *,
    dtype: str | None,
    shape: str | None,
    order: Order | None,
    ttl_s: float | None,
    owner: str,
    tags: Tags = NO_TAGS,
) -> ArrayInfo:
    """Reads the whole body of `request` into a new array of `owner`.

    Raises what is wrong with the headers before the first byte is read, what is wrong with the .npy header before any
    space is taken, and frees the space when the body breaks off or does not match its digest.
    """
    expected = parse_content_digest(request.headers.get("content-digest"))
    length = content_length(request)
    media_type = media_type_of(request)
    codings = request.headers.getlist("content-encoding")
    if media_type == NPY_HEADER:
        refuse_coding(codings)
        return await _receive_shared(request, core, length, expected, ttl_s=ttl_s, owner=owner, tags=tags)
    with ExitStack() as stack:
        body = RequestBody(request)
        if coding_of(codings) is not None:  # its digest is that of what was sent
            body, expected = stack.enter_context(decoding(request, expected, owner, ZSTD)), None
        declared, first = declare(media_type, dtype, shape, order), b""
        if declared is None:
            declared, first = await read_npy_head(body)
        if isinstance(body, CodedBody):
            check_coded_length(len(declared.header) + declared.nbytes, length, ZSTD)
        else:
            _check_length(declared, length)
        stack.enter_context(core.quotas.in_flight(owner, declared.nbytes))
        await core.store.make_room(declared.nbytes, owner)
        upload = declared.reserve(core.store, ttl_s=ttl_s, owner=owner, tags=tags)
        try:
            upload.write(first)
            if upload.filled < upload.nbytes:
                await body.fill(upload.view[upload.filled :], upload.advance, upload.place(upload.filled))
            if isinstance(body, CodedBody):
                await body.finish()
            return cast("ArrayInfo", await upload.commit(expected, prefix=declared.header))
        except BaseException:
            upload.abort()
            raise


async def _receive_shared(
    request: Request,
    core: Core,
    length: int,
    expected: bytes | None,
    **options: Any,
) -> ArrayInfo:
    """`receive_array` of a body that is a .npy header alone: the data are copied from shared memory. `options` are
    those of `Declared.reserve`.
    """
    owner: str = options["owner"]
    shared = SharedRequest(request, owner)
    try:
        memory = shared.take(request.headers.get(DATA_HEADER))
    finally:
        shared.close()  # an upload has no result to put anywhere
    try:
        declared, first = await read_npy_head(RequestBody(request))
        if first or length != len(declared.header):
            raise BodyTooLong(f"{NPY_HEADER} is a header alone, its data are in shared memory")
        with core.quotas.in_flight(owner, declared.nbytes):
            await core.store.make_room(declared.nbytes, owner)
            upload = await receive_shared(memory, declared, core.store, **options)
            return cast("ArrayInfo", await upload.commit(expected, prefix=declared.header))
    finally:
        memory.close()


def declare(media_type: str, dtype: str | None, shape: str | None, order: Order | None) -> Declared | None:
    """Return what the query says of bare bytes; None for a .npy file, whose header says it.

    Raises UnsupportedMediaType, InvalidParameters, NpyError.
    """
    if media_type == NPY:
        if dtype is not None or shape is not None or order is not None:
            raise InvalidParameters(f"dtype, shape and order belong to {OCTET_STREAM}; a .npy body says them itself")
        return None
    if media_type != OCTET_STREAM:
        raise UnsupportedMediaType(
            f"Content-Type is {media_type or 'missing'}; an array is {NPY} "
            f"(curl -H 'Content-Type: {NPY}' --data-binary @a.npy) or {OCTET_STREAM} with ?dtype= and ?shape="
        )
    if dtype is None or shape is None:
        raise InvalidParameters(f"{OCTET_STREAM} needs ?dtype= and ?shape=, as in ?dtype=complex64&shape=1024,1024")
    kind, extents = parse_dtype(dtype), parse_shape(shape)
    nbytes = kind.itemsize
    for extent in extents:
        nbytes *= extent
    return Declared(kind, extents, order or "C", nbytes)


def _check_length(declared: Declared, length: int) -> None:
    """Compares what is declared with Content-Length, before any space is taken."""
    present = length - len(declared.header)
    if present == declared.nbytes:
        return
    detail = (
        f"{declared.dtype.name} of shape {declared.shape} needs {declared.nbytes} bytes of data, "
        f"and the body has {present}"
    )
    raise (BodyTooShort if present < declared.nbytes else BodyTooLong)(detail)
