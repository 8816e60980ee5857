"""/v1/cells: which cells there are, and which of them answers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.routes.common import core_of, render

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
