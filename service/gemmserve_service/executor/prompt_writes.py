"""Writes that begin at once: an event loop's transports begin at the end of its turn, after all else done there.

Whoever waits at the other end goes on meanwhile. What the system takes at once is not copied either.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

_MAX_PIECES: Final = 1024  # of one call of the system (IOV_MAX)


class PromptWriter:
    """Sending side of one transport, which is written to by nobody else."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        connection = transport.get_extra_info("socket")
        plain = connection is not None and transport.get_extra_info("sslcontext") is None
        self._socket: int = connection.fileno() if plain else -1
        """Descriptor to which bytes may go as they are."""

    def write(self, *pieces: bytes | memoryview) -> None:
        """Write pieces one behind the other. Their memory is the caller's again after this."""
        transport = self._transport
        if transport.is_closing():
            return
        sent = 0
        if self._socket >= 0 and len(pieces) <= _MAX_PIECES and not transport.get_write_buffer_size():
            try:
                sent = os.writev(self._socket, pieces)
            except OSError:  # full, or broken, which the transport finds out
                sent = 0
        if rest := _after(pieces, sent):
            transport.write(rest)


def _after(pieces: Sequence[bytes | memoryview], sent: int) -> bytes:
    """Return what follows the first `sent` bytes."""
    for number, piece in enumerate(pieces):
        if sent < len(piece):
            return b"".join((memoryview(piece)[sent:], *pieces[number + 1 :]))
        sent -= len(piece)
    return b""
