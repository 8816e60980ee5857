"""/: the page for people who type the server's address into a browser.

What is known when it is asked for is in the HTML: whether the server takes work, and, where it has no keys, tables of
devices, queue and failures. `static/home.js` keeps that true and adds what a table cannot show.
"""

from __future__ import annotations

import re
import time
from html import escape
from typing import TYPE_CHECKING, Final

from gemmserve_service.http.pages import frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gemmserve_service.http.overview.schemas import FailureProblem, Overview, OverviewDevice
    from gemmserve_service.jobs.core import Unready

_LINKS: Final[tuple[tuple[str, str], ...]] = (
    ("docs", "the API, described"),
    ("openapi.json", "the same for programs (OpenAPI)"),
    ("problems", "the errors that it answers with"),
    ("readyz", "whether it takes work"),
)
_NONE: Final = "\N{EN DASH}"


def render(
    version: str,
    unready: str,
    reasons: Sequence[Unready],
    *,
    overview: Overview | None,
    keys: bool,
    metrics: bool,
    side: bool = False,
) -> str:
    """The page of a server of that version.

    unready: state of the server if there are `reasons` for which it is not ready. overview: None where its tables are
    not for everybody. keys: whether the API wants keys. metrics: whether this port has /metrics. side: whether it is
    the port of the metrics alone, which has no API for scripts to ask.
    """
    state = unready if reasons else "ready"
    kind = {"ready": "ok", "draining": "warn"}.get(state, "bad")
    why = "".join(f"<li><strong>{escape(each.reason)}</strong>: {_marked(each.remedy)}</li>" for each in reasons)
    if why:
        why = f'<ul class="reasons">{why}</ul>'
    body = (
        f'<div id="state" class="state"><h1>Server <span class="pill {kind}">{escape(state)}</span></h1>'
        f'<p class="muted">version {escape(version)}</p>{why}</div>'
        f"{'' if side else _sections(overview, keys=keys)}{_links(metrics=metrics, side=side)}"
    )
    return frame.document(
        "gemmserve",
        body,
        version=version,
        here="",
        styles=("home.css",),
        scripts=() if side else ("home.js",),
        data={} if side else {"keys": "true" if keys else "false"},
        session=not side,
        side=side,
    )


def _sections(overview: Overview | None, *, keys: bool) -> str:
    """Tables of devices, queue and failures, or the places where scripts put them, and what scripts alone can show."""
    unknown = overview is None
    return (
        f"{_section('devices', 'Devices', _devices(overview), hidden=unknown)}"
        f"{_section('tiles', 'Last hour', '', hidden=True)}"
        f'<div class="pair">{_section("queue", "Queue", _queue(overview), hidden=unknown)}'
        f"{_section('memory', 'Memory', '', hidden=True)}</div>"
        f"{_section('failures', 'Failures', _failures(overview), hidden=unknown)}{_live(keys=keys)}"
    )


def _devices(overview: Overview | None) -> str:
    if overview is None:
        return ""
    return _table(
        "Devices: memory, load and what runs on them",
        ("Device", "State", "Memory", "Busy", "Power", "Temperature", "Running"),
        (_device(each, overview.time) for each in overview.devices),
    )


def _device(device: OverviewDevice, now: float) -> tuple[str, ...]:
    memory = device.memory_bytes
    running = "; ".join(f"{each.what}, {_seconds(now - each.since)}" for each in device.running)
    return (
        device.name,
        "; ".join((device.state, *device.health)),
        f"{_bytes(device.memory_used_bytes)} of {_NONE if memory is None else _bytes(memory)}",
        _figure(device.utilisation, 100, "%"),
        _figure(device.power_watts, 1, "W"),
        _figure(device.temperature_celsius, 1, "°C"),
        running or "idle",
    )


def _queue(overview: Overview | None) -> str:
    if overview is None:
        return ""
    return _table(
        "Jobs by owner",
        ("Owner", "Queued", "Running", "Oldest"),
        (
            (
                each.owner or "everybody",
                str(each.queued),
                str(each.running),
                _NONE if each.oldest is None else _seconds(overview.time - each.oldest),
            )
            for each in overview.queue
        ),
        nothing="Nothing waits, nothing runs.",
    )


def _failures(overview: Overview | None) -> str:
    if overview is None:
        return ""
    return _table(
        "Last failures, newest first",
        ("When", "What", "Problem", "What to do"),
        ((_moment(each.time), each.kind, _problem(each.problem), each.remedy or _NONE) for each in overview.failures),
        nothing="None since the server started.",
    )


def _section(name: str, title: str, content: str, *, hidden: bool, tools: str = "") -> str:
    return (
        f'<section data-live class="card" aria-labelledby="{name}-title"{" hidden" if hidden else ""}>'
        f'<div class="head"><h2 id="{name}-title">{title}</h2>{tools}</div><div id="{name}">{content}</div></section>'
    )


def _live(*, keys: bool) -> str:
    """Sections that scripts fill."""
    states = "".join(
        f'<option value="{state}">{state}</option>'
        for state in ("queued", "running", "succeeded", "failed", "cancelled", "expired")
    )
    refresh = '<button type="button" id="{}-refresh" class="quiet">Refresh</button>'
    everybody = f'<label class="inline"{"" if keys else " hidden"}><input type="checkbox" id="everybody"> of all owners'
    welcome = (
        '<section id="welcome" class="card"><p>This server has API keys. '
        "Sign in with one to see its devices, queue, jobs and arrays, and to multiply.</p>"
        '<p><button type="button" id="sign-in" class="primary">Sign in</button></p></section>'
    )
    if not keys:
        welcome = welcome.replace('class="card"', 'class="card" hidden', 1)
    jobs = (
        '<div class="toolbar"><label class="inline">State <select id="jobs-state"><option value="">any</option>'
        f"{states}</select></label>{everybody}</label>{refresh.format('jobs')}</div>"
    )
    arrays = (
        '<form id="search-form" class="toolbar" role="search"><label class="inline">Name '
        '<input type="search" id="search" placeholder="or a part of one" autocomplete="off" spellcheck="false"></label>'
        f"{refresh.format('arrays')}</form>"
    )
    return (
        '<p id="no-scripts" class="muted">Charts, jobs, arrays and the form that multiplies need scripts.</p>'
        f"{welcome}{_section('multiply', 'Multiply', '', hidden=True)}"
        f"{_section('arrays', 'Arrays', '', hidden=True, tools=arrays)}"
        f"{_section('jobs', 'Jobs', '', hidden=True, tools=jobs)}"
    )


def _links(*, metrics: bool, side: bool) -> str:
    links = [link for link in _LINKS if not (side and link[0] == "problems")]
    if metrics:
        links.append(("metrics", "for Prometheus"))
    items = "".join(f'<li><a href="{path}">/{path}</a> {text}</li>' for path, text in links)
    return f'<footer><h2 class="visually-hidden">Other pages of this server</h2><ul>{items}</ul></footer>'


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, nothing: str = "") -> str:
    """A table of plain text, which is escaped here; `nothing` in its place where there is no row."""
    lines = "".join(
        f'<tr role="row">{"".join(_cell(name, text) for name, text in zip(columns, row, strict=True))}</tr>'
        for row in rows
    )
    if not lines and nothing:
        return f'<p class="muted">{escape(nothing)}</p>'
    heads = "".join(f'<th scope="col" role="columnheader">{escape(name)}</th>' for name in columns)
    return (
        f'<table role="table"><caption>{escape(caption)}</caption><thead role="rowgroup"><tr role="row">{heads}</tr>'
        f'</thead><tbody role="rowgroup">{lines}</tbody></table>'
    )


def _cell(name: str, text: str) -> str:
    return f'<td role="cell" data-label="{escape(name)}">{escape(text)}</td>'


def _marked(text: str) -> str:
    """HTML of plain text with `code` in backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _problem(problem: FailureProblem) -> str:
    return f"{problem.title}: {problem.detail}" if problem.detail else problem.title


def _figure(value: float | None, factor: float, unit: str) -> str:
    return _NONE if value is None else f"{value * factor:.0f} {unit}"


def _bytes(value: float) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    at = 0
    while value >= 1023.5 and at < len(units) - 1:
        value /= 1024
        at += 1
    return f"{value:.3g} {units[at]}" if value < 1000 else f"{value:.0f} {units[at]}"


def _seconds(value: float) -> str:
    value = max(value, 0.0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.1f} s"


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
