"""/v1/cells: which cells there are, and which of them answers; and what cells ask each other."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from gemmserve.wire import OCTET_STREAM
from gemmserve_service.errors import NotFound
from gemmserve_service.http.answers.pieces import Pieces, PiecesResponse
from gemmserve_service.http.headers.digests import digest_field
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.routes.common import ArrayPath, core_of, render
from gemmserve_service.runtime.ids import cell_of
from gemmserve_service.tenancy.cells import PEER_HEADER

if TYPE_CHECKING:
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.schemas import ArrayInfo

PATH = "/internal/cells/arrays/"

router = APIRouter(tags=["service"], default_response_class=Response)


class Cell(BaseModel):
    """One cell."""

    cell: int = Field(description="its number, which is at the end of the ids it makes; cell 0 leaves it out")
    url: str = Field(description="its own URL")


class CellList(BaseModel):
    """All cells behind a router."""

    cell: int = Field(description="the one that answers: behind a router, that of the key's owner")
    cells: list[Cell] = Field(description="all of them; none where the server stands alone")


@router.get("/v1/cells", summary="Cells", responses={200: doc.model(CellList, "All cells."), **doc.problems()})
async def cells(request: Request) -> Response:
    """List the cells and their own names: the only ones that a client may send its key and arrays to besides the name
    that it was given.
    """
    known = core_of(request).cells
    return render(CellList(cell=known.number, cells=[Cell(cell=number, url=url) for number, url in known.urls.items()]))


@router.get(PATH + "{array_id}", include_in_schema=False)
async def peer_info(request: Request, array_id: ArrayPath) -> Response:
    """Metadata of an array, for another cell that needs it as an operand. Raises Unauthorized, NotFound, Gone."""
    _, info = await _asked(request, array_id)
    return render(info)


@router.get(PATH + "{array_id}/data", include_in_schema=False)
async def peer_data(request: Request, array_id: ArrayPath) -> Response:
    """The array's bytes with their digest, likewise. Raises ArrayLost, too."""
    core, info = await _asked(request, array_id)
    with ExitStack() as stack:
        pinned = stack.enter_context(core.store.pin(info))
        await core.scheduler.writes.wait_readable(pinned, core.settings.oneshot_timeout_s)
        digest = await core.store.digests.of(pinned, npy=False)
        return PiecesResponse(
            Pieces((b"", pinned.view), range(info.nbytes), pinned.extent),
            length=info.nbytes,
            headers={"Repr-Digest": digest_field(bytes.fromhex(digest)), "Cache-Control": "no-store"},
            media_type=OCTET_STREAM,
            release=stack.pop_all().close,
        )


async def _asked(request: Request, array_id: str) -> tuple[Core, ArrayInfo]:
    """The array that another cell asks for. This cell made it, or it is none of this cell's: so no cell ever asks one
    that would ask on.
    """
    core = core_of(request)
    token = request.headers.get(PEER_HEADER, "")
    owner = core.cells.owner_of(token, request.method, request.url.path)
    if cell_of(array_id) != core.cells.number:
        raise NotFound(f"no array {array_id} of cell {core.cells.number}")
    return core, await core.store.info(array_id, owner=owner)
