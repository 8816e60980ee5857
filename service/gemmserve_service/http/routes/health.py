"""/healthz, /livez, /readyz and /metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from gemmserve_service.errors import Draining, NotReady
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.routes.common import core_of, render
from gemmserve_service.runtime import clock

router = APIRouter(tags=["service"], default_response_class=Response)


_VERSION: Final = version("gemmserve")
"""Read once: from the package's files, which takes a millisecond."""


class Health(BaseModel):
    """A sign of life."""

    status: str = Field(examples=["ok"])
    version: str
    uptime_s: float


def _alive(request: Request) -> Response:
    uptime_s = clock.time() - core_of(request).started_at
    return render(Health(status="ok", version=_VERSION, uptime_s=round(uptime_s, 3)))


_ALIVE = {200: doc.model(Health, "The process answers."), **doc.problems()}


@router.get("/healthz", summary="Alive", responses=_ALIVE)
@router.get("/livez", summary="Alive", responses=_ALIVE)
async def livez(request: Request) -> Response:
    """Whether the process answers; says nothing of workers."""
    return _alive(request)


@router.get(
    "/readyz",
    summary="Ready",
    responses={200: doc.model(Health, "Work is admitted and can run."), **doc.problems("not-ready", "draining")},
)
async def readyz(request: Request) -> Response:
    """Whether a worker has answered a verified product, some worker gets on with what it has, or nothing waits, and
    the server is not shutting down. A full queue is no reason: submitters are told 429.
    """
    core = core_of(request)
    ready, reasons = core.ready()
    if not ready:
        raise (Draining if core.draining else NotReady)("; ".join(reasons), reasons=reasons)
    return _alive(request)


@router.get(
    "/metrics",
    summary="Metrics",
    responses={
        200: {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **doc.problems(),
    },
)
async def metrics(request: Request) -> Response:
    """Jobs, seconds by phase, queue, bytes, flops, device memory, HTTP; prefix gemmserve_."""
    body, content_type = request.app.state.metrics.render(request.headers.get("accept"))
    return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})
