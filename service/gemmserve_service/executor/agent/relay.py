"""Tasks of one link on their way through a node: operands are brought, the task is passed on to the worker, results are
taken to the front, and then the answer.

Tasks are passed on in the order in which they came, express ones before the others; operands of those that wait are
brought meanwhile. Answers leave in the order in which the worker gave them, in each of the two kinds. What needs no
bytes passes within one turn of the event loop.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import JobCancelled, describe
from gemmserve_service.executor.agent.exchanges import PIECE, ExchangeError
from gemmserve_service.executor.agent.rows import node_row, node_rows, on_node, result_bytes, uses_of
from gemmserve_service.executor.agent.texts import Finished, Sent, frame_with
from gemmserve_service.executor.join_protocol import (
    INLINE_BYTES,
    RESULT_BYTES,
    ReadExtent,
    WriteResult,
    result_frame,
)
from gemmserve_service.executor.protocol import (
    Beat,
    Cancel,
    Done,
    Drop,
    Failed,
    Forget,
    RunBatch,
    Write,
    Written,
    encode,
    frame_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Protocol

    from pydantic import BaseModel

    from gemmserve_service.executor.agent.child import FromWorker
    from gemmserve_service.executor.agent.exchanges import Exchanges, Transfer
    from gemmserve_service.executor.agent.node_memory import Copy, NodeMemory
    from gemmserve_service.executor.agent.rows import Use
    from gemmserve_service.executor.protocol import ExtentRow, Work
    from gemmserve_service.store.extents.extents import Extent

    class Sender(Protocol):
        """The worker's connection."""

        def send(self, *messages: BaseModel | RunBatch | bytes) -> None: ...

    class Front(Protocol):
        """The link."""

        @property
        def waiting_bytes(self) -> int: ...

        def send(self, *messages: BaseModel | bytes | memoryview) -> None: ...


log = logging.getLogger(__name__)

Run = tuple[str, int, memoryview]
"""Run of bytes of a result: extent at the front, offset in its file, and the bytes."""

_STEP: Final = 1 << 16
"""Bytes by which a transfer counts as one part of a task that is done."""


@dataclass(eq=False, slots=True)
class _Task:
    work: Work
    group: int
    """Number of the message that it came in."""
    uses: list[Use | None]
    tail: bytes | None
    """Its text after the extents, where that can go to the worker as it came."""
    extents: dict[int, Extent] = field(default_factory=dict)
    """Node's extents by the number of the row."""
    own: dict[int, Extent] = field(default_factory=dict)
    """Those of them that are this task's alone."""
    copies: list[Copy] = field(default_factory=list)
    awaited: set[Copy] = field(default_factory=set)
    """Copies whose bytes are still to come."""
    transfer: Transfer | None = None
    """Transfer of operands that are its own, or of its results."""
    admitted: bool = False
    """Whether it has its memory."""
    passed: bool = False
    """Whether the worker has it."""
    answered: bool = False
    """Whether the worker has answered it, or it was answered in the worker's stead."""
    made: bool = False
    """Whether its results are made."""
    told: bool = False
    """Whether its answer may go to the front."""
    results: list[bytes | memoryview] | None = None
    """Frames with its results, in pieces, where the link may take these itself: made while the worker computes."""
    nbytes: int = 0
    """Bytes of these results."""
    frames: list[bytes | memoryview] = field(default_factory=list)
    """Frames for the front, in pieces: small results, and the answer."""
    refused: int = 0
    """Times that the front refused bytes of its operands."""
    bare: list[str] = field(default_factory=list)
    """Operands that were on the device alone when it came."""

    @property
    def ready(self) -> bool:
        """Whether it can be passed on."""
        return self.admitted and not self.awaited and self.transfer is None


@dataclass(eq=False, slots=True)
class _Deferred:
    """Results of a task that are on the device alone."""

    task: str
    attempt: int
    nbytes: dict[str, int]
    """Bytes by array."""
    places: dict[str, ExtentRow] | None = None
    """Rows of the front's that they are wanted in; None: the front has not said it yet."""
    extents: dict[str, Extent] = field(default_factory=dict)
    transfer: Transfer | None = None
    dropped: bool = False


class Relay:
    """Everything that is under way between one link and one connection of the worker."""

    def __init__(
        self,
        front: Front,
        worker: Sender,
        memory: NodeMemory,
        fetches: Exchanges,
        uploads: Exchanges,
        fail: Callable[[Exception], None],
        *,
        inline_bytes: int = RESULT_BYTES,
    ) -> None:
        """`fail(error)` ends the link. `inline_bytes`: results of a task up to so many go by the link itself."""
        self._front = front
        self._worker = worker
        self._memory = memory
        self._fetches = fetches
        self._uploads = uploads
        self._fail = fail
        self._inline_bytes = min(inline_bytes, RESULT_BYTES)
        self._waiting: tuple[deque[_Task], deque[_Task]] = deque(), deque()
        """Tasks that the worker has not been given: express ones, and others."""
        self._tasks: dict[str, _Task] = {}
        self._answers: tuple[deque[_Task], deque[_Task]] = deque(), deque()
        """Tasks that the worker has answered, of which the front has not heard, likewise."""
        self._arriving: dict[Copy, Transfer] = {}
        self._deferred: dict[str, _Deferred] = {}
        self._bytes: list[tuple[str, int, bytes]] = []
        """Bytes of operands of the tasks in the next message: extent, offset in its file, and they."""
        self._groups = 0
        self._draining: Callable[[], None] | None = None
        self._ended = False

    # -- from the front ---------------------------------------------------------------------------------------------

    def bytes_came(self, extent: str, offset: int, raw: bytes) -> None:
        """Take bytes of an operand of the tasks in the next message."""
        self._bytes.append((extent, offset, raw))

    def front_said(self, message: RunBatch | Cancel | Forget | Write | Drop) -> None:
        """Take a message of the front's. Raises ProtocolError for a task that makes no sense."""
        if isinstance(message, RunBatch):
            self.tasks_came([Sent(work, uses_of(work)) for work in message.tasks])
        elif isinstance(message, Cancel):
            self._cancel(message)
        elif isinstance(message, Forget):
            self._memory.forget(message.arrays)
            if message.arrays or message.parents:
                self._worker.send(Forget(arrays=message.arrays, parents=message.parents))
        elif isinstance(message, Write):
            self._write(message)
        elif isinstance(message, Drop):
            self._drop(message)

    def tasks_came(self, tasks: list[Sent]) -> None:
        """Take the tasks of one message."""
        self._groups += 1
        for sent in tasks:
            self._begin(sent)
        self._pump()
        self._bytes.clear()

    def _begin(self, sent: Sent) -> None:
        work, uses = sent.work, sent.uses
        task = _Task(work, self._groups, uses, sent.tail)
        task.bare = [use.array for use in uses if use is not None and use.placeless and use.reads and use.array]
        if task.bare:
            self._memory.reads(task.bare)
        self._tasks[work.task] = task
        self._waiting[not work.express].append(task)

    def _cancel(self, message: Cancel) -> None:
        task = self._tasks.get(message.task)
        if task is None:
            return
        if task.passed and not task.answered:
            self._worker.send(message)
            return
        if not task.passed:
            self._waiting[not task.work.express].remove(task)
            self._answers[not task.work.express].append(task)
        if not task.told:
            self._refuse(task)

    def extent_gone(self, extent: str) -> None:
        """Have the worker drop its mapping of an extent of the node's that is gone."""
        self._worker.send(Forget(extents=[extent]))

    # -- operands ---------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Bring operands of the tasks that wait, as far as there is memory for them, and pass on what has all of it."""
        if self._ended:
            return
        room = True
        for lane in self._waiting:
            for task in lane:
                if not task.admitted and room:
                    room = self._admit(task)
        if self._draining is not None:
            return
        for lane in self._waiting:
            ready: list[_Task] = []
            while lane and lane[0].ready:
                if ready and lane[0].group != ready[0].group:
                    self._pass(ready)
                    ready = []
                ready.append(lane.popleft())
            if ready:
                self._pass(ready)

    def _admit(self, task: _Task) -> bool:
        """Give a task its memory, and begin to bring its operands; False: it has to wait."""
        sizes = []
        for use in task.uses:
            if use is None or use.placeless:
                continue
            if use.shared and use.array is not None and self._memory.find(use.array, use.end) is not None:
                continue
            sizes.append(use.nbytes)
        if sizes and not self._memory.room_for(sizes):
            return False
        task.admitted = True
        pieces: list[tuple[str, memoryview]] = []
        for number, use in enumerate(task.uses):
            if use is None or use.placeless:
                continue
            if use.shared and use.array is not None:
                copy, new = self._memory.hold(use.array, use.end)
                task.copies.append(copy)
                task.extents[number] = copy.extent
                if new:
                    self._bring(copy, use, task)
                elif not copy.whole:
                    task.awaited.add(copy)
                continue
            extent = task.extents[number] = self._memory.take(use.nbytes)
            task.own[number] = extent
            if use.reads:
                pieces += self._missing(use, extent.view(use.nbytes))
        if pieces:
            self._track(task, pieces)
        return True

    def _bring(self, copy: Copy, use: Use, task: _Task) -> None:
        pieces = self._missing(use, copy.extent.view(copy.nbytes))
        if not pieces:
            copy.whole = True
            return
        task.awaited.add(copy)

        def done(error: Exception | None) -> None:
            self._arriving.pop(copy, None)
            if error is None:
                copy.whole = True
            for each in [each for each in self._tasks.values() if copy in each.awaited]:
                each.awaited.discard(copy)
                if error is not None:
                    self._withdraw(each)
            self._pump()

        self._arriving[copy] = self._fetches.fetch(pieces, done, urgency=int(not task.work.express))

    def _track(self, task: _Task, pieces: list[tuple[str, memoryview]]) -> None:
        def done(error: Exception | None) -> None:
            task.transfer = None
            if error is not None:
                self._withdraw(task)
            self._pump()

        task.transfer = self._fetches.fetch(pieces, done, urgency=int(not task.work.express))

    def _withdraw(self, task: _Task) -> None:
        """Let go of all that a task has, because the front refused some of it: what was asked for on behalf of another
        task, which is over now, it asks for itself. More than once is a fault of the front's, and ends the link.
        """
        task.refused += 1
        if task.refused > 1:
            self._fail(ExchangeError(f"the front refuses operands of task {task.work.task}"))
            return
        self._give_back(task)
        task.admitted = False

    def _missing(self, use: Use, target: memoryview) -> list[tuple[str, memoryview]]:
        """Put bytes that came with the message in their place; return the exchanges that bring the others."""
        name, start = use.row[0], use.row[3]
        first = use.first
        came = [(offset - start, raw) for extent, offset, raw in self._bytes if extent == name]
        pieces: list[tuple[str, memoryview]] = []
        for begin, end in use.reads:
            position = begin
            for offset, raw in sorted((each for each in came), key=lambda each: each[0]):
                low, high = max(position, offset), min(end, offset + len(raw))
                if low >= high:
                    continue
                if low > position:
                    pieces += _exchanges(name, start, position, low, target, first)
                target[low - first : high - first] = memoryview(raw)[low - offset : high - offset]
                position = high
            if position < end:
                pieces += _exchanges(name, start, position, end, target, first)
        return pieces

    def _pass(self, tasks: list[_Task]) -> None:
        for task in tasks:
            task.passed = True
        first = tasks[0]
        if len(tasks) == 1 and first.tail is not None:
            self._worker.send(frame_with(first.tail, first.work.task, node_rows(first.work, first.extents)))
        else:
            self._worker.send(RunBatch(tasks=[on_node(task.work, task.uses, task.extents) for task in tasks]))
        for task in tasks:
            runs = self._runs(task)
            task.nbytes = _bytes_of(runs)
            if task.nbytes <= self._inline_bytes:
                task.results = _frames(task.work.task, task.work.attempt, runs)

    # -- from the worker --------------------------------------------------------------------------------------------

    def worker_said(self, message: FromWorker, body: bytes) -> None:
        """Take a message of the worker's, of which `body` is the JSON."""
        if isinstance(message, Finished):
            self._answered(message.task, frame_of(body), made=True, written=True)
        elif isinstance(message, Done):
            self._answered(message.task, frame_of(body), made=True, written=message.written)
        elif isinstance(message, Failed):
            self._answered(message.task, frame_of(body), made=False, written=True)
        elif isinstance(message, Written):
            self._written(message)
        elif isinstance(message, Beat):
            self._front.send(self._with_progress(message))
        else:
            self._front.send(frame_of(body))

    def _answered(self, name: str, frame: bytes, *, made: bool, written: bool) -> None:
        task = self._tasks.get(name)
        if task is None or not task.passed or task.answered:
            log.warning("the worker answered task %s, which it does not have", name)
            return
        task.answered, task.made = True, made
        self._answers[not task.work.express].append(task)
        if made:
            if not written:
                self._deferred[name] = _Deferred(name, task.work.attempt, result_bytes(task.work))
            if task.results is None or not self._goes_inline(task.nbytes):
                self._upload(task, self._runs(task), frame)
                return
            task.frames, task.results = task.results, None
        task.frames.append(frame)
        self._end(task)

    def _goes_inline(self, nbytes: int) -> bool:
        """Whether results of so many bytes go by the link itself: small ones always, larger ones unless it has not
        taken what it was given before, which would wait in this process's memory, and keep others waiting.
        """
        return nbytes <= self._inline_bytes and (nbytes <= INLINE_BYTES or not self._front.waiting_bytes)

    def _end(self, task: _Task) -> None:
        """Let the answer go, and the task's memory with it."""
        task.told = True
        for lane in self._answers:
            while lane and lane[0].told:
                ended = lane.popleft()
                self._front.send(*ended.frames)
                ended.frames = []
                del self._tasks[ended.work.task]
        if task.frames:  # behind an earlier answer; its memory is somebody else's from here on
            task.frames = [b"".join(task.frames)]
        self._release(task)
        self._pump()
        self._look_if_drained()

    def _refuse(self, task: _Task) -> None:
        """Answer a task that nobody wants, in the worker's stead."""
        found = describe(JobCancelled("the job was cancelled"))
        answer = Failed(
            task=task.work.task, slug=found.slug, status=found.status, title=found.title, detail=found.detail
        )
        task.answered, task.made = True, False
        task.frames = [encode(answer)]
        self._end(task)

    def _release(self, task: _Task) -> None:
        """Give back all that a task has, which is over."""
        self._give_back(task)
        if task.bare:
            self._memory.read(task.bare)
            task.bare = []

    def _give_back(self, task: _Task) -> None:
        """Give back what a task has of the node's memory. What it made is kept, if it is a large array."""
        if task.transfer is not None:
            self._fetches.drop(task.transfer)
            self._uploads.drop(task.transfer)
            task.transfer = None
        task.results = None
        for copy in task.copies:
            if copy.users == 1 and (transfer := self._arriving.pop(copy, None)) is not None:
                self._fetches.drop(transfer)
            self._memory.release(copy)
        for number, extent in task.own.items():
            use = task.uses[number]
            if task.made and use is not None and use.array is not None and _worth_keeping(use):
                self._memory.keep(use.array, extent, use.end)
            else:
                self._memory.give(extent)
        task.copies, task.own = [], {}
        task.extents, task.awaited = {}, set()

    def _runs(self, task: _Task) -> list[Run]:
        """Return the runs of bytes that it wrote."""
        runs = []
        for number, use in enumerate(task.uses):
            if use is None or use.placeless or not use.writes:
                continue
            view = task.extents[number].view(use.nbytes)
            first = use.first
            runs += [(use.row[0], use.row[3] + low, view[low - first : high - first]) for low, high in use.writes]
        return runs

    def _upload(self, task: _Task, runs: list[Run], frame: bytes) -> None:
        def done(error: Exception | None) -> None:
            task.transfer = None
            if error is None:
                task.frames.append(frame)
                self._end(task)
            else:
                log.info("the front does not want the result of task %s any more", task.work.task)
                self._refuse(task)

        pieces = _uploads(task.work.task, task.work.attempt, runs)
        task.transfer = self._uploads.send(pieces, done, urgency=int(not task.work.express))

    def _with_progress(self, beat: Beat) -> Beat:
        """Return the beat, which speaks of the oldest task's transfers where the worker has nothing to do."""
        oldest = next(iter(self._tasks), None)
        if beat.task is not None or oldest is None:
            return beat
        return beat.model_copy(
            update={"task": oldest, "progress": (self._fetches.moved + self._uploads.moved) // _STEP}
        )

    # -- results that stay on the device ------------------------------------------------------------------------------

    def _write(self, message: Write) -> None:
        entry = self._deferred.get(message.task)
        if entry is None or entry.transfer is not None:
            return  # dropped, or on their way already
        if entry.places is None:
            entry.places = message.places
            entry.extents = {array: self._memory.take(entry.nbytes[array]) for array in message.places}
        rows = {array: node_row(extent, entry.places[array][4]) for array, extent in entry.extents.items()}
        self._worker.send(Write(task=message.task, places=rows, urgent=message.urgent))

    def _drop(self, message: Drop) -> None:
        passed_on = []
        for task in message.tasks:
            entry = self._deferred.get(task)
            if entry is not None and entry.transfer is not None:
                self._uploads.drop(entry.transfer)
                self._settle(entry, keep=False)
                self._front.send(Written(tasks=[task]))
                continue
            if entry is not None:
                entry.dropped = True
            passed_on.append(task)
        if passed_on:
            self._worker.send(Drop(tasks=passed_on))

    def _written(self, message: Written) -> None:
        settled = []
        for task in (*message.tasks, *message.lost):
            entry = self._deferred.get(task)
            if entry is None or entry.dropped or not entry.extents or task in message.lost:
                if entry is not None:
                    self._settle(entry, keep=False)
                if task not in message.lost:
                    settled.append(task)
            else:
                self._deliver(entry)
        if settled or message.lost:
            self._front.send(Written(tasks=settled, lost=message.lost))

    def _deliver(self, entry: _Deferred) -> None:
        """Take results, which are in the node's memory now, to the front."""
        assert entry.places is not None
        runs = []
        for array, extent in entry.extents.items():
            name, _, _, start, _ = entry.places[array]
            nbytes = entry.nbytes[array]
            runs.append((name, start, extent.view(nbytes)))

        def done(error: Exception | None) -> None:
            self._settle(entry, keep=error is None)
            self._front.send(Written(tasks=[entry.task]))

        if self._goes_inline(_bytes_of(runs)):
            self._front.send(*_frames(entry.task, entry.attempt, runs))
            del runs
            done(None)
            return
        entry.transfer = self._uploads.send(_uploads(entry.task, entry.attempt, runs), done, urgency=1)

    def _settle(self, entry: _Deferred, *, keep: bool) -> None:
        """Forget deferred results; the node's copies of them are kept where they are arrays of the store now."""
        self._deferred.pop(entry.task, None)
        for array, extent in entry.extents.items():
            if keep:
                self._memory.keep(array, extent, entry.nbytes[array])
            else:
                self._memory.give(extent)
        entry.extents = {}
        self._pump()
        self._look_if_drained()

    # -- ends -------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether the worker has a task, or a result is on its way."""
        return any(task.passed for task in self._tasks.values()) or any(
            entry.places is not None for entry in self._deferred.values()
        )

    def drain(self, drained: Callable[[], None]) -> None:
        """Pass on no task any more; call `drained` once the worker has none, and what it wrote is at the front."""
        self._draining = drained
        self._look_if_drained()

    def _look_if_drained(self) -> None:
        if self._draining is not None and not self.busy:
            drained, self._draining = self._draining, _nothing
            drained()

    def end(self) -> None:
        """The link is over, nothing moves any more, and the worker has let go of all: give back all memory."""
        self._ended = True
        for task in list(self._tasks.values()):
            task.made = False
            self._release(task)
        for entry in list(self._deferred.values()):
            self._settle(entry, keep=False)
        self._tasks.clear()
        self._memory.forget_made()


def _nothing() -> None:
    """Callback that tells nobody: whoever waited for the drain has been told."""


def _exchanges(
    name: str, start: int, low: int, high: int, target: memoryview, first: int
) -> list[tuple[str, memoryview]]:
    """Return the exchanges that bring bytes `low` to `high` of a row that begins at `start` of its file."""
    return [
        (ReadExtent(name, start + at, min(PIECE, high - at)).target, target[at - first : min(at + PIECE, high) - first])
        for at in range(low, high, PIECE)
    ]


def _uploads(task: str, attempt: int, runs: Iterable[Run]) -> list[tuple[str, memoryview]]:
    return [
        (WriteResult(task, attempt, extent, offset + at).target, body[at : at + PIECE])
        for extent, offset, body in runs
        for at in range(0, len(body), PIECE)
    ]


def _worth_keeping(use: Use) -> bool:
    """Whether a result is an array that would not come again with a task's message, as small ones do."""
    return use.array is not None and not use.reads and use.writes == [(0, use.end)] and use.end > INLINE_BYTES


def _bytes_of(runs: Iterable[Run]) -> int:
    return sum(len(body) for _, _, body in runs)


def _frames(task: str, attempt: int, runs: Iterable[Run]) -> list[bytes | memoryview]:
    frames: list[bytes | memoryview] = []
    for extent, offset, body in runs:
        frames += result_frame(task, attempt, extent, offset, body)
    return frames
