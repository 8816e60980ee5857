"""Content-Security-Policy of the pages, and what else every page is answered with."""

from __future__ import annotations

from typing import Final

from starlette.responses import HTMLResponse

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
"""Nothing comes from elsewhere, and nothing inline runs: no script and no style attribute, whatever a name holds."""


def page_response(text: str, status: int = 200) -> HTMLResponse:
    """Return an answer of the page `text`, which nobody caches."""
    return HTMLResponse(text, status, {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"})
