"""/v2, its health, its models and their statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastapi import APIRouter, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from gemmserve_service.errors import Draining, NotReady
from gemmserve_service.http.inference.messages import (
    ModelConfig,
    ModelMetadata,
    RepositoryEntry,
    ServerMetadata,
    Statistics,
)
from gemmserve_service.http.inference.models import SERVER, ModelPath, VersionPath, config, known_model, metadata
from gemmserve_service.http.inference.paths import MODELS, VERSION
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.routes.common import core_of, render

if TYPE_CHECKING:
    from gemmserve_service.http.inference.counts import Counts

router = APIRouter(tags=["inference"], default_response_class=Response)

_READY = {
    200: {"description": "Ready."},
    **doc.inference_errors("not-ready", "draining", "not-found", "parameter-invalid"),
}
_METADATA = {
    200: doc.model(ModelMetadata, "What the model is."),
    **doc.inference_errors("not-found", "parameter-invalid"),
}
_CONFIG = {200: doc.model(ModelConfig, "Its configuration."), **doc.inference_errors("not-found", "parameter-invalid")}
_STATISTICS = {
    200: doc.model(Statistics, "Everybody's inferences together."),
    **doc.inference_errors("not-found", "parameter-invalid"),
}
_INDEX: Final = TypeAdapter(list[RepositoryEntry])


@router.get(
    "/v2",
    summary="Server metadata",
    responses={200: doc.model(ServerMetadata, "What the server is."), **doc.inference_errors()},
)
async def server() -> Response:
    """Name, version and the extensions of the Open Inference Protocol that are spoken."""
    return render(SERVER)


@router.get("/v2/health/live", summary="Server live", responses={200: {"description": "Live."}})
async def live() -> Response:
    """Whether the process answers."""
    return Response()


@router.get("/v2/health/ready", summary="Server ready", responses=_READY)
async def ready(request: Request) -> Response:
    """Whether work is admitted and can run, as /readyz says."""
    return _ready(request)


def _ready(request: Request) -> Response:
    core = core_of(request)
    is_ready, reasons = core.ready()
    if not is_ready:
        raise (Draining if core.draining else NotReady)("; ".join(reasons))
    return Response()


@router.get(
    "/v2/models/stats",
    summary="Statistics of every model",
    responses={200: doc.model(Statistics, "Everybody's inferences together."), **doc.inference_errors()},
)
async def all_statistics(request: Request) -> Response:
    """Inferences since the server's start, and the nanoseconds that they took by phase."""
    return _statistics(request, *MODELS)


@router.get("/v2/models/{model}", summary="Model metadata", responses=_METADATA)
async def model_metadata(model: ModelPath) -> Response:
    """Inputs and outputs. A datatype is one of several, as `parameters` says: no model has a single one."""
    return render(metadata(known_model(model)))


@router.get("/v2/models/{model}/versions/{version}", summary="Metadata of a version", responses=_METADATA)
async def version_metadata(model: ModelPath, version: VersionPath) -> Response:
    """As without a version: there is one."""
    return render(metadata(known_model(model, version)))


@router.get("/v2/models/{model}/ready", summary="Model ready", responses=_READY)
async def model_ready(request: Request, model: ModelPath) -> Response:
    """Whether work is admitted and can run: models are there as long as the server is."""
    known_model(model)
    return _ready(request)


@router.get("/v2/models/{model}/versions/{version}/ready", summary="Version ready", responses=_READY)
async def version_ready(request: Request, model: ModelPath, version: VersionPath) -> Response:
    """As without a version: there is one."""
    known_model(model, version)
    return _ready(request)


@router.get("/v2/models/{model}/config", summary="Model configuration", responses=_CONFIG)
async def model_config(model: ModelPath) -> Response:
    """Triton's model configuration, as far as it means anything here."""
    return render(config(known_model(model)))


@router.get("/v2/models/{model}/versions/{version}/config", summary="Configuration of a version", responses=_CONFIG)
async def version_config(model: ModelPath, version: VersionPath) -> Response:
    """As without a version: there is one."""
    return render(config(known_model(model, version)))


@router.get("/v2/models/{model}/stats", summary="Model statistics", responses=_STATISTICS)
async def model_statistics(request: Request, model: ModelPath) -> Response:
    """Inferences since the server's start, and the nanoseconds that they took by phase."""
    return _statistics(request, known_model(model))


@router.get("/v2/models/{model}/versions/{version}/stats", summary="Statistics of a version", responses=_STATISTICS)
async def version_statistics(request: Request, model: ModelPath, version: VersionPath) -> Response:
    """As without a version: there is one."""
    return _statistics(request, known_model(model, version))


def _statistics(request: Request, *models: str) -> Response:
    counts: dict[str, Counts] = request.app.state.inference_counts
    return render(Statistics(model_stats=[counts[model].statistics() for model in models]))


@router.post(
    "/v2/repository/index",
    summary="Models",
    responses={200: doc.model(list[RepositoryEntry], "Every model."), **doc.inference_errors()},
)
async def repository(request: Request) -> Response:
    """The models, which are ready when the server is. None can be loaded or unloaded."""
    is_ready, reasons = core_of(request).ready()
    state = ("READY", "") if is_ready else ("UNAVAILABLE", "; ".join(reasons))
    entries = [RepositoryEntry(name=model, version=VERSION, state=state[0], reason=state[1]) for model in MODELS]
    return Response(_INDEX.dump_json(entries), headers={"Cache-Control": "no-store"}, media_type="application/json")
