"""/v1/devices and /v1/usage."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 (pydantic resolves it at run time)
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.routes.common import ViewQuery, core_of, render, view_of
from gemmserve_service.schemas import DeviceList

router = APIRouter(tags=["service"], default_response_class=Response)


class Quota(BaseModel):
    """One quota of the key's owner."""

    used: float
    limit: float | None = Field(description="null: none")


class Quotas(BaseModel):
    """Every quota of the key's owner."""

    stored_bytes: Quota = Field(description="stored arrays, and room for uploads and results on their way")
    inflight_bytes: Quota = Field(description="bodies that are being read, one-shot operands and results")
    queued_jobs: Quota = Field(description="jobs that wait")
    device_seconds_per_day: Quota = Field(description="device time since midnight, UTC")


class Usage(BaseModel):
    """Use against limits, of the key's owner; without keys of everybody together. null: no limit of its own."""

    owner: str | None = Field(description="null without keys")
    arrays: int = Field(description="arrays stored")
    store_bytes: int
    max_store_bytes: int | None
    max_array_bytes: int
    scratch_bytes: int = Field(description="operands and results of one-shot requests under way")
    jobs_queued: int
    max_queued_jobs: int
    jobs_running: int
    quotas: Quotas
    resets_at: datetime = Field(description="when device_seconds_per_day begins anew")
    owners: list[Usage] | None = Field(None, description="with all=true: each owner's")


@router.get(
    "/v1/devices",
    summary="Devices",
    responses={200: doc.model(DeviceList, "Every device and its worker."), **doc.problems()},
)
async def devices(request: Request) -> Response:
    """List each device, its memory, and the compute modes that it has."""
    return render(DeviceList(devices=core_of(request).devices()))


@router.get(
    "/v1/usage",
    summary="Use and limits",
    responses={200: doc.model(Usage, "Now."), **doc.problems("parameter-invalid")},
)
async def usage(request: Request, query: Annotated[ViewQuery, Query()]) -> Response:
    """Bytes, jobs and device seconds against their limits: the key's owner's, or with `all` everybody's."""
    core = core_of(request)
    document = core.usage(view_of(request, query))
    if query.all:
        document["owners"] = core.usage_by_owner()
    return JSONResponse(document, headers={"Cache-Control": "no-store"})
