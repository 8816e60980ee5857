"""Connections are taken; where no file can be opened, later."""

from __future__ import annotations

import asyncio
import socket

from gemmserve_service.runtime import acceptor as module
from gemmserve_service.runtime.acceptor import Acceptor


async def test_no_descriptors_left_for_a_connection(monkeypatch, caplog):
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    attempts, taken = [], asyncio.get_running_loop().create_future()

    class Full:
        def __init__(self, listener):
            self.fileno, self.setblocking = listener.fileno, listener.setblocking

        def accept(self):
            attempts.append(1)
            if len(attempts) < 3:
                raise OSError(24, "Too many open files")
            return listener.accept()

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        acceptor = Acceptor(Full(listener), taken.set_result, "guests")
        async with asyncio.timeout(60):
            (await taken).close()
        acceptor.stop()
    assert "guests wait for 0.01 s: [Errno 24] Too many open files" in caplog.text
