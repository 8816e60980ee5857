"""Thread of a device that brings panels of a large product ahead of its blocks, on a stream of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.executor.worker.blocks.panel_slots import PanelSlots


class PanelsAhead:
    """The thread, which begins with the first product. Every method may be called from any thread."""

    def __init__(self, enter: Callable[[], None]) -> None:
        """`enter` is called once in the thread before anything else."""
        self._enter = enter
        self._slots: PanelSlots | None = None
        """Slots of the last product, until they are closed."""
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def follow(self, slots: PanelSlots) -> None:
        """Bring what blocks of that product are expected to need, from when slots that were followed are closed."""
        with self._changed:
            self._slots = slots
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gemmserve-ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        self._enter()
        while True:
            with self._changed:
                while self._slots is None:
                    self._changed.wait()
                slots = self._slots
            slots.bring_ahead()
            with self._changed:
                if self._slots is slots:
                    self._slots = None
