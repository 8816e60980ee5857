"""The app on its sockets: uvicorn with our limits, TLS, and the second port for operators."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import sys
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from gemmserve_service.http.middleware.access import SidePort
from gemmserve_service.http.middleware.observe import request_done
from gemmserve_service.http.protocol.connections import Connections
from gemmserve_service.http.protocol.protocol import protocol_class
from gemmserve_service.http.small.exchange import SmallRequests

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping, Sequence

    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from gemmserve_service.errors import ServiceError
    from gemmserve_service.http.transfer.pool import TransferPool
    from gemmserve_service.settings import Settings

_CLOSE_S: Final = 5  # responses under way when everything else has ended
_TLS_CLOSE_S: Final = 5.0  # a peer that does not answer the end of TLS
_RELOAD_S: Final = 5.0  # how soon a renewed certificate is used

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn's server. It leaves signals to its caller, hangs up on TLS handshakes that do not come to an end, and may
    serve a Unix socket besides.

    uvicorn's manual has `Config` and `Server.serve`, which are used as they are; it has no option for any of the three.
    So this relies on more of its source, all without a leading underscore: that `serve` runs within `capture_signals()`
    and calls `startup(sockets)` once, which sets `lifespan`; that `shutdown` closes what is in `servers`; and on the
    arguments of the protocol class. `tests/unit/service/http` holds it to that, test_server.py and
    test_slow_connections.py above all, in continuous integration with the oldest version allowed, too (.ci/oldest.txt).
    """

    def __init__(self, config: uvicorn.Config, settings: Settings, certificate: Sequence[int] = ()) -> None:
        """`certificate`: times of its files before they were read (`_times`)."""
        super().__init__(config)
        self.settings = settings
        self._certificate = certificate
        self.unix: socket.socket | None = None
        """A Unix socket to serve besides, never with TLS. To be set before the start; its path is left in place."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no handlers: what runs must be drained before connections are closed."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until `should_exit` is set, and uses a certificate whose files are replaced meanwhile."""
        context = self.config.ssl
        renewal = None if context is None else asyncio.create_task(_renew(context, self.settings, self._certificate))
        try:
            await super().serve(sockets)
        finally:
            if renewal is not None:
                renewal.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts as uvicorn's; with TLS it listens itself, for uvicorn passes no time limit of the handshake on."""
        config = self.config
        await super().startup([] if config.ssl is not None else sockets)
        loop = asyncio.get_running_loop()
        if self.unix is not None:
            # From Python 3.13 on a server that closes would remove the path, which is the supervisor's.
            keep: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
            self.servers.append(await loop.create_unix_server(self._protocol, sock=self.unix, **keep))
        if config.ssl is None:
            return
        for listener in sockets or []:
            self.servers.append(
                await loop.create_server(
                    self._protocol,
                    sock=listener,
                    ssl=config.ssl,
                    backlog=config.backlog,
                    ssl_handshake_timeout=self.settings.head_timeout_s,
                    ssl_shutdown_timeout=_TLS_CLOSE_S,
                )
            )

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=None
        )
        return made


def main_server(app: FastAPI, settings: Settings, transfers: TransferPool | None = None) -> Server:
    """The server of the API. Raises OSError and ssl.SSLError for a certificate or key that cannot be used.

    `transfers` are its transfer processes.
    """

    def refused(error: ServiceError, client: tuple[str, int] | None, context: Mapping[str, str], logged: bool) -> None:
        app.state.metrics.connection_refused(error.slug)
        app.state.audit.write(
            action="connect",
            outcome="refused",
            status=error.status,
            problem=error.slug,
            address=client[0] if client else None,
            **context,
        )
        if not logged:
            unread = {"method": "-", "path": "-", "client": client}
            request_done(
                app.state.metrics, unread, context, error.status, seconds=0.0, received=0, sent=0, complete=True
            )

    return _server(
        app,
        settings,
        http=protocol_class(Connections(settings, refused), SmallRequests(app, settings), transfers),
        lifespan="on",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=None if settings.tls_key is None else str(settings.tls_key),
    )


def side_server(app: FastAPI, settings: Settings) -> Server:
    """The server of the second port: the same app, seen through `SidePort`, without TLS."""
    http = protocol_class(Connections(settings))
    return _server(SidePort(app), settings, http=http, lifespan="off", proxy_headers=False)


def _server(app: ASGIApp, settings: Settings, **options: Any) -> Server:
    config = uvicorn.Config(
        app,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_S,
        **options,
    )
    # Before they are read: what is replaced meanwhile is read again.
    certificate = _times(settings) if options.get("ssl_certfile") else ()
    config.load()
    return Server(config, settings, certificate)


def _times(settings: Settings) -> Sequence[int]:
    """Return the times at which the certificate's files were changed. Raises OSError."""
    paths = (settings.tls_certificate, settings.tls_key)
    return [path.stat().st_mtime_ns for path in paths if path is not None]


async def _renew(context: ssl.SSLContext, settings: Settings, loaded: Sequence[int]) -> None:
    """Uses a certificate from the moment that its files are replaced; runs until cancelled. `loaded`: times of those
    that are in use.
    """
    if settings.tls_certificate is None or settings.tls_key is None:
        return
    paths = (settings.tls_certificate, settings.tls_key)
    while True:
        await asyncio.sleep(_RELOAD_S)
        try:
            current = _times(settings)
            if current != loaded:
                # On another context first: half a pair would leave the one in use without a key.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*paths)
                context.load_cert_chain(*paths)
                loaded = current
                log.info("the renewed certificate is in use")
        except OSError:  # ssl.SSLError too: half of a pair was replaced, say; the next round sees the other half
            log.exception("the certificate could not be loaded again; the one before stays in use")
