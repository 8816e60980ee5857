"""The actor that Ray keeps on a node: it runs `gemmserve worker` as its child, starts it again, and says how it fares.

Nothing but the standard library: Ray imports this module on the node. The worker speaks to the front by itself and goes
on while Ray's head is gone. The token comes by a call of the bridge's, not in what makes the actor: Ray's head keeps
that (in Redis, where it is fault tolerant), and makes the actor anew from it.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TypedDict
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

LAUNCH: Final = "gemmserve_service.processes.ray.launch"
TOKEN_VARIABLE: Final = "GEMMSERVE_JOIN_TOKEN"  # noqa: S105 (its name)
_TOKEN_FILE_VARIABLE: Final = "GEMMSERVE_JOIN_TOKEN_FILE"  # noqa: S105 (likewise); it would come before the other

_MIN_DELAY_S: Final = 0.1
_MAX_DELAY_S: Final = 10.0
_STEADY_S: Final = 10.0
_HOPELESS: Final = {2, os.EX_UNAVAILABLE, os.EX_NOPERM, os.EX_PROTOCOL, os.EX_USAGE}
_HOPELESS_DELAY_S: Final = 60.0
_LOOK_S: Final = 15.0  # between two looks whether the front can be reached
_CONNECT_S: Final = 3.0


class Order(TypedDict):
    """Order to an actor: what it is to run."""

    arguments: list[str]
    """After `python`: `-m gemmserve.cli worker --join ...`."""
    join_url: str
    token: str | None
    threads: int | None
    """Threads of BLAS; None leaves them to the node."""
    orphan_s: float


class Report(TypedDict):
    """How an actor fares."""

    phase: str
    fingerprint: str
    unowned_s: float
    """Seconds since a bridge of this fingerprint looked."""
    node: str
    pid: int
    worker: int | None
    """The worker's process, while there is one."""
    starts: int
    status: int | None
    """With which the last one ended; negative: a signal."""


class WorkerActor:
    """A worker's parent, one at a time; every call returns at once. `leave` takes the actor itself away for good: Ray
    would start one anew that ends by itself.
    """

    def __init__(self, fingerprint: str, leave: Callable[[], None] | None = None) -> None:
        self._fingerprint = fingerprint
        self._leave = _leave if leave is None else leave
        self._phase = "empty"
        self._order: Order | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._status: int | None = None
        self._heard = self._looked = self._owned = time.monotonic()
        self._wake_read, self._wake_write = os.pipe()
        self._stop = threading.Event()
        # Also before there is an order: an actor whose bridge died before it gave one must not stay for ever.
        threading.Thread(target=self._run, name="gemmserve-worker", daemon=True).start()

    def look(self, fingerprint: str) -> Report:
        """Return how it fares; also the sign that there is a bridge, whose settings have that fingerprint."""
        self._heard = now = time.monotonic()
        if fingerprint == self._fingerprint:
            self._owned = now
        process = self._process
        return Report(
            phase=self._phase,
            fingerprint=self._fingerprint,
            unowned_s=now - self._owned,
            node=socket.gethostname(),
            pid=os.getpid(),
            worker=None if process is None else process.pid,
            starts=self._starts,
            status=self._status,
        )

    def take(self, order: Order) -> None:
        """Starts the worker, unless there was an order before."""
        if self._order is None and not self._stop.is_set():
            self._order = order
            self._phase = "serving"
            os.write(self._wake_write, b".")

    def stop(self) -> None:
        """Ends the worker by SIGTERM, after the task that it is at; `look` says when it is gone."""
        if self._stop.is_set():
            return
        self._phase = "stopped" if self._order is None else "stopping"
        self._stop.set()
        os.write(self._wake_write, b".")

    def _run(self) -> None:
        delay = 0.0
        while not self._stop.is_set():
            if self._order is None or delay:
                self._wait(None, delay or None)
                if self._order is None or self._stop.is_set():
                    continue
            started = time.monotonic()
            self._status = self._serve(self._order)
            steady = time.monotonic() - started >= _STEADY_S
            delay = 0.0 if steady else min(max(2 * delay, _MIN_DELAY_S), _MAX_DELAY_S)
            if self._status in _HOPELESS:
                delay = _HOPELESS_DELAY_S
        self._phase = "stopped"

    def _serve(self, order: Order) -> int:
        environment = dict(os.environ)
        for name in (TOKEN_VARIABLE, _TOKEN_FILE_VARIABLE):
            environment.pop(name, None)
        if order["token"] is not None:
            environment[TOKEN_VARIABLE] = order["token"]
        if order["threads"] is not None:
            environment |= {"OPENBLAS_NUM_THREADS": str(order["threads"]), "OMP_NUM_THREADS": str(order["threads"])}
        command = [sys.executable, "-m", LAUNCH, str(os.getpid()), sys.executable, *order["arguments"]]
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)  # noqa: S603 (our own module)
        except OSError:
            return os.EX_OSERR
        self._process, self._starts = process, self._starts + 1
        try:
            while process.poll() is None:
                if self._stop.is_set():
                    process.terminate()
                self._wait(process, None)
        finally:
            self._process = None
        return process.returncode

    def _wait(self, process: subprocess.Popen[bytes] | None, seconds: float | None) -> None:
        """Waits for the worker's end, a call, or so long; looks after the front meanwhile."""
        until = None if seconds is None else time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            pidfd = None
            try:
                if process is not None:
                    pidfd = os.pidfd_open(process.pid)
                    selector.register(pidfd, selectors.EVENT_READ)
                while until is None or time.monotonic() < until:
                    left = _LOOK_S if until is None else min(_LOOK_S, max(0.0, until - time.monotonic()))
                    ready = [key.fd for key, _ in selector.select(left)]
                    if self._wake_read in ready:
                        os.read(self._wake_read, 4096)
                    if ready:
                        return
                    self._look_around()
            finally:
                if pidfd is not None:
                    os.close(pidfd)

    def _look_around(self) -> None:
        """Leaves when neither a bridge was heard of nor the front could be reached for `orphan_s`."""
        now = time.monotonic()
        if now - self._heard < _LOOK_S or now - self._looked < _LOOK_S:
            return
        self._looked = now
        orphan_s = 600.0 if self._order is None else self._order["orphan_s"]
        if self._order is not None and reachable(self._order["join_url"]):
            self._heard = now
        if time.monotonic() - self._heard > orphan_s:
            self._leave()


def reachable(url: str) -> bool:
    """Whether somebody listens there."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _leave() -> None:
    ray: Any = sys.modules["ray"]  # which made this actor
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
