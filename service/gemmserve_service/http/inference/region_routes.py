"""/v2/systemsharedmemory: regions of POSIX shared memory; and that there are none of CUDA's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from fastapi import APIRouter, Path, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from gemmserve_service.errors import DescriptorRefused, TooLarge
from gemmserve_service.http.inference.messages import RegionRegistration, RegionStatus
from gemmserve_service.http.inference.peers import check_same_user
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.requests.strict_json import parse_object, validate
from gemmserve_service.http.routes.common import caller_of

if TYPE_CHECKING:
    from gemmserve_service.http.inference.regions import Regions

router = APIRouter(tags=["inference"], default_response_class=Response)

RegionPath = Annotated[str, Path(description="name of a region", examples=["operands"], max_length=256)]

_MAX_BODY: Final = 4096
_LIST: Final = TypeAdapter(list[RegionStatus])
_DONE = {200: {"description": "Done."}, **doc.inference_errors("parameter-invalid")}
_STATUS = {
    200: doc.model(list[RegionStatus], "Regions of the key's owner."),
    **doc.inference_errors("not-found", "parameter-invalid"),
}
_REGISTERED = {
    200: {"description": "Registered."},
    **doc.inference_errors("descriptor-refused", "malformed-json", "parameter-invalid", "too-large"),
}


def _regions(request: Request) -> Regions:
    regions: Regions = request.app.state.regions
    return regions


def _list(found: list[RegionStatus]) -> Response:
    return Response(_LIST.dump_json(found), headers={"Cache-Control": "no-store"}, media_type="application/json")


@router.get("/v2/systemsharedmemory/status", summary="Regions", responses=_STATUS)
async def status(request: Request) -> Response:
    """The regions that the key's owner has registered."""
    return _list(_regions(request).status(caller_of(request).owner))


@router.get("/v2/systemsharedmemory/region/{name}/status", summary="A region", responses=_STATUS)
async def region_status(request: Request, name: RegionPath) -> Response:
    """One of them."""
    return _list(_regions(request).status(caller_of(request).owner, name))


@router.post(
    "/v2/systemsharedmemory/region/{name}/register",
    summary="Register a region",
    responses=_REGISTERED,
    openapi_extra=doc.json_body(
        RegionRegistration, examples={"input": {"key": "/operands", "offset": 0, "byte_size": 1_048_576}}
    ),
)
async def register(request: Request, name: RegionPath) -> Response:
    """Opens POSIX shared memory, for inputs and outputs of inferences of the key's owner. For clients that come by TCP
    from a process of this machine that runs as the server's own user; it stays open until it is unregistered.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY:
            raise TooLarge(f"a registration has at most {_MAX_BODY} bytes")
    wanted: RegionRegistration = validate(RegionRegistration, parse_object(body))
    check_same_user(request)
    _regions(request).register(caller_of(request).owner, name, wanted)
    return Response()


@router.post("/v2/systemsharedmemory/unregister", summary="Unregister every region", responses=_DONE)
async def unregister_all(request: Request) -> Response:
    """Closes the regions of the key's owner."""
    _regions(request).unregister(caller_of(request).owner)
    return Response()


@router.post("/v2/systemsharedmemory/region/{name}/unregister", summary="Unregister a region", responses=_DONE)
async def unregister(request: Request, name: RegionPath) -> Response:
    """Closes one of them; done, too, where there is none of that name."""
    _regions(request).unregister(caller_of(request).owner, name)
    return Response()


@router.get("/v2/cudasharedmemory/status", include_in_schema=False)
async def cuda_status() -> Response:
    """None: the memory of devices is the workers' own."""
    return _list([])


@router.post("/v2/cudasharedmemory/unregister", include_in_schema=False)
async def cuda_unregister() -> Response:
    """Done: there is none."""
    return Response()


@router.post("/v2/cudasharedmemory/region/{name}/register", include_in_schema=False)
async def cuda_register(name: RegionPath) -> Response:
    """Refused, always. Raises DescriptorRefused."""
    raise DescriptorRefused(f"{name[:40]!r}: CUDA shared memory is not taken here; system shared memory is")
