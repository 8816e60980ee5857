"""Large answers read past the HTTP library, from its socket into the memory where they belong."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from gemmserve._transport.library import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve._transfer.bodies import Placing

DIRECT_FROM: Final = 8 << 20
"""Bytes for which a connection is given up to read past httpx, at twice the rate: it costs another handshake."""
MAX_AT_ONCE: Final = 4 << 20
"""Bytes of one read, so that progress is seen."""


def raw_socket(response: httpx.Response) -> socket.socket | None:
    """The socket that an answer comes by, where it can be read past httpx: after the first piece, for h11 then holds
    nothing back. The connection is closed with the answer, for h11 does not see the rest of it.
    """
    stream = response.extensions.get("network_stream")
    found = None if stream is None else stream.get_extra_info("socket")
    return found if isinstance(found, socket.socket) else None  # an ssl.SSLSocket is one


def landed(source: socket.socket, place: memoryview, receiver: Placing, timeout: float | None) -> Iterator[int]:
    """Reads until `place` is full, yielding how many bytes came each time."""
    source.settimeout(timeout)
    while place:
        try:
            count = source.recv_into(place[:MAX_AT_ONCE])
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        if not count:
            raise httpx.RemoteProtocolError("the server closed the connection before the answer was whole")
        receiver.landed(count)
        yield count
        place = place[count:]
