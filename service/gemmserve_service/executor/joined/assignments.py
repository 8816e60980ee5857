"""Assignments of one link: the tasks that its worker has now, and with that the bytes that it may read and write.

A node reads what the operands of these tasks are made of, and nothing else of the store; it writes what their results
are made of, in the attempt that it was sent. What it is asked about here is asked again for every piece that is moved:
in the turn of the event loop in which a task is taken from a link, all of this ends.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from gemmserve_service.executor.protocol import Form

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gemmserve_service.executor.join_protocol import WriteResult
    from gemmserve_service.executor.protocol import ExtentRow, Part, Work, Write

_MAX_TEXT: Final = 1 << 12  # characters of a form that is remembered: programs may have millions


class File(NamedTuple):
    """File that an extent lies in: what both ends call it, where it is, and its bytes."""

    name: str
    path: str
    nbytes: int


class Operand(NamedTuple):
    """Bytes of an operand: the file, where they begin there, how many, and the id of the immutable array that they are
    of; None: of none.
    """

    file: File
    start: int
    nbytes: int
    array: str | None


class Stale(RuntimeError):  # noqa: N818 (says what is the case)
    """The link does not have the task, or not in this attempt."""


class Elsewhere(RuntimeError):  # noqa: N818 (likewise)
    """The bytes are no place of the task's results."""


class _Ranges:
    """Ranges of one file, none touching another."""

    def __init__(self, file: File, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.file = file
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(ranges):
            self.add(start, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def add(self, start: int, end: int) -> None:
        """Add a range, which becomes one with those that it touches."""
        if not self._starts or start > self._ends[-1]:  # most
            self._starts.append(start)
            self._ends.append(end)
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def holds(self, start: int, end: int) -> bool:
        """Whether all bytes from `start` to `end` are in one of them."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and end <= self._ends[at]


class Assignment:
    """One task in one attempt."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.attempt = work.attempt
        self._reads: dict[str, _Ranges] | None = None
        self._writes: dict[str, _Ranges] | None = None
        self._came: dict[str, _Ranges] = {}
        """Bytes of results that are in their place."""
        self.deferred = False
        """Whether it was answered, and its results are still to be written."""
        self._placed = False
        """Whether it was said where the results of a deferred task go."""
        self.unwanted = False
        """Whether nobody wants its results any more, whatever they are."""

    def look_ahead(self) -> None:
        """Work out where its results go, which is asked when they come: nobody waits now."""
        if self._writes is None:
            self._writes = _by_file(self.work.extents, self._places("results"))

    def reads(self, extent: str, start: int, end: int) -> File | None:
        """Return the file of an operand's bytes; None: they are none of it."""
        if self.deferred:
            return None
        if self._reads is None:
            self._reads = _by_file(self.work.extents, self._places("operands"))
        return _found(self._reads, extent, start, end)

    def writes(self, extent: str, start: int, end: int) -> File | None:
        """Return the file of a result's bytes; None: they are none of it."""
        if self._writes is None:
            self._writes = _by_file(self.work.extents, self._places("results"))
        return _found(self._writes, extent, start, end)

    def came(self, extent: str, start: int, end: int) -> None:
        """Note bytes of a result that are in their place now."""
        came = self._came.get(extent)
        if came is None:
            file = self.writes(extent, start, end)
            assert file is not None
            came = self._came[extent] = _Ranges(file)
        came.add(start, end)

    @property
    def complete(self) -> bool:
        """Whether every byte of its results is in its place: what is not would be what another array had there."""
        if self.deferred and not self._placed:
            return False
        if self._writes is None:
            self._writes = _by_file(self.work.extents, self._places("results"))
        return all(
            (came := self._came.get(name)) is not None and came.holds(start, end)
            for name, ranges in self._writes.items()
            for start, end in ranges
        )

    def placed(self, message: Write) -> None:
        """Take in where results go that had no place. A second time, only that they are urgent."""
        if self._placed:
            return
        self._placed = True
        self._came.clear()
        rows = self.work.extents
        lengths = {rows[row][4]: nbytes for row, _, nbytes in self._places("results")}
        places, found = list(message.places.items()), []
        for number, (array, _) in enumerate(places):
            if array in lengths:
                found.append((number, 0, lengths[array]))
        self._writes = _by_file([row for _, row in places], found)

    def operands(self) -> Iterator[Operand]:
        """Yield each operand that has a place, once."""
        seen = set()
        for row, offset, nbytes in self._places("operands"):
            name, path, length, start, array = self.work.extents[row]
            place = name, start + offset, nbytes
            if path and place not in seen:
                seen.add(place)
                yield Operand(File(name, path, length), start + offset, nbytes, array)

    def _places(self, side: str) -> Iterator[tuple[int, int, int]]:
        """Yield row, offset and bytes of each array that has any."""
        for part in self.work.parts:
            lengths = _lengths(part)[side]
            for name, places in (part.operands if side == "operands" else part.results).items():
                if nbytes := lengths[name]:
                    for row, offset in places:
                        if row >= 0:
                            yield row, offset, nbytes


class Assignments:
    """The tasks of one link."""

    def __init__(self) -> None:
        self._tasks: dict[str, Assignment] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, work: Work) -> Assignment:
        """Take in a task that the worker is sent; an earlier attempt of it is over."""
        found = self._tasks[work.task] = Assignment(work)
        return found

    def has(self, task: str) -> bool:
        """Whether the link has the task, answered or not."""
        return task in self._tasks

    def waits_for(self, task: str) -> bool:
        """Whether the task has not been answered."""
        found = self._tasks.get(task)
        return found is not None and not found.deferred

    def complete(self, task: str) -> bool:
        """Whether all bytes of a task's results have come, or nobody wants them."""
        found = self._tasks.get(task)
        return found is not None and (found.unwanted or found.complete)

    def unwanted(self, tasks: Iterable[str]) -> None:
        """Note that nobody wants the results of these tasks any more."""
        for task in tasks:
            if (found := self._tasks.get(task)) is not None:
                found.unwanted = True

    def came(self, asked: WriteResult, start: int, end: int) -> None:
        """Note bytes that `writes` had a file for, and that are there now."""
        self._tasks[asked.task].came(asked.extent, start, end)

    def answered(self, task: str, *, written: bool) -> None:
        """Note that a task was answered: unless its results are still to be written, it is over."""
        if written:
            self._tasks.pop(task, None)
        elif (found := self._tasks.get(task)) is not None:
            found.deferred = True

    def placed(self, message: Write) -> None:
        """Take in where the results of a task go that was answered before."""
        found = self._tasks.get(message.task)
        if found is not None and found.deferred:
            found.placed(message)

    def over(self, tasks: Iterable[str]) -> None:
        """Note that nothing of these tasks is to be written any more."""
        for task in tasks:
            self._tasks.pop(task, None)

    def clear(self) -> None:
        """Note that the link has no task any more."""
        self._tasks.clear()

    def reads(self, extent: str, offset: int, length: int) -> File | None:
        """Return the file of these bytes of an operand; None: no task that the link has reads them."""
        for each in self._tasks.values():
            if (found := each.reads(extent, offset, offset + length)) is not None:
                return found
        return None

    def writes(self, asked: WriteResult, length: int) -> File:
        """Return the file of these bytes of a result: from `asked.offset` on as they lie there, `length` of each row.
        Raises Stale, Elsewhere.
        """
        found = self._tasks.get(asked.task)
        if found is None or found.attempt != asked.attempt:
            raise Stale
        end = asked.offset + (asked.rows - 1) * asked.stride + length
        file = found.writes(asked.extent, asked.offset, end)
        if file is None:
            raise Elsewhere
        return file


def _by_file(rows: list[ExtentRow], places: Iterable[tuple[int, int, int]]) -> dict[str, _Ranges]:
    ranges: dict[File, list[tuple[int, int]]] = {}
    for row, offset, nbytes in places:
        name, path, length, start, _ = rows[row]
        if path:
            ranges.setdefault(File(name, path, length), []).append((start + offset, start + offset + nbytes))
    return {file.name: _Ranges(file, each) for file, each in ranges.items()}


def _found(ranges: dict[str, _Ranges], extent: str, start: int, end: int) -> File | None:
    found = ranges.get(extent)
    return found.file if found is not None and end > start and found.holds(start, end) else None


def _lengths(part: Part) -> dict[str, dict[str, int]]:
    """Bytes of the arrays of a part, by side and name."""
    return _known_lengths(part.form) if len(part.form) <= _MAX_TEXT else _read_lengths(part.form)


def _read_lengths(text: str) -> dict[str, dict[str, int]]:
    form = Form.model_validate_json(text)
    return {
        side: {name: math.prod(kind.shape) * np.dtype(kind.dtype).itemsize for name, kind in kinds.items()}
        for side, kinds in (("operands", form.operands), ("results", form.results))
    }


_known_lengths = lru_cache(512)(_read_lengths)
