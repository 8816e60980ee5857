"""/problems for people: every problem with its status, when it occurs and what to do."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from gemmserve_service.http.pages import frame
from gemmserve_service.http.pages.markup import inline
from gemmserve_service.remedies import remedy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def render(catalogue: Mapping[str, Mapping[str, Any]], statuses: Mapping[str, Sequence[int]], version: str) -> str:
    """Return the page. `catalogue`: problems by slug; `statuses`: those that go with each slug."""
    contents = "".join(f'<li><a href="#{slug}">{slug}</a></li>' for slug in catalogue)
    sections = "".join(_problem(slug, entry, statuses[slug]) for slug, entry in catalogue.items())
    body = (
        '<div class="columns"><nav class="contents" aria-label="Problems"><div id="find"></div>'
        f"<ul>{contents}</ul></nav><div><h1>Problems</h1>"
        "<p>Every error is answered with a document of RFC 9457, <code>application/problem+json</code>. Its "
        "<code>type</code> is one of the addresses below, which stay the same; <code>detail</code> says what happened "
        "this time. Programs that ask for <code>application/json</code> get this list as JSON.</p>"
        f"{sections}</div></div>"
    )
    return frame.document(
        "gemmserve: problems", body, version=version, here="problems", styles=("docs.css",), scripts=("problems.js",)
    )


def _problem(slug: str, entry: Mapping[str, Any], statuses: Sequence[int]) -> str:
    pills = " ".join(f'<span class="pill {"bad" if status >= 500 else "warn"}">{status}</span>' for status in statuses)
    title, detail = f"{entry['title']}.", inline(" ".join(entry["detail"].split()))
    if not detail.startswith(entry["title"]):
        detail = f"<b>{escape(title)}</b> {detail}"
    return (
        f'<section class="card entry" id="{slug}" aria-labelledby="{slug}-head"><h2 id="{slug}-head">'
        f'<a href="#{slug}"><code>{slug}</code></a> {pills}</h2>'
        f"<p>{detail}</p><h3>What to do</h3><p>{inline(remedy(slug))}</p></section>"
    )
