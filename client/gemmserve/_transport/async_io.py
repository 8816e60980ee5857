"""I/O on asyncio: what `_sync_io` does, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gemmserve import _errors
from gemmserve._calls import places
from gemmserve._calls.places import HOPS, SERVER_ERROR, Elsewhere
from gemmserve._calls.requests import Pause, Request, Together, Work, document
from gemmserve._local.session import REFUSED
from gemmserve._transfer import traces
from gemmserve._transfer.progress import SharedBar
from gemmserve._transfer.sse import Event, EventParser
from gemmserve._transport.answers import length_of
from gemmserve._transport.connection import ELSEWHERE, Connection
from gemmserve._transport.library import check_transport, httpx
from gemmserve._transport.pool import AsyncPool

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

    from gemmserve._calls.exchanges import Flow

T = TypeVar("T")


class AsyncIO(Connection):
    """I/O over an httpx.AsyncClient, on asyncio."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None, **options: Any) -> None:
        check_transport(transport)
        super().__init__(url, own_transport=transport is not None, **options)
        self._transport = transport
        self._loop_ended = False
        """Whether an event loop that was used has been closed."""
        self._sleep = asyncio.sleep

    def _make(self, place: str | None = None) -> httpx.AsyncClient:
        local = None if self.socket is None else httpx.AsyncHTTPTransport(uds=self.socket)
        return httpx.AsyncClient(transport=self._transport or local, **self.options_of(place))

    def pool(self, place: str | None = None) -> AsyncPool:
        """The connections of this process and event loop, to the server or to one cell of it: another loop's are of no
        use in this one. Raises TransportError where there can be none.
        """
        self.own()
        loop = asyncio.get_running_loop()
        found: AsyncPool | None = self._pools.get((loop, place))
        if found is None:
            for ended in [each for each in self._pools if each[0].is_closed()]:
                del self._pools[ended]
                self._loop_ended = True
            found = self._pools[loop, place] = AsyncPool(
                partial(self._make, place), None if self._transport is None else self._make()
            )
            found.closed = self._closed
        return found

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise as `Connection.errors` does, and TransportError where the caller's transport is an ended loop's."""
        try:
            with super().errors():
                yield
        except RuntimeError as error:
            if isinstance(error, _errors.GemmserveError) or self._transport is None or not self._loop_ended:
                raise
            raise _errors.TransportError(
                "this client's transport belongs to an event loop that has ended: make an AsyncClient in this one",
                retriable=False,
            ) from error

    async def close(self) -> None:
        self._closed = True
        loop = asyncio.get_running_loop()
        for (owner, _), pool in list(self._pools.items()):
            if owner is loop:
                await pool.close()
            pool.closed = True
        if self._shared is not None:
            self._shared.close()

    async def drive(self, flow: Flow[T], bar: SharedBar | None = None) -> T:
        """Runs a flow to its end: sends what it yields and throws into it what goes wrong, cancellation too.

        `bar` shows its transfers.
        """
        try:
            step = next(flow)
            while True:
                try:
                    answer = await self._perform(step, bar)
                except GeneratorExit:  # the event loop is gone: nothing can be awaited any more
                    flow.close()
                    raise
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as done:
            value: T = done.value
            return value

    async def _perform(self, step: Request[Any] | Pause | Together | Work[Any], bar: SharedBar | None) -> Any:
        if isinstance(step, Request):
            return await self.send(step, bar)
        if isinstance(step, Together):
            return await self._together(step)
        if isinstance(step, Work):
            return await asyncio.to_thread(step.call)
        if (ask := self.doubt(step)) is not None:
            await asyncio.to_thread(ask)
        await self._sleep(step.seconds)
        return None

    async def _together(self, step: Together) -> list[Any]:
        bar = SharedBar(self.progress.bar(step.label, step.nbytes))
        places = asyncio.Semaphore(step.limit)

        async def one(flow: Flow[Any]) -> Any:
            async with places:
                return await self.drive(flow, bar)

        running = [asyncio.ensure_future(one(flow)) for flow in step.flows]
        try:
            return list(await asyncio.gather(*running))
        finally:
            bar.stop()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def send(self, request: Request[T], bar: SharedBar | None = None) -> T:
        """One exchange, with arrays in shared memory where there is any. Raises GemmserveError."""
        shared = self.shared
        # In a thread: it may have to copy large arrays.
        worth = shared is not None and shared.worth(request)
        staged = await asyncio.to_thread(shared.stage, request) if shared is not None and worth else None
        if shared is None or staged is None:
            return await self._exchange(request, bar)
        try:
            with staged:
                value: T = await self._exchange(staged.request)
                return value
        except _errors.APIError as error:
            if error.slug != REFUSED:
                raise
            shared.refused(staged, error)
        return await self._exchange(request)

    async def _exchange(self, request: Request[T], bar: SharedBar | None = None) -> T:
        """One exchange, at the cell that it is for."""
        if self.asks(request):
            await self._ask()
        place = self.places.place_of(request)
        for _ in range(HOPS):
            try:
                answer = await self._exchange_at(place, request, bar)
            except _errors.TransportError:
                if place is not None:
                    self.places.forget()
                raise
            if not isinstance(answer, Elsewhere):
                return answer
            await self._ask()
            place = self.places.follow(request, answer.location)
        raise _errors.ProtocolError(f"cells send {request.path} to each other")

    async def _ask(self) -> None:
        """Ask which cells there are. Raises GemmserveError; a server that does not know has none."""
        try:
            self.learn(await self._exchange_at(None, document(places.PATH)))
        except _errors.APIError as error:
            if error.status is not None and error.status >= SERVER_ERROR:
                raise
            self.places.none()

    async def _exchange_at(self, place: str | None, request: Request[T], bar: SharedBar | None = None) -> T | Elsewhere:
        with self.errors():
            async with self._open(request, bar, place) as response:
                if response.status_code == places.MOVED:
                    return self.sent_on(response, await response.aread())
                receiver = self.receiver(request, response)
                shown = bar or self.progress.bar(f"receiving {request.label}", length_of(response))
                try:
                    async for piece in _apieces(response):
                        receiver.feed(piece)
                        if shown is not None:
                            shown.advance(len(piece))
                finally:
                    if shown is not None:
                        shown.close()
            return receiver.finish()

    @contextlib.asynccontextmanager
    async def _open(
        self, request: Request[Any], bar: SharedBar | None = None, place: str | None = None
    ) -> AsyncIterator[httpx.Response]:
        sent = self.content_of(request, bar)
        content = None if sent is None else _awaited(sent)
        pool = self.pool(place)
        # In a thread where it goes through the body: that may be large.
        headers = (
            await asyncio.to_thread(self.headers_of, request) if self.digested(request) else self.headers_of(request)
        )
        with traces.span_of(request, self.address, headers) as span:
            async with (
                pool.connection(idle=request.idle) as http,
                http.stream(
                    request.method,
                    self.url_of(http, request.path, place),
                    params=request.query or None,
                    headers=headers,
                    content=content,  # type: ignore[arg-type]  # as above
                    timeout=self.timeout_of(request),
                ) as response,
            ):
                pool.note(http, response)
                if place is None:
                    self.places.heard(response.headers)
                traces.note(span, response)
                yield response

    async def events(self, request: Request[None]) -> AsyncGenerator[Event]:
        """Each server-sent event as it comes. Raises GemmserveError."""
        parser = EventParser()
        pid = os.getpid()
        with self.errors():
            async with self._open(request) as response:
                receiver = self.receiver(request, response)
                async with aclosing(_apieces(response)) as pieces:
                    async for piece in pieces:
                        if not response.is_success:
                            receiver.feed(piece)
                            continue
                        for event in parser.feed(piece):
                            yield event
                            if os.getpid() != pid:
                                raise _errors.TransportError(ELSEWHERE)
                receiver.finish()


async def _apieces(response: httpx.Response) -> AsyncGenerator[bytes]:
    if response.is_stream_consumed:
        yield response.content
        return
    async for piece in response.aiter_raw():
        yield piece


async def _awaited(pieces: Iterator[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    for piece in pieces:
        yield piece
