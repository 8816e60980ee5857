"""/v1/uploads: arrays in parts, in turn as draft-ietf-httpbis-resumable-upload has it, or several at once."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from gemmserve.wire import NPY, OCTET_STREAM
from gemmserve_service.errors import (
    InconsistentUploadLength,
    InvalidParameters,
    InvalidRequest,
    ServiceError,
    TooLarge,
    UnsupportedMediaType,
)
from gemmserve_service.http.headers import upload_fields
from gemmserve_service.http.headers.content_coding import refuse_coding
from gemmserve_service.http.headers.digests import parse_content_digest
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.problems import problem_response
from gemmserve_service.http.requests.body import RequestBody
from gemmserve_service.http.requests.ingest import content_length, declare_bare, receive_array
from gemmserve_service.http.requests.queries import Integer  # noqa: TC001 (FastAPI resolves it at run time)
from gemmserve_service.http.routes.arrays import UploadQuery  # noqa: TC001 (FastAPI resolves it at run time)
from gemmserve_service.http.routes.common import ViewQuery, caller_of, core_of, render, view_of
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.store.upload import now

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_service.jobs.core import Core
    from gemmserve_service.store.resumable.upload_resource import PartialUpload

router = APIRouter(tags=["uploads"], default_response_class=Response)

UploadPath = Annotated[str, Path(description="id of an upload", examples=["upl_01jd2w7m4h8k3n5p6q9r0s1t2v"])]


class UploadInfo(BaseModel):
    """An upload in parts. Offsets are those of the body: of a .npy file its header counts."""

    id: str
    media_type: str
    length: int | None = Field(description="bytes of the whole body; null until the .npy header has come")
    offset: int = Field(description="where the first missing byte is")
    received: list[tuple[int, int]] = Field(description="what has come, as [start, end)")
    complete: bool
    array: ArrayInfo | None = Field(description="what it became")
    max_part_bytes: int = Field(description="the largest part")
    expires_at: datetime = Field(description="when it is given up, if nothing more is heard of it")


_FIELDS: Final = {
    upload_fields.OFFSET: "where the first missing byte is",
    upload_fields.COMPLETE: "?1 once it is an array",
    upload_fields.LENGTH: "bytes of the whole body, once known",
    upload_fields.LIMIT: "max-size, max-append-size: bytes; max-age: seconds",
}
_PUBLISHED: Final = doc.model(
    ArrayInfo,
    "An array now.",
    {"Location": "the array's URL", **{name: _FIELDS[name] for name in (upload_fields.COMPLETE,)}},
)


def _header(name: str, text: str, *, required: bool = False, pattern: str | None = None) -> dict[str, Any]:
    schema = {"type": "string"} | ({"pattern": pattern} if pattern else {})
    return {"name": name, "in": "header", "description": text, "required": required, "schema": schema}


_DIGEST = r"^sha-256=:[A-Za-z0-9+/]{43}=:$"
_CONTENT_DIGEST = _header("Content-Digest", "RFC 9530; sha-256 of this request's body is checked", pattern=_DIGEST)
_REPR_DIGEST = _header("Repr-Digest", "RFC 9530; sha-256 of the whole body is checked", pattern=_DIGEST)
_LENGTH = _header(upload_fields.LENGTH, "bytes of the whole body; no number: ignored")


def _part_body(*media_types: str) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "description": "Bytes of the body; Content-Length must be sent.",
            "content": {media_type: {"schema": doc.BINARY} for media_type in media_types},
        }
    }


_RECEIVING: Final = (
    "invalid-npy", "body-length", "digest-mismatch", "invalid-request", "inconsistent-upload-length",
    "completed-upload", "length-required", "too-large", "unsupported-media-type", "dtype-unsupported",
    "parameter-invalid", "store-full", "quota-exceeded", "request-timeout", "upload-superseded", "upload-incomplete",
)  # fmt: skip


@router.post(
    "/v1/uploads",
    status_code=201,
    summary="Begin an upload in parts",
    responses={
        201: doc.model(
            UploadInfo | ArrayInfo, "Begun; with Upload-Complete: ?1 the array.", {"Location": "the upload", **_FIELDS}
        ),
        **doc.problems(*_RECEIVING, "draining"),
    },
    openapi_extra=doc.array_body()
    | {
        "parameters": [
            _header(
                upload_fields.COMPLETE, "?1: the body is the whole array, as in POST /v1/arrays; no boolean: ignored"
            ),
            _LENGTH,
            _CONTENT_DIGEST,
        ]
    },
)
async def create(request: Request, query: Annotated[UploadQuery, Query()]) -> Response:
    """The body is the beginning of the array's, and may be empty. Content-Type says of what: bare bytes need `dtype`
    and `shape`, and their space is reserved now; that of a .npy file when its header has come, with the first parts.
    """
    core, owner = core_of(request), caller_of(request).owner
    media_type = _media_type(request)
    length = upload_fields.parse_size(request.headers.get(upload_fields.LENGTH))
    if upload_fields.parse_boolean(request.headers.get(upload_fields.COMPLETE)):
        if length not in {None, content_length(request)}:
            raise InconsistentUploadLength(f"Upload-Length is {length}, and the whole body has another length")
        info = await receive_array(
            request, core, dtype=query.dtype, shape=query.shape, order=query.order, ttl_s=query.ttl_s, owner=owner
        )
        return _published(info)
    refuse_coding(request.headers.getlist("content-encoding"))  # offsets are those of the array's own bytes
    count = content_length(request)
    expected = parse_content_digest(request.headers.get("content-digest"))
    declared = None
    if media_type == OCTET_STREAM:
        declared = declare_bare(query.dtype, query.shape, query.order)
    elif media_type != NPY:
        raise UnsupportedMediaType(f"Content-Type is {media_type or 'missing'}; an array is {NPY} or {OCTET_STREAM}")
    elif query.dtype is not None or query.shape is not None or query.order is not None:
        raise InvalidParameters(f"dtype, shape and order belong to {OCTET_STREAM}; a .npy body says them itself")
    try:
        _check_size(core, count)
    except TooLarge as error:
        return problem_response(error, {upload_fields.LIMIT: _limit(core)})
    record = await core.uploads.create(owner, media_type, declared, length=length, ttl_s=query.ttl_s)
    try:
        if count:
            await core.uploads.receive(record, RequestBody(request), 0, count, expected, append=True)
    except BaseException:
        await core.uploads.cancel(record)  # nobody learned its id
        raise
    return render(_info(core, record), 201, {"Location": f"/v1/uploads/{record.id}", **_state(core, record)})


@router.head(
    "/v1/uploads/{upload_id}",
    status_code=204,
    summary="Where an upload goes on",
    responses={
        204: {"description": "See the headers.", "headers": doc.header_documents(_FIELDS)},
        **{
            status: {"description": document["description"]}
            for status, document in doc.problems("not-found", "gone", "parameter-invalid").items()
        },
    },
)
async def offset(request: Request, upload_id: UploadPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """Ends an append that is still under way, so that its offset can be relied upon; parts go on."""
    core = core_of(request)
    record = core.uploads.get(upload_id, view_of(request, query))
    await record.stop(span=(0, 0))
    return Response(status_code=204, headers={"Cache-Control": "no-store", **_state(core, record)})


@router.get(
    "/v1/uploads/{upload_id}",
    summary="What has come of an upload",
    responses={
        200: doc.model(UploadInfo, "What has come, and what it became.", _FIELDS),
        **doc.problems("not-found", "gone", "parameter-invalid"),
    },
)
async def metadata(request: Request, upload_id: UploadPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """Disturbs nothing that is under way. A completed upload is remembered for as long as an idle one."""
    core = core_of(request)
    record = core.uploads.get(upload_id, view_of(request, query))
    return render(_info(core, record), headers=_state(core, record))


@router.patch(
    "/v1/uploads/{upload_id}",
    status_code=204,
    summary="Append to an upload",
    responses={
        201: _PUBLISHED,
        204: {"description": "Appended.", "headers": doc.header_documents(_FIELDS)},
        **doc.problems(*_RECEIVING, "not-found", "gone", "mismatching-upload-offset"),
    },
    openapi_extra=_part_body(upload_fields.PARTIAL_UPLOAD)
    | {
        "parameters": [
            _header(upload_fields.OFFSET, "where it goes on", required=True, pattern=r"^\d{1,15}$"),
            _header(upload_fields.COMPLETE, "?1: these are the last bytes", required=True, pattern=r"^\?[01]$"),
            _LENGTH,
            _CONTENT_DIGEST,
            _REPR_DIGEST,
        ]
    },
)
async def append(request: Request, upload_id: UploadPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """At Upload-Offset, which must be the upload's own; an append that is still under way is ended. What of a broken
    append came is kept. With `Upload-Complete: ?1` the answer is that of POST /v1/arrays.
    """
    core = core_of(request)
    record = core.uploads.get(upload_id, view_of(request, query))
    try:
        start = upload_fields.parse_size(request.headers.get(upload_fields.OFFSET))
        last = upload_fields.parse_boolean(request.headers.get(upload_fields.COMPLETE))
        if start is None or last is None:
            raise InvalidRequest(
                f"an append needs {upload_fields.OFFSET}: bytes, and {upload_fields.COMPLETE}: ?0 or ?1"
            )
        await _receive(request, core, record, start, (upload_fields.PARTIAL_UPLOAD,), append=True, last=last)
    except ServiceError as error:
        return _refused(core, record, error)
    return await _complete(request, core, record) if last else _accepted(core, record)


@router.put(
    "/v1/uploads/{upload_id}/parts/{offset}",
    status_code=204,
    summary="Send a part",
    responses={
        204: {"description": "Taken.", "headers": doc.header_documents(_FIELDS)},
        **doc.problems(*_RECEIVING, "not-found", "gone"),
    },
    openapi_extra=_part_body(OCTET_STREAM, upload_fields.PARTIAL_UPLOAD) | {"parameters": [_CONTENT_DIGEST]},
)
async def part(
    request: Request,
    upload_id: UploadPath,
    offset: Annotated[Integer, Path(ge=0, lt=1 << 62, description="where in the body the part begins")],
    query: Annotated[ViewQuery, Query()],
) -> Response:
    """In any order, several at a time. A part may be sent again, and parts may overlap: what came last counts. One that
    is still under way for some of the same bytes is ended.
    """
    core = core_of(request)
    record = core.uploads.get(upload_id, view_of(request, query))
    try:
        await _receive(request, core, record, offset, (OCTET_STREAM, upload_fields.PARTIAL_UPLOAD), append=False)
    except ServiceError as error:
        return _refused(core, record, error)
    return _accepted(core, record)


@router.post(
    "/v1/uploads/{upload_id}/complete",
    status_code=201,
    summary="Complete an upload",
    responses={
        201: _PUBLISHED,
        **doc.problems(
            "not-found", "gone", "upload-incomplete", "digest-mismatch", "invalid-request", "store-full",
            "completed-upload", "parameter-invalid",
        ),
    },
    openapi_extra={"parameters": [_REPR_DIGEST]},
)  # fmt: skip
async def complete(request: Request, upload_id: UploadPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """Makes it an array, if every byte has come; parts still under way are ended. Again, it answers the same array."""
    core = core_of(request)
    record = core.uploads.get(upload_id, view_of(request, query))
    return await _complete(request, core, record)


@router.delete(
    "/v1/uploads/{upload_id}",
    status_code=204,
    summary="Cancel an upload",
    responses={204: {"description": "Its space is free."}, **doc.problems("not-found", "gone", "parameter-invalid")},
)
async def cancel(request: Request, upload_id: UploadPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """Ends what is under way and frees the space. Of a completed upload only the memory of it goes, not the array."""
    core = core_of(request)
    await core.uploads.cancel(core.uploads.get(upload_id, view_of(request, query)))
    return Response(status_code=204)


@router.options("/v1/uploads", include_in_schema=False)
async def options(request: Request) -> Response:
    """For clients that ask whether uploads can be resumed."""
    limit = _limit(core_of(request))
    return Response(status_code=204, headers={"Accept-Patch": upload_fields.PARTIAL_UPLOAD, upload_fields.LIMIT: limit})


# -- what they share --------------------------------------------------------------------------------------------------


async def _receive(
    request: Request,
    core: Core,
    record: PartialUpload,
    start: int,
    media_types: tuple[str, ...],
    *,
    append: bool,
    last: bool = False,
) -> None:
    media_type = _media_type(request)
    if media_type not in media_types:
        raise UnsupportedMediaType(f"Content-Type is {media_type or 'missing'}; a part is {' or '.join(media_types)}")
    count = content_length(request)
    expected = parse_content_digest(request.headers.get("content-digest"))
    _check_size(core, count)
    record.check_length(upload_fields.parse_size(request.headers.get(upload_fields.LENGTH)))
    record.check_length(start + count if last else None)
    await core.uploads.receive(record, RequestBody(request), start, count, expected, append=append)


async def _complete(request: Request, core: Core, record: PartialUpload) -> Response:
    try:
        expected = parse_content_digest(request.headers.get("repr-digest"))
        return _published(await core.uploads.complete(record, expected))
    except ServiceError as error:
        return _refused(core, record, error)


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


def _check_size(core: Core, count: int) -> None:
    limit = core.settings.max_part_bytes
    if count > limit:
        raise TooLarge(f"the part has {count} bytes, and {limit} are the most")


def _limit(core: Core, record: PartialUpload | None = None) -> str:
    settings = core.settings
    age = None if record is None else core.uploads.max_age(record)
    return upload_fields.limits(max_size=settings.max_array_bytes, max_append_size=settings.max_part_bytes, max_age=age)


def _state(core: Core, record: PartialUpload) -> Mapping[str, str]:
    found = {
        upload_fields.OFFSET: str(record.offset),
        upload_fields.COMPLETE: upload_fields.boolean(record.complete),
        upload_fields.LIMIT: _limit(core, record),
    }
    if record.length is not None:
        found[upload_fields.LENGTH] = str(record.length)
    if record.array is not None:
        found["Location"] = f"/v1/arrays/{record.array.id}"
    return found


def _info(core: Core, record: PartialUpload) -> UploadInfo:
    return UploadInfo(
        id=record.id,
        media_type=record.media_type,
        length=record.length,
        offset=record.offset,
        received=list(record.received),
        complete=record.complete,
        array=record.array,
        max_part_bytes=core.settings.max_part_bytes,
        expires_at=now() + timedelta(seconds=core.uploads.max_age(record)),
    )


def _accepted(core: Core, record: PartialUpload) -> Response:
    return Response(status_code=204, headers={"Cache-Control": "no-store", **_state(core, record)})


def _published(info: ArrayInfo) -> Response:
    return render(info, 201, {"Location": f"/v1/arrays/{info.id}", upload_fields.COMPLETE: "?1"})


def _refused(core: Core, record: PartialUpload, error: ServiceError) -> Response:
    """The problem, with what a client wants to know to go on."""
    return problem_response(error, _state(core, record))
