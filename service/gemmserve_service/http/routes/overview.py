"""/v1/overview and its stream: what the server does, for people to look at."""

from __future__ import annotations

import asyncio
import gzip
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from gemmserve_service.http.headers.content_coding import GZIP, chosen_coding, pool
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.overview.schemas import Overview
from gemmserve_service.http.routes.common import caller_of

if TYPE_CHECKING:
    from gemmserve_service.http.overview.live_overview import LiveOverview

router = APIRouter(tags=["service"], default_response_class=Response)

_GZIP_LEVEL: Final = 1  # an hour in a millisecond
_EVENTS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "event": {"enum": ["overview", "point"]},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {
                "oneOf": [{"$ref": "#/components/schemas/Overview"}, {"$ref": "#/components/schemas/Point"}]
            },
        },
    },
}


class OverviewQuery(BaseModel):
    """Choice of what is told."""

    model_config = ConfigDict(extra="forbid")

    history: bool = Field(
        default=False,
        description="the last hour too, a point every five seconds: some 70 kB, coded by gzip where that is accepted",
    )


def _overview_of(request: Request) -> LiveOverview:
    return cast("LiveOverview", request.app.state.overview)


@router.get(
    "/v1/overview",
    summary="Overview",
    responses={200: doc.model(Overview, "Now, and the last hour."), **doc.problems("parameter-invalid")},
)
async def overview(request: Request, query: Annotated[OverviewQuery, Query()]) -> Response:
    """Readiness and what to do about the lack of it, devices with their sensors and what they work on, the queue by
    owner, memory, the last failures with remedies. Other owners' jobs are shown to the scope admin alone: else they are
    summed, without names.
    """
    content = _overview_of(request).render(caller_of(request), history=query.history)
    headers = {"Cache-Control": "no-store"}
    if query.history:
        headers["Vary"] = "Accept-Encoding"
        if chosen_coding(request.headers.get("accept-encoding"), GZIP) != "no":
            headers["Content-Encoding"] = GZIP
            content = await asyncio.get_running_loop().run_in_executor(pool(), gzip.compress, content, _GZIP_LEVEL)
    return Response(content, headers=headers, media_type="application/json")


@router.get(
    "/v1/overview/stream",
    summary="Watch the overview",
    responses={
        200: {
            "description": "Server-sent events. `event: overview`: an Overview without history, first and then when it "
            "has changed, once a second at most and every 15 s at least. `event: point`: a Point, every five seconds. "
            "Ends when the server drains or the key is no longer valid, and for a listener that does not read.",
            "content": {"text/event-stream": {"schema": _EVENTS}},
        },
        **doc.problems("too-many-connections", "draining"),
    },
)
async def stream(request: Request) -> Response:
    """The overview again and again, rendered once for all who may see the same. There may be 64 streams, 32 of one
    owner.
    """
    return _overview_of(request).stream.listen(caller_of(request))
