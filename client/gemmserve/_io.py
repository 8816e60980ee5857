"""The only module that talks to the network: sends a Request through httpx, feeds its receiver, maps every error.

The two classes differ in `await` alone. Everything they share is in `_Connection`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import ipaddress
import ssl
import time
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from gemmserve import _errors
from gemmserve._auth import auth_of
from gemmserve._progress import Progress, watched
from gemmserve._requests import Pause, Request
from gemmserve._sse import EventParser
from gemmserve._transfer import Body, Receiver, Whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator

    from gemmserve._flows import Flow

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"

_HTTPX_ERRORS = _errors.httpx_errors()


class _Connection:
    """The base URL, the headers of every request, timeouts, and how a Request becomes httpx's arguments."""

    def __init__(
        self, url: str, *, api_key: str | None, verify: bool | str | ssl.SSLContext, timeout: float, progress: bool
    ) -> None:
        self.url = normal_url(url)
        self.verify = trust(verify)
        self.timeout = timeout
        self.progress = Progress(enabled=progress)
        self.headers = {
            "User-Agent": f"gemmserve/{importlib.metadata.version('gemmserve')}",
            "Accept": "application/json",
            # Arrays do not compress, and their bytes are copied as they come.
            "Accept-Encoding": "identity",
        }
        self.auth = auth_of(api_key, self.url)

    def headers_of(self, request: Request[Any]) -> dict[str, str]:
        headers = dict(request.headers)
        if request.body is not None:
            headers["Content-Type"] = request.body.content_type
            headers["Content-Length"] = str(request.body.nbytes)
        return headers

    def timeout_of(self, request: Request[Any]) -> httpx.Timeout:
        """Silence allowed: the client's timeout, plus what the request lets the server wait."""
        silence = self.timeout if request.limit_s is None else min(self.timeout, request.limit_s)
        return httpx.Timeout(silence, read=silence + request.wait_s, pool=None)

    def _sent(self, body: Body, label: str) -> Iterator[bytes | memoryview]:
        return watched(body.pieces(), self.progress, f"sending {label}", body.nbytes)

    def receiver(self, request: Request[T], response: httpx.Response) -> Receiver[T]:
        """What takes this answer's body; for an error's answer, one that raises it at the end."""
        if not response.is_success:
            return Whole(lambda data: _raise(_errors.from_answer(response.status_code, response.headers, data)))
        if response.headers.get("content-encoding", "identity") != "identity":
            raise _errors.ProtocolError("something on the way compressed the answer although identity was asked for")
        return request.receiver(response.headers)


def _raise(error: Exception) -> Any:
    raise error


def normal_url(url: str) -> str:
    """`url` with its scheme (http where none is given) and without a trailing slash. Raises ParameterInvalid."""
    full = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parsed = httpx.URL(full)
    except httpx.InvalidURL as error:
        raise _errors.from_httpx(error, url) from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise _errors.ParameterInvalid(f"{url!r} is no http:// or https:// URL")
    return full.rstrip("/")


def trust(verify: bool | str | ssl.SSLContext) -> bool | ssl.SSLContext:
    """What httpx is told. Raises ParameterInvalid for a file that holds no certificates."""
    if not isinstance(verify, str):
        return verify
    try:
        return ssl.create_default_context(cafile=verify)
    except OSError as error:  # ssl.SSLError too
        raise _errors.ParameterInvalid(f"{verify!r} is no file of CA certificates: {error}") from error


def is_loopback(url: str) -> bool:
    """Whether `url` names this machine: then no HTTP_PROXY is asked, which would look for the server on itself."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _length(response: httpx.Response) -> int | None:
    text = response.headers.get("content-length", "")
    return int(text) if text.isdigit() else None


class SyncIO(_Connection):
    """Blocking I/O over an httpx.Client; safe to share between threads, as that is."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None, **options: Any) -> None:
        super().__init__(url, **options)
        self._http = httpx.Client(
            base_url=self.url,
            headers=self.headers,
            auth=self.auth,
            verify=self.verify,
            transport=transport,
            trust_env=not is_loopback(self.url),
        )
        self._sleep = time.sleep

    def close(self) -> None:
        self._http.close()

    def drive(self, flow: Flow[T]) -> T:
        """Runs a flow to its end: sends what it yields and throws into it what goes wrong."""
        try:
            step = next(flow)
            while True:
                try:
                    answer = self._perform(step)
                except BaseException as error:  # interruptions too: the flow decides what to tidy up
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as done:
            value: T = done.value
            return value

    def _perform(self, step: Request[Any] | Pause) -> Any:
        if isinstance(step, Request):
            return self.send(step)
        self._sleep(step.seconds)
        return None

    def send(self, request: Request[T]) -> T:
        """One exchange. Raises GemmserveError."""
        try:
            with self._open(request) as response:
                receiver = self.receiver(request, response)
                pieces = _pieces(response)
                for piece in watched(pieces, self.progress, f"receiving {request.label}", _length(response)):
                    receiver.feed(piece)
            return receiver.finish()
        except _HTTPX_ERRORS as error:
            raise _errors.from_httpx(error, self.url) from error

    def _open(self, request: Request[Any]) -> Any:
        content: Iterator[bytes | memoryview] | None = None
        if request.body is not None:
            content = self._sent(request.body, request.label)
        return self._http.stream(
            request.method,
            request.path,
            params=request.query or None,
            headers=self.headers_of(request),
            content=content,  # type: ignore[arg-type]  # h11 takes any buffer; httpx's annotation says bytes
            timeout=self.timeout_of(request),
        )

    def events(self, request: Request[None]) -> Iterator[Any]:
        """The JSON of each server-sent event as it comes. Raises GemmserveError."""
        parser = EventParser()
        try:
            with self._open(request) as response:
                if not response.is_success:
                    receiver = self.receiver(request, response)
                    for piece in _pieces(response):
                        receiver.feed(piece)
                    receiver.finish()
                with closing(_pieces(response)) as pieces:
                    for piece in pieces:
                        yield from parser.feed(piece)
        except _HTTPX_ERRORS as error:
            raise _errors.from_httpx(error, self.url) from error


class AsyncIO(_Connection):
    """The same over an httpx.AsyncClient, on asyncio."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None, **options: Any) -> None:
        super().__init__(url, **options)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=self.headers,
            auth=self.auth,
            verify=self.verify,
            transport=transport,
            trust_env=not is_loopback(self.url),
        )
        self._sleep = asyncio.sleep

    async def close(self) -> None:
        await self._http.aclose()

    async def drive(self, flow: Flow[T]) -> T:
        """Runs a flow to its end: sends what it yields and throws into it what goes wrong, cancellation too."""
        try:
            step = next(flow)
            while True:
                try:
                    answer = await (self._sleep(step.seconds) if isinstance(step, Pause) else self.send(step))
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

    async def send(self, request: Request[T]) -> T:
        """One exchange. Raises GemmserveError."""
        try:
            async with self._open(request) as response:
                receiver = self.receiver(request, response)
                bar = self.progress.bar(f"receiving {request.label}", _length(response))
                try:
                    async for piece in _apieces(response):
                        receiver.feed(piece)
                        if bar is not None:
                            bar.advance(len(piece))
                finally:
                    if bar is not None:
                        bar.close()
            return receiver.finish()
        except _HTTPX_ERRORS as error:
            raise _errors.from_httpx(error, self.url) from error

    def _open(self, request: Request[Any]) -> Any:
        content: AsyncIterator[bytes | memoryview] | None = None
        if request.body is not None:
            content = _awaited(self._sent(request.body, request.label))
        return self._http.stream(
            request.method,
            request.path,
            params=request.query or None,
            headers=self.headers_of(request),
            content=content,  # type: ignore[arg-type]  # as above
            timeout=self.timeout_of(request),
        )

    async def events(self, request: Request[None]) -> AsyncIterator[Any]:
        """The JSON of each server-sent event as it comes. Raises GemmserveError."""
        parser = EventParser()
        try:
            async with self._open(request) as response:
                if not response.is_success:
                    receiver = self.receiver(request, response)
                    async for piece in _apieces(response):
                        receiver.feed(piece)
                    receiver.finish()
                async with aclosing(_apieces(response)) as pieces:
                    async for piece in pieces:
                        for event in parser.feed(piece):
                            yield event
        except _HTTPX_ERRORS as error:
            raise _errors.from_httpx(error, self.url) from error


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
