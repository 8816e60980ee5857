"""`python -m gemmserve_service.processes.healthcheck`: exit status 0 once the server here is ready (/readyz is 200).

For HEALTHCHECK and exec probes, every other second for as long as a container lives: standard library only, and no more
of it than it takes. It finds the server by the same variables as the server its sockets.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMEOUT_S: Final = 4.0
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 (names, not bound)


def address(environment: Mapping[str, str]) -> tuple[str, int, bool]:
    """Host, port and whether it speaks TLS: the second port where there is one, since that has neither keys nor TLS.

    Raises ValueError for a port that is no number.
    """
    side = environment.get("GEMMSERVE_METRICS_PORT", "none").lower()
    if side not in {"none", ""}:
        host = environment.get("GEMMSERVE_METRICS_HOST", "127.0.0.1")
        return _EVERYWHERE.get(host, host), int(side), False
    host = environment.get("GEMMSERVE_HOST", "127.0.0.1")
    certificate = environment.get("GEMMSERVE_TLS_CERTIFICATE", "none").lower()
    return _EVERYWHERE.get(host, host), int(environment.get("GEMMSERVE_PORT", "8000")), certificate not in {"none", ""}


def status(host: str, port: int, *, tls: bool, timeout_s: float = _TIMEOUT_S) -> int:
    """The status of GET /readyz. Raises OSError where nobody answers, ValueError for an answer that is not HTTP."""
    with socket.create_connection((host, port), timeout=timeout_s) as raw:
        if tls:
            import ssl

            # It looks whether the server answers, not who it is: the name in its certificate is not loopback's.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(raw) as wrapped:
                return _ask(wrapped)
        return _ask(raw)


def _ask(connection: socket.socket) -> int:
    connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    head = b""
    while b"\r\n" not in head and (piece := connection.recv(4096)):
        head += piece
    version, _, rest = head.partition(b" ")
    if not version.startswith(b"HTTP/"):
        raise ValueError(f"no HTTP answer: {head[:40]!r}")
    return int(rest[:3])


def main() -> int:
    """Asks once; what is wrong goes to standard output, where the engine keeps it."""
    try:
        found = status(*address(os.environ)[:2], tls=address(os.environ)[2])
    except (OSError, ValueError) as error:
        print(f"not ready: {error}")
        return 1
    print(f"/readyz answers {found}")
    return 0 if found == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
