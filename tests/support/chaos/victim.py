"""The server that is to suffer: one port for all its lives, its processes found by kind, killed and timed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING

import httpx
import psutil
from joined_workers import JoinedWorkers, all_joined, reserved_port

if TYPE_CHECKING:
    from pathlib import Path

MARK = "GEMMSERVE_CHAOS_MARK"
MODULES = {"front": "gemmserve_service.processes.front", "worker": "gemmserve_service.executor.worker"}
AGENT = ("--join", "gemmserve_service.executor.agent")
"""Words, one of which is in the command of what brings a worker of another host."""


class Victim:
    """A `gemmserve serve` on a data directory that outlives it."""

    def __init__(self, folder: Path, *, log: Path | None = None, **environment: str) -> None:
        self.data_dir = folder / "data"
        self.log = log or folder / "server.log"
        self._holder = reserved_port()
        self.port = self._holder.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.mark = uuid.uuid4().hex
        self.environment = os.environ | {
            "GEMMSERVE_DEVICE": "cpu",
            "OPENBLAS_NUM_THREADS": "1",
            "GEMMSERVE_DATA_DIR": str(self.data_dir),
            "GEMMSERVE_PORT": str(self.port),
            MARK: self.mark,
            **environment,
        }
        self.joined: JoinedWorkers | None = None
        if all_joined():
            for device in self.environment["GEMMSERVE_DEVICE"].split(","):
                self.join().add(device)
        self.supervisor: subprocess.Popen | None = None

    def join(self, host: str = "127.0.0.1") -> JoinedWorkers:
        """The joined workers that it has instead of its own from now on, of which there are none at first."""
        if self.joined is None:
            self.joined = JoinedWorkers(environment=self.environment, log=self.log, host=host)
            self.environment |= self.joined.settings
        return self.joined

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill("all")
        self._holder.close()
        if self.joined is not None:
            self.joined.stop()

    def start(self, *, within_s: float = 120) -> float:
        """Starts it; returns the seconds until it was ready."""
        began = time.monotonic()
        if self.joined is not None:
            self.joined.start()
        with self.log.open("ab") as log:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-m", "gemmserve.cli", "serve"], stdout=log, stderr=log, env=self.environment
            )
        return self.wait_ready(began, within_s=within_s)

    def stop(self, *, within_s: float = 120) -> int:
        """SIGTERM; returns the exit status, or the first other than 0 of its agents."""
        self.supervisor.terminate()
        status = self.supervisor.wait(within_s)
        joined, self.joined = self.joined, None
        return status or max(joined.stop() if joined is not None else [0])

    def wait_ready(self, since: float, *, within_s: float = 120) -> float:
        """Seconds from `since` until /readyz said yes."""
        while True:
            try:
                if httpx.get(f"{self.url}/readyz", timeout=30, trust_env=False).status_code == 200:
                    return time.monotonic() - since
            except httpx.TransportError:
                pass
            if time.monotonic() - since > within_s:
                raise RuntimeError(f"not ready within {within_s} s:\n{self.tail()}")
            time.sleep(0.01)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def processes(self, kind: str = "all") -> list[psutil.Process]:
        """supervisor, front, worker, agent (of a joined worker), or all."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) != self.mark or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                command = process.cmdline()
            except psutil.Error:
                continue
            is_kind = {name: module in command for name, module in MODULES.items()}
            is_kind["agent"] = not any(is_kind.values()) and any(word in command for word in AGENT)
            is_kind |= {"supervisor": not any(is_kind.values()), "all": True}
            if is_kind[kind]:
                found.append(process)
        return found

    def kill(self, kind: str) -> list[psutil.Process]:
        """SIGKILL; without the supervisor there is nothing left that would start again. Returns when they are gone."""
        victims = self.processes(kind)
        for process in victims:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        if kind in {"supervisor", "all"} and self.supervisor is not None:
            self.supervisor.wait(120)
        psutil.wait_procs(victims, timeout=120)
        return victims

    def kill_and_recover(self, kind: str) -> float:
        """Seconds from the kill until the server was ready again."""
        before = {process.pid for process in self.processes(kind)}
        began = time.monotonic()
        self.kill(kind)
        if kind == "agent" and self.joined is not None:
            self.joined.start()
        if kind in {"supervisor", "all"}:
            self.start()
            return time.monotonic() - began
        while not {process.pid for process in self.processes(kind)} - before:
            if time.monotonic() - began > 120:
                raise RuntimeError(f"no new {kind}:\n{self.tail()}")
            time.sleep(0.01)
        return self.wait_ready(began)
