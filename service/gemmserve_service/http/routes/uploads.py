"""/v1/uploads: arrays in parts, in any order and several at once, that go on after a broken connection."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from gemmserve.wire import NPY, OCTET_STREAM
from gemmserve_service.errors import BodyTooLong, CompletedUpload, UnsupportedMediaType
from gemmserve_service.http.headers.digests import parse_content_digest
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.problems import problem_response
from gemmserve_service.http.requests.body import RequestBody, media_type_of
from gemmserve_service.http.requests.ingest import content_length, declare
from gemmserve_service.http.requests.queries import Integer  # noqa: TC001 (FastAPI resolves it at run time)
from gemmserve_service.http.routes.arrays import UploadQuery  # noqa: TC001 (FastAPI resolves it at run time)
from gemmserve_service.http.routes.common import ViewQuery, caller_of, core_of, render, view_of
from gemmserve_service.runtime.clock import now
from gemmserve_service.schemas import ArrayInfo

if TYPE_CHECKING:
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.store.resumable.uploads import ResumableUpload

router = APIRouter(tags=["uploads"], default_response_class=Response)

UploadPath = Annotated[str, Path(description="id of an upload", examples=["upl_01jd2w7m4h8k3n5p6q9r0s1t2v"])]
_NO_STORE: Final = {"Cache-Control": "no-store"}


class UploadInfo(BaseModel):
    """An upload in parts. Offsets are those of the body: of a .npy file its header counts."""

    id: str
    media_type: str
    length: int | None = Field(description="bytes of the whole body; null until the .npy header has come")
    received: list[tuple[int, int]] = Field(description="what has come, as [start, end)")
    complete: bool
    array: ArrayInfo | None = Field(description="what it became")
    max_part_bytes: int = Field(description="the largest part")
    expires_at: datetime = Field(description="when it is given up, if nothing more is heard of it")


@router.post(
    "/v1/uploads",
    status_code=201,
    summary="Begin an upload in parts",
    responses={
        201: doc.model(UploadInfo, "Begun.", {"Location": "the upload"}),
        **doc.problems(
            "body-length", "too-large", "unsupported-media-type", "dtype-unsupported", "parameter-invalid",
            "store-full", "quota-exceeded", "invalid-npy", "draining", "tier-unavailable",
        ),
    },
    openapi_extra={
        "parameters": [
            {
                "name": "Content-Type",
                "in": "header",
                "description": "what the parts will make up",
                "required": True,
                "schema": {"type": "string", "enum": [NPY, OCTET_STREAM]},
            }
        ]
    },
)  # fmt: skip
async def create(request: Request, query: Annotated[UploadQuery, Query()]) -> Response:
    """Begin an upload, with no body. Content-Type says what the parts will make up: bare bytes need `dtype` and
    `shape`, and their space is reserved now; that of a .npy file when its header has come, at the start of the part at
    offset 0.
    """
    core, owner = core_of(request), caller_of(request).owner
    media_type = media_type_of(request)
    declared = declare(media_type, query.dtype, query.shape, query.order)
    if await RequestBody(request).piece():
        raise BodyTooLong("an upload begins without a body: PUT its bytes to .../parts/0 and on")
    record = await core.uploads.create(owner, media_type, declared, ttl_s=query.ttl_s, tags=query.tags)
    return render(_info(core, record), 201, {"Location": f"/v1/uploads/{record.id}"})


@router.get(
    "/v1/uploads/{upload_id}",
    summary="What has come of an upload",
    responses={
        200: doc.model(UploadInfo, "What has come, and what it became."),
        **doc.problems("not-found", "gone", "parameter-invalid"),
    },
)
async def metadata(request: Request, upload_id: UploadPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """Disturbs nothing that is under way. A completed upload is remembered for as long as an idle one."""
    core = core_of(request)
    return render(_info(core, core.uploads.get(upload_id, view_of(request, query))), headers=_NO_STORE)


@router.put(
    "/v1/uploads/{upload_id}/parts/{offset}",
    status_code=204,
    summary="Send a part",
    responses={
        204: {"description": "Taken."},
        **doc.problems(
            "invalid-npy", "body-length", "digest-mismatch", "invalid-request", "completed-upload", "length-required",
            "too-large", "unsupported-media-type", "dtype-unsupported", "parameter-invalid", "store-full",
            "quota-exceeded", "request-timeout", "upload-superseded", "upload-incomplete", "not-found", "gone",
            "tier-unavailable",
        ),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "Bytes of the body; Content-Length must be sent.",
            "content": {OCTET_STREAM: {"schema": doc.BINARY}},
        },
        "parameters": [doc.digest_header("Content-Digest", "this request's body")],
    },
)  # fmt: skip
async def part(
    request: Request,
    upload_id: UploadPath,
    offset: Annotated[Integer, Path(ge=0, lt=1 << 62, description="where in the body the part begins")],
    query: Annotated[ViewQuery, Query()],
) -> Response:
    """Take a part, in any order, several at a time. A part may be sent again, and parts may overlap: what came last
    counts. One that is still under way for some of the same bytes is ended. The first of a .npy file holds its whole
    header.
    """
    core = core_of(request)
    record = core.uploads.get(upload_id, view_of(request, query))
    media_type = media_type_of(request)
    if media_type != OCTET_STREAM:
        raise UnsupportedMediaType(f"Content-Type is {media_type or 'missing'}; a part is {OCTET_STREAM}")
    count = content_length(request)
    expected = parse_content_digest(request.headers.get("content-digest"))
    try:
        await core.uploads.receive(record, RequestBody(request), offset, count, expected)
    except CompletedUpload as error:
        return _completed(record, error)
    return Response(status_code=204, headers=_NO_STORE)


@router.post(
    "/v1/uploads/{upload_id}/complete",
    status_code=201,
    summary="Complete an upload",
    responses={
        201: doc.model(ArrayInfo, "An array now.", {"Location": "the array's URL"}),
        **doc.problems(
            "not-found", "gone", "upload-incomplete", "digest-mismatch", "invalid-request", "store-full",
            "completed-upload", "parameter-invalid", "tier-unavailable",
        ),
    },
    openapi_extra={"parameters": [doc.digest_header("Repr-Digest", "the whole body")]},
)  # fmt: skip
async def complete(request: Request, upload_id: UploadPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """Makes it an array, if every byte has come; parts still under way are ended. Again, it answers the same array."""
    core = core_of(request)
    record = core.uploads.get(upload_id, view_of(request, query))
    expected = parse_content_digest(request.headers.get("repr-digest"))
    try:
        info = await core.uploads.complete(record, expected)
    except CompletedUpload as error:
        return _completed(record, error)
    return render(info, 201, {"Location": f"/v1/arrays/{info.id}"})


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


def _info(core: Core, record: ResumableUpload) -> UploadInfo:
    return UploadInfo(
        id=record.id,
        media_type=record.media_type,
        length=record.length,
        received=list(record.received),
        complete=record.complete,
        array=record.array,
        max_part_bytes=core.settings.max_part_bytes,
        expires_at=now() + timedelta(seconds=core.uploads.remaining_s(record)),
    )


def _completed(record: ResumableUpload, error: CompletedUpload) -> Response:
    """The problem, with the array's place."""
    return problem_response(error, {"Location": f"/v1/arrays/{record.array_id}"})
