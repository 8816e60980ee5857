"""Texts of tasks: what tasks of one kind share is read once, and goes on to the worker as it came.

A message of one task is a head, the task's name and its extents, and a tail, everything after those. The tail of a job
that comes again is the same text; it is known by that, with what it says. Of the message the head alone is read then,
and written anew for the worker, on the node's extents.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.executor.agent.rows import SHIFT, layout_of, uses_in
from gemmserve_service.executor.protocol import Work, frame_of

if TYPE_CHECKING:
    from gemmserve_service.executor.agent.rows import Layout, Use
    from gemmserve_service.executor.protocol import ExtentRow, RunBatch

_MAX_KNOWN: Final = 512
_MAX_TEXT: Final = 1 << 12  # bytes of a tail that is kept: programs may have millions
_TAIL: Final = b',"parts":'
"""Beginning of a tail. Its quotes stand in no string, where they would have backslashes."""
_END: Final = "}]}"
"""End of a head: a text that is JSON with it is JSON with any tail that another head had."""
_DONE: Final = b'{"kind":"done","task":"'
_WRITTEN: Final = b',"written":true}'
# A model's reader takes twice as long in a process that was asleep: its code has to come from memory first.
_READ: Final = json.JSONDecoder().raw_decode


@dataclass(slots=True)
class Finished:
    """Answer of which no more is read here: a `Done` whose results are written. The front reads the rest."""

    task: str


@dataclass(slots=True)
class Sent:
    """Task as it was sent: what it says, the use of each of its rows, and its tail, where that is known."""

    work: Work
    uses: list[Use | None]
    tail: bytes | None = None


class Texts:
    """Tails of the messages that came last, each of one task."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[Work, Layout]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, body: bytes) -> Sent | None:
        """Return the task of a message whose tail is known; None for any other. Raises ProtocolError for a task that
        makes no sense.
        """
        at = body.find(_TAIL)
        if at < 0 or len(body) - at > _MAX_TEXT:
            return None
        known = self._known.get(tail := body[at:])
        if known is None or (head := _head_of(body[:at])) is None:
            return None
        self._known.move_to_end(tail)
        like, layout = known
        work = Work(*head, like.parts, like.attempt, like.verify, like.defer, like.express, like.block)
        return Sent(work, uses_in(layout, work), tail)

    def learn(self, body: bytes, message: RunBatch) -> None:
        """Remember the tail of a message, unless places in it may be others on the node. Raises ProtocolError for a
        task that makes no sense.
        """
        at = body.find(_TAIL)
        if len(message.tasks) != 1 or at < 0 or len(body) - at > _MAX_TEXT or _head_of(body[:at]) is None:
            return
        (work,) = message.tasks
        layout = layout_of(work)
        if all((reads or writes)[0][0] < SHIFT for reads, writes in layout.values()):
            self._known[body[at:]] = work, layout
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)


def finished_in(body: bytes) -> Finished | None:
    """Return what a worker's message says, if it is a `Done`, as `encode` writes it, whose results are written; None
    for any other.
    """
    if not (body.startswith(_DONE) and body.endswith(_WRITTEN)):
        return None
    task = body[len(_DONE) : body.index(b'"', len(_DONE))]
    return None if b"\\" in task else Finished(task.decode())


def frame_with(tail: bytes, task: str, extents: list[ExtentRow]) -> bytes:
    """Return the frame of the message of a task on these extents."""
    rows = ",".join([_row(*each) for each in extents])
    return frame_of(f'{{"kind":"run_batch","tasks":[{{"task":{quoted(task)},"extents":[{rows}]'.encode() + tail)


def _row(name: str, path: str, nbytes: int, start: int, array: str | None) -> str:
    return f"[{quoted(name)},{quoted(path)},{nbytes},{start},{'null' if array is None else quoted(array)}]"


def _head_of(text: bytes) -> tuple[str, list[ExtentRow]] | None:
    """Return the task that a head names, and its extents; None for one that is none, or of several tasks."""
    try:
        message: dict[str, Any] = _READ(text.decode() + _END)[0]
        (task,) = message["tasks"]
        rows: list[ExtentRow] = [(name, path, nbytes, at, array) for name, path, nbytes, at, array in task["extents"]]
        name: str = task["task"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # Nothing else is there; what is of another type, the model's reader refuses.
    plain = len(message) == len(task) == 2 and type(name) is str and all(map(_is_row, rows))
    return (name, rows) if plain else None


def _is_row(row: ExtentRow) -> bool:
    name, path, nbytes, start, array = row
    return (
        type(name) is type(path) is str and type(nbytes) is type(start) is int and (array is None or type(array) is str)
    )
