"""/, /docs, their icon and the files that they load."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from gemmserve_service.errors import NotFound
from gemmserve_service.http.middleware.access import SIDE_PORT
from gemmserve_service.http.pages import assets, docs_page, home_page
from gemmserve_service.http.pages.policy import POLICY, page_response
from gemmserve_service.http.routes.common import caller_of, core_of

if TYPE_CHECKING:
    from collections.abc import Mapping

router = APIRouter(include_in_schema=False, default_response_class=Response)

_VERSION: Final = version("gemmserve")
"""Read once: from the package's files, which takes a millisecond."""


@router.get("/")
async def home(request: Request) -> Response:
    """Page that says what this server is, and where the rest is described."""
    core = core_of(request)
    side = SIDE_PORT in request.scope
    keys = core.keyring.current.closed
    page = home_page.render(
        _VERSION,
        "draining" if core.draining else "not ready",
        core.unready(),
        # The port of the metrics may be open to more people than the API.
        overview=None if side or keys else request.app.state.overview.look(caller_of(request)),
        keys=keys,
        metrics=side or core.settings.metrics_port is None,
        side=side,
    )
    return page_response(page)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The API's description, for people."""
    made: dict[tuple[bool, bool], assets.Asset] = request.app.state.docs_pages
    kind = SIDE_PORT in request.scope, core_of(request).keyring.current.closed
    if kind not in made:
        side, keys = kind
        text = docs_page.render(request.app.openapi(), side=side, keys=keys)
        made[kind] = assets.packed("docs.html", text.encode())
    return _answer(request, made[kind], {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})


@router.get("/favicon.ico")
@router.get("/favicon.svg")
async def favicon(request: Request) -> Response:
    """Icon, where browsers look for it by themselves: beside what is no page."""
    name: str = request.url.path.rpartition("/")[2]
    return _answer(request, assets.named(name), {"Cache-Control": "public, max-age=86400"})


@router.get("/static/{name}")
async def static(request: Request, name: str) -> Response:
    """File of a page, under the name that its content has: it may be kept for ever."""
    asset = assets.find(name)
    if asset is None:
        raise NotFound(f"no page loads {name[:80]!r}")
    return _answer(request, asset, {"Cache-Control": "public, max-age=31536000, immutable"})


def _answer(request: Request, asset: assets.Asset, fields: Mapping[str, str]) -> Response:
    """Return the asset in the coding that the client reads best, or 304 where it has it."""
    content, coding = asset.encoded(request.headers.get("accept-encoding"))
    headers = {**fields, "ETag": asset.etag, "Vary": "Accept-Encoding"}
    if request.headers.get("if-none-match") in {asset.etag, f"W/{asset.etag}", "*"}:
        return Response(status_code=304, headers=headers)
    if coding:
        headers["Content-Encoding"] = coding
        headers["ETag"] = f"W/{asset.etag}"
    return Response(content, headers=headers, media_type=asset.media_type)
