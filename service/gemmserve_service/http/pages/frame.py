"""Frame of every page: head, bar with the ways to the other pages, and where the scripts are."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from gemmserve_service.http.pages import assets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PAGES: Final = (("", "Overview"), ("docs", "API"), ("problems", "Problems"))
_SESSION: Final = '<div id="session" class="session"></div>'
_MAIN_PORT: Final = frozenset({"problems"})


def document(
    title: str,
    body: str,
    *,
    version: str,
    here: str,
    base: str = "",
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: Mapping[str, str] | None = None,
    session: bool = False,
    side: bool = False,
) -> str:
    """Return a whole page.

    title: text, escaped here. body: HTML of the main part. here: path of the page among those of the bar ("", "docs",
    "problems"). base: "../" of a page one level down; all links are relative, for a proxy may add a prefix. styles and
    scripts: names of files under `static/`, the latter modules, beside site.css which every page has. data: data
    attributes of the main part, which scripts read. session: whether the bar has room for the button that session.js
    fills in. side: on the port of the metrics, which lacks some pages.
    """
    root = base or "./"
    ways = [way for way in _PAGES if not (side and way[0] in _MAIN_PORT)]
    links = "".join(
        f'<li><a href="{root if not path else base + path}"{_current(path, here)}>{text}</a>' for path, text in ways
    )
    given = "".join(f' data-{name}="{escape(value)}"' for name, value in (data or {}).items())
    sheets = "".join(f'<link rel="stylesheet" href="{assets.url(name, base=base)}">' for name in ("site.css", *styles))
    modules = "".join(f'<script type="module" src="{assets.url(name, base=base)}"></script>' for name in scripts)
    needed = sorted({module for name in scripts for module in assets.imported(name)})
    modules += "".join(f'<link rel="modulepreload" href="{assets.url(name, base=base)}">' for name in needed)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" type="image/svg+xml" href="{assets.url("favicon.svg", base=base)}">{sheets}{modules}</head>'
        '<body><a class="skip" href="#main">Skip to the content</a>'
        f'<header class="bar"><a class="brand" href="{root}"><img src="{assets.url("favicon.svg", base=base)}" alt="" '
        f'width="24" height="24">gemmserve <small>{escape(version)}</small></a>'
        f'<nav aria-label="Pages"><ul>{links}</ul></nav>'
        f"{_SESSION if session else ''}</header>"
        f'<main id="main" tabindex="-1"{given}>{body}</main></body></html>'
    )


def _current(path: str, here: str) -> str:
    return ' aria-current="page"' if path == here else ""
