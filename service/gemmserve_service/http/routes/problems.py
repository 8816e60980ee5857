"""/problems: the types that errors have, as JSON for programs and as a page for people."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Final

from fastapi import APIRouter, Path, Request
from starlette.responses import JSONResponse, Response

from gemmserve_service.errors import NotFound
from gemmserve_service.http.headers.preferences import choose_media_type
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.pages import problems_page
from gemmserve_service.http.pages.policy import page_response
from gemmserve_service.http.problems import catalogue, statuses
from gemmserve_service.schemas import Problem

router = APIRouter(tags=["service"], default_response_class=Response)

_VERSION: Final = version("gemmserve")
_VARY: Final = {"Vary": "Accept"}
_HTML: Final = {"text/html": {"schema": {"type": "string"}}}


def _for_people(request: Request) -> bool:
    """Whether the client likes HTML better than JSON, as browsers do."""
    return choose_media_type(request.headers.get("accept"), ("application/json", "text/html")) == "text/html"


@router.get(
    "/problems",
    summary="Problem types",
    responses={
        200: {
            "description": "Problem types by slug; where `Accept` likes HTML better, a page that says what to do too.",
            "content": {"application/json": {"schema": {"type": "object"}}, **_HTML},
        }
    },
)
async def problem_list(request: Request) -> Response:
    """Every `type` that an error may carry, with status, title and meaning."""
    known = catalogue()
    if not _for_people(request):
        return JSONResponse(known, headers=_VARY)
    by_slug = {slug: sorted(statuses(slug) | {entry["status"]}) for slug, entry in known.items()}
    answer = page_response(problems_page.render(known, by_slug, _VERSION))
    answer.headers.update(_VARY)
    return answer


@router.get(
    "/problems/{slug}",
    summary="A problem type",
    responses={
        200: doc.model(Problem, "What it means."),
        303: {
            "description": "`Accept` likes HTML better: its place on the page of all.",
            "headers": {"Location": {"description": "/problems#slug", "schema": {"type": "string"}}},
        },
        **doc.problems("not-found", "parameter-invalid"),
    },
)
async def problem(
    request: Request, slug: Annotated[str, Path(description="the last part of a problem's type")]
) -> Response:
    """Describe one `type`."""
    document = catalogue().get(slug)
    if document is None:
        raise NotFound(f"no problem type {slug[:80]!r}; GET /problems lists them")
    if _for_people(request):
        # Relative: a proxy may add a prefix.
        return Response(status_code=303, headers={"Location": f"../problems#{slug}", **_VARY})
    return JSONResponse(document, headers=_VARY, media_type="application/json")
