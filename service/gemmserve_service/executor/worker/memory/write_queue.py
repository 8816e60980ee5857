"""Queue of results that are on the device alone: written to the store later, by a thread of their own, or never.

A job has succeeded when its result is on the device, for what it was made of is on record. So its way to the host may
wait a little: by then it may be an operand that nobody downloads, deleted by its owner. Results are written in the
order in which they came; before the others those that somebody waits for; last those that nobody can see any more and
that others were made of.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np

    from gemmserve_service.executor.worker.memory.residency import Residency

_MIN_BYTES: Final = 1 << 18
"""Bytes of results below which the copy takes no longer than the messages about it."""
_SHARE: Final = 4  # of the copies' budget, a quarter may be unwritten
_MAX_TASKS: Final = 1024  # tasks: each is bookkeeping of the front's too
_HURRY_SHARE: Final = 2  # from half of what may be unwritten on nothing lingers

log = logging.getLogger(__name__)


class Copies(Protocol):
    """Copies on a device (`DeviceCopies`), as far as the queue uses them."""

    resident: Residency

    def store(self, array: Any, out: np.ndarray[Any, Any]) -> None:
        """Copies an array of the device to the host; returns when it is there."""


@dataclass(frozen=True, slots=True)
class Result:
    """One result: the array's id, its copy on the device, and its place in the store."""

    array: str
    value: Any
    out: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome, for the front: `task`'s results are in the store, or nobody is at them any more; or they are gone."""

    task: str
    lost: bool = False


class Priority(IntEnum):
    """Order in which results are written, or dropped."""

    DROP = 0
    """Results that nobody needs."""
    FIRST = 1
    """Somebody waits for them."""
    NORMAL = 2
    """Results written after a delay: they may be deleted by then."""
    LAST = 3
    """Results that nobody can see, written only when there is little room."""


@dataclass(eq=False, slots=True)
class _Entry:
    task: str
    results: Sequence[Result]
    nbytes: int
    due: float = 0.0
    """Time at which it is to be written (time.monotonic)."""
    started: bool = False
    """Whether the front has been told of the task's end."""
    priority: Priority = Priority.NORMAL
    writing: bool = False
    outcome: Outcome | None = None
    """Outcome to report once the front knows that the task has ended."""


class WriteQueue:
    """The results of one device that are not in the store yet. Every method may be called from any thread; `begin`
    comes first.
    """

    def __init__(self, copies: Copies, enter: Callable[[], None], *, delay_s: float) -> None:
        """`enter` is called once in the writing thread before anything else; `delay_s`: how long a result that nobody
        waits for stays unwritten.
        """
        self.limit = copies.resident.budget // _SHARE
        """Bytes that may be unwritten; what is more is written before its job's end."""
        self.nbytes = 0
        """Bytes that are."""
        self.resident = copies.resident
        self._copies = copies
        self._enter = enter
        self._delay_s = delay_s
        self._tell: Callable[[Outcome], None] = lambda _: None
        self._entries: dict[str, _Entry] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, tell: Callable[[Outcome], None]) -> None:
        """A front is there: it is told what becomes of each task's results."""
        with self._changed:
            self._tell = tell

    def reserve(self, task: str, results: Sequence[Result]) -> bool:
        """Takes the results of a task over if there is room; `start` follows once its end has been told."""
        nbytes = sum(result.out.nbytes for result in results)
        with self._changed:
            if nbytes < _MIN_BYTES or self.nbytes + nbytes > self.limit or len(self._entries) >= _MAX_TASKS:
                return False
            resident = self.resident
            for number, result in enumerate(results):
                if not resident.put(result.array, result.value, result.out.nbytes, pinned=True):
                    for other in results[:number]:
                        resident.unpin(other.array)
                    return False
            self._entries[task] = _Entry(task, results, nbytes)
            self.nbytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gemmserve-write", daemon=True)
                self._thread.start()
        return True

    def start(self, task: str) -> None:
        """The front knows that the task has ended; from here on its results are written when their time comes."""
        with self._changed:
            entry = self._entries.get(task)
            if entry is None:
                return
            entry.started = True
            entry.due = time.monotonic() + self._delay_s
            tell, outcome = self._tell, entry.outcome
            if outcome is not None:
                self._remove(entry)
            self._changed.notify_all()
        if outcome is not None:
            tell(outcome)

    def reorder(self, *, first: Iterable[str] = (), last: Iterable[str] = (), drop: Iterable[str] = ()) -> None:
        """Change the priority of tasks' results; unknown tasks are ignored. Who waits outweighs that nobody can see
        them, that nobody needs them outweighs both.
        """
        with self._changed:
            for priority, tasks in ((Priority.FIRST, first), (Priority.LAST, last), (Priority.DROP, drop)):
                for task in tasks:
                    entry = self._entries.get(task)
                    if entry is not None and (priority < entry.priority or entry.priority is Priority.NORMAL):
                        entry.priority = priority
            self._changed.notify_all()

    def flush(self, arrays: Iterable[str | None] | None = None) -> None:
        """Returns when those arrays, or all, are in the store. In a thread that uses the device."""
        wanted = None if arrays is None else set(arrays)
        while True:
            with self._changed:
                mine = [
                    entry
                    for entry in self._entries.values()
                    if entry.outcome is None
                    and (wanted is None or any(result.array in wanted for result in entry.results))
                ]
                if not mine:
                    return
                entry = next((each for each in mine if not each.writing), None)
                if entry is None:
                    self._changed.wait()
                    continue
                entry.writing = True
            self._settle(entry, write=True)

    def write(self, results: Sequence[Result]) -> None:
        """Takes results to the store at once, for which there is no room here."""
        for result in results:
            self._copies.store(result.value, result.out)
        self.keep(results)

    def keep(self, results: Sequence[Result]) -> None:
        """Keeps results that are in the store, too, as copies like others."""
        for result in results:
            self.resident.put(result.array, result.value, result.out.nbytes)

    def abandon(self) -> None:
        """The front is gone: nothing more is written. Returns when nothing is being written any more."""
        with self._changed:
            self._tell = lambda _: None
            for entry in [each for each in self._entries.values() if not each.writing]:
                self._remove(entry)
            while self._entries:
                self._changed.wait()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._enter()
        while True:
            entry = self._next()
            self._settle(entry, write=entry.priority is not Priority.DROP)

    def _next(self) -> _Entry:
        """Waits for what is to be done next."""
        with self._changed:
            while True:
                found, wait_s = self._choose(time.monotonic())
                if found is not None:
                    found.writing = True
                    return found
                self._changed.wait(wait_s)

    def _choose(self, now: float) -> tuple[_Entry | None, float | None]:
        """The results whose turn it is, or None and for how long to wait (None: for a change)."""
        ready = (entry for entry in self._entries.values() if entry.started and not entry.writing)
        entry = min(ready, key=lambda entry: entry.priority, default=None)  # the first of several
        if entry is None:
            return None, None
        pressed = self.nbytes * _HURRY_SHARE > self.limit
        if pressed or entry.priority < Priority.NORMAL:
            return entry, None
        if entry.priority is Priority.LAST:
            return None, None
        return (entry, None) if entry.due <= now else (None, entry.due - now)

    def _settle(self, entry: _Entry, *, write: bool) -> None:
        lost = False
        try:
            if write:
                for result in entry.results:
                    self._copies.store(result.value, result.out)
        except Exception:
            log.exception("the results of task %s could not be written", entry.task)
            lost = True
        outcome = Outcome(entry.task, lost)
        with self._changed:
            tell = self._tell
            if not entry.started:
                entry.outcome, entry.writing = outcome, False
                self._changed.notify_all()
                return
            self._remove(entry)
        tell(outcome)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.task]
        self.nbytes -= entry.nbytes
        for result in entry.results:
            self.resident.unpin(result.array)
        self._changed.notify_all()
