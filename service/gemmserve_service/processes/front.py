"""The front process: HTTP, queue and scheduler on the supervisor's socket. It never touches a device."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Final

import uvicorn

from gemmserve_service.executor.local import LocalExecutor
from gemmserve_service.http.app import create_app
from gemmserve_service.http.server import main_server, side_server
from gemmserve_service.http.transfer.pool import TransferPool
from gemmserve_service.jobs.core import Core
from gemmserve_service.processes.ray.demand import PERIOD_S, Demand, tell
from gemmserve_service.runtime import logs
from gemmserve_service.runtime.handoff import FrontHandoff
from gemmserve_service.runtime.open_files import OpenFiles
from gemmserve_service.runtime.tracing.provider import open_tracing
from gemmserve_service.runtime.tuning import keep_from_collector, share_interpreter
from gemmserve_service.store.database.migrations import SchemaTooNew
from gemmserve_service.store.extents.arena import Arena
from gemmserve_service.store.tier.cold import TierUnusableError
from gemmserve_service.tenancy.keyring import KeyringWatch

if TYPE_CHECKING:
    from gemmserve_service.executor.port import Executor
    from gemmserve_service.http.server import Server

_SIDE_CLOSE_S: Final = 1.0
_READY_POLL_S: Final = 0.02
_PULSE_S: Final = 1.0

log = logging.getLogger(__name__)


async def _drain(core: Core, server: Server, drain_s: float) -> None:
    """New work is refused at once; what runs gets `drain_s`; then the server closes."""
    log.info("draining: new work is refused, running jobs get %g s", drain_s)
    if not await core.drain(drain_s):
        log.warning("jobs were still running after %g s; stored ones start again with the server", drain_s)
    server.should_exit = True


async def _pulse(core: Core, pulse_fd: int) -> None:
    """Tells the supervisor every second that this loop turns, and once that the server is ready."""
    os.set_blocking(pulse_fd, False)
    ready, pulsed = False, 0.0
    while True:
        became_ready = not ready and core.ready()[0]
        if became_ready or time.monotonic() - pulsed >= _PULSE_S:
            ready, pulsed = ready or became_ready, time.monotonic()
            with contextlib.suppress(BlockingIOError):  # a supervisor that is stopped does not read
                os.write(pulse_fd, b"1" if became_ready else b".")
        await asyncio.sleep(_PULSE_S if ready else _READY_POLL_S)


async def _tell_demand(core: Core, demand_fd: int) -> None:
    """Tells the bridge to Ray what waits and what runs."""
    os.set_blocking(demand_fd, False)
    while True:
        scheduler = core.scheduler
        tell(demand_fd, Demand(time.monotonic(), scheduler.queued, scheduler.products_running))
        await asyncio.sleep(PERIOD_S)


async def _serve(handoff: FrontHandoff) -> bool:
    """Serve until it is told to drain. Return False if it could not start. Raises SchemaTooNew, TierUnusableError."""
    settings = handoff.settings
    keyring = KeyringWatch(settings.data_dir, settings.keys_file)
    local = LocalExecutor(socket.socket(fileno=handoff.control_fd), handoff.devices)
    executor: Executor = local
    joined = None
    if handoff.join_fd is not None:
        # Here, and not above: who lets no workers join loads nothing of it.
        from gemmserve_service.executor.composed import ComposedExecutor
        from gemmserve_service.executor.joined.executor import JoinedExecutor

        joined = JoinedExecutor(socket.socket(fileno=handoff.join_fd), settings, keyring)
        executor = ComposedExecutor(local, joined)
    arena = None
    if handoff.arena_path is not None:
        arena = Arena(handoff.arena_path, handoff.arena_bytes, writers=handoff.arena_writers)
    tracing = open_tracing(settings.trace_ratio)
    core = Core(settings, executor, arena, tracing, keyring)
    core.database.check()
    core.store.open_tier()
    app = create_app(settings, core)
    if joined is not None:
        app.state.metrics.watch_joined(joined)
    transfers = None
    if handoff.transfer_fd is not None:
        transfers = TransferPool(socket.socket(fileno=handoff.transfer_fd), silence_s=settings.heartbeat_timeout_s)
        core.store.on_extent_destroyed(transfers.forget)
        app.state.metrics.watch(transfers)
        transfers.start()
    files = OpenFiles.of(settings)
    log.log(logging.WARNING if files.connections < settings.max_connections else logging.INFO, "%s", files)
    server = main_server(app, settings, transfers)
    keep_from_collector()
    if handoff.unix_fd is not None:
        server.unix = socket.socket(fileno=handoff.unix_fd)
    if handoff.descriptors_fd is not None:
        app.state.descriptors.start(socket.socket(fileno=handoff.descriptors_fd))
    tasks: set[asyncio.Task[None]] = set()

    def on_signal() -> None:
        if tasks:  # the second one
            server.should_exit = server.force_exit = True
        else:
            tasks.add(asyncio.create_task(_drain(core, server, settings.drain_s)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    beside = [asyncio.create_task(_pulse(core, handoff.ready_fd))]
    if handoff.demand_fd is not None:
        beside.append(asyncio.create_task(_tell_demand(core, handoff.demand_fd)))
    side, of_side = None, None
    if handoff.side_fd is not None:
        side = side_server(app, settings)
        of_side = asyncio.create_task(side.serve(sockets=[socket.socket(fileno=handoff.side_fd)]))
        beside.append(of_side)
    try:
        await server.serve(sockets=[socket.socket(fileno=handoff.listen_fd)])
    finally:
        # Last, so that operators see the drain to its end.
        if side is not None and of_side is not None:
            side.should_exit = True
            await asyncio.wait([of_side], timeout=_SIDE_CLOSE_S)
        for task in beside:
            task.cancel()
        if transfers is not None:
            transfers.stop()
        if tracing is not None:
            tracing.close()
    return server.started


def main() -> int:
    """Runs until it is told to drain; returns the exit status, EX_CONFIG where starting it again would not help."""
    handoff = FrontHandoff.receive()
    logs.configure(handoff.settings)
    share_interpreter()
    # uvloop where it is installed, as uvicorn would choose.
    loop_factory = uvicorn.Config(app="", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return 0 if runner.run(_serve(handoff)) else 1
        except (SchemaTooNew, TierUnusableError) as error:
            log.error("%s", error)  # noqa: TRY400 (not a fault of the program: no traceback)
            return os.EX_CONFIG


if __name__ == "__main__":
    raise SystemExit(main())
