"""Process tuning, the same in every process of the service: malloc thresholds, limits, the supervisor's pipe."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Final, Literal

# Body pieces of ~256 KiB are above glibc's mmap threshold: each is mapped, faulted in and unmapped again, which costs
# more than receiving it. These two values took uvicorn's receive rate from 727 to 1,732 MiB/s (docs/transfer.md).
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLD: Final = 32 << 20
_TRIM_THRESHOLD: Final = 256 << 20

# Objects between two looks of the garbage collector at the young ones. A request makes a hundred or so and most are
# gone by then: looking every seven requests, as by default, took a twentieth of the processor's time. A look at 10,000
# took up to 17 ms, for which everybody waited; at 2,000 it takes 2.
_YOUNG: Final = 2_000

_SWITCH_S: Final = 1e-4

_CGROUP: Final = Path("/sys/fs/cgroup")  # version 2; of a container its own

# Four gave sixteen processors 2.4 to 3.5 times the rate of four streams and 2.7 times the one-shot products of 24 MiB;
# two processors lose by any (docs/transfer.md).
_TRANSFER_FROM: Final = 8
_MAX_TRANSFER_PROCESSES: Final = 4


def keep_freed_memory() -> bool:
    """Raises glibc's malloc thresholds; False where the C library has no mallopt (musl, macOS)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD))


def keep_from_collector() -> None:
    """Spares the garbage collector what is there now: modules and classes, which stay as long as the process does.

    Otherwise it looks at each of these half a million objects again whenever enough new ones have come, and every
    request waits for it, for fifty milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


def share_interpreter() -> None:
    """Make a thread wait for the interpreter for a tenth of a millisecond, not for five, while another one computes.

    A commit takes it thirty times: beside long JSON in the event loop uploads took 50 ms at the 99th percentile, and 10
    with this. The event loop in turn waits for threads of pure Python, such as those that compile programs, each time
    that it wakes.
    """
    sys.setswitchinterval(_SWITCH_S)


def raise_file_limit() -> None:
    """Lets this process open as many files as the system allows it: connections hold one each, and so does memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if sys.platform == "linux" else min(hard, 10_240), hard))


def exit_with(pipe_fd: int) -> None:
    """Ends this process as soon as the other end of the pipe closes, however the supervisor died.

    A daemon thread blocks in read(); os._exit runs no handlers, so nothing can hold the process back.
    """

    def watch() -> None:
        while os.read(pipe_fd, 1):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="gemmserve-pipe", daemon=True).start()


def cpu_count() -> int:
    """Processors that this process may keep busy: those of its affinity, or of its container's quota if less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        return count
    return min(count, max(1, int(quota) // int(period))) if quota.isdigit() else count


def transfer_processes(setting: int | Literal["auto"]) -> int:
    """Transfer processes to start. "auto": from eight processors up (Linux) one for every four, four at most."""
    if setting != "auto":
        return setting
    count = cpu_count()
    return min(count // 4, _MAX_TRANSFER_PROCESSES) if sys.platform == "linux" and count >= _TRANSFER_FROM else 0


def host_memory() -> int:
    """Bytes of memory of this machine, or of this container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        text = (_CGROUP / "memory.max").read_text("ascii").strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total
