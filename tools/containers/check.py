"""Builds the CPU image and runs it, as the README says and then as nobody should: `make containers`.

Inside `tools/containers/engine.sh`, with this project's environment (the Python that runs this file has hadolint and
the client). Each step prints how long it took; the first that fails ends the run with status 1 and the server's log.

The README's compose section is run line by line. Before its last line, `down`, jobs are put through kill -9 of the
worker, of the front and of the whole container, a second container tries to have the same volume, and the container
is stopped with a job running. A project name and ports of its own keep it apart from a server of this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve import Client, GemmserveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "gemmserve-check"
PROFILES = ("cpu", "cuda", "rocm", "ray", "monitoring", "tracing")
CONTAINER = f"{PROJECT}-cpu-1"
DATA = f"{PROJECT}_data"
SLOW = 2048  # rows and columns of a complex128 product: seconds on one core, long enough to be interrupted
STOP_WITHIN_S = 30  # docker-compose.yml's stop_grace_period
WAIT_S = 90.0
_TRIES = 5
_SHOWN = 8  # lines of a command's output


class CheckError(Exception):
    """Something is not as it should be; the message says what."""


def run(*command: str | Path, check: bool = True, show: bool = False, timeout_s: float = 900) -> str:
    """Standard output and error of a command. Raises CheckError unless it ends well, or `check` is false."""
    print("+", *command, flush=True) if show else None
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=timeout_s
    )
    if check and done.returncode:
        raise CheckError(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def demand(condition: object, text: str) -> None:
    """Raises CheckError with that text unless the condition holds."""
    if not condition:
        raise CheckError(text)


def wait_for(what: str, condition: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    """The condition's value once it is true. Raises CheckError when time is up."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise CheckError(f"{what}: not within {within_s:g} s")
        time.sleep(0.1)
    return value


@contextmanager
def step(name: str) -> Iterator[None]:
    """Prints the name and how long it took."""
    began = time.monotonic()
    yield
    print(f"containers: {name}: {time.monotonic() - began:.1f} s", flush=True)


def readme_commands() -> list[str]:
    """The lines of the README's compose section."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- not run: the containers job[^>]*-->\n```sh\n(.*?)```", text, re.DOTALL)
    if found is None:
        raise CheckError("the README has no compose section")
    return [line.partition("  #")[0].strip() for line in found[1].splitlines()]


def free_port() -> str:
    """A TCP port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


# -- what is looked at without running ---------------------------------------------------------------------------------


def lint() -> None:
    """Hadolint on the Dockerfile, and compose's own look at every profile."""
    hadolint = Path(sys.executable).with_name("hadolint")
    demand(hadolint.exists(), f"{hadolint} is missing: install the extra gemmserve[dev]")
    run(hadolint, "Dockerfile")
    for profile in PROFILES:
        run("docker", "compose", "--profile", profile, "config", "--quiet")
    public = ("-f", "docker-compose.yml", "-f", "deploy/compose.public.yml")
    refused = run("docker", "compose", *public, "--profile", "cpu", "config", "--quiet", check=False)
    demand("missing a value" in refused, f"compose.public.yml does without keys:\n{refused}")


# -- the server in its container ---------------------------------------------------------------------------------------


def client() -> Client:
    """A client of the container."""
    return Client(os.environ["GEMMSERVE_SERVER"])


def ready() -> bool:
    """Whether the container is healthy, as its HEALTHCHECK says."""
    return run("docker", "inspect", "-f", "{{.State.Health.Status}}", CONTAINER, check=False).strip() == "healthy"


def starts() -> int:
    """How often the engine has started the container again."""
    return int(run("docker", "inspect", "-f", "{{.RestartCount}}", CONTAINER))


def supervisor_pid() -> int:
    """The container's first process, by the machine's number."""
    return int(run("docker", "inspect", "-f", "{{.State.Pid}}", CONTAINER))


_KILL = """
import os, pathlib, signal, sys
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    words = (entry / "cmdline").read_bytes().split(b"\\0")
    if words[1:3] == [b"-m", sys.argv[1].encode()]:
        os.kill(int(entry.name), signal.SIGKILL)
        print(entry.name)
"""


def kill_inside(module: str) -> None:
    """SIGKILL for the container's process of that Python module."""
    killed = run("docker", "exec", CONTAINER, "python", "-I", "-c", _KILL, module)
    demand(killed.strip(), f"there is no {module} in the container")


def slow_job(connected: Client) -> tuple[Any, Any]:
    """A job that runs for seconds, already begun, and its operand."""
    operand = connected.put(np.full((SLOW, SLOW), 1 + 1j))
    job = connected.submit("gemm", operand, operand)
    wait_for("the job begins", lambda: connected.job(job.id).state == "running")
    return job, operand


def finished(connected: Client, job_id: str) -> Any:
    """The job once it has ended, whatever happens to the connection meanwhile; its result is checked."""

    def ended() -> Any:
        try:
            job = connected.job(job_id)
        except (GemmserveError, OSError):
            return None  # the server is on its way back
        return job if job.state in {"succeeded", "failed", "cancelled", "expired"} else None

    job = wait_for(f"job {job_id} ends", ended, 180)
    demand(job.state == "succeeded", f"job {job_id} {job.state}")
    demand(np.all(job.result().numpy() == 2j * SLOW), f"job {job_id}: the result is wrong")
    return job


def confined() -> None:
    """Not root, nothing written but the volumes, no privileges to gain."""
    uid = run("docker", "exec", CONTAINER, "id", "-u").strip()
    demand(uid == "10001", f"the server runs as user {uid}")
    written = run("docker", "exec", CONTAINER, "sh", "-c", "touch /opt/gemmserve/x /etc/x", check=False)
    demand(written.count("Read-only file system") == 2, f"the root file system can be written: {written}")
    lines = run("docker", "exec", CONTAINER, "cat", "/proc/1/status").splitlines()
    status = dict(line.partition(":")[::2] for line in lines)
    demand(int(status["CapEff"], 16) == 0, f"capabilities: {status['CapEff']}")
    demand(int(status["NoNewPrivs"]) == 1, "privileges may be gained")


def pages() -> None:
    """The pages on the API's port, the metrics on their own."""
    for path in ("", "docs", "openapi.json"):
        run("curl", "-fsS", "-o", os.devnull, f"http://127.0.0.1:{os.environ['GEMMSERVE_PORT']}/{path}")
    metrics = run("curl", "-fsS", f"http://127.0.0.1:{os.environ['GEMMSERVE_METRICS_PORT']}/metrics")
    demand("gemmserve_" in metrics, "the second port has no metrics")


def killed_with_a_job(connected: Client, module: str) -> int:
    """SIGKILL for the process of that module while a job runs; the attempts that the job took, its result checked."""
    job, operand = slow_job(connected)
    kill_inside(module)
    attempts: int = finished(connected, job.id).info.attempt
    wait_for(f"ready after kill -9 of {module}", ready)
    operand.delete()
    return attempts


def kills() -> None:
    """Kill -9 of the worker, of the front, and of the container's first process, each with a job running."""
    with client() as connected:
        attempts = [killed_with_a_job(connected, "gemmserve_service.executor.worker")]
        while attempts[-1] == 1 and len(attempts) < _TRIES:  # it had ended before the signal came
            attempts.append(killed_with_a_job(connected, "gemmserve_service.executor.worker"))
        demand(attempts[-1] > 1, "no job was lost with its worker")
        killed_with_a_job(connected, "gemmserve_service.processes.front")
        demand(starts() == 0, "the container should have outlived its worker and its front")
        job, operand = slow_job(connected)
        os.kill(supervisor_pid(), 9)
        wait_for("the engine starts the container again", lambda: starts() == 1)
        finished(connected, job.id)
        wait_for("ready after kill -9 of the container", ready)
        operand.delete()


def second_container() -> None:
    """A second server on the same volume is refused in words, and the first one does not notice."""
    image = run("docker", "inspect", "-f", "{{.Image}}", CONTAINER).strip()
    volume = ("-v", f"{DATA}:/var/lib/gemmserve", "--read-only", "--tmpfs", "/tmp")  # noqa: S108 (in the container)
    said = run("docker", "run", "--rm", *volume, image, "serve", "--allow-unauthenticated", check=False, timeout_s=60)
    demand("another server" in said, f"a second server on the volume: {said}")
    demand(starts() == 1 and ready(), "the first server noticed the second")


def refusals() -> None:
    """Without keys nobody beyond the machine is let in; a volume that cannot be written is named."""
    image = run("docker", "inspect", "-f", "{{.Image}}", CONTAINER).strip()
    said = run("docker", "run", "--rm", image, check=False, timeout_s=60)
    demand("there are no API keys" in said, f"open to all without a word: {said}")
    with tempfile.TemporaryDirectory() as folder:  # root's, mode 700
        said = run(
            "docker", "run", "--rm", "-v", f"{folder}:/var/lib/gemmserve", image, "serve", "--allow-unauthenticated",
            check=False, timeout_s=60,
        )  # fmt: skip
    demand("cannot be" in said and "Permission denied" in said, f"a volume that cannot be written: {said}")


def stopped_with_a_job() -> None:
    """`docker compose stop` ends in time with status 0, and the job that ran is not lost."""
    with client() as connected:
        job, _ = slow_job(connected)
        began = time.monotonic()
        run("docker", "compose", "--profile", "cpu", "stop")
        took = time.monotonic() - began
        demand(took < STOP_WITHIN_S + 5, f"stopping took {took:.0f} s")
        status = run("docker", "inspect", "-f", "{{.State.ExitCode}}", CONTAINER).strip()
        demand(status == "0", f"a server that was stopped ended with status {status}")
        run("docker", "compose", "--profile", "cpu", "up", "--wait")
        finished(connected, job.id)


ATTACKS = (confined, pages, kills, second_container, refusals, stopped_with_a_job)


def main() -> int:
    """Runs everything; 1 where something failed."""
    port = free_port()
    os.environ |= {
        "COMPOSE_PROJECT_NAME": PROJECT,
        "GEMMSERVE_PORT": port,
        "GEMMSERVE_METRICS_PORT": free_port(),
        "GEMMSERVE_SERVER": f"http://127.0.0.1:{port}",
    }
    shutil.rmtree(ROOT / ".venv-client", ignore_errors=True)
    try:
        with step("hadolint, compose config"):
            lint()
        *commands, last = readme_commands()
        for command in commands:
            with step(command):
                print(*run("bash", "-c", command).splitlines()[-_SHOWN:], sep="\n")
        for attack in ATTACKS:
            with step((attack.__doc__ or "").splitlines()[0]):
                attack()
        with step(last):
            run("bash", "-c", last)
    except CheckError as failure:
        print(f"containers: FAILED: {failure}", file=sys.stderr)
        print(run("docker", "compose", "--profile", "cpu", "logs", "--tail", "60", check=False), file=sys.stderr)
        return 1
    finally:
        run("docker", "compose", "--profile", "cpu", "down", "--volumes", check=False)
        shutil.rmtree(ROOT / ".venv-client", ignore_errors=True)
    print("containers: all is well", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
