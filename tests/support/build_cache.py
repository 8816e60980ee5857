"""Cache on disk of what tests compile: shared objects of the CPU shim, cubins of NVRTC.

An entry's name is a digest of everything that goes into it. It is made under a temporary name and renamed, under a lock
of its own, so that several test processes neither see half an entry nor make the same one at once. Entries that no
test has asked for in `KEPT_S` seconds go when the next one is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT_S = 3 * 86400.0


@functools.cache
def cache_directory() -> Path:
    """Return the folder of the cache, among temporary files. Raises PermissionError where others can write it."""
    path = Path(tempfile.gettempdir()) / f"gemmserve-tests-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or path.is_symlink():
        raise PermissionError(f"{path} is not this user's alone: objects from it are not loaded")
    return path


def digest(*parts: object) -> str:
    """Hexadecimal digest of the parts' texts, fit for the name of a file."""
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:32]


def once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, a file of the cache; unless it is there, `make` writes it under the path that it is given.

    What `make` raises goes on to the caller, and nothing is left but the lock.
    """
    with contextlib.suppress(FileNotFoundError):
        os.utime(target)
        return target
    _forget_old(target.parent)
    with target.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            out = Path(folder) / target.name
            make(out)
            out.rename(target)
    return target


@functools.cache
def _forget_old(folder: Path) -> None:
    """Removes the files of the cache that were last asked for too long ago; once a process."""
    end = time.time() - KEPT_S
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process removes them, too
            if entry.is_file() and entry.stat().st_mtime < end:
                Path(entry).unlink()
