"""Texts of tasks: what tasks of one kind share is read once, and goes on to the worker as it came.

A message of one task is a head, the task's name and its extents, and a tail, everything after those. The tail of a job
that comes again is the same text; it is known by that, with what it says. Of the message the head alone is read then,
and written anew for the worker, on the node's extents.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gemmserve_service.executor.agent.rows import layout_of, uses_in
from gemmserve_service.executor.protocol import ExtentRow, Work, frame_of

if TYPE_CHECKING:
    from gemmserve_service.executor.agent.rows import Layout, Use
    from gemmserve_service.executor.protocol import RunBatch

_MAX_KNOWN: Final = 512
_MAX_TEXT: Final = 1 << 12  # bytes of a tail that is kept: programs may have millions
_TAIL: Final = b',"parts":'
"""What a tail begins with. Its quotes stand in no string, where they would have backslashes."""
_END: Final = b"}]}"
"""What closes a head: a text that is a message with it is one with any tail that follows a head."""


@dataclass(slots=True)
class _Head:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    task: str
    extents: list[ExtentRow]


@dataclass(slots=True)
class _Heads:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    kind: Literal["run_batch"]
    tasks: list[_Head]


_HEADS: Final = TypeAdapter(_Heads)


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
        known = self._known.get(tail := body[at:]) if at >= 0 else None
        if known is None:
            return None
        if (head := _head_of(body[:at])) is None:
            return None
        self._known.move_to_end(tail)
        like, layout = known
        work = Work(  # `replace` takes five times as long
            head.task, head.extents, like.parts, like.attempt, like.verify, like.defer, like.express, like.block
        )
        return Sent(work, uses_in(layout, work), tail)

    def learn(self, body: bytes, message: RunBatch) -> None:
        """Remember the tail of a message. Raises ProtocolError for a task that makes no sense."""
        at = body.find(_TAIL)
        if len(message.tasks) != 1 or at < 0 or len(body) - at > _MAX_TEXT or _head_of(body[:at]) is None:
            return
        (work,) = message.tasks
        self._known[body[at:]] = work, layout_of(work)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


def frame_with(tail: bytes, task: str, extents: list[ExtentRow]) -> bytes:
    """Return the frame of the message of a task on these extents."""
    return frame_of(_HEADS.dump_json(_Heads("run_batch", [_Head(task, extents)]))[: -len(_END)] + tail)


def _head_of(text: bytes) -> _Head | None:
    """Return what a head says; None for one that is none, or of several tasks."""
    try:
        heads = _HEADS.validate_json(text + _END)
    except ValidationError:
        return None
    return heads.tasks[0] if len(heads.tasks) == 1 else None
