"""A cluster of Ray's on this machine: a head that has nothing to give, nodes with a processor each, all killable."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from networks import Network

HEALTH = {"initial_delay_ms": "500", "period_ms": "500", "timeout_ms": "1000", "failure_threshold": "4"}
MARK = "GEMMSERVE_RAY_MARK"
_LONG_S = 120
_STARTED = "Ray runtime started."


class RayCluster:
    """Nodes that are processes of `ray start --block`, with Ray's token, a port and a folder of their own.

    Each process of theirs is found by a mark in its environment, and none is left.
    """

    def __init__(self, nodes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ray")  # short: Ray puts sockets below it
        self.mark = uuid.uuid4().hex
        token = Path(self._folder.name) / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        own = {f"RAY_health_check_{name}": value for name, value in HEALTH.items()}
        own |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "1800", "RAY_worker_niceness": "0", MARK: self.mark}
        self._environment = os.environ | self.environment | own
        self._log = (Path(self._folder.name) / "log").open("w")
        self.ip = _address()
        self.address = f"{self.ip}:{free_port()}"
        self._nodes = nodes
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            port = self.address.rpartition(":")[2]
            head = ["--head", "--port", port, "--num-cpus=0", "--include-dashboard=false"]
            self._start(*head, "--temp-dir", self._folder.name)
            self._wait_for_node("the head")
            for _ in range(self._nodes):
                self.add_node()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + _LONG_S
        while left := self.processes():
            assert time.monotonic() < deadline, left
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        for process in self._started:
            process.wait()
        self._log.close()
        self._folder.cleanup()

    def add_node(self, network: Network | None = None) -> None:
        """Adds a node, on another host if there is one, and waits until it has joined: one that begins earlier may take
        its socket's name.
        """
        self._start("--address", self.address, "--num-cpus=1", network=network)
        self._wait_for_node("a node")

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Living processes of the cluster, with what its actors have started, whose command line matches."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) != self.mark or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if re.search(pattern, " ".join(process.cmdline())):
                    found.append(process)
        return found

    def actors(self) -> list[psutil.Process]:
        """Processes of our actors."""
        return self.processes("^ray::WorkerActor")

    def node_of(self, actor: psutil.Process) -> psutil.Process:
        """The raylet that started it."""
        return next(parent for parent in actor.parents() if "raylet" in " ".join(parent.cmdline()[:1]))

    def logs(self) -> str:
        """All that Ray has written: its processes' logs, events, and what `ray start` said."""
        files = [file for file in Path(self._folder.name).rglob("*") if file.is_file() and file.name != "token"]
        return "\n".join(file.read_bytes().decode(errors="replace") for file in files)

    def stop_head(self) -> None:
        """Stops the process of the head's tables without ending it."""
        (head,) = self.processes("gcs/gcs_server")
        head.send_signal(signal.SIGSTOP)

    def continue_head(self) -> None:
        """Undoes that."""
        (head,) = self.processes("gcs/gcs_server")
        head.send_signal(signal.SIGCONT)

    def _start(self, *arguments: str, network: Network | None = None) -> None:
        ip = self.ip if network is None else network.there
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--node-ip-address", ip]
        command += ["--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        if network is not None:
            network.route_back()
            command = network.command(command)
        process = subprocess.Popen(
            command, env=self._environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        self._started.append(process)

    def _wait_for_node(self, what: str) -> None:
        """Waits for the word of the node that was started last; it comes when the head has it on its list."""
        log = Path(self._log.name)
        deadline = time.monotonic() + _LONG_S
        while (text := log.read_text(errors="replace")).count(_STARTED) < len(self._started):
            assert time.monotonic() < deadline, f"{what} did not come\n{text}"
            assert self._started[-1].poll() is None, text
            time.sleep(0.1)


def _address() -> str:
    """This machine's, as Ray sees it."""
    import ray

    return ray.util.get_node_ip_address()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
