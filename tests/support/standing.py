"""Processes that stand still."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
from live_server import until


def stand_still(pid: int) -> psutil.Process:
    """Stops a process (SIGSTOP), and returns once none of its threads runs any more.

    The signal alone promises nothing: until every thread has met it, a process answers, multiplies and accepts.
    """
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _stands(pid))
    return psutil.Process(pid)


def _stands(pid: int) -> bool:
    if sys.platform != "linux":
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    # The name of the process stands in brackets and may hold anything; the state follows it.
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return bool(stats) and all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
