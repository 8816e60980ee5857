"""The data directory's lock: one server a directory, whatever became of the one before."""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.runtime.start_error import StartError

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

_WAIT_S: Final = 30.0  # for processes that end because their supervisor did: on a busy machine that takes its time
_POLL_S: Final = 0.02


def lock(data_dir: Path, stack: ExitStack) -> int:
    """The descriptor that holds the lock. Waits for what a killed server left behind; raises StartError at once for a
    server that lives.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(f"the data directory {data_dir} cannot be used: {error.strerror}") from error
    stack.callback(os.close, fd)
    give_up = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            if alive(owner) or time.monotonic() > give_up:
                name = f"pid {owner}" if owner else "of unknown pid"
                raise StartError(f"another server ({name}) uses the data directory {data_dir}") from None
            time.sleep(_POLL_S)
        else:
            break
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def alive(pid: str) -> bool:
    """Whether that process exists; true if it cannot be known."""
    if not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
