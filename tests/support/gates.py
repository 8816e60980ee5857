"""Workers that are held in the middle of their work for as long as a test wants: see held_work/sitecustomize.py."""

from __future__ import annotations

from pathlib import Path

from live_server import until
from python_path import python_path

_FOLDER = Path(__file__).with_name("held_work")


class Gate:
    """Gate of the workers of a server that was started with its `environment`. It is open at first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reached = path.with_name(path.name + ".reached")
        self.environment = {"PYTHONPATH": python_path(_FOLDER), "GEMMSERVE_TEST_GATE": str(path)}

    def shut(self, after: int = 1) -> None:
        """From now on a worker stands still once it has passed `after` of the points between parts of its work: one
        before a product, one after each panel."""
        self.open()
        self._reached.unlink(missing_ok=True)
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(str(after))
        new.replace(self._path)

    def wait_reached(self) -> None:
        """Waits until a worker stands there."""
        until(self._reached.exists)

    def open(self) -> None:
        """Lets it go on."""
        self._path.unlink(missing_ok=True)
