"""Folder of one agent's control socket, in the system's folder for temporary files.

Its agent holds a lock on the folder for as long as it lives. What an agent that was killed has left behind is locked by
nobody, and the next agent of the same user removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "gemmserve-agent-"


class OwnFolder:
    """Folder that is this process's alone, mode 0700. To be closed."""

    def __init__(self) -> None:
        """Make it, and remove those of agents that are no more. Raises OSError."""
        remove_abandoned()
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            if (lock := _lock(path)) is not None:
                break
        self.path = path
        self._lock = lock

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Remove the folders of this user's agents that have ended without doing so."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another one removes it at the same time
            if path.lstat().st_uid == os.getuid() and (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the folder's lock; None if another process holds it, or the folder is gone."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(folder), path.lstat()):
            return folder
    except OSError:
        pass
    os.close(folder)
    return None
