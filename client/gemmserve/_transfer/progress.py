"""Progress of large transfers on a terminal: rich's bar where rich is installed, one plain line otherwise."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SHOW_FROM: Final = 8 << 20
"""Smaller transfers are over before a bar can be read."""

_REDRAW_S: Final = 0.1


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
        stream = self._stream or sys.stderr
        if not stream.isatty():
            return None
        try:
            return _OneProcess(_RichBar(label, total, stream))
        except ImportError:
            return _OneProcess(_PlainBar(label, total, stream))


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


class _RichBar:
    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        self._progress = Progress(*columns, TransferSpeedColumn(), console=Console(file=stream), transient=True)
        self._task = self._progress.add_task(label, total=total)
        self._progress.start()

    def advance(self, nbytes: int) -> None:
        self._progress.advance(self._task, nbytes)

    def close(self) -> None:
        self._progress.stop()


class _PlainBar:
    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self._label, self._total, self._stream = label, total, stream
        self._done = 0
        self._began = time.monotonic()
        self._drawn = 0.0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._drawn < _REDRAW_S:
            return
        self._drawn = now
        speed = self._done / max(now - self._began, 1e-6) / 2**20
        line = f"{self._label}  {self._done / 2**20:.0f} of {self._total / 2**20:.0f} MiB  {speed:.0f} MiB/s"
        self._stream.write(f"\r{line:<60}")
        self._stream.flush()

    def close(self) -> None:
        self._stream.write(f"\r{'':<60}\r")
        self._stream.flush()
