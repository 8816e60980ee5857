"""Small requests straight from the connection, without ASGI: one-shot products, submissions of jobs, looks at them and
at arrays, and deletions of arrays, one or many.

A request whose head is plain and whose body is small is gathered by the connection's protocol and answered from there.
It passes the same gate, queue, limits and workers as any other and leaves the same log line, counts and audit. Whatever
is unusual or wrong in its head, or in a form, is handed to the app with every byte that came: there it is answered as
if it had gone there at once.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from gemmserve_service.errors import ServiceError
from gemmserve_service.http.small import heads
from gemmserve_service.http.small.heads import DeletionsRoute, JobsRoute, KnownHeads, SmallRoute, StatesRoute
from gemmserve_service.http.small.product_exchange import ProductExchange
from gemmserve_service.http.small.route_exchange import (
    ArrayExchange,
    DeletionsExchange,
    JobStateExchange,
    StatesExchange,
    SubmissionExchange,
)
from gemmserve_service.jobs.small import small_products

if TYPE_CHECKING:
    from fastapi import FastAPI

    from gemmserve_service.http.metrics.metrics import Metrics
    from gemmserve_service.http.middleware.access import Gate
    from gemmserve_service.http.middleware.audit import AuditLog
    from gemmserve_service.http.protocol.asgi_cycle import AsgiCycle
    from gemmserve_service.http.protocol.connection import Connection
    from gemmserve_service.http.small.base_exchange import Exchange
    from gemmserve_service.http.small.heads import Head, Varying
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.settings import Settings

_MAX_GATHERED: Final = 64 << 20  # bytes of all bodies that are being gathered

log = structlog.get_logger(__name__)


class SmallRequests:
    """State that the exchanges of one server share; belongs to the event loop's thread."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        self.core: Core = app.state.core
        self.gate: Gate = app.state.gate
        self.metrics: Metrics = app.state.metrics
        self.audit: AuditLog = app.state.audit
        self.tracing = self.core.tracing
        self.products = small_products.SmallProducts()
        self.heads = KnownHeads()
        self.gathered = 0
        """Bytes of the bodies that are being gathered, as their heads announce them."""
        self._proxies = ProxyHeadersMiddleware(_nobody, settings.trusted_proxies) if settings.trusted_proxies else None
        self._ended: list[Exchange] = []
        self._answered: list[Exchange] = []

    def begin(self, protocol: Connection, cycle: AsgiCycle) -> Exchange | None:
        """The exchange of a request whose head the parser has read; None: it is the app's."""
        head = heads.read(cycle.scope)
        return None if head is None else self.accept(protocol, head, 0, head.varying, cycle)

    def accept(
        self, protocol: Connection, head: Head, start: int, varying: Varying, cycle: AsgiCycle | None = None
    ) -> Exchange | None:
        """The exchange of a request with that head; None: it is the app's.

        Without a `cycle` the request comes past the parser, and the first `start` bytes that are fed are its head's.
        `varying`: values of its head that are its own.
        """
        if protocol.flow.write_paused or self.gathered + head.size > _MAX_GATHERED:
            return None
        connection = {"client": protocol.client, "scheme": protocol.scheme}
        scope: Any = {**head.scope, **connection} if cycle is None else cycle.scope
        if varying.item and cycle is None:
            scope["path"] = head.route.path.partition("{")[0] + varying.item
        if varying.item and self.core.cells.elsewhere(varying.item) is not None:
            return None
        if isinstance(head.route, DeletionsRoute | StatesRoute) and self.core.cells.urls:  # some may be other cells'
            return None
        if not self.gate.anyone(scope, head.fields):
            try:
                self.gate.caller(scope, partial(_values, head.fields))
            except ServiceError:
                return None
        if self._proxies is not None:
            with contextlib.suppress(StopIteration):  # it awaits nothing before the app, nor does that
                self._proxies(scope, None, None).send(None)  # type: ignore[arg-type]
        scope["route"] = head.route
        return _kind(head)(self, protocol, head, start, varying, scope, cycle)

    def ended(self, exchange: Exchange, *, now: bool) -> None:
        """Answers it: later in this turn of the event loop, when the workers have been given what follows; `now`,
        where nothing follows.
        """
        if now and not self._ended and not self.core.scheduler.queued:
            exchange.answer()
            return
        if not self._ended:
            exchange.protocol.loop.call_soon(self._answer_all)
        self._ended.append(exchange)

    def _answer_all(self) -> None:
        ended, self._ended = self._ended, []
        for exchange in ended:
            exchange.answer()

    def answered(self, exchange: Exchange) -> None:
        """Counts it in the next turn of the event loop: what was written goes out at the end of this one."""
        if not self._answered:
            exchange.protocol.loop.call_soon(self._record_all)
        self._answered.append(exchange)

    def _record_all(self) -> None:
        answered, self._answered = self._answered, []
        for exchange in answered:
            try:
                exchange.record()
            except Exception:
                log.exception("unexpected error")


def _kind(head: Head) -> type[Exchange]:
    if isinstance(head.route, SmallRoute):
        return ProductExchange
    if isinstance(head.route, JobsRoute):
        return SubmissionExchange
    if isinstance(head.route, DeletionsRoute):
        return DeletionsExchange
    if isinstance(head.route, StatesRoute):
        return StatesExchange
    return JobStateExchange if head.route is heads.JOB else ArrayExchange


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    """An app that does nothing."""


def _values(fields: dict[bytes, bytes], name: str) -> tuple[str, ...]:
    value = fields.get(name.encode("ascii"))
    return () if value is None else (value.decode("latin-1"),)
