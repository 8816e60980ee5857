"""Admission to the queue: bounds by number and by bytes, a share for each owner, and when to come back.

An owner may have at most a multiple of what is still free (Choudhury, Hahne, "Dynamic Queue Length Thresholds for
Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking 6(2), 1998): alone it gets most of the queue, the
more owners push the less each gets, and a part stays free for the one who comes next.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import QueueFull
from gemmserve_service.store.quotas import Quotas

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.scheduling.fair_queue import FairQueue
    from gemmserve_service.settings import Settings

_ALPHA: Final = 4.0  # one owner alone gets 4/5 of the queue, two 4/9 each; no measurement behind the figure
_SMOOTHING: Final = 0.1  # of the running mean of the time between two ends; no measurement behind the figure
_RETRY_SHARE: Final = 0.1  # a refused client comes back when a tenth of the queue has gone
_MIN_RETRY_S: Final = 0.05  # sooner costs more requests than places
_MAX_RETRY_S: Final = 60.0


class Places:
    """Places in the queue for an owner's tasks that are being prepared; a context manager.

    It gives `claim(nbytes)`, to be called once the size of one is known, which raises QueueFull.
    """

    __slots__ = ("_admission", "_claimed", "_owner", "_tasks")

    def __init__(self, admission: Admission, owner: str, tasks: int) -> None:
        self._admission = admission
        self._owner = owner
        self._tasks = tasks
        self._claimed = 0

    def __enter__(self) -> Callable[[int], None]:
        self._admission.arrive(self._owner, self._tasks)
        return self._claim

    def __exit__(self, *_: object) -> None:
        self._admission.arrived(self._owner, self._tasks, self._claimed)

    def _claim(self, nbytes: int) -> None:
        self._admission.claim(self._owner, nbytes)
        self._claimed += nbytes


class Admission:
    """Places in the queue, for tasks that wait and for those that are being prepared."""

    def __init__(self, settings: Settings, queue: FairQueue, quotas: Quotas | None = None) -> None:
        self._settings = settings
        self._queue = queue
        self._quotas = quotas or Quotas()
        self._arriving: dict[str, int] = {}
        self._arriving_bytes: dict[str, int] = {}
        self._steps: dict[str, int] = {}
        self._interval_s: float | None = None
        self._last_end = 0.0

    def place(self, owner: str, tasks: int = 1) -> Places:
        """Places for tasks that are being prepared. Raises QueueFull, QuotaExceeded when it is entered."""
        return Places(self, owner, tasks)

    def arrive(self, owner: str, tasks: int) -> None:
        """Count tasks that are being prepared; `arrived` follows. Raises QueueFull, QuotaExceeded."""
        self.check_place(owner, tasks)
        self._arriving[owner] = self._arriving.get(owner, 0) + tasks

    def fits(self, owner: str, nbytes: int) -> bool:
        """Return whether several tasks of so many bytes in all are sure to have room, however they share them."""
        everybody = self._queue.nbytes + sum(self._arriving_bytes.values()) + nbytes
        left = self._settings.max_queued_bytes - everybody
        own = self._queue.waiting_bytes(owner) + self._arriving_bytes.get(owner, 0) + nbytes
        return left >= 0 and (not owner or own <= _ALPHA * left)

    def claim(self, owner: str, nbytes: int) -> None:
        """Count the bytes of one of them. Raises QueueFull."""
        self._check_bytes(owner, nbytes)
        self._arriving_bytes[owner] = self._arriving_bytes.get(owner, 0) + nbytes

    def arrived(self, owner: str, tasks: int, nbytes: int) -> None:
        """Count them no more: they are queued, or given up."""
        self._release(self._arriving, owner, tasks)
        if nbytes:
            self._release(self._arriving_bytes, owner, nbytes)

    def check(self, owner: str, nbytes: int) -> None:
        """Raise what `place` and its claim raise, for a task that is queued in the same turn of the event loop."""
        self.check_place(owner)
        self._check_bytes(owner, nbytes)

    @property
    def steps(self) -> int:
        """Steps of all programs that are not over."""
        return sum(self._steps.values())

    def take_steps(self, owner: str, steps: int, *, recovered: bool = False) -> Callable[[], None]:
        """Admit a program of so many steps, each of which takes some kilobytes of memory; returns what ends that.

        One program always fits. `recovered`: it had been admitted by an earlier process. Raises QueueFull.
        """
        if not steps:
            return nothing
        if self.steps and not recovered:
            most = self._settings.max_queued_steps
            self._check(owner, self._steps.get(owner, 0), self.steps, most, "steps of programs are waiting", steps)
        self._steps[owner] = self._steps.get(owner, 0) + steps
        return lambda: self._release(self._steps, owner, steps)

    def ended(self) -> None:
        """A task is through: keeps a running mean of the time between two ends while tasks wait."""
        clock = time.monotonic()
        if len(self._queue) and self._last_end:
            interval = clock - self._last_end
            mean = self._interval_s if self._interval_s is not None else interval
            self._interval_s = mean + _SMOOTHING * (interval - mean)
        self._last_end = clock

    @property
    def drain_rate(self) -> float:
        """Tasks that end in a second, while others wait; 0 until that has been seen."""
        return 1 / self._interval_s if self._interval_s else 0.0

    def retry_after_s(self) -> float:
        """Seconds in which a tenth of the queue will have gone, at the measured rate; one until that is known."""
        if self._interval_s is None:
            return 1.0
        return min(max(_RETRY_SHARE * len(self._queue) * self._interval_s, _MIN_RETRY_S), _MAX_RETRY_S)

    def check_place(self, owner: str, more: int = 1) -> None:
        """Raise QueueFull or QuotaExceeded where there is no place for so many more tasks."""
        waiting, total = self._queue.waiting(owner), len(self._queue)
        if self._arriving:
            waiting += self._arriving.get(owner, 0)
            total += sum(self._arriving.values())
        self._check(owner, waiting, total, self._settings.max_queued_jobs, "jobs are waiting", more)
        self._quotas.check_job(owner, waiting, more, retry_after_s=self.retry_after_s)

    def _check_bytes(self, owner: str, nbytes: int) -> None:
        everybody = self._queue.nbytes + sum(self._arriving_bytes.values())
        if everybody:  # one task always fits: it could never run otherwise
            held = self._queue.waiting_bytes(owner) + self._arriving_bytes.get(owner, 0)
            self._check(owner, held, everybody, self._settings.max_queued_bytes, "bytes of jobs are waiting", nbytes)

    def _check(self, owner: str, own: int, total: int, most: int, what: str, more: int) -> None:
        """Raise QueueFull past the bound, or the owner's share; without keys there is one owner, who may fill it."""
        if total + more > most:
            raise QueueFull(f"{total} {what} already", retry_after_s=self.retry_after_s())
        if owner and own + more > max(_ALPHA * (most - total), more):
            raise QueueFull(f"{own} of this key's {what} already", retry_after_s=self.retry_after_s())

    @staticmethod
    def _release(counts: dict[str, int], owner: str, amount: int) -> None:
        left = counts[owner] - amount
        if left:
            counts[owner] = left
        else:
            del counts[owner]


def nothing() -> None:
    """Give nothing back."""
