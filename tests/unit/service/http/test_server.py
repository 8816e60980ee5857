"""What `Server` relies on of uvicorn beyond its manual; handshakes without an end are in test_slow_connections.py."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket

import pytest

from gemmserve_service.http.app import create_app
from gemmserve_service.http.server import main_server, side_server
from gemmserve_service.runtime.unix_sockets import listen_unix

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def app(settings, core):
    return create_app(settings, core)


async def started(server, listener):
    serving = asyncio.ensure_future(server.serve([listener]))
    async with asyncio.timeout(60):
        while not server.started and not serving.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.005)
    return serving


async def said(reader, writer):
    async with asyncio.timeout(60):
        writer.write(GET)
        text = await reader.read()
    writer.close()
    return text


async def test_signals_are_the_caller_s_while_it_serves(app, settings):
    """uvicorn's handlers would take the place of those that drain first."""

    def mine(*_):
        raise AssertionError("nobody sends any")

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, mine) for number in numbers]
    try:
        server = main_server(app, settings)
        serving = await started(server, socket.create_server(("127.0.0.1", 0)))
        assert [signal.getsignal(number) for number in numbers] == [mine, mine]
        server.should_exit = True
        await serving
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


async def test_a_unix_socket_is_served_besides_and_its_path_stays(app, settings, tmp_path, stack):
    server = main_server(app, settings)
    server.unix = listen_unix(tmp_path / "socket", 0o600, stack)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    serving = await started(server, listener)
    assert b"200 OK" in await said(*await asyncio.open_unix_connection(tmp_path / "socket"))
    assert b"200 OK" in await said(*await asyncio.open_connection("127.0.0.1", port))
    server.should_exit = True
    await serving
    assert (tmp_path / "socket").exists()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_unix_connection(tmp_path / "socket")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_two_servers_of_one_app_start_and_end_apart(app, settings):
    """The second port's has no lifespan of its own."""
    servers = [main_server(app, settings), side_server(app, settings)]
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in servers]
    ports = [listener.getsockname()[1] for listener in listeners]
    serving = [await started(*each) for each in zip(servers, listeners, strict=True)]
    for port in ports:
        assert b"200 OK" in await said(*await asyncio.open_connection("127.0.0.1", port))
    servers[1].should_exit = True
    await serving[1]
    assert b"200 OK" in await said(*await asyncio.open_connection("127.0.0.1", ports[0]))
    servers[0].should_exit = True
    await serving[0]
