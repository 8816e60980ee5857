"""The only module that talks to the network: sends a Request through httpx, feeds its receiver, maps every error.

The two classes differ in `await` alone. Everything they share is in `_Connection`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import secrets
import threading
import time
import weakref
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import numpy as np

from gemmserve import _direct, _errors, _local_memory
from gemmserve._auth import auth_of
from gemmserve._compression import ZSTD, DecodingReceiver
from gemmserve._digests import WANTED, CheckedPlacing, CheckedReceiver, field_value, sha256_of
from gemmserve._local import HTTP_BASE, socket_path
from gemmserve._local_session import REFUSED, SharedMemory
from gemmserve._parts import Span
from gemmserve._pool import AsyncPool, SyncPool
from gemmserve._progress import Progress, SharedBar, watched
from gemmserve._requests import Pause, Request, Together, Work
from gemmserve._sse import Event, EventParser
from gemmserve._transfer import Body, Placing, Receiver, Whole
from gemmserve._urls import context_of, is_loopback, normal_url
from gemmserve.wire import EXCHANGE_HEADER, SESSION_HEADER

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence

    from gemmserve._arrays import AnyArray
    from gemmserve._digests import Digests
    from gemmserve._flows import Flow

T = TypeVar("T")


_HTTPX_ERRORS = _errors.httpx_errors()

NO_CONTENT = 204

ELSEWHERE = "this stream of events was begun in another process"


_lock = threading.Lock()
"""Held while what belongs to a process is made anew."""
_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()


def _forked() -> None:
    """In a child process: a thread of the parent may have held the lock, and the sockets are the parent's."""
    global _lock
    _lock = threading.Lock()
    for connection in _connections:
        connection.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class _Connection:
    """The base URL, the headers of every request, timeouts, and how a Request becomes httpx's arguments.

    Connections, shared memory and progress bars belong to one process and are made anew where that changed.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        verify: bool | str | ssl.SSLContext,
        timeout: float,
        progress: bool,
        digests: Digests,
        own_transport: bool,
    ) -> None:
        self.socket = socket_path(url)
        """Path of the server's Unix socket, where that is the way to it."""
        self.url = normal_url(url) if self.socket is None else f"unix:{self.socket}"
        self.base = self.url if self.socket is None else HTTP_BASE
        """What httpx is told."""
        self.verify = context_of(self.base, verify)
        self.timeout = timeout
        self.digests = digests
        self.answered = False
        """Whether the server has ever answered."""
        self.headers = {
            "User-Agent": f"gemmserve/{importlib.metadata.version('gemmserve')}",
            "Accept": "application/json",
            # Most arrays hardly compress, and their bytes are copied as they come; a request may say otherwise.
            "Accept-Encoding": "identity",
        }
        self.auth = auth_of(api_key, self.base)
        self._show_progress = progress
        self._own_transport = own_transport
        self._made_in = os.getpid()
        self._closed = False
        self._renew()
        _connections.add(self)

    def _renew(self) -> None:
        """What belongs to this process."""
        self._pid = os.getpid()
        self._progress = Progress(enabled=self._show_progress)
        key = None if self.auth is None else self.auth.key
        self._shared = SharedMemory(self.socket, key) if self.socket is not None else None
        self._pools: dict[Any, Any] = {}

    def leave(self) -> None:
        """In a child process: gives up what is the parent's. What was closed there stays closed."""
        for pool in self._pools.values():
            pool.leave()
        if self._shared is not None:
            self._shared.leave()
        self._renew()
        if self._shared is not None and self._closed:
            self._shared.close()

    def own(self) -> None:
        """Makes sure that everything belongs to this process. Raises TransportError where it cannot: a transport of the
        caller's own has connections that nobody else can make anew.
        """
        pid = os.getpid()
        if self._pid != pid:  # a fork past os.fork
            with _lock:
                if self._pid != pid:
                    self.leave()
        if self._own_transport and self._made_in != pid:
            raise _errors.TransportError(
                "this client was made in another process, with a transport that belongs to that: make one here",
                retriable=False,
            )

    @property
    def progress(self) -> Progress:
        """Bars of the process that asks."""
        self.own()
        return self._progress

    @property
    def shared(self) -> SharedMemory | None:
        """Shared memory of the process that asks."""
        self.own()
        return self._shared

    def empty(self, shape: int | Sequence[int], dtype: Any, order: str) -> AnyArray:
        """An array in memory that can be passed to the server, if there is such; else an ordinary one."""
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        made = np.empty(0, dtype)
        shared = self.shared
        if shared is not None and _local_memory.supported() and not made.dtype.hasobject:
            with contextlib.suppress(OSError):  # no more descriptors, say
                return _local_memory.empty(extents, made.dtype, order, shared.pool)
        return np.empty(extents, dtype, order="F" if order == "F" else "C")

    def freeze(self, array: AnyArray) -> AnyArray:
        """A read-only array with the same elements, in sealed memory if that can be passed to the server."""
        shared = self.shared
        if shared is not None and _local_memory.supported():
            with contextlib.suppress(OSError):
                return _local_memory.freeze(array, shared.pool)
        frozen = array.copy(order="A")
        frozen.flags.writeable = False
        return frozen

    def headers_of(self, request: Request[Any]) -> dict[str, str]:
        headers = {**request.headers, EXCHANGE_HEADER: secrets.token_urlsafe(12)}
        if request.body is not None:
            headers["Content-Type"] = request.body.content_type
            headers["Content-Length"] = str(request.body.nbytes)
        if self._digested(request):
            if request.body is not None and request.body.nbytes:
                headers.setdefault("Content-Digest", field_value(request.body.pieces()))
            headers[f"Want-{request.digest.capitalize()}-Digest"] = WANTED
        return headers

    def _digested(self, request: Request[Any]) -> bool:
        """Whether everything of an exchange has a digest: but for events, and what goes by shared memory."""
        return self.digests == "always" and request.digest != "none" and SESSION_HEADER not in request.headers

    def timeout_of(self, request: Request[Any]) -> httpx.Timeout:
        """Silence allowed: the client's timeout, plus what the request lets the server wait."""
        silence = self.timeout if request.limit_s is None else min(self.timeout, request.limit_s)
        return httpx.Timeout(silence, read=silence + request.wait_s, pool=None)

    def _sent(self, body: Body, label: str) -> Iterator[bytes | memoryview]:
        return watched(body.pieces(), self.progress, f"sending {label}", body.nbytes)

    def content_of(self, request: Request[Any], bar: SharedBar | None) -> Iterator[bytes | memoryview] | None:
        """What is sent, if anything, counted on `bar` or on one of its own."""
        if request.body is None:
            return None
        if bar is None:
            return self._sent(request.body, request.label)
        return watched(request.body.pieces(), self.progress, request.label, None, bar)

    def receiver(self, request: Request[T], response: httpx.Response) -> Receiver[T]:
        """What takes this answer's body; for an error's answer, one that raises it at the end. Raises CrossedAnswer for
        the answer to another request, ProtocolError for no answer of a gemmserve server.
        """
        _check_exchange(response)
        self.answered = True
        if not response.is_success:
            return Whole(lambda data: _raise(_errors.from_answer(response.status_code, response.headers, data)))
        coding = response.headers.get("content-encoding", "identity")
        if coding == ZSTD and request.headers.get("Accept-Encoding") == ZSTD:
            headers = {name: value for name, value in response.headers.items() if name != "content-length"}
            return DecodingReceiver(request.receiver(headers))
        if coding != "identity":
            raise _errors.ProtocolError("something on the way compressed the answer although identity was asked for")
        receiver: Any = request.receiver(response.headers)
        if isinstance(receiver, Span):  # which is part of a whole that has one digest
            found: Receiver[Any] = receiver
            return found
        return self._checked(request, response, receiver)

    def _checked(self, request: Request[T], response: httpx.Response, receiver: Receiver[T]) -> Receiver[T]:
        """Compares the answer's digest, if it has one. Raises ProtocolError where it has to have one and has not."""
        if self.digests == "never" or request.digest == "none":
            return receiver
        expected = sha256_of(response.headers.get(f"{request.digest}-digest"))
        if expected is None:
            if self._digested(request) and response.status_code != NO_CONTENT:
                raise _errors.ProtocolError(
                    f'the answer has no {request.digest.capitalize()}-Digest, and digests="always" wants one: an older '
                    "server's, or something on the way drops it"
                )
            return receiver
        if isinstance(receiver, Placing):
            return CheckedPlacing(receiver, expected)
        return CheckedReceiver(receiver, expected)


def _check_exchange(response: httpx.Response) -> None:
    """Whether this is the answer to its request: whatever a server of ours made repeats what the request named itself.

    An error may come without, from something on the way that has read no request, or not understood it.
    """
    sent, said = response.request.headers.get(EXCHANGE_HEADER), response.headers.get(EXCHANGE_HEADER)
    if said == sent:
        return
    if said is not None:
        raise _errors.CrossedAnswer(
            "the answer to another request came (it says so): a connection is used by two sides at once, or something "
            "on the way mixes answers up"
        )
    if not response.is_success:
        return
    if _errors.REQUEST_ID_HEADER in response.headers:
        raise _errors.CrossedAnswer(
            f"the answer does not say which request it belongs to: another one's, a server's that is older than this "
            f"client, or something on the way drops the header {EXCHANGE_HEADER}"
        )
    raise _errors.ProtocolError(
        f"status {response.status_code}, but no answer of a gemmserve server: another one's, or a proxy's"
    )


def _raise(error: Exception) -> Any:
    raise error


def _length(response: httpx.Response) -> int | None:
    text = response.headers.get("content-length", "")
    return int(text) if text.isdigit() else None


class SyncIO(_Connection):
    """Blocking I/O over an httpx.Client; safe to share between threads, as that is."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None, **options: Any) -> None:
        super().__init__(url, own_transport=transport is not None, **options)
        self._transport = transport
        self._sleep = time.sleep

    def _make(self) -> httpx.Client:
        local = None if self.socket is None else httpx.HTTPTransport(uds=self.socket)
        return httpx.Client(
            base_url=self.base,
            headers=self.headers,
            auth=self.auth,
            verify=self.verify,
            transport=self._transport or local,
            trust_env=not is_loopback(self.base),
        )

    def pool(self) -> SyncPool:
        """Connections of the process that asks. Raises TransportError where it can have none."""
        self.own()
        found: SyncPool | None = self._pools.get(None)
        if found is None:
            with _lock:
                made = SyncPool(self._make, None if self._transport is None else self._make())
                made.closed = self._closed
                found = self._pools.setdefault(None, made)
        return found

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
        self._sleep(step.seconds)
        return None

    def _together(self, step: Together) -> list[Any]:
        bar = SharedBar(self.progress.bar(step.label, step.nbytes))
        pool = ThreadPoolExecutor(step.limit, thread_name_prefix="gemmserve-part")
        try:
            running = [pool.submit(self.drive, flow, bar) for flow in step.flows]
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
        try:
            with self._open(request, bar) as response:
                receiver = self.receiver(request, response)
                shown = bar or self.progress.bar(f"receiving {request.label}", _length(response))
                try:
                    for count in self._received(request, response, receiver):
                        if shown is not None:
                            shown.advance(count)
                finally:
                    if shown is not None:
                        shown.close()
            return receiver.finish()
        except _HTTPX_ERRORS as error:
            raise _errors.from_httpx(error, self.url, answered=self.answered) from error

    def _received(self, request: Request[Any], response: httpx.Response, receiver: Receiver[Any]) -> Iterator[int]:
        """Gives the body to `receiver`, yielding how many bytes each time. Where the rest of a large one belongs is
        known after its first piece: it is read there.
        """
        length = _length(response) or 0
        with closing(_pieces(response)) as pieces:
            for number, piece in enumerate(pieces):
                receiver.feed(piece)
                yield len(piece)
                rest = length - len(piece)
                if number == 0 and rest >= _direct.DIRECT_FROM and isinstance(receiver, Placing):
                    place = receiver.place()
                    source = _direct.raw_socket(response) if len(place) == rest else None
                    if source is not None:
                        yield from _direct.landed(source, place, receiver, self.timeout_of(request).read)
                        return

    @contextlib.contextmanager
    def _open(self, request: Request[Any], bar: SharedBar | None = None) -> Iterator[httpx.Response]:
        content = self.content_of(request, bar)
        pool = self.pool()
        with (
            pool.connection(idle=request.idle) as http,
            http.stream(
                request.method,
                request.path,
                params=request.query or None,
                headers=self.headers_of(request),
                content=content,  # type: ignore[arg-type]  # h11 takes any buffer; httpx's annotation says bytes
                timeout=self.timeout_of(request),
            ) as response,
        ):
            pool.note(http, response)
            yield response

    def events(self, request: Request[None]) -> Generator[Event]:
        """Each server-sent event as it comes. Raises GemmserveError: in another process than it began in, too."""
        parser = EventParser()
        pid = os.getpid()
        try:
            with self._open(request) as response:
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
        except _HTTPX_ERRORS as error:
            raise _errors.from_httpx(error, self.url, answered=self.answered) from error


class AsyncIO(_Connection):
    """The same over an httpx.AsyncClient, on asyncio."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None, **options: Any) -> None:
        super().__init__(url, own_transport=transport is not None, **options)
        self._transport = transport
        self._sleep = asyncio.sleep

    def _make(self) -> httpx.AsyncClient:
        local = None if self.socket is None else httpx.AsyncHTTPTransport(uds=self.socket)
        return httpx.AsyncClient(
            base_url=self.base,
            headers=self.headers,
            auth=self.auth,
            verify=self.verify,
            transport=self._transport or local,
            trust_env=not is_loopback(self.base),
        )

    def pool(self) -> AsyncPool:
        """The connections of this process and event loop: another loop's are of no use in this one. Raises
        TransportError where there can be none.
        """
        self.own()
        loop = asyncio.get_running_loop()
        found: AsyncPool | None = self._pools.get(loop)
        if found is None:
            for ended in [each for each in self._pools if each.is_closed()]:
                del self._pools[ended]
            found = self._pools[loop] = AsyncPool(self._make, None if self._transport is None else self._make())
            found.closed = self._closed
        return found

    async def close(self) -> None:
        self._closed = True
        loop = asyncio.get_running_loop()
        for owner, pool in list(self._pools.items()):
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
        try:
            async with self._open(request, bar) as response:
                receiver = self.receiver(request, response)
                shown = bar or self.progress.bar(f"receiving {request.label}", _length(response))
                try:
                    async for piece in _apieces(response):
                        receiver.feed(piece)
                        if shown is not None:
                            shown.advance(len(piece))
                finally:
                    if shown is not None:
                        shown.close()
            return receiver.finish()
        except _HTTPX_ERRORS as error:
            raise _errors.from_httpx(error, self.url, answered=self.answered) from error

    @contextlib.asynccontextmanager
    async def _open(self, request: Request[Any], bar: SharedBar | None = None) -> AsyncIterator[httpx.Response]:
        sent = self.content_of(request, bar)
        content = None if sent is None else _awaited(sent)
        pool = self.pool()
        # In a thread where it goes through the body: that may be large.
        headers = (
            await asyncio.to_thread(self.headers_of, request) if self._digested(request) else self.headers_of(request)
        )
        async with (
            pool.connection(idle=request.idle) as http,
            http.stream(
                request.method,
                request.path,
                params=request.query or None,
                headers=headers,
                content=content,  # type: ignore[arg-type]  # as above
                timeout=self.timeout_of(request),
            ) as response,
        ):
            pool.note(http, response)
            yield response

    async def events(self, request: Request[None]) -> AsyncGenerator[Event]:
        """Each server-sent event as it comes. Raises GemmserveError."""
        parser = EventParser()
        pid = os.getpid()
        try:
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
        except _HTTPX_ERRORS as error:
            raise _errors.from_httpx(error, self.url, answered=self.answered) from error


def _pieces(response: httpx.Response) -> Generator[bytes]:
    """The body as it comes; whole if a transport (a test's) handed it over whole."""
    if response.is_stream_consumed:
        yield response.content
    else:
        yield from response.iter_raw()


async def _apieces(response: httpx.Response) -> AsyncGenerator[bytes]:
    if response.is_stream_consumed:
        yield response.content
        return
    async for piece in response.aiter_raw():
        yield piece


async def _awaited(pieces: Iterator[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    for piece in pieces:
        yield piece
