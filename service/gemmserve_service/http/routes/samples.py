"""/v1/arrays/{id}/sample: a few elements of an array at even distances, to look at."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from gemmserve.wire import NPY, format_npy_header
from gemmserve_service.http.answers.samples import sample
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.requests.queries import Integer  # noqa: TC001 (pydantic resolves it at run time)
from gemmserve_service.http.routes.common import ArrayPath, ViewQuery, core_of, view_of

router = APIRouter(tags=["arrays"], default_response_class=Response)


class SampleQuery(ViewQuery):
    """Size of a sample."""

    rows: Integer = Field(64, ge=1, le=64, description="at most")
    columns: Integer = Field(64, ge=1, le=64, description="at most")


@router.get(
    "/v1/arrays/{array_id}/sample",
    summary="A few elements at even distances",
    responses={
        200: doc.binary("The elements, of the array's dtype.", NPY),
        204: {
            "description": "A result that is on a device alone, as yet, or an array in the tier: nothing is moved for "
            "a sample."
        },
        **doc.problems("not-found", "gone", "array-lost", "parameter-invalid"),
    },
)
async def elements(request: Request, array_id: ArrayPath, query: Annotated[SampleQuery, Query()]) -> Response:
    """Elements at even distances along rows and columns, as a .npy of two dimensions, for a picture of the array: read
    from where they lie, the rest is not. A vector is one row; of more than two dimensions it is the first matrix.
    """
    store = core_of(request).store
    info = await store.info(array_id, owner=view_of(request, query))
    with store.pin(info) as pinned:
        if pinned.pending is not None or pinned.cold is not None:
            return Response(status_code=204, headers={"Cache-Control": "no-store"})
        # In a thread: each element may be on a page of its own, and a page on a disk.
        found = await asyncio.to_thread(sample, pinned.view, info, query.rows, query.columns)
    content = format_npy_header(found.dtype, found.shape) + found.tobytes()
    return Response(content, headers={"Cache-Control": "no-store"}, media_type=NPY)
