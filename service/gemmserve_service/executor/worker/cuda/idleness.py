"""Idleness of a worker: whether it has had no task for a while, so that what is prepared ahead is not felt by any.

Preparations share the interpreter, the driver's locks and the process's memory map with tasks: pages that were touched
and registered beside small products made those wait for up to 20 ms. Between two tasks of one client there are
milliseconds, less than a step of some preparations takes, so a gap counts only once it has lasted for `QUIET_S`.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

QUIET_S: Final = 0.25
"""Seconds without a task after which the next one is not expected at once: many times what a client takes between an
answer and its next request."""
_POLL_S: Final = 0.02


class Idleness:
    """Time for which a worker has been without tasks. Callable from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` is the time in seconds, from any moment on."""
        self._now = now
        self._busy: Callable[[], bool] = lambda: False
        self._worked = -math.inf

    def follow(self, busy: Callable[[], bool]) -> None:
        """Ask `busy` from now on whether the worker has tasks."""
        self._busy = busy

    def worked(self) -> None:
        """Note that a task came or was answered: between two looks at `busy` many have come and gone."""
        self._worked = self._now()

    @property
    def quiet(self) -> bool:
        """Whether there is no task, and has been none for `QUIET_S`."""
        if self._busy():
            self._worked = self._now()
            return False
        return self._now() - self._worked >= QUIET_S

    def wait(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Return once it is quiet, or `unless` is true."""
        while not (unless() or self.quiet):
            time.sleep(_POLL_S)
