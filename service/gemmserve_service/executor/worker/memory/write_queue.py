"""Queue of results that are on the device alone: written where and when the front says, by a thread of their own.

A job has succeeded when its result is on the device, for what it was made of is on record. When its bytes go to the
host, and where, is the front's to decide (`gemmserve_service.scheduling.results.write_back`); by then it may be an
operand that nobody downloads, deleted by its owner. Here the results are held, and written in turns of some megabytes,
on a stream and in a thread of their own, so that kernels run on and what somebody waits for overtakes the others.

A task whose results find no room waits for it, and for nothing else: the front is told less than there is room for, and
has results written before that is full. Results of a task that had too little memory were put together on the host, and
are held in memory of this process, as are those that had to go because another task had too little.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gemmserve_service.executor.protocol import ExtentRow
    from gemmserve_service.executor.worker.memory.residency import Residency

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_TURN_BYTES: Final = 32 << 20
"""Bytes after which more urgent results go first: half a millisecond of a link."""
_LIMIT_SHARE: Final = 3 / 4  # of the copies' budget; the others are operands
_OFFERED_SHARE: Final = 1 / 2
"""Share of the copies' budget that the front knows of. It leaves half of that without an order at most, so that any one
result which it lets stay on the device, and is no larger than this, finds room in time."""
_MAX_PLACES: Final = 1 << 16
_LOOK_S: Final = 0.05  # between two moments at which a wait for room can be interrupted

log = logging.getLogger(__name__)


class Copies(Protocol):
    """Copies on a device (`DeviceCopies`), as far as the queue uses them."""

    resident: Residency

    def write(self, array: Any, start: int, target: Bytes) -> None:
        """Start to copy bytes of a contiguous array of the device, from byte `start` on, to the host."""

    def mark(self) -> Any:
        """Return a mark behind what this thread began with `write`."""

    def wait(self, mark: Any) -> None:
        """Return when all before a mark is there."""

    def fetch(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a copy in memory of this process, lying as the array does. Raises MemoryError."""


@dataclass(frozen=True, slots=True)
class Result:
    """One result: the array's id, and its bytes in one piece: an array of the device, or of NumPy."""

    array: str
    value: Any


@dataclass(eq=False, slots=True)
class _Entry:
    task: str
    results: list[Result]
    nbytes: int
    places: Mapping[str, ExtentRow] | None = None
    """Where the results go, by array; None: the front has not said it yet."""
    targets: list[Bytes] | None = None
    """Those places' memory, once it was looked up."""
    number: int = 0
    """Number of the result that is written next."""
    start: int = 0
    """Byte of it from which on."""
    turns: int = 0
    """Turns that write some of it and are not over."""
    moving: bool = False
    """Whether its values are being taken to memory of this process."""
    dropped: bool = False
    failed: bool = False

    @property
    def over(self) -> bool:
        """Whether no more of it is to be written."""
        return self.dropped or self.failed or self.number == len(self.results)

    @property
    def busy(self) -> bool:
        """Whether a thread reads its values."""
        return self.turns > 0 or self.moving


_Piece = tuple[_Entry, int, int, int]
"""Entry, number of its result, first byte, bytes."""
_Turn = tuple[list[_Entry], Any]
"""Entries of which a turn writes some, and the mark behind the copies; None: there were none."""


class WriteQueue:
    """The results of one device that are not in the store yet. Every method may be called from any thread; `begin`
    comes first.
    """

    def __init__(self, copies: Copies, enter: Callable[[], None]) -> None:
        """`enter` is called once in the writing thread before anything else."""
        self.resident = copies.resident
        self.limit = int(self.resident.budget * _LIMIT_SHARE)
        """Bytes that may be unwritten."""
        self.offered = int(self.resident.budget * _OFFERED_SHARE)
        """Bytes of them that the front is told of; no result is larger."""
        self.nbytes = 0
        """Bytes that are."""
        self._expected = 0
        """Bytes of results that are being made and have been given room."""
        self._copies = copies
        self._enter = enter
        self._tell: Callable[[list[str], list[str]], None] = lambda *_: None
        self._locate: Callable[[ExtentRow], Bytes] = _nowhere
        self._entries: dict[str, _Entry] = {}
        self._urgent: OrderedDict[str, _Entry] = OrderedDict()
        """Entries with places that somebody waits for, in the order in which they were asked for."""
        self._ordered: OrderedDict[str, _Entry] = OrderedDict()
        """The others that have places, likewise."""
        self._values: dict[str, Any] = {}
        """Values of all entries, by array."""
        self._places: OrderedDict[str, ExtentRow] = OrderedDict()
        """Places of arrays that were written last: tasks that were sent before the front knew of it look for them."""
        self._last = False
        """Whether the front has said all that it will."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, tell: Callable[[list[str], list[str]], None], locate: Callable[[ExtentRow], Bytes]) -> None:
        """A front is there: `tell(settled, lost)` is called in any thread with tasks whose results are in the store, or
        whose results nobody will write any more; and with those whose results are gone. `locate` maps a place: it
        returns the bytes from there on, and raises OSError or ValueError if it is gone.
        """
        with self._changed:
            self._tell, self._locate = tell, locate
            self._last = False
            self._places.clear()

    def reserve(self, task: str, results: Sequence[Result], checkpoint: Callable[[], None]) -> None:
        """Take over the results of a task, which is answered after that. Waits for room; `checkpoint` is called while
        it does, and what it raises ends the wait.
        """
        nbytes = sum(result.value.nbytes for result in results)
        while True:
            with self._changed:
                if not self._entries or self.nbytes + nbytes <= self.limit or self._last:
                    self._add(_Entry(task, list(results), nbytes))
                    return
                self._changed.wait(_LOOK_S)
            checkpoint()

    def expect(self, nbytes: int) -> bool:
        """Keep room for results of so many bytes that are being made, until `release`; False: there is none, beside
        others that are expected. What waits in `reserve` waits for none of these, which may be behind it.
        """
        with self._changed:
            alone = not self._entries and not self._expected
            if not (alone or self.nbytes + self._expected + nbytes <= self.limit or self._last):
                return False
            self._expected += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Keep that room no longer: the results have been taken over, or there will be none."""
        with self._changed:
            self._expected -= nbytes

    def take(self, task: str, results: Sequence[Result]) -> None:
        """Take over expected results of a task, which is answered after that."""
        with self._changed:
            self._add(_Entry(task, list(results), sum([result.value.nbytes for result in results])))

    def write(self, task: str, places: Mapping[str, ExtentRow], *, urgent: bool) -> None:
        """Have a task's results written to `places`, by array; again: have them overtake others. An unknown task's
        results have been written or dropped: nothing is done.
        """
        with self._changed:
            entry = self._entries.get(task)
            if entry is None:
                return
            if entry.places is None:
                entry.places = dict(places)
                self._ordered[task] = entry
            if urgent and self._ordered.pop(task, None) is not None:
                self._urgent[task] = entry
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gemmserve-write", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drop(self, tasks: Iterable[str]) -> None:
        """Drop results that nobody needs; unknown tasks are ignored."""
        settled = []
        with self._changed:
            for task in tasks:
                entry = self._entries.get(task)
                if entry is not None:
                    entry.dropped = True
                    if not entry.busy:
                        self._remove(entry)
                        settled.append(task)
            tell = self._tell
        if settled:
            tell(settled, [])

    def read(self, array: str) -> Bytes:
        """Return an array's bytes on the host: copied from the device, if they are there alone. In a thread that uses
        the device. Raises OSError where it is nowhere.
        """
        found = self.unwritten(array)
        if found is not None:
            return found
        with self._changed:
            place, locate = self._places.get(array), self._locate
        if place is None:
            raise FileNotFoundError(f"the bytes of array {array} are neither on the device nor in the store")
        return locate(place)

    def on_device(self, array: str) -> Any:
        """Return the device's copy of an array, contiguous, whether it is a result that is not written or another; None
        where there is none.
        """
        value = self._values.get(array)
        if value is None:
            value = self.resident.peek(array)
        return None if isinstance(value, np.ndarray) else value

    def unwritten(self, array: str) -> Bytes | None:
        """Return an array's bytes on the host, if its place has not all of them yet, whether it has one or not; None:
        nothing is held of it here. In a thread that uses the device.
        """
        value = self._values.get(array)
        if value is None:
            return None
        return _bytes_of(value if isinstance(value, np.ndarray) else self._copies.fetch(value))

    def vacate(self) -> bool:
        """Free the device of results: return when those that have a place are there, and others in memory of this
        process. In a thread that uses the device. False: there was none. Raises MemoryError.
        """
        found = False
        while True:
            with self._changed:
                held = [entry for entry in self._entries.values() if not _on_host(entry)]
                if not held:
                    return found
                found = True
                entry = next((each for each in held if each.places is None and not each.busy), None)
                if entry is None:  # the writing thread, or another one, is at them
                    self._changed.wait()
                    continue
                entry.moving = True
                results = entry.results
            try:
                moved = [
                    result
                    if isinstance(result.value, np.ndarray)
                    else Result(result.array, self._copies.fetch(result.value))
                    for result in results
                ]
            except BaseException:
                self._moved(entry, entry.results)
                raise
            self._moved(entry, moved)

    def end(self) -> None:
        """The front says nothing any more, and there will be no room by its orders: nobody waits for it."""
        with self._changed:
            self._last = True
            self._changed.notify_all()

    def forget(self, array: str) -> None:
        """Forget the place of an array that is gone."""
        with self._changed:
            self._places.pop(array, None)

    def abandon(self) -> None:
        """The front is gone: nothing more is written, and nobody needs the results. Return when nothing is being
        written any more.
        """
        with self._changed:
            self._tell = lambda *_: None
            self.drop(list(self._entries))
            while self._entries:
                self._changed.wait()
            self._places.clear()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _add(self, entry: _Entry) -> None:
        self._entries[entry.task] = entry
        self.nbytes += entry.nbytes
        for result in entry.results:
            self._values[result.array] = result.value
            if not isinstance(result.value, np.ndarray):
                self.resident.put(result.array, result.value, result.value.nbytes, pinned=True)

    def _remove(self, entry: _Entry) -> None:
        """Forget an entry, under the lock. What was written stays as a copy like others."""
        for entries in (self._entries, self._urgent, self._ordered):
            entries.pop(entry.task, None)
        self.nbytes -= entry.nbytes
        written = not entry.dropped and not entry.failed
        for result in entry.results:
            del self._values[result.array]
            if written and entry.places is not None and result.array in entry.places:
                self._places[result.array] = entry.places[result.array]
            if written:
                self.resident.unpin(result.array)
            else:
                self.resident.forget(result.array)
        while len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)
        self._changed.notify_all()

    def _run(self) -> None:
        """Write in turns, one begun before the one before is over, so that the link is never idle."""
        self._enter()
        under_way: _Turn | None = None
        while True:
            pieces = self._next_turn(wait=under_way is None)
            begun = self._begin_turn(pieces) if pieces else None
            if under_way is not None:
                self._end_turn(under_way)
            under_way = begun  # and nothing else: who waits for results keeps none that were written

    def _next_turn(self, *, wait: bool) -> list[_Piece]:
        """Return the next pieces to write, of the most urgent results; `wait` for some."""
        with self._changed:
            while True:
                pieces = self._gather(self._urgent) or self._gather(self._ordered)
                if pieces or not wait:
                    return pieces
                self._changed.wait()

    @staticmethod
    def _gather(entries: Mapping[str, _Entry]) -> list[_Piece]:
        pieces: list[_Piece] = []
        left = _TURN_BYTES
        for entry in entries.values():
            if entry.moving or entry.over:
                continue
            entry.turns += 1
            while not entry.over and left:
                size = entry.results[entry.number].value.nbytes
                count = min(size - entry.start, left)
                pieces.append((entry, entry.number, entry.start, count))
                left -= count
                entry.start += count
                if entry.start == size:
                    entry.number, entry.start = entry.number + 1, 0
            if not left:
                break
        return pieces

    def _begin_turn(self, pieces: list[_Piece]) -> _Turn:
        """Start to copy the pieces. An entry whose place is gone fails alone; an error of the device fails all."""
        entries = list(dict.fromkeys(piece[0] for piece in pieces))
        for entry in entries:
            if entry.targets is None:
                try:
                    entry.targets = self._targets(entry)
                except Exception:
                    log.exception("the results of task %s have no place to go", entry.task)
                    entry.failed = True
        try:
            for entry, number, start, count in pieces:
                if entry.failed or entry.dropped or entry.targets is None:
                    continue
                value, target = entry.results[number].value, entry.targets[number][start : start + count]
                if isinstance(value, np.ndarray):
                    np.copyto(target, _bytes_of(value)[start : start + count])
                else:
                    self._copies.write(value, start, target)
        except Exception:
            log.exception("the results of %d tasks could not be written", len(entries))
            _fail(entries)
        try:
            return entries, self._copies.mark()
        except Exception:
            log.exception("nobody knows when the results of %d tasks are written", len(entries))
            _fail(entries)
            return entries, None

    def _end_turn(self, turn: _Turn) -> None:
        entries, mark = turn
        try:
            if mark is not None:
                self._copies.wait(mark)
        except Exception:
            log.exception("the results of %d tasks could not be written", len(entries))
            _fail(entries)
        settled: list[str] = []
        lost: list[str] = []
        with self._changed:
            for entry in entries:
                entry.turns -= 1
                if entry.over and not entry.busy:
                    self._remove(entry)
                    (lost if entry.failed else settled).append(entry.task)
            self._changed.notify_all()
            tell = self._tell
        if settled or lost:
            tell(settled, lost)

    def _moved(self, entry: _Entry, results: list[Result]) -> None:
        """Note where an entry's values are now."""
        with self._changed:
            entry.moving = False
            entry.results = results
            for result in results:
                self._values[result.array] = result.value
                if isinstance(result.value, np.ndarray):
                    self.resident.forget(result.array)
            dropped = entry.dropped
            if dropped:
                self._remove(entry)
            self._changed.notify_all()
            tell = self._tell
        if dropped:
            tell([entry.task], [])

    def _targets(self, entry: _Entry) -> list[Bytes]:
        assert entry.places is not None
        targets = []
        for result in entry.results:
            memory = self._locate(entry.places[result.array])[: result.value.nbytes]
            if memory.size < result.value.nbytes:
                raise ValueError(f"{memory.size} bytes for an array of {result.value.nbytes}")
            targets.append(memory)
        return targets


def _fail(entries: list[_Entry]) -> None:
    for entry in entries:
        entry.failed = True


def _on_host(entry: _Entry) -> bool:
    return all(isinstance(result.value, np.ndarray) for result in entry.results)


def _bytes_of(array: np.ndarray[Any, Any]) -> Bytes:
    """Return the bytes of an array that is one piece, as they lie."""
    return array.ravel(order="K").view(np.uint8)


def _nowhere(row: ExtentRow) -> Bytes:
    raise FileNotFoundError(f"there is no front that has {row[0]}")
