"""Pending results: the results of one job that are on a device and not in the store yet, as a state machine.

Everything here is pure: `handle_event` maps a state and an event to the next state and to the instructions that whoever
looks after the results has to carry out (`gemmserve_service.scheduling.write_back`). An event that the table has no
line for changes nothing.

    state               event                     next state          instructions
    ------------------  ------------------------  ------------------  -------------------
    UNRECORDED          RECORDED                  HELD
                        REQUESTED                 UNRECORDED          WRITE_FIRST
                        ABANDONED                 DROPPED             DROP
                        WRITTEN                   UNRECORDED_WRITTEN
                        NOT_WRITTEN, WORKER_LOST  UNRECORDED_LOST
    UNRECORDED_WRITTEN  RECORDED                  STORED              COMMIT
                        ABANDONED                 SETTLED             FREE
    UNRECORDED_LOST     RECORDED                  RECOMPUTING         TAINT, RECOMPUTE
                        ABANDONED                 SETTLED             TAINT, FREE
    HELD                REQUESTED                 REQUESTED           WRITE_FIRST
                        HIDDEN                    POSTPONED           WRITE_LAST
    POSTPONED           REQUESTED                 REQUESTED           WRITE_FIRST
    ON_DEVICE           UNUSED                    DROPPED             DROP
                        WRITTEN                   STORED              COMMIT
                        NOT_WRITTEN               RECOMPUTING         RECOMPUTE
                        WORKER_LOST               RECOMPUTING         TAINT, RECOMPUTE
    FOUND               RECOVERABLE               RECOMPUTING         RECOMPUTE
                        UNRECOVERABLE             FAILED              FAIL
                        ABANDONED                 SETTLED             TAINT, FREE
    RECOMPUTING         WRITTEN                   STORED              COMMIT
                        UNRECOVERABLE             FAILED              FAIL
                        UNUSED                    DROPPED             CANCEL
    DROPPED             WRITTEN, NOT_WRITTEN      SETTLED             FREE
                        WORKER_LOST               SETTLED             TAINT, FREE
    STORED              ON_RECORD                 SETTLED             RELEASE
    FAILED              UNUSED                    SETTLED             FREE
                        WORKER_LOST               FAILED              TAINT

ON_DEVICE stands for HELD, REQUESTED and POSTPONED.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import ArrayLost

if TYPE_CHECKING:
    from gemmserve_service.errors import ServiceError
    from gemmserve_service.store.record import Record


class State(Enum):
    """State of pending results: their place, and who needs them."""

    UNRECORDED = auto()
    """Results on a device; the job's end is not on record yet."""
    UNRECORDED_WRITTEN = auto()
    """Results in the store; the job's end is not on record yet."""
    UNRECORDED_LOST = auto()
    """Nowhere; the job's end is not on record yet."""
    HELD = auto()
    """Results on a device."""
    REQUESTED = auto()
    """Results on a device, which was told to write them before others: somebody waits for them."""
    POSTPONED = auto()
    """Results on a device, which was told to write others first: hidden, but something was made of them."""
    FOUND = auto()
    """Nowhere: an earlier process left their rows."""
    RECOMPUTING = auto()
    """Nowhere; a task computes them again, into their place in the store."""
    DROPPED = auto()
    """Needed by nobody; a worker may still write to their place."""
    STORED = auto()
    """Results in the store, which is not on record yet: after a crash they are computed again."""
    FAILED = auto()
    """Lost for good."""
    SETTLED = auto()
    """Final: in the store, or gone; nothing is held for them."""


class Event(Enum):
    """Event in the life of pending results."""

    RECORDED = auto()
    """The job's end is on record, and they are arrays."""
    ABANDONED = auto()
    """The results become no arrays, or nobody can see them and nothing is made of them."""
    REQUESTED = auto()
    """Somebody waits for their bytes."""
    HIDDEN = auto()
    """All of them are deleted or expired, and some are pinned."""
    UNUSED = auto()
    """All of them are deleted or expired, and none is pinned."""
    WRITTEN = auto()
    """Every byte is in the store, and no worker writes any more."""
    NOT_WRITTEN = auto()
    """The results are on no device any more, and no worker writes."""
    WORKER_LOST = auto()
    """The results are on no device any more; the process that was lost may still write for a while."""
    RECOVERABLE = auto()
    """Everything that they were made of is pinned."""
    UNRECOVERABLE = auto()
    """The results cannot be computed again."""
    ON_RECORD = auto()
    """Presence in the store is on record."""


class Instruction(Enum):
    """Step to take on an event."""

    WRITE_FIRST = auto()
    """Tell the worker to write them before others."""
    WRITE_LAST = auto()
    """Tell the worker to write others before."""
    DROP = auto()
    """Tell the worker that nobody needs them."""
    COMMIT = auto()
    """Show them as stored, and put that on record: `ON_RECORD` follows."""
    RECOMPUTE = auto()
    """Queue a task that computes them again: `WRITTEN` or `UNRECOVERABLE` follows."""
    CANCEL = auto()
    """Cancel that task: `NOT_WRITTEN` or `WORKER_LOST` follows when no worker is at it any more."""
    TAINT = auto()
    """Their place in the store must serve no other array."""
    FAIL = auto()
    """Put on record that they are lost, and release what they were made of."""
    FREE = auto()
    """Release what they were made of, and give their place back."""
    RELEASE = auto()
    """Release what they were made of."""


_ON_DEVICE: Final = (State.HELD, State.REQUESTED, State.POSTPONED)
_TRANSITIONS: Final[dict[tuple[State, Event], tuple[State, tuple[Instruction, ...]]]] = {
    (State.UNRECORDED, Event.RECORDED): (State.HELD, ()),
    (State.UNRECORDED, Event.REQUESTED): (State.UNRECORDED, (Instruction.WRITE_FIRST,)),
    (State.UNRECORDED, Event.ABANDONED): (State.DROPPED, (Instruction.DROP,)),
    (State.UNRECORDED, Event.WRITTEN): (State.UNRECORDED_WRITTEN, ()),
    (State.UNRECORDED, Event.NOT_WRITTEN): (State.UNRECORDED_LOST, ()),
    (State.UNRECORDED, Event.WORKER_LOST): (State.UNRECORDED_LOST, ()),
    (State.UNRECORDED_WRITTEN, Event.RECORDED): (State.STORED, (Instruction.COMMIT,)),
    (State.UNRECORDED_WRITTEN, Event.ABANDONED): (State.SETTLED, (Instruction.FREE,)),
    (State.UNRECORDED_LOST, Event.RECORDED): (State.RECOMPUTING, (Instruction.TAINT, Instruction.RECOMPUTE)),
    (State.UNRECORDED_LOST, Event.ABANDONED): (State.SETTLED, (Instruction.TAINT, Instruction.FREE)),
    (State.HELD, Event.REQUESTED): (State.REQUESTED, (Instruction.WRITE_FIRST,)),
    (State.HELD, Event.HIDDEN): (State.POSTPONED, (Instruction.WRITE_LAST,)),
    (State.POSTPONED, Event.REQUESTED): (State.REQUESTED, (Instruction.WRITE_FIRST,)),
    **{(state, Event.UNUSED): (State.DROPPED, (Instruction.DROP,)) for state in _ON_DEVICE},
    **{(state, Event.WRITTEN): (State.STORED, (Instruction.COMMIT,)) for state in _ON_DEVICE},
    **{(state, Event.NOT_WRITTEN): (State.RECOMPUTING, (Instruction.RECOMPUTE,)) for state in _ON_DEVICE},
    **{
        (state, Event.WORKER_LOST): (State.RECOMPUTING, (Instruction.TAINT, Instruction.RECOMPUTE))
        for state in _ON_DEVICE
    },
    (State.FOUND, Event.RECOVERABLE): (State.RECOMPUTING, (Instruction.RECOMPUTE,)),
    (State.FOUND, Event.UNRECOVERABLE): (State.FAILED, (Instruction.FAIL,)),
    (State.FOUND, Event.ABANDONED): (State.SETTLED, (Instruction.TAINT, Instruction.FREE)),
    (State.RECOMPUTING, Event.WRITTEN): (State.STORED, (Instruction.COMMIT,)),
    (State.RECOMPUTING, Event.UNRECOVERABLE): (State.FAILED, (Instruction.FAIL,)),
    (State.RECOMPUTING, Event.UNUSED): (State.DROPPED, (Instruction.CANCEL,)),
    (State.DROPPED, Event.WRITTEN): (State.SETTLED, (Instruction.FREE,)),
    (State.DROPPED, Event.NOT_WRITTEN): (State.SETTLED, (Instruction.FREE,)),
    (State.DROPPED, Event.WORKER_LOST): (State.SETTLED, (Instruction.TAINT, Instruction.FREE)),
    (State.STORED, Event.ON_RECORD): (State.SETTLED, (Instruction.RELEASE,)),
    (State.FAILED, Event.UNUSED): (State.SETTLED, (Instruction.FREE,)),
    (State.FAILED, Event.WORKER_LOST): (State.FAILED, (Instruction.TAINT,)),
}


def handle_event(state: State, event: Event) -> tuple[State, tuple[Instruction, ...]]:
    """Return the state after `event` and what is to be done, in this order; see the module's table."""
    return _TRANSITIONS.get((state, event), (state, ()))


@dataclass(eq=False)
class PendingResults:
    """The results of one job, from the end of its task until they are settled."""

    job: str
    state: State
    records: list[Record] = field(default_factory=list)
    """Their arrays, once the job's end is on record."""
    holder: str | None = None
    """Id of the worker whose device has them: no other can compute with them."""
    tainted: bool = False
    """Whether a process that was lost may still write to their place in the store."""
    error: ServiceError | None = None
    """Error for which they are lost for good."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once they are in the store, or lost for good."""


def lost(job: str, reason: str = "") -> ArrayLost:
    """Return the error for results that are lost for good."""
    reason = f": {reason}" if reason else ""
    return ArrayLost(
        f"a result of job {job} was lost with its device before it was written, and could not be computed again{reason}"
    )
