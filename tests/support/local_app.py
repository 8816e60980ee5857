"""The app on a Unix socket and the socket for shared memory beside it, in a thread, for tests that look into it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Self

from spy_executor import SpyExecutor

from gemmserve.wire import DESCRIPTORS_SUFFIX
from gemmserve_service.http.app import create_app
from gemmserve_service.http.server import main_server
from gemmserve_service.jobs.core import Core
from gemmserve_service.runtime.unix_sockets import listen_unix
from gemmserve_service.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path


class LocalApp:
    """`path` is the socket's, `url` the client's way to it. As a context manager: serves, then ends and checks that
    nothing of shared memory is left."""

    def __init__(self, path: Path, data_dir: Path, *, descriptors: bool = True, **settings: object) -> None:
        self.path = path
        self.url = f"unix:{path}"
        self.executor = SpyExecutor()
        self.settings = Settings(data_dir=data_dir, uds=path, **{"verify_share": 0.0, **settings})
        self._descriptors = descriptors
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            self.core = Core(self.settings, self.executor)
            self.app = create_app(self.settings, self.core)
            self._loop = asyncio.get_running_loop()
            self._server = main_server(self.app, self.settings)
            self._server.config.timeout_graceful_shutdown = 1
            self._server.unix = listen_unix(self.path, 0o600, stack)
            if self._descriptors:
                beside = self.path.with_name(self.path.name + DESCRIPTORS_SUFFIX)
                listener = listen_unix(beside, 0o600, stack, kind=socket.SOCK_SEQPACKET)
                self.app.state.descriptors.start(listener)
            serving = asyncio.ensure_future(self._server.serve([]))
            while not self._server.started and not serving.done():  # noqa: ASYNC110 (uvicorn has no event for it)
                await asyncio.sleep(0.01)
            self._started.set()
            await serving

    @property
    def descriptors(self):
        return self.app.state.descriptors

    def end_sessions(self) -> None:
        """As if the connections had broken."""

        def end() -> None:
            for session in list(self.descriptors._sessions.values()):
                session.close()
            done.set()

        done = threading.Event()
        self._loop.call_soon_threadsafe(end)
        assert done.wait(60)

    def until(self, condition, within_s: float = 60.0) -> None:
        """Waits for something that the app's thread does."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.005)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.until(lambda: self.core.store.scratch_bytes == 0)
        self._server.should_exit = True
        self._thread.join(60)
        if kind is None:
            assert (self.descriptors.held, self.descriptors.sessions) == (0, 0)
