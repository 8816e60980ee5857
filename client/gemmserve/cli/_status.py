"""status and top: what the server has and does, once, or again and again in the terminal."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gemmserve import _errors
from gemmserve._handles.display import size_text
from gemmserve._transfer.progress import clock_text
from gemmserve.cli._context import UsageError, add_connection, columns_text
from gemmserve.cli._jobs import done_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from gemmserve import Client, JobInfo
    from gemmserve.cli._context import Context

_JOBS: Final = 200
"""Jobs of a state that `top` asks for: more than a terminal has lines."""
_SENSORS: Final = ("use", "power", "temp")
"""Columns of what devices' sensors say."""
_LOOKS: Final = 30
"""Looks that the share of busy ones is taken of."""
_CLEAR: Final = "\x1b[H\x1b[J"
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
"""The terminal's second screen, without a cursor: what was there comes back with `_LEAVE`."""
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"


Looks: TypeAlias = "defaultdict[str, deque[bool]]"
"""Whether a device had a job, at the last looks, by its id."""


class _Status:
    name = "status"
    help = "show the server, its devices, queue, store and quotas"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        found = snapshot(context.connect())
        if args.json:
            context.console.json(found)
        else:
            for line in status_lines(found):
                context.console.print(line)
        return 0 if found["ready"] else 1


class _Top:
    name = "top"
    help = "watch the server's devices, owners and jobs; q quits"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between looks (default 2)")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        if not 0.1 <= args.interval <= 3600:
            raise UsageError("--interval is a number of seconds from 0.1 to 3600")
        client = context.connect()
        if not sys.stdout.isatty():
            for line in top_lines(client):
                context.console.print(line)
            return 0
        looks: Looks = defaultdict(lambda: deque(maxlen=_LOOKS))
        with _screen():
            while True:
                try:
                    lines = top_lines(client, looks)
                except _errors.TransportError as error:  # a server that starts again comes back
                    looks.clear()
                    lines = [error.detail]
                width, height = shutil.get_terminal_size()
                sys.stdout.write(_CLEAR + "\r\n".join(line[:width] for line in lines[: height - 1]))
                sys.stdout.flush()
                if _quits_within(args.interval):
                    return 0


def snapshot(client: Client) -> dict[str, Any]:
    """Return what the server says of itself: url, version, uptime_s, ready, devices, usage. Raises GemmserveError."""
    health = client.health()
    return {
        "url": client.url,
        "version": health["version"],
        "uptime_s": health["uptime_s"],
        "ready": client.ready(),
        "devices": client.devices(),
        "usage": client.usage(),
    }


def status_lines(found: dict[str, Any], looks: Looks | None = None) -> list[str]:
    """A snapshot on one screen; `looks` as in `top_lines`."""
    usage = found["usage"]
    quotas = [(name.replace("_", " "), quota) for name, quota in usage["quotas"].items() if quota["limit"] is not None]
    state = "ready" if found["ready"] else "not ready"
    lines = [
        f"server   {found['url']}  gemmserve {found['version']}, {state}, up {clock_text(found['uptime_s'])}",
        f"queue    {usage['jobs_queued']} of {usage['max_queued_jobs']} jobs wait, {usage['jobs_running']} run",
        f"store    {usage['arrays']} arrays, {_part(usage['store_bytes'], usage['max_store_bytes'])}",
        f"today    {usage['quotas']['device_seconds_per_day']['used']:.1f} s of devices",
    ]
    lines += [f"quota    {name}: {quota['used']:g} of {quota['limit']:g}" for name, quota in quotas]
    return [*lines, "", *_device_lines(found["devices"], looks)]


def top_lines(client: Client, looks: Looks | None = None) -> list[str]:
    """The server's state, owners and jobs. `looks`: whether each device was busy at the last looks; this one is added.

    Raises GemmserveError.
    """
    found, owners = snapshot(client), _owners(client)
    running, queued = ([job.info for job in client.jobs(state=state, limit=_JOBS)] for state in ("running", "queued"))
    if looks is not None:
        for device in found["devices"]:
            looks[device["id"]].append(device["jobs_running"] > 0)
    lines = status_lines(found, looks)
    if owners:
        columns = ("owner", "running", "queued", "stored", "device s today")
        lines += ["", *columns_text(columns, [_owner_row(owner) for owner in owners])]
    rows = [_job_row(info) for info in (*running, *queued)]
    if rows:
        lines += ["", *columns_text(("job", "op", "state", "done", "expected", "created"), rows)]
    return lines


def _owners(client: Client) -> list[dict[str, Any]]:
    """Use by owner, where the server has keys and this one may see others' things; else none."""
    try:
        return list(client.usage(everybody=True).get("owners") or ())
    except _errors.Forbidden:
        return []


def _owner_row(usage: dict[str, Any]) -> tuple[object, ...]:
    seconds = usage["quotas"]["device_seconds_per_day"]["used"]
    return (
        usage["owner"],
        usage["jobs_running"],
        usage["jobs_queued"],
        size_text(usage["store_bytes"]),
        f"{seconds:.1f}",
    )


def _job_row(info: JobInfo) -> tuple[object, ...]:
    expected = "" if info.estimated_s is None else f"{info.estimated_s:.1f} s"
    created = "" if info.created_at is None else info.created_at.astimezone().strftime("%H:%M:%S")
    return info.id, info.op, info.state, done_text(info), expected, created


def _device_lines(devices: list[dict[str, Any]], looks: Looks | None) -> list[str]:
    """One line a device, and one for each warning. Columns of sensors that no device has are left out."""
    sensors = [_sensors(device) for device in devices]
    told = [name for name in _SENSORS if any(name in each for each in sensors)]
    columns = ("device", "state", "jobs", *([] if looks is None else ["busy"]), *told, "memory", "restarts", "name")
    rows = []
    for device, sensed in zip(devices, sensors, strict=True):
        seen = None if looks is None else looks[device["id"]]
        busy = [] if seen is None else [f"{sum(seen) / len(seen):.0%}"]
        said = (sensed.get(name, "") for name in told)
        memory = _part(device["memory_used"], device["memory_total"])
        name = device["spec"].get("name", "")
        jobs, restarts = device["jobs_running"], device["restarts"]
        rows.append((device["id"], device["state"], jobs, *busy, *said, memory, restarts, name))
    warnings = [f"{device['id']}: {text}" for device in devices for text in _health(device).get("warnings", ())]
    return [*columns_text(columns, rows), *warnings]


def _health(device: dict[str, Any]) -> dict[str, Any]:
    """Return what the device's sensors say; nothing from servers that do not ask them."""
    return device.get("health") or {}


def _sensors(device: dict[str, Any]) -> dict[str, str]:
    """Texts by the names of `_SENSORS`, of what the device tells."""
    health = _health(device)
    found = {}
    if (share := health.get("utilisation")) is not None:
        found["use"] = f"{share:.0%}"
    if (power := health.get("power_watts")) is not None:
        limit = health.get("power_limit_watts")
        found["power"] = f"{power:.0f} W" if limit is None else f"{power:.0f} of {limit:.0f} W"
    if (temperature := health.get("temperature_celsius")) is not None:
        found["temp"] = f"{temperature:.0f} °C"
    return found


def _part(used: int, whole: int | None) -> str:
    return size_text(used) if whole is None else f"{size_text(used)} of {size_text(whole)}"


@contextmanager
def _screen() -> Iterator[None]:
    """The terminal's second screen, its keys read one by one and not shown, until the block ends."""
    import termios
    import tty

    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    kept = None if keys is None else termios.tcgetattr(keys)
    try:
        if keys is not None:
            tty.setcbreak(keys)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if keys is not None and kept is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, kept)


def _quits_within(seconds: float) -> bool:
    """Whether q is pressed in that time. A terminal that is gone quits too."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            pressed = os.read(sys.stdin.fileno(), 1)
            if pressed in {b"q", b"Q", b""}:
                return True
    return False


STATUS, TOP = _Status(), _Top()
