"""Devices of this machine, found in a process of its own: asking the driver makes a context."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys


def accelerators() -> list[str]:
    """Return the names of the accelerators: cuda:0, rocm:1."""
    if importlib.util.find_spec("cupy") is None:
        return []
    probe = subprocess.run(
        [sys.executable, "-m", "gemmserve_service.executor.worker", "--probe"], stdout=subprocess.PIPE, check=False
    )
    if probe.returncode:
        say(f"looking for accelerators failed ({reason(probe.returncode)}); using the CPU")
        return []
    names: list[str] = json.loads(probe.stdout.splitlines()[-1])  # whatever libraries may print before
    return names


def reason(status: int) -> str:
    """Return why a process ended."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def say(text: str) -> None:
    """Print a line for the operator."""
    with contextlib.suppress(OSError):  # a log on a full disk
        print(f"gemmserve: {text}", file=sys.stderr, flush=True)
