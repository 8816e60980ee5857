"""`python -m gemmserve_service.processes.ray.launch PID COMMAND...` becomes the command, and dies with the process PID.

An actor that is killed with SIGKILL cannot end its worker: the kernel does (PR_SET_PDEATHSIG of Linux, kept over exec).
A program of its own, because Python code between fork and exec is not safe in a process of many threads. The signal
comes when the *thread* that forked ends: the actor starts workers from one that lives as long as itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main(arguments: list[str]) -> int:
    """Replaces this process; returns EX_TEMPFAIL if the parent is gone already, EX_OSERR where the kernel refuses."""
    parent, *command = arguments
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        return os.EX_OSERR
    if os.getppid() != int(parent):
        return os.EX_TEMPFAIL
    return os.execv(command[0], command)  # noqa: S606 (the actor's own command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
