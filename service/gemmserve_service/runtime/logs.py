"""Structured logs: JSON lines or console text, with the request's id and trace on every line written while it runs."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from gemmserve_service.settings import Settings

_QUOTED: Final = re.compile("[ ='\"]")
_STAMP: Final = structlog.processors.TimeStamper(fmt="iso", utc=True)
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Unfailing:
    """A stream that drops what it cannot write: a log on a full disk, or nobody at a pipe's other end, is no reason
    for a request to fail.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """The length of `text`, written or not."""
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Passes on what can be."""
        try:  # not contextlib's `suppress`, which takes three calls of each request
            self._stream.flush()
        except OSError:
            return


def configure(settings: Settings) -> None:
    """Sends structlog's and the standard library's records (uvicorn's) through one chain of processors to stderr."""
    stream = cast("TextIO", Unfailing(sys.stderr))
    level = _LEVELS[settings.log_level]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _STAMP,
        structlog.processors.StackInfoRenderer(),
    ]
    renderers = _renderers(json=settings.log_json)
    REQUESTS.configure(stream, renderers[-1])
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                *shared,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                _drop_color_message,
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(json=settings.log_json),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers[:] = []
        logger.propagate = True
        logger.disabled = name == "uvicorn.access"  # the access line is `middleware.Observe`'s


class RequestLines:
    """The lines of requests: such as structlog would write, for a fifth of the time, and those of one turn of the event
    loop in one write.
    """

    def __init__(self) -> None:
        self._stream: TextIO | None = None
        self._render: Any = None
        self._waiting: list[str] = []

    def configure(self, stream: TextIO, render: Any) -> None:
        """Set where lines go, and structlog's last processor, which makes them."""
        self._stream, self._render = stream, render

    def write(self, level: str, fields: dict[str, Any]) -> None:
        """A line "request". Where structlog is set up otherwise than by `configure`, it has its way."""
        config = structlog.get_config()
        if not config["wrapper_class"].is_enabled_for(None, _LEVELS[level]):
            return
        processors = config["processors"]
        if self._stream is None or not processors or processors[-1] is not self._render:
            getattr(structlog.get_logger("gemmserve.access"), level)("request", **fields)
            return
        if self._render.__class__ is PlainRenderer:
            line = f"{self._render.line(_now(), level, 'request', fields)}\n"
        else:
            event = {**fields, "event": "request", "level": level, "timestamp": _now()}
            line = f"{self._render(None, level, event)}\n"
        if self._waiting:
            self._waiting.append(line)
            return
        try:
            asyncio.get_running_loop().call_soon(self._flush)
        except RuntimeError:
            self._stream.write(line)
            self._stream.flush()
        else:
            self._waiting.append(line)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._stream is not None:
            self._stream.write("".join(waiting))
            self._stream.flush()


REQUESTS: Final = RequestLines()
"""Request lines of this process."""


def _renderers(*, json: bool) -> list[Any]:
    # Without the frames' locals: they hold what people sent.
    if json:
        transform = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(transform), structlog.processors.JSONRenderer()]
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    return [console if sys.stderr.isatty() else PlainRenderer(console)]


class PlainRenderer:
    """The line that structlog's console renderer writes without colors, for a tenth of its time: there is one a
    request. What has a traceback is left to that renderer.
    """

    _LEFT: Final = frozenset({"exc_info", "exception", "stack", "logger", "logger_name"})

    def __init__(self, console: structlog.dev.ConsoleRenderer) -> None:
        self._console = console

    def __call__(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        """A processor of structlog's."""
        if not self._LEFT.isdisjoint(event):
            return str(self._console(logger, name, event))
        stamp, level, text = event.pop("timestamp", ""), event.pop("level", ""), event.pop("event", "")
        return self.line(stamp, level, text, event)

    @staticmethod
    def line(stamp: str, level: str, text: str, fields: Mapping[str, Any]) -> str:
        """The line of an event that has no traceback. Its strings are looked at together: hardly ever is one quoted."""
        names, form = _form(tuple(fields))
        values = [fields[name] for name in names]
        strings = "".join([value for value in values if value.__class__ is str])
        if not strings.isprintable() or _QUOTED.search(strings) is not None:
            values = [
                value
                if value.__class__ is not str or (value.isprintable() and _QUOTED.search(value) is None)
                else repr(value)
                for value in values
            ]
        return (form % (stamp, level, text, *values)).rstrip(" ")


@lru_cache(64)
def _form(names: tuple[str, ...]) -> tuple[list[str], str]:
    """The names of an event's fields in the order of their places in its line, and the line: those of requests have the
    same ones again and again.
    """
    ordered = sorted(names)
    return ordered, "%s [%-9s] %-30s " + " ".join([f"{name.replace('%', '%%')}=%s" for name in ordered])


def _now() -> str:
    """Return the time as `_STAMP` writes it, in a part of its time."""
    seconds, microseconds = divmod(time.time_ns() // 1000, 1_000_000)
    return f"{_second(seconds)}.{microseconds:06d}Z" if microseconds else f"{_second(seconds)}Z"


@lru_cache(2)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().removesuffix("+00:00")


def _drop_color_message(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Uvicorn attaches a second copy of each message, for terminals."""
    event.pop("color_message", None)
    return event
