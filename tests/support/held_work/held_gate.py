"""The process's side of `gates.Gate`: whoever comes to it stands there while its file is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class HeldGate:
    """A gate whose file holds how many pass first; another file says that somebody stands there."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._reached = Path(path + ".reached")
        self._which: int | None = None
        self._passed = self._first = 0

    def stand(self, look: Callable[[], object] = lambda: None) -> None:
        """Returns when the gate is open; `look` raises where whoever stands there is to end."""
        if self._shut():
            self._passed += 1
            while self._shut() and self._passed > self._first:
                self._reached.touch()
                look()
                time.sleep(0.002)

    def _shut(self) -> bool:
        try:
            which = self._path.stat().st_mtime_ns
            if which != self._which:  # shut again since
                self._which, self._passed, self._first = which, 0, int(self._path.read_text())
        except FileNotFoundError:
            return False
        return True
