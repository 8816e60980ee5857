"""/v2, its health, its models and their statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

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
    from collections.abc import Callable

    from gemmserve_service.http.inference.counts import Counts

    Answer = Callable[[Request, str], Response]

router = APIRouter(tags=["inference"], default_response_class=Response)

_READY: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "Ready."},
    **doc.inference_errors("not-ready", "draining", "not-found", "parameter-invalid"),
}
_METADATA: Final[dict[int | str, dict[str, Any]]] = {
    200: doc.model(ModelMetadata, "What the model is."),
    **doc.inference_errors("not-found", "parameter-invalid"),
}
_CONFIGURATION: Final[dict[int | str, dict[str, Any]]] = {
    200: doc.model(ModelConfig, "Its configuration."),
    **doc.inference_errors("not-found", "parameter-invalid"),
}
_STATISTICS: Final[dict[int | str, dict[str, Any]]] = {
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


def _of_model(
    part: str, what: str, summaries: tuple[str, str], responses: dict[int | str, dict[str, Any]]
) -> Callable[[Answer], Answer]:
    """Add a model's route, and the same of its version, in which there is nothing else.

    `part`: what follows the model, or the version, in the path. `what`: the routes' names after `model_` and
    `version_`. What is decorated answers for a model that is known.
    """

    def added(answer: Answer) -> Answer:
        async def of_model(request: Request, model: ModelPath) -> Response:
            return answer(request, known_model(model))

        async def of_version(request: Request, model: ModelPath, version: VersionPath) -> Response:
            return answer(request, known_model(model, version))

        for kind, below, endpoint, summary, description in (
            ("model", "", of_model, summaries[0], answer.__doc__),
            ("version", "/versions/{version}", of_version, summaries[1], "As without a version: there is one."),
        ):
            router.add_api_route(
                f"/v2/models/{{model}}{below}{part}",
                endpoint,
                methods=["GET"],
                name=f"{kind}_{what}",
                summary=summary,
                description=description,
                responses=responses,
            )
        return answer

    return added


@_of_model("", "metadata", ("Model metadata", "Metadata of a version"), _METADATA)
def _metadata(_: Request, model: str) -> Response:
    """Inputs and outputs. A datatype is one of several, as `parameters` says: no model has a single one."""
    return render(metadata(model))


@_of_model("/ready", "ready", ("Model ready", "Version ready"), _READY)
def _model_ready(request: Request, _: str) -> Response:
    """Whether work is admitted and can run: models are there as long as the server is."""
    return _ready(request)


@_of_model("/config", "config", ("Model configuration", "Configuration of a version"), _CONFIGURATION)
def _config(_: Request, model: str) -> Response:
    """Triton's model configuration, as far as it means anything here."""
    return render(config(model))


@_of_model("/stats", "statistics", ("Model statistics", "Statistics of a version"), _STATISTICS)
def _model_statistics(request: Request, model: str) -> Response:
    """Inferences since the server's start, and the nanoseconds that they took by phase."""
    return _statistics(request, model)


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
