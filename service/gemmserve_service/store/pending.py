"""Pending results: the results of one job that are on a device or in the host arena, and not on disk yet, as a state
machine.

Everything here is pure: `handle_event` maps a state and an event to the next state and to the instructions that whoever
looks after the results has to carry out (`gemmserve_service.scheduling.results.write_back`). An event that the table
has no line for changes nothing.

    state               event                     next state          instructions
    ------------------  ------------------------  ------------------  -------------------
    UNRECORDED          RECORDED                  HELD                WRITE_LATER
                        ABANDONED                 DROPPED             DROP
                        NOT_WRITTEN, WORKER_LOST  UNRECORDED_LOST
    UNRECORDED_LOST     RECORDED                  RECOMPUTING         TAINT, RECOMPUTE
                        ABANDONED                 SETTLED             TAINT, FREE
    UNRECORDED_HOST     RECORDED                  HOST                SHOW, SPILL
                        ABANDONED                 SETTLED             FREE
    HELD                REQUESTED                 REQUESTED           WRITE_FIRST
                        HIDDEN                    POSTPONED           WRITE_LAST
    POSTPONED           REQUESTED                 REQUESTED           WRITE_FIRST
    ON_DEVICE           UNUSED                    DROPPED             DROP
                        COPIED                    HOST                SHOW, SPILL
                        WRITTEN                   SYNCING             SYNC
                        NOT_WRITTEN               RECOMPUTING         RECOMPUTE
                        WORKER_LOST               RECOMPUTING         TAINT, RECOMPUTE
    HOST                WRITTEN                   STORED              COMMIT
                        UNUSED                    SETTLED             FREE
    FOUND               RECOVERABLE               RECOMPUTING         RECOMPUTE
                        UNRECOVERABLE             FAILED              FAIL, GIVE_SPACE_BACK
                        ABANDONED                 SETTLED             TAINT, FREE
    RECOMPUTING         WRITTEN                   SYNCING             SYNC
                        UNRECOVERABLE             FAILED              FAIL
                        UNUSED                    DROPPED             CANCEL
    DROPPED             COPIED, WRITTEN           SETTLED             FREE
                        NOT_WRITTEN               SETTLED             FREE
                        WORKER_LOST               SETTLED             TAINT, FREE
    SYNCING             SYNCED                    STORED              COMMIT
                        SYNC_FAILED               RECOMPUTING         REPLACE, RECOMPUTE
    STORED              ON_RECORD                 SETTLED             RELEASE
    FAILED              UNUSED                    SETTLED             FREE
                        NOT_WRITTEN               FAILED              GIVE_SPACE_BACK
                        WORKER_LOST               FAILED              TAINT, GIVE_SPACE_BACK

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
    from gemmserve_service.runtime.tracing.spans import ProductTrace
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.record import Record


class _Fixed(Enum):
    """Members that are hashed as what they are, one object each: by their names, as Enum does, takes a call of Python,
    and the results of one job are looked up ten times.
    """

    __hash__ = object.__hash__


class State(_Fixed):
    """State of pending results: their place, and who needs them."""

    UNRECORDED = auto()
    """Results on a device; the job's end is not on record yet."""
    UNRECORDED_LOST = auto()
    """Nowhere; the job's end is not on record yet."""
    UNRECORDED_HOST = auto()
    """Results in the host arena, where the blocks of a large product were written; the job's end is not on record yet,
    and nobody knows of them."""
    HELD = auto()
    """Results on a device."""
    REQUESTED = auto()
    """Results on a device, to be written before others: somebody waits for them."""
    POSTPONED = auto()
    """Results on a device, to be written after all others: hidden, but something was made of them."""
    HOST = auto()
    """Results in the host arena, where everybody reads them, and not on disk."""
    FOUND = auto()
    """Nowhere: an earlier process left their rows."""
    RECOMPUTING = auto()
    """Nowhere; a task computes them again, into their place in the store."""
    DROPPED = auto()
    """Needed by nobody; a worker may still write to their place."""
    SYNCING = auto()
    """In files that the disk may not have taken: with `durability=power` nobody reads them before it has."""
    STORED = auto()
    """Results on disk, which is not on record yet: after a crash they are computed again."""
    FAILED = auto()
    """Lost for good."""
    SETTLED = auto()
    """Final: on disk, or gone; nothing is held for them."""


UNNAMED: Final = frozenset({State.HELD, State.REQUESTED, State.POSTPONED, State.HOST})
"""States of arrays whose rows name no file, and will name none before the next state."""


class Event(_Fixed):
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
    COPIED = auto()
    """Every byte is in the host arena, and no worker writes any more."""
    WRITTEN = auto()
    """Every byte is in a file of the store, and nobody writes any more."""
    NOT_WRITTEN = auto()
    """The results are on no device any more, and no worker writes."""
    WORKER_LOST = auto()
    """The results are on no device any more; the process that was lost may still write for a while."""
    RECOVERABLE = auto()
    """Everything that they were made of is pinned."""
    UNRECOVERABLE = auto()
    """The results cannot be computed again."""
    ON_RECORD = auto()
    """Presence on disk is on record."""
    SYNCED = auto()
    """The disk has taken the files, or is not asked."""
    SYNC_FAILED = auto()
    """The disk did not take a file: what was written there may be gone."""


class Instruction(_Fixed):
    """Step to take on an event."""

    WRITE_LATER = auto()
    """Have them written after a while, or when the device has little room."""
    WRITE_FIRST = auto()
    """Have them written at once, before others."""
    WRITE_LAST = auto()
    """Have them written after all others, if at all."""
    DROP = auto()
    """Tell the worker that nobody needs them."""
    SHOW = auto()
    """Let everybody read them in the host arena."""
    SPILL = auto()
    """Have them copied from there to disk after a while, or when the arena has little room: `WRITTEN` follows."""
    SYNC = auto()
    """Have the disk take the files, where settings ask for that: `SYNCED` or `SYNC_FAILED` follows."""
    REPLACE = auto()
    """Give files up that the disk did not take."""
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
    GIVE_SPACE_BACK = auto()
    """Give back what files they have, and the promise of any."""
    FREE = auto()
    """Release what they were made of, and give their place back."""
    RELEASE = auto()
    """Release what they were made of."""


_ON_DEVICE: Final = (State.HELD, State.REQUESTED, State.POSTPONED)
_TRANSITIONS: Final[dict[tuple[State, Event], tuple[State, tuple[Instruction, ...]]]] = {
    (State.UNRECORDED, Event.RECORDED): (State.HELD, (Instruction.WRITE_LATER,)),
    (State.UNRECORDED, Event.ABANDONED): (State.DROPPED, (Instruction.DROP,)),
    (State.UNRECORDED, Event.NOT_WRITTEN): (State.UNRECORDED_LOST, ()),
    (State.UNRECORDED, Event.WORKER_LOST): (State.UNRECORDED_LOST, ()),
    (State.UNRECORDED_LOST, Event.RECORDED): (State.RECOMPUTING, (Instruction.TAINT, Instruction.RECOMPUTE)),
    (State.UNRECORDED_LOST, Event.ABANDONED): (State.SETTLED, (Instruction.TAINT, Instruction.FREE)),
    (State.UNRECORDED_HOST, Event.RECORDED): (State.HOST, (Instruction.SHOW, Instruction.SPILL)),
    (State.UNRECORDED_HOST, Event.ABANDONED): (State.SETTLED, (Instruction.FREE,)),
    (State.HELD, Event.REQUESTED): (State.REQUESTED, (Instruction.WRITE_FIRST,)),
    (State.HELD, Event.HIDDEN): (State.POSTPONED, (Instruction.WRITE_LAST,)),
    (State.POSTPONED, Event.REQUESTED): (State.REQUESTED, (Instruction.WRITE_FIRST,)),
    **{(state, Event.UNUSED): (State.DROPPED, (Instruction.DROP,)) for state in _ON_DEVICE},
    **{(state, Event.COPIED): (State.HOST, (Instruction.SHOW, Instruction.SPILL)) for state in _ON_DEVICE},
    **{(state, Event.WRITTEN): (State.SYNCING, (Instruction.SYNC,)) for state in _ON_DEVICE},
    **{(state, Event.NOT_WRITTEN): (State.RECOMPUTING, (Instruction.RECOMPUTE,)) for state in _ON_DEVICE},
    **{
        (state, Event.WORKER_LOST): (State.RECOMPUTING, (Instruction.TAINT, Instruction.RECOMPUTE))
        for state in _ON_DEVICE
    },
    (State.HOST, Event.WRITTEN): (State.STORED, (Instruction.COMMIT,)),
    (State.HOST, Event.UNUSED): (State.SETTLED, (Instruction.FREE,)),
    (State.FOUND, Event.RECOVERABLE): (State.RECOMPUTING, (Instruction.RECOMPUTE,)),
    (State.FOUND, Event.UNRECOVERABLE): (State.FAILED, (Instruction.FAIL, Instruction.GIVE_SPACE_BACK)),
    (State.FOUND, Event.ABANDONED): (State.SETTLED, (Instruction.TAINT, Instruction.FREE)),
    (State.RECOMPUTING, Event.WRITTEN): (State.SYNCING, (Instruction.SYNC,)),
    (State.SYNCING, Event.SYNCED): (State.STORED, (Instruction.COMMIT,)),
    (State.SYNCING, Event.SYNC_FAILED): (State.RECOMPUTING, (Instruction.REPLACE, Instruction.RECOMPUTE)),
    (State.RECOMPUTING, Event.UNRECOVERABLE): (State.FAILED, (Instruction.FAIL,)),
    (State.RECOMPUTING, Event.UNUSED): (State.DROPPED, (Instruction.CANCEL,)),
    (State.DROPPED, Event.COPIED): (State.SETTLED, (Instruction.FREE,)),
    (State.DROPPED, Event.WRITTEN): (State.SETTLED, (Instruction.FREE,)),
    (State.DROPPED, Event.NOT_WRITTEN): (State.SETTLED, (Instruction.FREE,)),
    (State.DROPPED, Event.WORKER_LOST): (State.SETTLED, (Instruction.TAINT, Instruction.FREE)),
    (State.STORED, Event.ON_RECORD): (State.SETTLED, (Instruction.RELEASE,)),
    (State.FAILED, Event.UNUSED): (State.SETTLED, (Instruction.FREE,)),
    (State.FAILED, Event.NOT_WRITTEN): (State.FAILED, (Instruction.GIVE_SPACE_BACK,)),
    (State.FAILED, Event.WORKER_LOST): (State.FAILED, (Instruction.TAINT, Instruction.GIVE_SPACE_BACK)),
}


def handle_event(state: State, event: Event) -> tuple[State, tuple[Instruction, ...]]:
    """Return the state after `event` and what is to be done, in this order; see the module's table."""
    return _TRANSITIONS.get((state, event), (state, ()))


@dataclass(eq=False)
class PendingResults:
    """The results of one job, from the end of its task until they are settled."""

    job: str
    state: State
    nbytes: int = 0
    """Bytes of all of them."""
    records: list[Record] = field(default_factory=list)
    """Their arrays, once the job's end is on record."""
    holder: str | None = None
    """Id of the worker whose device has them: no other can compute with them."""
    places: dict[str, Extent] = field(default_factory=dict)
    """Extents of the host arena that a worker was told to write them to, by the array's id, until it has."""
    readers: list[Pinned] = field(default_factory=list)
    """Pins of tasks that were sent to their device while they had no place: the worker finds them wherever it wrote
    them, should it need them from there."""
    ordered: bool = False
    """Whether a worker was told to write them, and has not answered."""
    sync_failures: int = 0
    """Times that the disk did not take them, up to a bound."""
    tainted: bool = False
    """Whether a process that was lost may still write to their place in the store."""
    error: ServiceError | None = None
    """Error for which they are lost for good."""
    trace: ProductTrace | None = None
    """Trace of the job, where its request was traced."""
    available: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once everybody can read them, or they are lost for good."""

    @property
    def readable(self) -> bool:
        """Whether everybody can read them, wherever they are."""
        return self.state in {State.HOST, State.STORED}


def lost(job: str, reason: str = "") -> ArrayLost:
    """Return the error for results that are lost for good."""
    reason = f": {reason}" if reason else ""
    return ArrayLost(
        f"a result of job {job} was lost with its device before it was written, and could not be computed again{reason}"
    )
