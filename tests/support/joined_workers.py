"""Joined workers of a server under test: processes of `gemmserve worker` beside it, or on other hosts.

GEMMSERVE_TEST_WORKERS=joined has every server that tests start (`live_server.LiveServer`, `chaos.victim.Victim`)
compute on joined workers alone, over TCP, instead of on its own: the same tests, unchanged.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from networks import Network

SWITCH = "GEMMSERVE_TEST_WORKERS"
_NOT_THE_AGENTS = {
    "GEMMSERVE_DEVICE",
    "GEMMSERVE_PORT",
    "GEMMSERVE_DATA_DIR",
    "GEMMSERVE_JOIN_PORT",
    "GEMMSERVE_JOIN_HOST",
}


def all_joined() -> bool:
    """Whether the servers of this run have joined workers alone."""
    return os.environ.get(SWITCH) == "joined"


def reserved_port(host: str = "127.0.0.1") -> socket.socket:
    """A port that the system gives to nobody else while this socket is open, and that a server of ours can have: one
    that listens may stand beside one that is only bound, if both say SO_REUSEADDR."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


class Agent:
    """One `gemmserve worker`, which can be killed, and started again."""

    def __init__(
        self,
        url: str,
        device: str,
        name: str,
        *,
        environment: Mapping[str, str],
        log: Path,
        node: Network | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        command = [sys.executable, "-m", "gemmserve.cli", "worker", "--join", url, "--device", device, "--name", name]
        command += arguments
        self._command = command if node is None else node.command(command)
        self._environment = {key: value for key, value in environment.items() if key not in _NOT_THE_AGENTS}
        self.log = log
        self.id = f"{name}/{device}"
        """Id of the worker, as the server shows it."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, unless it runs."""
        if self.process is None or self.process.poll() is not None:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)

    def end(self, with_signal: signal.Signals = signal.SIGTERM, *, within_s: float = 60) -> int:
        """Ends it; returns its exit status. One that does not end in time is killed, and TimeoutExpired raised."""
        assert self.process is not None
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(with_signal)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class JoinedWorkers:
    """Agents of one server, and the join port that they come by, which is known before the server is there.

    `host` is the address that the server listens on for them.
    """

    def __init__(self, *, environment: Mapping[str, str], log: Path, host: str = "127.0.0.1") -> None:
        self._environment, self._log = environment, log
        self._holder = reserved_port(host)
        self.port: int = self._holder.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        self.settings = {
            "GEMMSERVE_DEVICE": "none",
            "GEMMSERVE_JOIN_PORT": str(self.port),
            "GEMMSERVE_JOIN_HOST": host,
        }
        """The server's."""
        self.agents: list[Agent] = []

    def add(
        self,
        device: str,
        name: str = "node",
        *,
        url: str | None = None,
        node: Network | None = None,
        arguments: Sequence[str] = (),
        **environment: str,
    ) -> Agent:
        """One more agent, which `start` starts; `url`: by another way than straight to the port."""
        asked = {**self._environment, **environment}
        agent = Agent(url or self.url, device, name, environment=asked, log=self._log, node=node, arguments=arguments)
        self.agents.append(agent)
        return agent

    def start(self) -> None:
        """Starts those that do not run."""
        for agent in self.agents:
            agent.start()

    def stop(self) -> list[int]:
        """Ends all of them by SIGTERM, and gives the port back; returns their exit statuses."""
        started = [agent for agent in self.agents if agent.process is not None]
        for agent in started:
            assert agent.process is not None
            with contextlib.suppress(ProcessLookupError):
                agent.process.terminate()
        try:
            return [agent.end() for agent in started]
        finally:
            self._holder.close()


def take_device(arguments: Sequence[str], environment: dict[str, str]) -> tuple[list[str], str]:
    """Return a server's arguments without `--device`, and the devices that these or its environment name."""
    left = list(arguments)
    devices = environment.get("GEMMSERVE_DEVICE", "auto")
    if "--device" in left:
        at = left.index("--device")
        devices = left[at + 1]
        del left[at : at + 2]
    return left, devices
