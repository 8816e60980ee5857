"""Progress of large transfers and of jobs, on a terminal or in a notebook: rich's bar where rich can draw it there, one
plain line otherwise, each with the time that is left.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from gemmserve._model import JobInfo

SHOW_FROM: Final = 8 << 20
"""Smaller transfers are over before a bar can be read."""

SHOW_AFTER_S: Final = 0.5
"""Seconds of a wait after which a job's bar appears."""

_REDRAW_S: Final = 0.1
_WIDTH: Final = 72
_BAR: Final = 20
"""Characters of a job's bar."""


class Bar(Protocol):
    """One transfer's display."""

    def advance(self, nbytes: int) -> None: ...

    def close(self) -> None: ...


class Progress:
    """Makes bars, or None for transfers that need none: small ones, and all of them when nobody watches."""

    def __init__(self, *, enabled: bool, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._enabled = enabled

    def bar(self, label: str, total: int | None) -> Bar | None:
        """A bar for `total` bytes, drawn on stderr, or None."""
        if not self._enabled or total is None or total < SHOW_FROM:
            return None
        stream = self._watched()
        if stream is None:
            return None
        try:
            return _OneProcess(_RichBar(label, total, stream))
        except ImportError:
            return _OneProcess(_PlainBar(label, total, stream))

    def job(self) -> JobBar | None:
        """A bar for a job that is waited for, drawn on stderr, or None."""
        stream = self._watched() if self._enabled else None
        return None if stream is None else JobBar(stream)

    def _watched(self) -> TextIO | None:
        """The stream that bars go to, if somebody sees it."""
        stream = self._stream or sys.stderr
        return stream if stream.isatty() or in_notebook() else None


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook: its stderr is no terminal, and yet is seen."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class _OneProcess:
    """A bar of the process that began it: a child that was forked meanwhile leaves the terminal alone."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._pid = os.getpid()

    def advance(self, nbytes: int) -> None:
        if os.getpid() == self._pid:
            self._bar.advance(nbytes)

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._bar.close()


class Stopped(Exception):  # noqa: N818 (no error: another part of the same transfer has failed)
    """A transfer is wanted no more."""


class SharedBar:
    """One bar for transfers in several threads; none is drawn where `bar` is None. Stops them all, too."""

    def __init__(self, bar: Bar | None) -> None:
        self._bar = bar
        self._lock = threading.Lock()
        self._stopped = False

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more bytes. Raises Stopped."""
        with self._lock:
            if self._stopped:
                raise Stopped
            if self._bar is not None:
                self._bar.advance(nbytes)

    def close(self) -> None:
        """Do nothing at the end of one transfer: the bar is the others' too."""

    def stop(self) -> None:
        """Ends every transfer at its next piece, and the bar."""
        with self._lock:
            if not self._stopped and self._bar is not None:
                self._bar.close()
            self._stopped = True


def watched(
    pieces: Iterable[bytes | memoryview], progress: Progress, label: str, total: int | None, shared: Bar | None = None
) -> Iterator[bytes | memoryview]:
    """The same pieces, counted on a bar as they are taken; it appears with the first and goes with the last.

    `shared`: the bar of a larger transfer that these are part of.
    """
    bar = shared or progress.bar(label, total)
    if bar is None:
        yield from pieces
        return
    try:
        for piece in pieces:
            yield piece
            bar.advance(len(piece))
    finally:
        bar.close()


def _rich_console(stream: TextIO) -> Console:
    """A console to draw on. Raises ImportError where rich is missing, or ipywidgets, which it needs in a notebook."""
    from rich.console import Console

    if in_notebook():
        import_module("ipywidgets")
    return Console(file=stream)


class _RichBar:
    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        self._progress = Progress(
            *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=_rich_console(stream), transient=True
        )
        self._task = self._progress.add_task(label, total=total)
        self._progress.start()

    def advance(self, nbytes: int) -> None:
        self._progress.advance(self._task, nbytes)

    def close(self) -> None:
        self._progress.stop()


class _Line:
    """One line of a stream, drawn over again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def draw(self, text: str) -> None:
        self._stream.write(f"\r{text:<{_WIDTH}}")
        self._stream.flush()

    def clear(self) -> None:
        self._stream.write(f"\r{'':<{_WIDTH}}\r")
        self._stream.flush()


class _PlainBar:
    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self._label, self._total, self._line = label, total, _Line(stream)
        self._done = 0
        self._began = time.monotonic()
        self._drawn = 0.0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._drawn < _REDRAW_S:
            return
        self._drawn = now
        speed = self._done / max(now - self._began, 1e-6)
        left = max(self._total - self._done, 0) / max(speed, 1.0)
        done = f"{self._done / 2**20:.0f} of {self._total / 2**20:.0f} MiB"
        self._line.draw(f"{self._label}  {done}  {speed / 2**20:.0f} MiB/s  {clock_text(left)} left")

    def close(self) -> None:
        self._line.clear()


class JobBar:
    """State of a job that is waited for, and how far it is: as the server says, or else by its estimate of the time.

    A thread redraws it, from `show` on and once the wait has taken `SHOW_AFTER_S`; quick jobs draw nothing.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._info: JobInfo | None = None
        self._since = 0.0
        """Time at which the job was first seen running (time.monotonic); 0: it was not."""
        self._began = time.monotonic()
        self._thread: threading.Thread | None = None

    def show(self, info: JobInfo) -> None:
        """Take over the job's state. Called by whoever waits, in its thread."""
        running = info.state == "running"
        if running and not self._since:
            self._since = time.monotonic()
        elif not running:
            self._since = 0.0
        self._info = info
        if self._thread is None and not info.final:
            self._thread = threading.Thread(target=self._draw, name="gemmserve-bar", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the drawing; the line is clear afterwards."""
        self._ended.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join()

    def _draw(self) -> None:
        if self._ended.wait(SHOW_AFTER_S):
            return
        try:
            drawn: _Line | _RichLine = _RichLine(self._stream)
        except ImportError:
            drawn = _Line(self._stream)
        try:
            while not self._ended.wait(_REDRAW_S):
                if self._info is not None:
                    drawn.draw(job_text(self._info, self._since and time.monotonic() - self._since))
        finally:
            drawn.clear()


class _RichLine:
    """One line that rich draws, in colours and in notebooks too."""

    def __init__(self, stream: TextIO) -> None:
        from rich.live import Live

        self._live = Live(console=_rich_console(stream), transient=True, auto_refresh=False)
        self._live.start()

    def draw(self, text: str) -> None:
        from rich.text import Text

        self._live.update(Text(text, overflow="ellipsis", no_wrap=True), refresh=True)

    def clear(self) -> None:
        self._live.stop()


def job_text(info: JobInfo, running_s: float) -> str:
    """A job's line: its state, and while it runs for how long it has, a bar and the time that is left by estimate."""
    what = f"{info.op} {info.id[-6:]}"
    if info.state != "running":
        return f"{what}  {info.state}"
    if info.compiling:
        return f"{what}  waits for the compiler"
    expected = info.estimated_s or 0.0
    if info.progress:  # which is known, where the estimate is a guess
        filled = int(_BAR * info.progress)
        said = f"{info.progress:.0%} in {clock_text(running_s)}"
        if expected:
            said += f", about {clock_text(expected * (1 - info.progress))} left"
    elif expected <= running_s:  # the estimate was wrong: nobody knows
        return f"{what}  running for {clock_text(running_s)}"
    else:
        filled = int(_BAR * running_s / expected)
        said = f"{clock_text(running_s)}, about {clock_text(expected - running_s)} left"
    return f"{what}  [{'#' * filled}{'.' * (_BAR - filled)}]  {said}"


def clock_text(seconds: float) -> str:
    """Seconds for people: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
