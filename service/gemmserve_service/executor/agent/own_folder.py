"""Folder of one agent's control socket, in the system's folder for temporary files.

Its agent holds a lock on the folder for as long as it lives. What an agent that was killed has left behind is locked by
nobody, and the next agent of the same user removes it. Where the file system has no locks, it stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

PREFIX: Final = "gemmserve-agent-"


class OwnFolder:
    """Folder that is this process's alone, mode 0700. To be closed."""

    def __init__(self) -> None:
        """Make it, and remove those of agents that are no more. Raises OSError."""
        remove_abandoned()
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            try:
                self._lock = _lock(self.path)  # None: another agent took it for one that was left, and removes it
            except OSError as error:
                log.warning("%s stays if this process is killed: it cannot be locked (%s)", self.path, error)
                break

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned() -> None:
    """Remove the folders of this user's agents that have ended without doing so."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another one removes it at the same time; or there are no locks
            if path.lstat().st_uid == os.getuid() and (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the folder's lock; None if another process holds it, or the folder is gone.

    Raises OSError where there are no locks, and for what is no folder.
    """
    with contextlib.ExitStack() as undo:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            undo.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(folder), path.lstat())
        except (BlockingIOError, FileNotFoundError):
            return None
        if not held:
            return None
        undo.pop_all()
        return folder
