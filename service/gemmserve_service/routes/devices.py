"""/v1/devices and /v1/usage."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from gemmserve_service import documentation as doc
from gemmserve_service.routes.common import core_of, render
from gemmserve_service.schemas import Device, DeviceList

router = APIRouter(tags=["service"], default_response_class=Response)


class Usage(BaseModel):
    """Use against limits; null: no limit of its own."""

    arrays: int = Field(description="arrays stored")
    store_bytes: int
    max_store_bytes: int | None
    max_array_bytes: int
    scratch_bytes: int = Field(description="operands and results of one-shot requests under way")
    jobs_queued: int
    max_queued_jobs: int
    jobs_running: int


@router.get(
    "/v1/devices",
    summary="Devices",
    responses={200: doc.model(DeviceList, "Every device and its worker."), **doc.problems()},
)
async def devices(request: Request) -> Response:
    """What each device is, its memory, and the compute modes that it has."""
    return render(DeviceList(devices=[_device(info) for info in core_of(request).devices()]))


@router.get("/v1/usage", summary="Use and limits", responses={200: doc.model(Usage, "Now."), **doc.problems()})
async def usage(request: Request) -> Response:
    """Bytes and jobs against their limits."""
    return JSONResponse(core_of(request).usage(), headers={"Cache-Control": "no-store"})


def _device(info: Any) -> Device:
    return Device.model_validate(info, from_attributes=True)
