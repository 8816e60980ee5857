"""Connections of a listening socket, taken in the event loop's thread without asyncio's transports."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_MAX_AT_ONCE: Final = 64  # connections that are taken before others have their turn
_PAUSE_S: Final = 1.0  # when there are no descriptors left, as asyncio's own servers do

log = logging.getLogger(__name__)


class Acceptor:
    """Takes connections until it is stopped; pauses while this process can open no more files."""

    def __init__(self, listener: socket.socket, take: Callable[[socket.socket], object], what: str) -> None:
        """`take` is called with each connection; `what` they are, for the log."""
        self._listener: socket.socket | None = listener
        self._take = take
        self._what = what
        listener.setblocking(False)
        self._listen()

    def stop(self) -> None:
        """Takes no more; the listener stays open."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener = None

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            if self._listener is None:
                return
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("%s wait for %g s: %s", self._what, _PAUSE_S, error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener.fileno())
                loop.call_later(_PAUSE_S, self._listen)
                return
            self._take(connection)
