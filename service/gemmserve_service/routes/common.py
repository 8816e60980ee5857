"""What several routes share: the core of the running app, rendered models, paging, timings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast
from urllib.parse import urlencode

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from gemmserve_service.core import Core
    from gemmserve_service.identity import Caller
    from gemmserve_service.schemas import Timings

ArrayPath = Annotated[str, Path(description="id of an array", examples=["arr_01jd2w7m4h8k3n5p6q9r0s1t2v"])]
JobPath = Annotated[str, Path(description="id of a job", examples=["job_01jd2w7m4h8k3n5p6q9r0s1t2v"])]


class ViewQuery(BaseModel):
    """Whose things are looked at."""

    model_config = ConfigDict(extra="forbid")

    all: bool = Field(
        default=False, description="everybody's, not only what belongs to the key's owner; needs the scope admin"
    )


class PageQuery(ViewQuery):
    """Where in a listing."""

    limit: int = Field(100, ge=1, le=1000, description="entries on a page")
    cursor: str | None = Field(None, max_length=256, description="next_cursor of the page before")


def core_of(request: Request) -> Core:
    """The core that the app was made with."""
    return cast("Core", request.app.state.core)


def caller_of(request: Request) -> Caller:
    """Who sends the request; `access.Access` found out."""
    return cast("Caller", request.state.caller)


def view_of(request: Request, query: ViewQuery) -> str:
    """Whose things the request may see: an owner's, or everybody's (""). Raises Forbidden."""
    return caller_of(request).view(everybody=query.all)


def render(model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A model as JSON that nobody caches."""
    return Response(
        model.model_dump_json(), status, {"Cache-Control": "no-store", **(headers or {})}, media_type="application/json"
    )


def page_headers(request: Request, query: BaseModel, next_cursor: str | None) -> dict[str, str]:
    """The Link to the next page (RFC 8288), if there is one."""
    if next_cursor is None:
        return {}
    fields = {**query.model_dump(mode="json", exclude_defaults=True), "cursor": next_cursor}
    return {"Link": f'<{request.url.path}?{urlencode(fields)}>; rel="next"'}


def server_timing(timings: Timings, **more_s: float) -> str:
    """Server-Timing's value: milliseconds by phase."""
    phases = {
        **more_s,
        "queue": timings.queue_s,
        "h2d": timings.h2d_s,
        "kernel": timings.kernel_s,
        "d2h": timings.d2h_s,
    }
    return ", ".join([f"{name};dur={seconds * 1e3:.3f}" for name, seconds in phases.items()])
