"""Processes that are held in the middle of their work for as long as a test wants: workers at any product by
held_work/sitecustomize.py, and on the stand-in device whoever writes results by device_on_host/sitecustomize.py.
"""

from __future__ import annotations

from pathlib import Path

from live_server import until
from python_path import python_path

_FOLDER = Path(__file__).with_name("held_work")


class Gate:
    """Gate of the processes of a server that was started with its `environment`. It is open at first."""

    def __init__(self, path: Path, variable: str = "GEMMSERVE_TEST_GATE") -> None:
        """`variable`: names the file to whoever is held."""
        self._path = path
        self._reached = path.with_name(path.name + ".reached")
        self.environment = {"PYTHONPATH": python_path(_FOLDER), variable: str(path)}

    def shut(self, after: int = 1) -> None:
        """From now on a process stands still once it has passed `after` of the points between parts of its work: of a
        product there is one before it, and one after each panel; of writing results one before each piece."""
        self.open()
        self._reached.unlink(missing_ok=True)
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(str(after))
        new.replace(self._path)

    def wait_reached(self) -> None:
        """Waits until a process stands there."""
        until(self._reached.exists)

    def open(self) -> None:
        """Lets it go on."""
        self._path.unlink(missing_ok=True)
