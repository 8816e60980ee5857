"""Servers in processes of their own: started, waited for, looked at, ended with everything that they began."""

from __future__ import annotations

import collections
import ctypes
import http.client
import importlib.metadata
import itertools
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

RIVALS = Path(__file__).parent / "rivals"
ENVIRONMENTS = Path(__file__).parents[2] / ".venv-rivals"
START_WITHIN_S = 120.0
STOP_WITHIN_S = 40.0
ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""glibc keeps freed memory instead of giving it back page by page."""


def processor_seconds(process):
    """What a process has used of processors, to the nanosecond where the system tells: psutil counts hundredths of a
    second. Raises psutil.NoSuchProcess.

    The clock of another process is numbered as by clock_getcpuclockid(3) of Linux.
    """
    if not sys.platform.startswith("linux"):
        return sum(process.cpu_times()[:2])
    try:
        return time.clock_gettime(~process.pid << 3 | 2)
    except OSError as error:
        raise psutil.NoSuchProcess(process.pid) from error


class ServerError(Exception):
    """A server that does not start, or is not installed."""


@dataclass(frozen=True)
class Kind:
    """A server: how it is started and spoken to.

    `command`: with {port}, {folder} and {path} (a Unix socket's) to fill in. `environment`: the name of the rival's
    own virtual environment, or "" for the project's. `packages`: whose versions are recorded.
    """

    name: str
    protocol: str
    command: tuple[str, ...]
    environment: str = ""
    ready: str = "/"
    packages: tuple[str, ...] = ()
    variables: dict = field(default_factory=dict)
    unix: bool = False
    stop: signal.Signals = signal.SIGTERM


GEMMSERVE = ("-m", "gemmserve.cli", "serve", "--device", "cpu", "--log-level", "warning", "--data-dir", "{folder}/data")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("gemmserve", "gemmserve", (*GEMMSERVE, "--port", "{port}"), ready="/readyz",
             packages=("gemmserve", "numpy", "uvicorn")),
        Kind("tritonserver", "inference", ("{rivals}/tritonserver.py", "{port}", "{folder}"), "triton",
             ready="/v2/models/product/ready", packages=("nvidia-pytriton", "tritonclient", "numpy")),
        Kind("pytriton", "inference", ("{rivals}/pytriton_app.py", "{port}", "{folder}/workspace"), "triton",
             ready="/v2/models/product/ready", packages=("nvidia-pytriton", "numpy"), stop=signal.SIGINT),
        Kind("litserve", "predict", ("{rivals}/litserve_app.py", "{port}"), "litserve", ready="/health",
             packages=("litserve", "fastapi", "uvicorn", "numpy")),
        Kind("bentoml", "predict",
             ("-m", "bentoml", "serve", "bentoml_app:Gemm", "--working-dir", "{rivals}", "--port", "{port}",
              "--host", "127.0.0.1"),
             "bentoml", ready="/readyz", packages=("bentoml", "uvicorn", "numpy"),
             variables={"BENTOML_HOME": "{folder}", "BENTOML_DO_NOT_TRACK": "True"}),
        Kind("fastapi", "multipart", ("{rivals}/fastapi_app.py", "{port}"), packages=("fastapi", "uvicorn", "numpy")),
        Kind("asgi", "frame", ("{rivals}/asgi_app.py", "{port}"), packages=("uvicorn", "uvloop", "httptools")),
        Kind("asgi, malloc", "frame", ("{rivals}/asgi_app.py", "{port}"), variables=MALLOC,
             packages=("uvicorn", "uvloop", "httptools")),
        Kind("recv_into, TCP", "loop", ("{rivals}/loop_server.py", "{port}"), ready=""),
        Kind("recv_into, Unix", "loop", ("{rivals}/loop_server.py", "{path}"), ready="", unix=True),
    )
}  # fmt: skip


def interpreter(kind):
    """The Python that runs it. Raises ServerError where its environment is missing."""
    if not kind.environment:
        return sys.executable
    python = ENVIRONMENTS / kind.environment / "bin" / "python"
    if not python.is_file():
        raise ServerError(f"{kind.name} is not installed: no {python.parent.parent.name} in {ENVIRONMENTS.name}")
    return str(python)


def versions(kind):
    """Return the versions of its packages and of its Python. Raises ServerError."""
    if not kind.environment:
        found = {package: importlib.metadata.version(package) for package in kind.packages}
        return {"python": platform.python_version()} | found
    code = (
        "import importlib.metadata as m, platform, json, sys\n"
        "print(json.dumps({'python': platform.python_version()} | {p: m.version(p) for p in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [interpreter(kind), "-c", code, *kind.packages], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise ServerError(f"{kind.name}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port():
    """A TCP port that nobody has, nor the next one (PyTriton's gRPC). Until the server has it, the system gives it to
    nobody else by itself, such as a connection that somebody opens meanwhile, where it tells which it takes for those.
    """
    low, high = map(int, PORT_RANGE.read_text().split()) if PORT_RANGE.is_file() else (32768, 60999)
    apart = [*range(10_000, low - 1), *range(high + 1, 65_535)] or list(range(10_000, 65_535))
    while True:
        port = random.choice(apart)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def role(command):
    """What a process with that command line does."""
    for flag, module in itertools.pairwise(command):
        if flag == "-m":
            return module.rpartition(".")[2]
    scripts = [Path(part).stem for part in command if part.endswith(".py")]
    return (scripts or [Path(part).name for part in command[:1]] or ["?"])[0]


LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1


def end_with_parent():
    """In the child: a SIGTERM when its parent dies, even by SIGKILL (Linux)."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """A context manager: ready on entry, gone on exit with every process that it began."""

    def __init__(self, kind, arguments=(), variables=None):
        self.kind, self._arguments, self._variables = kind, arguments, variables or {}

    def __enter__(self):
        python = interpreter(self.kind)
        self._temporary = tempfile.TemporaryDirectory(prefix="gemmserve-bench-")
        self.folder = Path(self._temporary.name)
        self.port, self.path = free_port(), str(self.folder / "socket")
        self.address = self.path if self.kind.unix else ["127.0.0.1", self.port]
        fill = {"port": self.port, "path": self.path, "folder": self.folder, "rivals": RIVALS}
        command = [python, *(part.format(**fill) for part in (*self.kind.command, *self._arguments))]
        variables = {name: value.format(**fill) for name, value in {**self.kind.variables, **self._variables}.items()}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment = {**inherited, **ONE_THREAD, **variables}
        self.log = self.folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                cwd=self.folder, start_new_session=True, preexec_fn=end_with_parent,  # noqa: PLW1509 (one thread)
            )  # fmt: skip
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        left = self.processes()
        try:
            if self.process.poll() is None:
                self.process.send_signal(self.kind.stop)
            try:
                self.process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            for each in left:  # what the server left behind
                if each.is_running():
                    each.kill()
            psutil.wait_procs(left, timeout=10)
        finally:
            self._temporary.cleanup()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def tail(self, lines=15):
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait_until_ready(self):
        end = time.monotonic() + START_WITHIN_S
        while not self._ready():
            if self.process.poll() is not None:
                raise ServerError(f"{self.kind.name} ended with status {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > end:
                raise ServerError(f"{self.kind.name} was not ready within {START_WITHIN_S:.0f} s:\n{self.tail()}")
            time.sleep(0.05)

    def _ready(self):
        try:
            if not self.kind.ready:
                family = socket.AF_UNIX if self.kind.unix else socket.AF_INET
                with socket.socket(family) as probe:
                    probe.connect(self.path if self.kind.unix else ("127.0.0.1", self.port))
                return True
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", self.kind.ready)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False

    # ---- what it uses

    def processes(self):
        """It and its descendants, those that started sessions of their own too."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def find(self, text):
        """The descendant whose command line holds that text, or None."""
        for process in self.processes():
            try:
                if any(text in part for part in process.cmdline()):
                    return process
            except psutil.Error:
                continue
        return None

    def cpu_seconds(self):
        """That all of its processes have used."""
        return sum(used for _, used in self._used())

    def cpu_by_role(self):
        """The same for each kind of its processes: the module or script that it runs, or the program's name."""
        found = collections.Counter()
        for each, used in self._used():
            found[role(each.cmdline())] += used
        return found

    def rss_bytes(self):
        """Resident, of all of its processes; shared pages count in each."""
        return sum(each.memory_info().rss for each in self._alive())

    def _used(self):
        """Yield each of its processes, and what it has used of processors; none that has ended meanwhile."""
        for each in self._alive():
            try:
                used = processor_seconds(each)
            except psutil.NoSuchProcess:
                continue
            yield each, used

    def _alive(self):
        for each in self.processes():
            try:
                with each.oneshot():
                    each.cpu_times(), each.memory_info()
                    yield each
            except psutil.Error:
                continue
