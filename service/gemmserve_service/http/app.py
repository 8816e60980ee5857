"""The composition root of the HTTP side: one app around one core."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.routing import Match

from gemmserve_service.http import problems
from gemmserve_service.http.metrics.metrics import Metrics
from gemmserve_service.http.middleware.access import Access, Gate
from gemmserve_service.http.middleware.audit import Audit, AuditLog
from gemmserve_service.http.middleware.body_limits import BodyLimit
from gemmserve_service.http.middleware.body_rate import BodyRate
from gemmserve_service.http.middleware.content_digests import ContentDigests
from gemmserve_service.http.middleware.direct_routes import DirectRoutes
from gemmserve_service.http.middleware.head_requests import HeadRequests
from gemmserve_service.http.middleware.observe import Observe
from gemmserve_service.http.openapi import documentation
from gemmserve_service.http.requests.descriptors import Descriptors
from gemmserve_service.http.routes import arrays, batch, devices, health, jobs, oneshot, uploads

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
        try:
            yield
        finally:
            app.state.descriptors.stop()
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
    )
    app.state.core = core
    app.state.descriptors = Descriptors(settings, core.keyring)
    app.state.gate = Gate(settings, core.keyring)
    app.state.metrics = Metrics(core)
    app.state.audit = AuditLog(settings.audit_log)
    core.observers.append(app.state.metrics)
    core.keyring.on_change.append(app.state.audit.keys_changed)
    problems.install(app)
    documentation.install(app)
    for module in (oneshot, batch, arrays, uploads, jobs, devices, health):
        app.include_router(module.router)
    # The last one added is the outermost.
    app.add_middleware(DirectRoutes, endpoints={**oneshot.DIRECT, **batch.DIRECT, **jobs.DIRECT})
    app.add_middleware(ContentDigests)
    app.add_middleware(HeadRequests, own=partial(_knows_head, app))
    app.add_middleware(BodyLimit, settings=settings)
    app.add_middleware(Access, gate=app.state.gate)
    app.add_middleware(BodyRate, settings=settings)
    app.add_middleware(Audit, log=app.state.audit)
    app.add_middleware(Observe, metrics=app.state.metrics)
    return app


def _knows_head(app: FastAPI, scope: Scope) -> bool:
    """Whether a route for HEAD is at that path."""
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
