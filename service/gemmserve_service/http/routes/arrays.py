"""/v1/arrays: upload, listing, metadata, download, deletion."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from fastapi import APIRouter, Query, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from gemmserve.wire import NPY, OCTET_STREAM
from gemmserve_kernels.problem.vocabulary import Dtype
from gemmserve_service.http.answers.coded import coded, worth_coding
from gemmserve_service.http.answers.pieces import Pieces, PiecesResponse
from gemmserve_service.http.cells.redirects import check_download
from gemmserve_service.http.headers.content_coding import ZSTD, chosen_coding
from gemmserve_service.http.headers.digests import digest_field, wants_sha256
from gemmserve_service.http.headers.preferences import choose_media_type
from gemmserve_service.http.headers.ranges import UnsatisfiableError, if_range_holds, none_match, parse_range
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.problems import NotAcceptable, RangeNotSatisfiable, problem_response
from gemmserve_service.http.requests.ingest import receive_array
from gemmserve_service.http.requests.queries import Number  # noqa: TC001 (pydantic resolves it at run time)
from gemmserve_service.http.requests.shared_memory import SharedRequest
from gemmserve_service.http.routes.common import (
    ArrayPath,
    PageQuery,
    TagsQuery,
    ViewQuery,
    caller_of,
    core_of,
    page_headers,
    render,
    view_of,
)
from gemmserve_service.schemas import ArrayInfo, ArrayPage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from gemmserve_service.jobs.core import Core
    from gemmserve_service.store.pin import Pinned

router = APIRouter(tags=["arrays"], default_response_class=Response)


class UploadQuery(TagsQuery):
    """Lifetime, name and labels of an upload, and the meaning of bare bytes."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    ttl_s: Number | None = Field(
        None, gt=0, le=31_536_000, description="seconds to live; default: the server's setting"
    )
    dtype: str | None = Field(
        None,
        description=f"of {OCTET_STREAM}: element type, little-endian",
        json_schema_extra={"enum": list(get_args(Dtype))},
    )
    shape: str | None = Field(
        None,
        description=f"of {OCTET_STREAM}: extents; empty for a scalar",
        examples=["1024,1024"],
        json_schema_extra={"pattern": r"^(\d{1,19}(,\d{1,19})*)?$"},
    )
    order: Literal["C", "F"] | None = Field(
        None, description=f"of {OCTET_STREAM}: memory order, C where it is not given"
    )


@router.post(
    "/v1/arrays",
    status_code=201,
    summary="Upload an array",
    responses={
        201: doc.model(ArrayInfo, "Stored.", {"Location": "the array's URL"}),
        **doc.problems(
            "invalid-npy", "body-length", "digest-mismatch", "invalid-request", "length-required", "too-large",
            "unsupported-media-type", "dtype-unsupported", "parameter-invalid", "draining", "store-full",
            "quota-exceeded", "request-timeout", "descriptor-refused", "tier-unavailable",
        ),
    },
    openapi_extra=doc.array_body()
    | {
        "parameters": [
            doc.digest_header("Content-Digest", "the body"),
            {
                "name": "Content-Encoding",
                "in": "header",
                "description": "zstd (RFC 8878, a window of 8 MiB at most); Content-Length and Content-Digest are then "
                "those of the compressed body. 415 where the server lacks it",
                "schema": {"type": "string", "enum": ["zstd", "identity"]},
            },
        ]
    },
)  # fmt: skip
async def upload(request: Request, query: Annotated[UploadQuery, Query()]) -> Response:
    """Stores the body as an immutable array. The space is reserved once the header is known and before the data are
    read; it is freed if the body breaks off. A client of this machine may have the data in shared memory and send the
    .npy header alone, as `application/x-npy-header`.
    """
    info = await receive_array(
        request,
        core_of(request),
        dtype=query.dtype,
        shape=query.shape,
        order=query.order,
        ttl_s=query.ttl_s,
        owner=caller_of(request).owner,
        tags=query.tags,
    )
    return render(info, 201, {"Location": f"/v1/arrays/{info.id}"})


class ArraysQuery(TagsQuery, PageQuery):
    """Filter of a listing of arrays."""


@router.get(
    "/v1/arrays",
    summary="List arrays",
    responses={
        200: doc.model(ArrayPage, "A page, newest first.", {"Link": 'the next page, rel="next"'}),
        **doc.problems("parameter-invalid", "invalid-request"),
    },
)
async def listing(request: Request, query: Annotated[ArraysQuery, Query()]) -> Response:
    """The arrays there are, of the key's owner, with that name and all of those labels if any are given; `next_cursor`
    is null on the last page. Behind a router they are those of the cell that answers alone.
    """
    owner = view_of(request, query)
    items, next_cursor = await core_of(request).store.list(
        limit=query.limit, cursor=query.cursor, owner=owner, tags=query.tags
    )
    return render(ArrayPage(items=items, next_cursor=next_cursor), headers=page_headers(request, query, next_cursor))


@router.get(
    "/v1/arrays/{array_id}",
    summary="An array's metadata",
    responses={
        200: doc.model(ArrayInfo, "What the array is."),
        **doc.problems("not-found", "gone", "parameter-invalid"),
    },
)
async def metadata(request: Request, array_id: ArrayPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """Type, shape, order, size, digest (null until known), when it was made and when it expires."""
    return await look(core_of(request), array_id, view_of(request, query))


async def look(core: Core, array_id: str, owner: str) -> Response:
    """Return the array's metadata, as `owner` sees it. Raises NotFound, Gone."""
    return render(await core.store.info(array_id, owner=owner))


@router.delete(
    "/v1/arrays/{array_id}",
    status_code=204,
    summary="Delete an array",
    responses={204: {"description": "Hidden."}, **doc.problems("not-found", "gone", "parameter-invalid")},
)
async def delete(request: Request, array_id: ArrayPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """Hides the array at once; its bytes are freed after the last job and the last download that use it."""
    return await remove(core_of(request), array_id, view_of(request, query))


async def remove(core: Core, array_id: str, owner: str) -> Response:
    """Hide the array; return the answer. Raises NotFound, Gone."""
    await core.store.delete(array_id, owner=owner)
    return Response(status_code=204)


_DATA_HEADERS = {
    "Repr-Digest": "RFC 9530: sha-256 of the whole representation, where it is known or wanted; not if compressed",
    "ETag": "strong, unless compressed; the array never changes",
    "Accept-Ranges": "bytes, unless compressed",
    "Content-Length": "bytes of this answer, unless compressed",
    "Content-Encoding": "zstd, where it is compressed",
}
_DATA_DOCS = {
    200: doc.binary("The bytes.", NPY, OCTET_STREAM, headers=_DATA_HEADERS),
    206: doc.binary(
        "The range that was asked for.",
        NPY,
        OCTET_STREAM,
        headers=_DATA_HEADERS | {"Content-Range": "bytes first-last/all"},
    ),
    304: {"description": "If-None-Match holds."},
    **doc.problems(
        "other-cell", "not-found", "gone", "array-lost", "array-corrupt", "tier-unavailable", "not-acceptable",
        "range-not-satisfiable", "parameter-invalid",
        "descriptor-refused", "timeout", "draining",
    ),
}  # fmt: skip
_HEAD_DOCS: dict[int | str, dict[str, Any]] = {
    **{status: {"description": document["description"]} for status, document in _DATA_DOCS.items() if status != 206},
    200: doc.binary("As GET, without the bytes.", NPY, OCTET_STREAM, headers=_DATA_HEADERS),
}
_DATA_PARAMETERS = {
    "parameters": [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
        for name, text in (
            ("Range", "one range of bytes of the chosen representation, such as bytes=0-1023"),
            ("If-Range", "an ETag: the range is served only if it still holds"),
            ("If-None-Match", "ETags that the client has"),
            ("Accept-Encoding", "zstd: compressed, where that makes it shorter"),
            ("Want-Repr-Digest", "sha-256=1 to 10: the digest is worked out where it is not known"),
        )
    ]
}


@router.get("/v1/arrays/{array_id}/data", summary="Download", responses=_DATA_DOCS, openapi_extra=_DATA_PARAMETERS)
async def download(request: Request, array_id: ArrayPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """The array's bytes: as a .npy file, or bare (`Accept: application/octet-stream`) in the order of the metadata.
    With `Accept-Encoding: zstd` and without Range they come compressed, if that makes them an eighth shorter; the ETag
    is then a weak one, and its own.
    """
    return await _data(request, array_id, view_of(request, query))


@router.head(
    "/v1/arrays/{array_id}/data",
    summary="Size, ETag and digest of a download",
    responses=_HEAD_DOCS,
    openapi_extra=_DATA_PARAMETERS,
)
async def head(request: Request, array_id: ArrayPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """Return the headers that GET would send, not compressed, without the bytes."""
    return await _data(request, array_id, view_of(request, query))


def _cold_span(request: Request, pinned: Pinned, header: bytes, etag: str) -> range | None:
    """Return the range that is asked for, if it can be read from the tier alone: it is not all of the array, and no
    digest of the whole is wanted.
    """
    if pinned.cold is None or request.method != "GET" or wants_sha256(request.headers.get("want-repr-digest")):
        return None
    size = len(header) + pinned.info.nbytes
    try:
        holds = if_range_holds(request.headers.get("if-range"), etag)
        span = parse_range(request.headers.get("range"), size) if holds else None
    except UnsatisfiableError:
        return None
    return span if span is not None and span.stop > len(header) and len(span) < pinned.info.nbytes else None


async def _chained(
    first: Sequence[bytes | memoryview], others: AsyncIterator[bytes | memoryview]
) -> AsyncIterator[bytes | memoryview]:
    for piece in first:
        yield piece
    async for piece in others:
        yield piece


async def _data(request: Request, array_id: str, owner: str) -> Response:
    media_type = choose_media_type(request.headers.get("accept"), (NPY, OCTET_STREAM))
    if media_type is None:
        raise NotAcceptable(f"an array is {NPY} or {OCTET_STREAM}")
    core = core_of(request)
    info = await core.store.info(array_id, owner=owner)
    if request.method == "GET":
        check_download(core.cells, request, info.nbytes)
    suffix = "npy" if media_type == NPY else "bin"
    etag, coded_etag = f'"{info.id}.{suffix}"', f'W/"{info.id}.{suffix}.{ZSTD}"'
    headers = {"ETag": etag, "Vary": "Accept, Accept-Encoding", "Cache-Control": "private, no-cache"}
    accepted = request.headers.getlist("accept-encoding")
    coding = "no" if "range" in request.headers else chosen_coding(", ".join(accepted))
    # Of what the client can read: a cache could give it no other on the strength of a 304.
    for tag in {"no": (etag,), "may": (etag, coded_etag), "must": (coded_etag,)}[coding]:
        if none_match(request.headers.get("if-none-match"), tag.removeprefix("W/")):
            return Response(status_code=304, headers=headers | {"ETag": tag})
    with ExitStack() as stack:
        pinned = stack.enter_context(core.store.pin(info))
        header = pinned.npy_header if media_type == NPY else b""
        size = len(header) + info.nbytes
        parts: tuple[bytes | memoryview, ...] = ()
        tier = core.store.tier
        if tier is not None and (part := _cold_span(request, pinned, header, etag)) is not None:
            pieces = tier.read_range(pinned, max(part.start - len(header), 0), part.stop - len(header))
            first = await anext(pieces)  # what is wrong with the tier is told before anything is sent
            headers |= {"Accept-Ranges": "bytes", "Content-Range": f"bytes {part.start}-{part.stop - 1}/{size}"}
            return PiecesResponse(
                _chained((header[part.start :], first), pieces),
                length=len(part),
                status_code=206,
                headers=headers,
                media_type=media_type,
                release=stack.pop_all().close,
            )
        headers |= {"Accept-Ranges": "bytes"}
        span, status = range(size), 200
        ranged = request.method == "GET" and if_range_holds(request.headers.get("if-range"), etag)
        try:
            chosen = parse_range(request.headers.get("range"), size) if ranged else None
        except UnsatisfiableError as error:
            return problem_response(RangeNotSatisfiable(str(error)), {"Content-Range": f"bytes */{size}"})
        wanted = wants_sha256(request.headers.get("want-repr-digest"))
        timeout_s = core.settings.oneshot_timeout_s
        shared = None
        if ranged and chosen is None and media_type == NPY:
            shared = SharedRequest(request, caller_of(request).owner)
            stack.callback(shared.close)
            if not wanted:
                answer = await shared.delivered(pinned, headers, core.scheduler.deliveries, timeout_s)
                if answer is not None:
                    return answer
        if request.method == "GET" or wanted:
            # A job's result may be on a device alone.
            await core.scheduler.writes.wait_readable(pinned, timeout_s)
            parts = (header, pinned.view)
        known = core.store.digests.known(array_id, npy=media_type == NPY)
        if known is None and wanted:
            known = await core.store.digests.of(pinned, npy=media_type == NPY)
        digest = {} if known is None else {"Repr-Digest": digest_field(bytes.fromhex(known))}
        if chosen is not None:
            span, status = chosen, 206
            headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{size}"
        elif shared is not None:
            answer = await shared.answer(pinned, headers)
            if answer is not None:
                return answer
        headers["Content-Disposition"] = f'attachment; filename="{info.id}.{suffix}"'
        if request.method == "GET" and (coding == "must" or (coding == "may" and await worth_coding(pinned.view))):
            del headers["Accept-Ranges"]
            headers |= {"ETag": coded_etag, "Content-Encoding": ZSTD}
            release = stack.pop_all().close
            return PiecesResponse(coded(parts), length=None, headers=headers, media_type=media_type, release=release)
        return PiecesResponse(
            Pieces(parts, span, pinned.extent if parts else None),  # a HEAD reads nothing
            length=len(span),
            status_code=status,
            headers=headers | digest,
            media_type=media_type,
            release=stack.pop_all().close,
        )
