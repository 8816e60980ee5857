"""The worker process of a node, started as the supervisor starts one, and the control socket that it connects to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import ValidationError

from gemmserve_service.executor.agent.own_folder import OwnFolder
from gemmserve_service.executor.agent.texts import Finished, finished_in
from gemmserve_service.executor.prompt_writes import PromptWriter
from gemmserve_service.executor.protocol import TO_FRONT, Beat, Decoder, Hello, ProtocolError, encode
from gemmserve_service.runtime.handoff import WorkerHandoff
from gemmserve_service.runtime.unix_sockets import peer_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pydantic import BaseModel

    from gemmserve_service.executor.protocol import Compiling, Delivered, Done, Failed, Kept, RunBatch, Written
    from gemmserve_service.settings import Settings

    FromWorker = Finished | Beat | Compiling | Done | Failed | Written | Delivered | Kept

log = logging.getLogger(__name__)

_CONTROL: Final = "control.sock"
_MIN_DELAY_S: Final = 0.1
_MAX_DELAY_S: Final = 10.0
_STEADY_S: Final = 10.0  # a process that lived this long starts again without delay
_UNAVAILABLE_DELAY_S: Final = 60.0


class DeviceGone(Exception):  # noqa: N818 (says what is the case)
    """The worker's device cannot be used, and none of its processes ever could."""


class Control(asyncio.Protocol):
    """One connection of the worker: `hello` first, then what `attach`'s handler hears; `on_lost()` at its end, once."""

    def __init__(self, child: Child) -> None:
        self.on_lost: Callable[[], None] = lambda: None
        self.hello: Hello | None = None
        self.heard = time.monotonic()
        """Time of its last sign of life (time.monotonic)."""
        self._child = child
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._writer: PromptWriter | None = None
        self._handler: Callable[[FromWorker, bytes], None] | None = None
        self._early: list[tuple[FromWorker, bytes]] = []
        """Messages that came before anybody wanted to hear them."""

    def attach(self, handler: Callable[[FromWorker, bytes], None]) -> None:
        """Have `handler(message, body)` hear what the worker says, and what it has said already but its beats."""
        self._handler = handler
        early, self._early = self._early, []
        for message, body in early:
            handler(message, body)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._writer = PromptWriter(self._transport)
        peer = peer_of(transport.get_extra_info("socket"))
        if peer is not None and peer[1] != os.getuid():
            log.error("a process of another user connected to the control socket: closed")
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        try:
            for body in self._decoder.feed(data):
                message = finished_in(body) or TO_FRONT.validate_json(body)
                if isinstance(message, Finished) and self._handler is not None:  # most
                    self._handler(message, body)
                elif isinstance(message, Hello):
                    self.hello = message
                    self._child.greeted(self)
                elif self.hello is None:
                    log.error("a worker answered before it said hello: closing its connection")
                    self.close()
                elif self._handler is not None:
                    self._handler(message, body)
                elif not isinstance(message, Beat):
                    self._early.append((message, body))
        except (ProtocolError, ValidationError):
            log.exception("the worker speaks nonsense: closing its connection")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = self._writer = None
        self.on_lost()

    @property
    def alive(self) -> bool:
        """Whether the connection is there."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, *messages: BaseModel | RunBatch | bytes) -> None:
        """Send messages, or whole frames."""
        if self._writer is not None:
            self._writer.write(*[each if isinstance(each, bytes) else encode(each) for each in messages])

    def close(self) -> None:
        """Close the connection: the worker ends what it does and comes again."""
        if self._transport is not None:
            self._transport.close()


class Child:
    """The worker process of `device`; started again whenever it ends. To be closed."""

    def __init__(self, settings: Settings, device: str, pipe_fd: int) -> None:
        """`pipe_fd`: read end of a pipe whose other end is this process's alone."""
        self.device = device
        self.block_side = settings.block_side
        self._settings = settings
        self._pipe_fd = pipe_fd
        self._folder = OwnFolder()
        self._server: asyncio.Server | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Control | None = None
        self._changed = asyncio.Event()
        self._started = 0.0
        self._delay = 0.0
        self._served = False
        self._gone = False
        self._closed = False
        self._restart: asyncio.TimerHandle | None = None

    @property
    def path(self) -> Path:
        """Path of the control socket."""
        return self._folder.path / _CONTROL

    @property
    def pid(self) -> int | None:
        """Number of the process that runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Listen, and start the process."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.path))
        loop = asyncio.get_running_loop()
        keep: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        self._server = await loop.create_unix_server(lambda: Control(self), sock=listener, **keep)
        self._spawn()

    async def close(self) -> None:
        """End the process and remove the socket."""
        self._closed = True
        if self._restart is not None:
            self._restart.cancel()
        if self._server is not None:
            self._server.close()
        self.kill()
        while self._process is not None:
            await self._wait()
        self._folder.close()

    async def connected(self) -> Control:
        """Return the worker's connection, once it has said hello. Raises DeviceGone."""
        while True:
            if self._gone:
                raise DeviceGone(self.device)
            if self._control is not None and self._control.alive:
                return self._control
            await self._wait()

    async def settle(self, control: Control, within_s: float) -> None:
        """Close a connection; return when the worker has come again, or its process is gone: nothing is written by what
        it was told there. One that takes longer than `within_s` is killed.
        """
        if self._control is control:
            self._control = None
        process = self._process
        control.close()
        try:
            async with asyncio.timeout(within_s):
                while self._process is process and process is not None and self._control is None:
                    await self._wait()
        except TimeoutError:
            log.warning("the worker did not let go of its task within %.1f s: it is killed", within_s)
            self.kill()
            while self._process is process:
                await self._wait()

    def kill(self) -> None:
        """SIGKILL; a new process follows."""
        self._control = None
        if self._process is not None:
            self._process.kill()

    def greeted(self, control: Control) -> None:
        """Take note of a worker's hello."""
        before, self._control = self._control, control
        self._served = True
        if before is not None:
            before.close()
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _spawn(self) -> None:
        self._restart = None
        handoff = WorkerHandoff(
            settings=self._settings.model_copy(update={"block_side": self.block_side}),
            pipe_fd=self._pipe_fd,
            device=self.device,
            control_path=str(self.path),
        )
        self._started = time.monotonic()
        # A session of its own: Ctrl-C in the terminal reaches the agent alone, which lets the task end.
        process = subprocess.Popen(
            [sys.executable, "-m", "gemmserve_service.executor.worker"],
            stdin=subprocess.PIPE,
            pass_fds=(self._pipe_fd,),
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(handoff.model_dump_json().encode())
            process.stdin.close()
        self._process = process
        loop = asyncio.get_running_loop()

        def watch() -> None:
            status = process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
                loop.call_soon_threadsafe(self._ended, status)

        threading.Thread(target=watch, name="gemmserve-child", daemon=True).start()

    def _ended(self, status: int) -> None:
        control, self._control = self._control, None
        self._process = None
        if control is not None:
            control.close()
        if status == os.EX_UNAVAILABLE and not self._served:
            self._gone = True
        elif not self._closed:
            lived_s = time.monotonic() - self._started
            self._delay = 0.0 if lived_s >= _STEADY_S else min(max(2 * self._delay, _MIN_DELAY_S), _MAX_DELAY_S)
            if status == os.EX_UNAVAILABLE:
                self._delay = _UNAVAILABLE_DELAY_S
            log.warning(
                "the worker of %s ended (status %d); starting it again in %.1f s", self.device, status, self._delay
            )
            self._restart = asyncio.get_running_loop().call_later(self._delay, self._spawn)
        self._changed.set()
