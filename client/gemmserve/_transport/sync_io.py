"""Blocking I/O: sends a Request through httpx, feeds its receiver, drives flows."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gemmserve import _errors
from gemmserve._calls import places
from gemmserve._calls.places import HOPS, SERVER_ERROR, Elsewhere
from gemmserve._calls.requests import Pause, Request, Together, Work, document
from gemmserve._local.session import REFUSED
from gemmserve._transfer import traces
from gemmserve._transfer.bodies import Placing, Receiver
from gemmserve._transfer.progress import SharedBar
from gemmserve._transfer.sse import Event, EventParser
from gemmserve._transport import connection, direct
from gemmserve._transport.answers import length_of
from gemmserve._transport.connection import ELSEWHERE, Connection
from gemmserve._transport.library import ERRORS, check_transport, httpx
from gemmserve._transport.pool import SyncPool

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from gemmserve._calls.exchanges import Flow

T = TypeVar("T")


class SyncIO(Connection):
    """Blocking I/O over an httpx.Client; safe to share between threads, as that is."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None, **options: Any) -> None:
        check_transport(transport)
        super().__init__(url, own_transport=transport is not None, **options)
        self._transport = transport
        self._sleep = time.sleep
        self._past = transport is None and direct.may_be(self.address, trust_env=self.made_of["trust_env"])
        """Whether exchanges go past the HTTP library."""

    def _make(self, place: str | None = None) -> httpx.Client:
        local = None if self.socket is None else httpx.HTTPTransport(uds=self.socket)
        return httpx.Client(transport=self._transport or local, **self.options_of(place))

    def _wire(self, place: str | None = None) -> direct.Wire:
        base = self.address if place is None else httpx.URL(place)
        context = self.verify_of(base) if base.scheme == "https" else None
        return direct.Wire(base, path=self.socket, context=context, headers=self.headers, auth=self.auth)

    def pool(self, place: str | None = None) -> SyncPool[Any]:
        """Connections of the process that asks, to the server or to one cell of it. Raises TransportError where it can
        have none.
        """
        self.own()
        kind = (self._past, place)
        found: SyncPool[Any] | None = self._pools.get(kind)
        if found is None:
            with connection.lock:
                made: SyncPool[Any]
                if self._past:
                    made = SyncPool(partial(self._wire, place))
                else:
                    made = SyncPool(partial(self._make, place), self._shared_http())
                made.closed = self._closed
                found = self._pools.setdefault(kind, made)
        return found

    def _shared_http(self) -> httpx.Client | None:
        """Client of the caller's own transport, which all requests share."""
        return None if self._transport is None else self._make()

    def close(self) -> None:
        self._closed = True
        for pool in self._pools.values():
            pool.close()
        if self._shared is not None:
            self._shared.close()

    def drive(self, flow: Flow[T], bar: SharedBar | None = None) -> T:
        """Runs a flow to its end: sends what it yields and throws into it what goes wrong.

        `bar` shows its transfers.
        """
        try:
            step = next(flow)
            while True:
                try:
                    answer = self._perform(step, bar)
                except BaseException as error:  # interruptions too: the flow decides what to tidy up
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as done:
            value: T = done.value
            return value

    def _perform(self, step: Request[Any] | Pause | Together | Work[Any], bar: SharedBar | None) -> Any:
        if isinstance(step, Request):
            return self.send(step, bar)
        if isinstance(step, Together):
            return self._together(step)
        if isinstance(step, Work):
            return step.call()
        if (ask := self.doubt(step)) is not None:
            ask()
        self._sleep(step.seconds)
        return None

    def _together(self, step: Together) -> list[Any]:
        bar = SharedBar(self.progress.bar(step.label, step.nbytes))
        pool = ThreadPoolExecutor(step.limit, thread_name_prefix="gemmserve-part")
        try:
            running = [pool.submit(copy_context().run, self.drive, flow, bar) for flow in step.flows]
            wait(running, return_when=FIRST_EXCEPTION)
            # Of what failed, what failed by itself.
            errors = [error for one in running if one.done() and not one.cancelled() and (error := one.exception())]
            if errors:
                raise errors[0]
            return [one.result() for one in running]
        finally:
            bar.stop()
            pool.shutdown(wait=False, cancel_futures=True)

    def send(self, request: Request[T], bar: SharedBar | None = None) -> T:
        """One exchange, with arrays in shared memory where there is any. Raises GemmserveError."""
        shared = self.shared
        staged = shared.stage(request) if shared is not None and shared.worth(request) else None
        if shared is None or staged is None:
            return self._exchange(request, bar)
        try:
            with staged:
                value: T = self._exchange(staged.request)
                return value
        except _errors.APIError as error:
            if error.slug != REFUSED:
                raise
            shared.refused(staged, error)
        return self._exchange(request)

    def _exchange(self, request: Request[T], bar: SharedBar | None = None) -> T:
        """One exchange, at the cell that it is for."""
        if self.asks(request):
            self._ask()
        place = self.places.place_of(request)
        for _ in range(HOPS):
            try:
                answer = self._exchange_at(place, request, bar)
            except _errors.TransportError:
                if place is not None:
                    self.places.forget()
                raise
            if not isinstance(answer, Elsewhere):
                return answer
            self._ask()
            place = self.places.follow(request, answer.location)
        raise _errors.ProtocolError(f"cells send {request.path} to each other")

    def _ask(self) -> None:
        """Ask which cells there are. Raises GemmserveError; a server that does not know has none."""
        try:
            self.learn(self._exchange_at(None, document(places.PATH)))
        except _errors.APIError as error:
            if error.status is not None and error.status >= SERVER_ERROR:
                raise
            self.places.none()

    def _exchange_at(self, place: str | None, request: Request[T], bar: SharedBar | None = None) -> T | Elsewhere:
        try:
            with self._open(request, bar, place) as response:
                if response.status_code == places.MOVED:
                    return self.sent_on(response, b"".join(_pieces(response)))
                receiver = self.receiver(request, response)
                shown = bar or self.progress.bar(f"receiving {request.label}", length_of(response))
                try:
                    for count in self._received(request, response, receiver):
                        if shown is not None:
                            shown.advance(count)
                finally:
                    if shown is not None:
                        shown.close()
            return receiver.finish()
        except ERRORS as error:  # as `errors` does, for less
            raise self.as_error(error) from error

    def _received(
        self, request: Request[Any], response: httpx.Response | direct.Answer, receiver: Receiver[Any]
    ) -> Iterator[int]:
        """Gives the body to `receiver`, yielding how many bytes each time. Where the rest of a large one belongs is
        known after its first piece: it is read there.
        """
        if isinstance(response, direct.Answer):
            yield from response.given_to(receiver)
            return
        length = length_of(response) or 0
        with closing(_pieces(response)) as pieces:
            for number, piece in enumerate(pieces):
                receiver.feed(piece)
                yield len(piece)
                rest = length - len(piece)
                if number == 0 and rest >= direct.DIRECT_FROM and isinstance(receiver, Placing):
                    place = receiver.place()
                    source = direct.raw_socket(response) if len(place) == rest else None
                    if source is not None:
                        yield from direct.landed(source, place, receiver, self.timeout_of(request).read)
                        return

    @contextlib.contextmanager
    def _open(
        self, request: Request[Any], bar: SharedBar | None = None, place: str | None = None
    ) -> Iterator[httpx.Response | direct.Answer]:
        content = self.content_of(request, bar)
        pool = self.pool(place)
        headers = self.headers_of(request)
        with traces.span_of(request, self.address, headers) as span, pool.connection(idle=request.idle) as http:
            if isinstance(http, direct.Wire):
                try:
                    answer = self._asked(pool, http, request, headers, content)
                    if "set-cookie" in answer.headers:  # something on the way wants it back, which the library does
                        self._past = False
                    if place is None:
                        self.places.heard(answer.headers)
                    traces.note(span, answer)
                    yield answer
                finally:
                    http.leave()
                return
            with http.stream(
                request.method,
                self.url_of(http, request.path, place),
                params=request.query or None,
                headers=headers,
                content=content,
                timeout=self.timeout_of(request),
            ) as response:
                pool.note(http, response)
                if place is None:
                    self.places.heard(response.headers)
                traces.note(span, response)
                yield response

    def _asked(
        self,
        pool: SyncPool[Any],
        wire: direct.Wire,
        request: Request[Any],
        headers: dict[str, str],
        content: Iterator[bytes | memoryview] | None,
    ) -> direct.Answer:
        """Send a request past the library; return its answer, whose body is still to be read."""
        silence = self.timeout if request.limit_s is None else min(self.timeout, request.limit_s)
        made = wire.ready(silence)
        if made is not None:
            pool.note_socket(wire, made)
        return wire.exchange(
            request.method, request.path, request.query, headers, content, silence=silence, wait=request.wait_s
        )

    def events(self, request: Request[None]) -> Generator[Event]:
        """Each server-sent event as it comes. Raises GemmserveError: in another process than it began in, too."""
        parser = EventParser()
        pid = os.getpid()
        with self.errors(), self._open(request) as response:
            receiver = self.receiver(request, response)
            with closing(_pieces(response)) as pieces:
                for piece in pieces:
                    if not response.is_success:
                        receiver.feed(piece)
                        continue
                    for event in parser.feed(piece):
                        yield event
                        if os.getpid() != pid:
                            raise _errors.TransportError(ELSEWHERE)
            receiver.finish()


def _pieces(response: httpx.Response | direct.Answer) -> Generator[bytes]:
    """The body as it comes; whole if a transport (a test's) handed it over whole."""
    if isinstance(response, direct.Answer):
        yield from response.pieces()
    elif response.is_stream_consumed:
        yield response.content
    else:
        yield from response.iter_raw()
