"""The front process: HTTP, queue and scheduler on the supervisor's socket. It never touches a device."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, Final

import uvicorn

from gemmserve_service import logging as logs
from gemmserve_service.app import create_app
from gemmserve_service.core import Core
from gemmserve_service.executor.local import LocalExecutor
from gemmserve_service.handoff import FrontHandoff

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLOSE_S: Final = 5  # responses under way when everything else has ended
_READY_POLL_S: Final = 0.02

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Leaves signals to `_drain`, which must run before connections are closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _drain(core: Core, server: uvicorn.Server, drain_s: float) -> None:
    """New work is refused at once; what runs gets `drain_s`; then the server closes."""
    log.info("draining: new work is refused, running jobs get %g s", drain_s)
    if not await core.drain(drain_s):
        log.warning("jobs were still running after %g s; stored ones start again with the server", drain_s)
    server.should_exit = True


async def _announce(core: Core, ready_fd: int) -> None:
    while not core.ready()[0]:  # noqa: ASYNC110 (once, at the start; workers and draining both decide)
        await asyncio.sleep(_READY_POLL_S)
    os.write(ready_fd, b"1")
    os.close(ready_fd)


async def _serve(handoff: FrontHandoff) -> bool:
    """Until it is told to drain. False: it could not start."""
    settings = handoff.settings
    executor = LocalExecutor(socket.socket(fileno=handoff.control_fd), handoff.devices)
    core = Core(settings, executor)
    config = uvicorn.Config(
        create_app(settings, core),
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = _Server(config)
    tasks: set[asyncio.Task[None]] = set()

    def on_signal() -> None:
        if tasks:  # the second one
            server.should_exit = server.force_exit = True
        else:
            tasks.add(asyncio.create_task(_drain(core, server, settings.drain_s)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    announcement = asyncio.create_task(_announce(core, handoff.ready_fd))
    try:
        await server.serve(sockets=[socket.socket(fileno=handoff.listen_fd)])
    finally:
        announcement.cancel()
    return server.started


def main() -> int:
    """Runs until it is told to drain."""
    handoff = FrontHandoff.receive()
    logs.configure(handoff.settings)
    # uvloop where it is installed, as uvicorn would choose.
    loop_factory = uvicorn.Config(app="", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return 0 if runner.run(_serve(handoff)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
