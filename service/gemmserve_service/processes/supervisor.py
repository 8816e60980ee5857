"""The thin parent: holds the data directory's lock and the sockets, and keeps its children running.

Children are the front (`front.py`), one worker a device (`worker/__main__.py`), where it is asked for the bridge to Ray
(`ray/bridge.py`), and, where processors allow, transfer processes (`http/transfer`), which end with the front: the next
one starts when they are gone. All read from a
pipe whose other end is this process's alone, so that they end with it even when it is killed. The listening
socket stays open while the front restarts: connections wait in its backlog. They hold the data directory's lock too:
the next server begins when the last process of this one is gone, not before.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import selectors
import signal
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from gemmserve_service.processes.datadir import lock
from gemmserve_service.processes.devices import accelerators, reason, say
from gemmserve_service.processes.listeners import control_socket, listen, listen_here, runtime_folder, transfer_socket
from gemmserve_service.processes.ray.join_token import read_token
from gemmserve_service.runtime.handoff import FrontHandoff, RayHandoff, TransferHandoff, WorkerHandoff
from gemmserve_service.runtime.start_error import StartError, UsageError
from gemmserve_service.runtime.tuning import transfer_processes
from gemmserve_service.settings import is_loopback
from gemmserve_service.store.extents.memfd import arena_bytes, create_arena, create_panel_table, shares_panels
from gemmserve_service.tenancy.keyring import KeyringError, read_keyring

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from gemmserve_service.settings import Settings

_CONTROL: Final = "control.sock"
_TRANSFER: Final = "transfer.sock"
_MIN_DELAY_S: Final = 0.1
_MAX_DELAY_S: Final = 10.0
_STEADY_S: Final = 10.0  # a child that lived this long starts again without delay
_UNAVAILABLE_DELAY_S: Final = 60.0
_FRONT_TRIES: Final = 3  # starts of the front before the first success
_BRIDGE_DELAY_S: Final = 2.0  # it waits for Ray's head by itself
_BRIDGE_END_S: Final = 5.0
_KILL_AFTER_S: Final = 7.0  # past the drain: the front closes connections for up to 5 s


@dataclass(eq=False)
class _Child:
    name: str
    spawn: Callable[[], subprocess.Popen[bytes]]
    """Raises OSError where the system has no process to give."""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    delay: float = 0.0
    due: float = 0.0
    failures: int = 0
    last_status: int = 0
    doomed: bool = False
    """Whether it was killed and is not gone yet."""
    max_delay_s: float = _MAX_DELAY_S

    def start(self) -> None:
        self.started = time.monotonic()
        try:
            self.process = self.spawn()
        except OSError as error:
            self.ended(os.EX_OSERR)
            say(f"{self.name} cannot be started ({error.strerror}); trying again in {self.delay:.1f} s")

    def ended(self, status: int) -> None:
        """Plans the next start, later after each short life."""
        self.process, self.doomed = None, False
        self.last_status = status
        now = time.monotonic()
        if now - self.started >= _STEADY_S:
            self.delay, self.failures = 0.0, 0
        else:
            self.failures += 1
            self.delay = min(max(2 * self.delay, _MIN_DELAY_S), self.max_delay_s)
        if status == os.EX_UNAVAILABLE:
            self.delay = _UNAVAILABLE_DELAY_S
        self.due = now + self.delay


def run(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Raises StartError."""
    with ExitStack() as stack:
        check_keys(settings)
        _check_certificate(settings)
        _check_probe(settings)
        _check_cells(settings)
        _check_ray(settings)
        lock_fd = lock(settings.data_dir, stack)
        listener = stack.enter_context(listen(settings.host, settings.port))
        side = None
        if settings.metrics_port is not None:
            side = stack.enter_context(listen(settings.metrics_host, settings.metrics_port))
        join = None
        if settings.join_port is not None:
            join = stack.enter_context(listen(settings.join_host, settings.join_port))
        unix, descriptors = listen_here(settings, stack)
        folder = runtime_folder(settings, stack)
        control = stack.enter_context(control_socket(str(folder / _CONTROL)))
        count = transfer_processes(settings.transfer_processes)
        transfers = stack.enter_context(transfer_socket(str(folder / _TRANSFER))) if count else None
        devices = _devices(settings.device, settings.executor)
        arena = _arena(arena_bytes(settings, devices), stack)
        panels = _panel_table(len(devices), stack) if shares_panels(settings, devices) else None
        return _Supervisor(
            settings,
            lock_fd,
            listener,
            side,
            join,
            unix,
            descriptors,
            folder,
            control,
            transfers,
            count,
            devices,
            *arena,
            panels,
        ).run()


@dataclass(eq=False)
class _Supervisor:
    settings: Settings
    lock_fd: int
    listener: socket.socket
    side: socket.socket | None
    join: socket.socket | None
    """The port by which workers join."""
    unix: socket.socket | None
    descriptors: socket.socket | None
    folder: Path
    """Folder of the sockets that workers and transfer processes connect to."""
    control: socket.socket
    transfer_socket: socket.socket | None
    transfer_count: int
    devices: list[str]
    arena_path: str | None
    """Path of the memory that results come to from devices; its descriptor is this process's."""
    arena_bytes: int
    panels_path: str | None
    """Path of the table of panels that devices share, likewise."""
    pipe: tuple[int, int] = field(default_factory=os.pipe)
    ready: tuple[int, int] = field(default_factory=os.pipe)
    announced: bool = False
    heard: float | None = None
    """Time at which the front that runs now last gave a sign of life; None before its first."""
    looked: float = field(default_factory=time.monotonic)
    stopping: float | None = None
    fronts: int = 0
    """Fronts that were started."""

    def __post_init__(self) -> None:
        self.front = _Child("front", self._spawn_front)
        self.workers = [_Child(f"worker {name}", partial(self._spawn_worker, name)) for name in self.devices]
        names = map(str, range(self.transfer_count))
        self.transfers = [_Child(f"transfer process {name}", partial(self._spawn_transfer, name)) for name in names]
        self.bridges: list[_Child] = []
        self.demand: tuple[int, int] | None = None
        if self.settings.executor == "ray":
            self.demand = os.pipe()
            self.bridges = [_Child("bridge to Ray", self._spawn_bridge, max_delay_s=_BRIDGE_DELAY_S)]

    @property
    def children(self) -> tuple[_Child, ...]:
        """All of them, the front last."""
        return (*self.workers, *self.transfers, *self.bridges, self.front)

    def run(self) -> int:
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(wake_read, selectors.EVENT_READ, self._on_signals)
        selector.register(self.ready[0], selectors.EVENT_READ, self._on_pulse)
        pipe_read, pipe_write = self.pipe
        try:
            while self.stopping is None or self.front.process is not None:
                self._start_due()
                for key, _ in selector.select(self._pause()):
                    key.data(key.fd)
                self._reap()
                self._watch_front()
                if self.stopping is not None and time.monotonic() > self.stopping:
                    self._kill_all()
            return 0
        finally:
            self._end_bridges()
            os.close(pipe_write)  # the workers' and, if need be, the front's order to end
            self._kill_all()
            signal.set_wakeup_fd(-1)
            selector.close()
            for fd in (wake_read, wake_write, pipe_read, *self.ready, *(self.demand or ())):
                os.close(fd)

    # -- events -----------------------------------------------------------------------------------------------------

    def _on_signals(self, fd: int) -> None:
        for number in os.read(fd, 4096):
            if number == signal.SIGCHLD:
                continue
            if self.stopping is None:
                self.stopping = time.monotonic() + self.settings.drain_s + _KILL_AFTER_S
            if self.front.process is not None:
                self.front.process.terminate()

    def _on_pulse(self, fd: int) -> None:
        pulse = os.read(fd, 4096)
        if self.front.process is not None:
            self.heard = time.monotonic()
        if b"1" in pulse and not self.announced:
            self.announced = True
            scheme = "http" if self.settings.tls_certificate is None else "https"
            side = "" if self.side is None else f"; metrics: {_url('http', self.side)}"
            if self.unix is not None:
                side += f"; socket: unix:{self.settings.uds}"
            if self.join is not None:
                side += f"; workers join: {_url(scheme, self.join)}"
            where = _url(scheme, self.listener)
            with contextlib.suppress(OSError):
                print(f"gemmserve ready on {where} (devices: {', '.join(self.devices) or 'none'}{side})", flush=True)

    def _watch_front(self) -> None:
        """Kills a front that has fallen silent: its event loop stands still, and with it every client."""
        now, timeout_s = time.monotonic(), self.settings.heartbeat_timeout_s
        if now - self.looked > timeout_s / 2 and self.heard is not None:
            self.heard = now  # this process was stopped itself, or the machine slept
        self.looked = now
        if self.heard is not None and now - self.heard > timeout_s and self.front.process is not None:
            say(f"the front gave no sign of life for {now - self.heard:.1f} s; killing it")
            self.front.process.kill()
            self.heard = None

    def _start_due(self) -> None:
        if self.stopping is not None:
            return
        now = time.monotonic()
        for child in self._missing():
            if now >= child.due:
                child.start()

    def _missing(self) -> list[_Child]:
        """Those that are to be started when they are due.

        The last front's transfer processes might still write to an extent that the next one takes up: it starts later.
        """
        if any(transfer.doomed for transfer in self.transfers):
            return [child for child in self.workers if child.process is None]
        return [child for child in self.children if child.process is None]

    def _pause(self) -> float | None:
        """Seconds until something is due."""
        moments = [] if self.heard is None else [time.monotonic() + self.settings.heartbeat_timeout_s / 4]
        moments += [self.stopping] if self.stopping is not None else []
        if self.stopping is None:
            moments += [child.due for child in self._missing()]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _reap(self) -> None:
        for child in self.children:
            status = None if child.process is None else child.process.poll()
            if status is None:
                continue
            child.ended(status)
            if child is self.front and status == os.EX_CONFIG:
                raise StartError("the front does not start with this data directory; its log above says why")
            if child is self.front:
                for transfer in self.transfers:
                    if transfer.process is not None:
                        transfer.process.kill()
                        transfer.doomed = True
            if self.stopping is None:
                say(f"{child.name} ended ({reason(status)}); starting it again in {child.delay:.1f} s")
        if self.announced or self.stopping is not None:
            return
        if self.front.failures >= _FRONT_TRIES:
            raise StartError(f"the front ended {_FRONT_TRIES} times before it was ready; its log above says why")
        if self.workers and all(
            child.process is None and child.last_status == os.EX_UNAVAILABLE for child in self.workers
        ):
            raise StartError(f"no device can be used ({', '.join(self.devices)}); `gemmserve doctor` explains")

    def _end_bridges(self) -> None:
        """Lets them take their workers away, which would wait for this server for long."""
        for child in self.bridges:
            if child.process is not None:
                child.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(_BRIDGE_END_S)

    def _kill_all(self) -> None:
        for child in self.children:
            if child.process is not None:
                child.process.kill()
                child.process.wait()
                child.process = None

    # -- children ---------------------------------------------------------------------------------------------------

    def _spawn_front(self) -> subprocess.Popen[bytes]:
        self.heard = None
        # A worker that runs already may still write what the front before told it to, until it says hello to this one.
        running = [name for name, child in zip(self.devices, self.workers, strict=True) if child.process is not None]
        writers = running if self.fronts else []
        self.fronts += 1
        handoff = FrontHandoff(
            settings=self.settings,
            pipe_fd=self.pipe[0],
            listen_fd=self.listener.fileno(),
            side_fd=None if self.side is None else self.side.fileno(),
            unix_fd=None if self.unix is None else self.unix.fileno(),
            descriptors_fd=None if self.descriptors is None else self.descriptors.fileno(),
            transfer_fd=None if self.transfer_socket is None else self.transfer_socket.fileno(),
            control_fd=self.control.fileno(),
            join_fd=None if self.join is None else self.join.fileno(),
            ready_fd=self.ready[1],
            demand_fd=None if self.demand is None else self.demand[1],
            devices=self.devices,
            arena_path=self.arena_path,
            arena_bytes=self.arena_bytes,
            arena_writers=writers,
        )
        fds: tuple[int, ...] = (self.lock_fd, self.pipe[0], handoff.listen_fd, handoff.control_fd, handoff.ready_fd)
        others: tuple[int | None, ...] = (handoff.side_fd, handoff.unix_fd, handoff.descriptors_fd, handoff.transfer_fd)
        others += (handoff.demand_fd, handoff.join_fd)
        fds += tuple(fd for fd in others if fd is not None)
        return _spawn("gemmserve_service.processes.front", handoff.model_dump_json(), fds, _without_threads())

    def _spawn_worker(self, device: str) -> subprocess.Popen[bytes]:
        handoff = WorkerHandoff(
            settings=self.settings,
            pipe_fd=self.pipe[0],
            device=device,
            control_path=str(self.folder / _CONTROL),
            arena_path=self.arena_path,
            arena_bytes=self.arena_bytes,
            panels_path=self.panels_path,
            panels_row=self.devices.index(device),
        )
        fds = (self.lock_fd, self.pipe[0])
        return _spawn("gemmserve_service.executor.worker", handoff.model_dump_json(), fds, dict(os.environ))

    def _spawn_bridge(self) -> subprocess.Popen[bytes]:
        assert self.demand is not None
        assert self.settings.ray_join_url is not None
        handoff = RayHandoff(
            settings=self.settings,
            pipe_fd=self.pipe[0],
            demand_fd=self.demand[0],
            join_url=self.settings.ray_join_url,
        )
        fds = (self.lock_fd, self.pipe[0], self.demand[0])
        return _spawn("gemmserve_service.processes.ray.bridge", handoff.model_dump_json(), fds, _without_threads())

    def _spawn_transfer(self, name: str) -> subprocess.Popen[bytes]:
        handoff = TransferHandoff(
            settings=self.settings, pipe_fd=self.pipe[0], name=name, control_path=str(self.folder / _TRANSFER)
        )
        fds = (self.lock_fd, self.pipe[0])
        return _spawn("gemmserve_service.http.transfer", handoff.model_dump_json(), fds, _without_threads())


def _without_threads() -> dict[str, str]:
    """Environment of what multiplies nothing: a pool of BLAS threads in it would only cost memory."""
    return os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _spawn(module: str, text: str, fds: tuple[int, ...], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in the terminal reaches the supervisor alone, which then drains the others.
    process = subprocess.Popen(  # noqa: S603 (our own module)
        [sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=fds, env=environment, start_new_session=True
    )
    assert process.stdin is not None
    try:
        process.stdin.write(text.encode())
        process.stdin.close()
    except BrokenPipeError:
        say(f"{module} ended before it read its settings")
    return process


def check_keys(settings: Settings) -> None:
    """Raises StartError for a key file that cannot be read, UsageError for a host beyond loopback without any key.

    A server whose keys are all revoked or expired may listen anywhere: it lets nobody in. Says where keys travel in
    clear text; where a proxy is trusted, that is taken to have TLS.
    """
    try:
        keyring = read_keyring(settings.data_dir, settings.keys_file)
    except KeyringError as error:
        raise StartError(str(error)) from error
    if not (settings.loopback or settings.allow_unauthenticated or keyring.closed):
        raise UsageError(
            f"host {settings.host} can be reached by others and there are no API keys: make one with "
            "`gemmserve keys create`, listen on 127.0.0.1, or give --allow-unauthenticated"
        )
    if keyring.closed and not (settings.loopback or settings.tls_certificate or settings.trusted_proxies):
        say(
            f"warning: without TLS, API keys and arrays travel in clear text to and from {settings.host}: give "
            "--tls-certificate and --tls-key, or, where TLS ends at a proxy before this server, its address as "
            "--trusted-proxies"
        )
    if settings.join_port is None or keyring.closed or settings.allow_unauthenticated:
        return
    if not is_loopback(settings.join_host):
        raise UsageError(
            f"workers may join from other hosts by {settings.join_host}, and there are no keys: make one with "
            "`gemmserve keys create --scope worker`, or give --allow-unauthenticated"
        )


def _check_certificate(settings: Settings) -> None:
    """Raises StartError for a certificate or key that the front could not use."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            settings.tls_certificate, settings.tls_key, _no_passphrase
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        names = f"the certificate {settings.tls_certificate} and the key {settings.tls_key}"
        raise StartError(f"{names} cannot be used: {error}") from error


def _check_probe(settings: Settings) -> None:
    """Raises StartError for a probe's file that the front could not use."""
    if settings.probe_file is None:
        return
    # Here, and not above: it brings NumPy, which the supervisor has no other use for.
    from gemmserve_kernels.planning.rates import read_rates

    try:
        read_rates(settings.probe_file)
    except (OSError, ValueError) as error:  # ParameterInvalid is a ValueError
        raise StartError(f"the rates in {settings.probe_file} cannot be used: {error}") from error


def _check_cells(settings: Settings) -> None:
    """Raises StartError for a file of cells that the front could not use."""
    if settings.cells_file is None:
        return
    from gemmserve_service.tenancy.cells import CellsError, read_cells

    try:
        read_cells(settings)
    except CellsError as error:
        raise StartError(str(error)) from error


def _check_ray(settings: Settings) -> None:
    """Raises StartError where Ray is asked for and is not there, or the workers' token cannot be read."""
    if settings.executor != "ray":
        return
    if importlib.util.find_spec("ray") is None:
        raise StartError('executor ray needs Ray, which is not installed here: pip install "gemmserve[server,ray]"')
    try:
        read_token(settings.ray_token_file)
    except (OSError, ValueError) as error:
        raise StartError(f"the workers' token cannot be read: {error}") from error


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase, and nobody is there to type it")


def _url(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _devices(device: str, executor: str) -> list[str]:
    """The worker names: what the setting lists; for "auto" every accelerator, else the CPU. Where Ray has the devices,
    "auto" is none: two workers would share each of this machine's.
    """
    if device == "none" or (device == "auto" and executor == "ray"):
        return []
    if device != "auto":
        return device.split(",")
    return accelerators() or ["cpu"]


def _arena(nbytes: int, stack: ExitStack) -> tuple[str | None, int]:
    """Path and bytes of the memory that results come to from devices; without it they go to files."""
    if not nbytes:
        return None, 0
    try:
        fd = create_arena(nbytes)
    except OSError as error:
        say(f"no memory for results ({error.strerror}); they go to files at once")
        return None, 0
    stack.callback(os.close, fd)
    return f"/proc/{os.getpid()}/fd/{fd}", nbytes


def _panel_table(rows: int, stack: ExitStack) -> str | None:
    """Path of the table by which devices share panels of large products; without it each brings its own."""
    try:
        fd = create_panel_table(rows)
    except OSError as error:
        say(f"no table of panels ({error.strerror}); devices share none")
        return None
    stack.callback(os.close, fd)
    return f"/proc/{os.getpid()}/fd/{fd}"
