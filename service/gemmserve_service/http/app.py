"""The composition root of the HTTP side: one app around one core."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.routing import Match

from gemmserve_service.http import problems
from gemmserve_service.http.cells import routes as cell_routes
from gemmserve_service.http.inference import descriptions, infer, region_routes
from gemmserve_service.http.inference.counts import Counts
from gemmserve_service.http.inference.json_data import JsonMemory
from gemmserve_service.http.inference.paths import MODELS
from gemmserve_service.http.inference.regions import Regions
from gemmserve_service.http.metrics.metrics import Metrics
from gemmserve_service.http.middleware.access import Access, Gate
from gemmserve_service.http.middleware.audit import AuditLog
from gemmserve_service.http.middleware.body_limits import BodyLimits
from gemmserve_service.http.middleware.body_rate import BodyRate
from gemmserve_service.http.middleware.content_digests import ContentDigests
from gemmserve_service.http.middleware.direct_routes import DirectRoutes
from gemmserve_service.http.middleware.head_requests import HeadRequests
from gemmserve_service.http.middleware.observe import Observe
from gemmserve_service.http.openapi import documentation
from gemmserve_service.http.overview.live_overview import LiveOverview
from gemmserve_service.http.pages import routes as pages
from gemmserve_service.http.requests.descriptors import Descriptors
from gemmserve_service.http.routes import (
    arrays,
    batch,
    deletions,
    devices,
    health,
    jobs,
    oneshot,
    overview,
    samples,
    uploads,
)
from gemmserve_service.http.routes import problems as problem_routes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Scope

    from gemmserve_service.jobs.core import Core
    from gemmserve_service.settings import Settings


def create_app(settings: Settings, core: Core) -> FastAPI:
    """The ASGI app. Its lifespan starts and stops `core`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await core.start()
        app.state.overview.start()
        try:
            yield
        finally:
            await app.state.overview.stop()
            app.state.descriptors.stop()
            app.state.regions.close()
            await core.stop()

    app = FastAPI(
        title="gemmserve",
        version=version("gemmserve"),
        description=documentation.DESCRIPTION,
        openapi_tags=documentation.TAGS,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        # FastAPI's own (from 0.165 on, others ignore this): it sees no small request, and would see the others twice.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.core = core
    app.state.descriptors = Descriptors(settings, core.keyring)
    app.state.regions = Regions(settings.max_shared_descriptors)
    app.state.json_memory = JsonMemory()
    app.state.inference_counts = {model: Counts(model) for model in MODELS}
    app.state.gate = Gate(settings, core.keyring)
    app.state.metrics = Metrics(core)
    app.state.docs_pages = {}
    app.state.audit = AuditLog(settings.audit_log)
    core.observers.append(app.state.metrics)
    app.state.overview = LiveOverview(core, app.state.metrics)
    core.keyring.on_change.append(app.state.audit.keys_changed)
    problems.install(app)
    documentation.install(app)
    for module in (
        oneshot, batch, arrays, deletions, samples, uploads, jobs, devices, overview, health, problem_routes, pages,
        descriptions, infer, region_routes, cell_routes,
    ):  # fmt: skip
        app.include_router(module.router)
    # The last one added is the outermost.
    direct = {**oneshot.DIRECT, **batch.DIRECT, **jobs.DIRECT, **infer.DIRECT}
    app.add_middleware(DirectRoutes, endpoints=direct, routes=infer.ROUTES)
    app.add_middleware(ContentDigests)
    app.add_middleware(HeadRequests, own=partial(_knows_head, app))
    app.add_middleware(Access, gate=app.state.gate, limits=BodyLimits(settings), cells=core.cells)
    app.add_middleware(BodyRate, settings=settings)
    app.add_middleware(Observe, metrics=app.state.metrics, audit=app.state.audit, tracing=core.tracing)
    return app


def _knows_head(app: FastAPI, scope: Scope) -> bool:
    """Whether a route for HEAD is at that path."""
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
