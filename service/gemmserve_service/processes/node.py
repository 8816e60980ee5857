"""A node's agents: one for each device, in this process where there is one device, else in processes of their own.

Those are kept running, and end with this one: they read from a pipe whose other end is this process's alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.processes.devices import accelerators, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.runtime.handoff import AgentHandoff

_MIN_DELAY_S: Final = 0.1
_MAX_DELAY_S: Final = 10.0
_STEADY_S: Final = 10.0  # an agent that lived this long starts again without delay
_KILL_AFTER_S: Final = 7.0  # past the drain
_FINAL: Final = frozenset({0, os.EX_NOPERM, os.EX_PROTOCOL, os.EX_CONFIG, os.EX_USAGE, os.EX_UNAVAILABLE, 2})
"""Exit statuses that would be the same the next time."""


def devices_of(setting: str) -> list[str]:
    """Return the devices that get an agent: those that are named; for "auto" every accelerator, else the CPU."""
    return setting.split(",") if setting != "auto" else accelerators() or ["cpu"]


def run_node(handoff: AgentHandoff, devices: Sequence[str]) -> int:
    """Run agents until SIGTERM; return the exit status: of the first that refuses to go on, or EX_UNAVAILABLE if no
    device can be used. Raises UsageError.
    """
    # Here, and not above: it brings NumPy, which the parent of several has no other use for.
    if len(devices) == 1:
        from gemmserve_service.executor.agent.process import run

        return run(handoff.model_copy(update={"device": devices[0]}))
    return _Node(handoff, devices).run()


class _Node:
    """The parent of several agents."""

    def __init__(self, handoff: AgentHandoff, devices: Sequence[str]) -> None:
        self._handoff = handoff
        self._pipe = os.pipe()
        self._stopping = threading.Event()
        self._final: dict[str, int] = {}
        self._devices = list(devices)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._due: dict[str, float] = dict.fromkeys(devices, 0.0)
        self._delay: dict[str, float] = dict.fromkeys(devices, 0.0)
        self._started: dict[str, float] = {}

    def run(self) -> int:
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        status: int | None = None
        try:
            while status is None:
                status = self._turn()
                if status is not None:
                    break
                pause_s = max(min(self._due.values(), default=time.monotonic() + 1) - time.monotonic(), 0.0)
                readable, _, _ = select.select([wake_read], [], [], min(pause_s, 1.0))
                if readable and any(number != signal.SIGCHLD for number in os.read(wake_read, 4096)):
                    status = 0
        finally:
            self._end()
            signal.set_wakeup_fd(-1)
            for fd in (wake_read, wake_write, *self._pipe):
                os.close(fd)
        return status

    def _turn(self) -> int | None:
        """Start agents that are due, and look after those that have ended; return the exit status once there is one."""
        now = time.monotonic()
        for device in [device for device, due in self._due.items() if now >= due]:
            self._start(device)
        for device, process in list(self._processes.items()):
            status = process.poll()
            if status is None:
                continue
            del self._processes[device]
            if status == os.EX_UNAVAILABLE:
                say(f"{device} cannot be used")
                self._final[device] = status
                if len(self._final) == len(self._devices):
                    return status
            elif status in _FINAL:
                return status
            else:
                steady = now - self._started[device] >= _STEADY_S
                delay_s = self._delay[device] = (
                    0.0 if steady else min(max(2 * self._delay[device], _MIN_DELAY_S), _MAX_DELAY_S)
                )
                say(f"the agent of {device} ended (status {status}); starting it again in {delay_s:.1f} s")
                self._due[device] = now + delay_s
        return None

    def _start(self, device: str) -> None:
        del self._due[device]
        self._started[device] = time.monotonic()
        handoff = self._handoff.model_copy(update={"device": device, "pipe_fd": self._pipe[0]})
        process = subprocess.Popen(
            [sys.executable, "-m", "gemmserve_service.executor.agent"],
            stdin=subprocess.PIPE,
            pass_fds=(self._pipe[0],),
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its status says more
            process.stdin.write(handoff.model_dump_json().encode())
            process.stdin.close()
        self._processes[device] = process

    def _end(self) -> None:
        """Have all agents end after their tasks."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + self._handoff.settings.drain_s + _KILL_AFTER_S
        for process in self._processes.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
