"""Link of one worker that joined: the messages of `protocol` over TCP, with the tasks that it has in the meantime."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from gemmserve_service.executor.join_protocol import (
    FROM_AGENT,
    INLINE_BYTES,
    MAX_GREETING_FRAME,
    PROTOCOL,
    Bytes,
    Join,
    JoinDecoder,
    Leave,
    Pulse,
    Rate,
    Refused,
    ResultBytes,
    WriteResult,
    binary_frame,
)
from gemmserve_service.executor.joined.assignments import Assignments, Elsewhere, Stale
from gemmserve_service.executor.joined.sent_operands import SentOperands
from gemmserve_service.executor.prompt_writes import PromptWriter
from gemmserve_service.executor.protocol import (
    Beat,
    Cancel,
    Compiling,
    Done,
    Drop,
    Failed,
    Hello,
    Kept,
    ProtocolError,
    RunBatch,
    Stop,
    Write,
    Written,
    encode,
)
from gemmserve_service.field_errors import message_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pydantic import BaseModel

    from gemmserve_service.executor.join_protocol import Frame
    from gemmserve_service.executor.joined.assignments import Assignment, File, Operand
    from gemmserve_service.executor.joined.door import Door
    from gemmserve_service.executor.joined.exchange import Exchange
    from gemmserve_service.executor.port import ToOne, Worker
    from gemmserve_service.executor.protocol import Forget

MAX_EXCHANGES: Final = 32
"""Data connections of one link."""
_MAX_FRAME: Final = 16 << 20  # of what a node says: answers of programs of a thousand steps are the longest
_MAX_INLINE: Final = 64  # operands of a task that are sent in frames of their own
_MAPPED: Final = 1 << 16  # bytes of a result from which on no mapping is made for it: smaller ones share a file

log = logging.getLogger(__name__)


class Link:
    """One connection that began as a link's. Before `joined` nothing of it is believed."""

    def __init__(self, executor: Door, transport: asyncio.Transport, address: str) -> None:
        self.address = address
        self.assignments = Assignments()
        self.join: Join | None = None
        self.secret = ""
        self.key_id = ""
        """Key by which it joined; "" where the server has none."""
        self.worker: Worker | None = None
        """Set by the executor when it joined; None again when it is over."""
        self.greeted = False
        """Whether its worker said hello."""
        self.leaves = False
        """Whether the node said that it ends."""
        self.heard = self.took = time.monotonic()
        """Times of its last sign of life, and since which it has taken what it was sent (time.monotonic)."""
        self._executor = executor
        self._transport = transport
        self._writer = PromptWriter(transport)
        self._decoder = JoinDecoder(MAX_GREETING_FRAME)
        self._result: WriteResult | None = None
        """Result of the binary frame whose bytes come."""
        self._exchanges: set[Exchange] = set()
        self._arrays: set[str] = set()
        """Arrays that it was sent tasks on, or was told to make: of no other it may say that it has a copy."""
        self._sent = SentOperands()
        self._paused = False
        self._over = False

    # -- what comes -------------------------------------------------------------------------------------------------

    def feed(self, data: memoryview) -> None:
        """Take in what came. The memory is the caller's again after this."""
        self.heard = time.monotonic()
        answered = False
        try:
            for frame in self._decoder.feed(data):
                if self._over:
                    return
                if self.join is None:
                    self._joins(frame)
                else:
                    answered |= self._takes_frame(frame)
        except (ProtocolError, ValidationError, ValueError) as error:
            text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            log.error("a node at %s speaks nonsense (%s): closing its link", self.address, text)  # noqa: TRY400
            self.end()
        except OSError as error:
            log.error("a result of the node at %s cannot be written: %s", self.address, error)  # noqa: TRY400
            self.end()
        finally:
            if answered and self._executor.owner is not None:
                self._executor.owner.answers_over()

    def _joins(self, frame: Frame) -> None:
        if frame.raw is not None:
            raise ProtocolError("a link that begins with bytes")
        body = frame.body
        try:
            fields = json.loads(body)
        except RecursionError:
            raise ProtocolError("a link that begins with JSON in too many brackets") from None
        if not isinstance(fields, dict) or fields.get("kind") != "join":
            raise ProtocolError("a link that does not begin with Join")
        if fields.get("protocol", PROTOCOL) != PROTOCOL:
            self.refuse(Refused(slug="protocol", detail=f"this server speaks version {PROTOCOL}"))
            return
        try:
            join = Join.model_validate_json(body)
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))
            slug = "name" if where == "name" else "malformed"
            self.refuse(Refused(slug=slug, detail=f"{where}: {message_of(problem, show=False)}"))
            return
        self._decoder.limit = _MAX_FRAME
        self.join = join
        self._executor.joins(self, join)

    def _takes_frame(self, frame: Frame) -> bool:
        """Take in a frame; True for an answer. Raises ProtocolError, ValueError for one that cannot be, OSError."""
        if frame.raw is None:
            return self._takes(FROM_AGENT.validate_json(frame.body))
        if not frame.at or self._result is None:  # all parts of a frame have its head
            self._result = _result_in(frame.body)
        if self.worker is None:
            return False
        if not self.greeted:
            raise ProtocolError("an answer before a hello")
        self.worker.heard = self.heard
        self._takes_bytes(self._result, frame, frame.raw)
        return False

    def _takes(self, message: BaseModel) -> bool:
        """Take in a message of JSON alone, likewise."""
        owner, worker = self._executor.owner, self.worker
        if isinstance(message, Done | Failed) and worker is not None and self.greeted:
            worker.heard = self.heard
            return self._takes_answer(message, worker)
        if isinstance(message, ResultBytes):
            raise ProtocolError("a result without bytes")
        if worker is None or isinstance(message, Pulse):  # of the agent, which says nothing of the worker
            return False
        if self.greeted:
            worker.heard = self.heard
        if isinstance(message, Leave):
            self.leaves = True
            self.end()
        elif isinstance(message, Hello):
            if message.worker != worker.id or self.greeted:
                raise ProtocolError("a hello of another worker than has joined, or a second one")
            self._executor.greets(self, message)
        elif isinstance(message, Rate):
            if worker.link is not None:
                worker.link.bytes_s = message.bytes_s
        elif isinstance(message, Beat) and not self.greeted:
            return False
        elif not self.greeted:
            raise ProtocolError("an answer before a hello")
        elif isinstance(message, Written):
            written_tasks = [task for task in message.tasks if self.assignments.complete(task)]
            lost = [task for task in message.tasks if self.assignments.has(task) and task not in written_tasks]
            lost += [task for task in message.lost if self.assignments.has(task)]
            self.assignments.over([*written_tasks, *lost])
            self._look()
            if owner is not None:
                owner.results_written(worker, Written(tasks=written_tasks, lost=lost))
        elif isinstance(message, Beat):
            worker.beat(message.task, message.progress)
            worker.prepares = message.prepares
            if message.task is not None and message.share > 0 and owner is not None:
                owner.task_progressed(worker, message.task, message.share)
            if message.health is not None:
                worker.health = message.health
        elif isinstance(message, Compiling):
            if owner is not None:
                owner.task_compiles(worker, message)
        elif isinstance(message, Kept):
            came = [array for array in message.came if array in self._arrays]
            worker.keeps(message)
            if owner is not None:
                owner.copies_changed(worker, message.model_copy(update={"came": came}))
        else:
            raise ProtocolError("a second Join")
        return False

    def _takes_answer(self, message: Done | Failed, worker: Worker) -> bool:
        if not self.assignments.waits_for(message.task):
            return False
        written = not isinstance(message, Done) or message.written
        if isinstance(message, Done) and written and not self.assignments.complete(message.task):
            # Its place holds what was there before: somebody else's bytes.
            raise ProtocolError(f"task {message.task} is said to be done, and its results have not come")
        self.assignments.answered(message.task, written=written)
        self._look()
        if self._executor.owner is None:
            return False
        self._executor.owner.task_ended(worker, message, more=True)
        return True

    def _takes_bytes(self, asked: WriteResult, frame: Frame, raw: memoryview) -> None:
        try:
            self.write(asked, frame.nbytes, frame.at, raw)
        except Stale:
            if frame.at + len(raw) == frame.nbytes:
                self.count_stale()  # Done follows, and finds nobody who waits for it
        except Elsewhere:
            raise ProtocolError("bytes of a result for another place than its own") from None

    # -- what is sent -----------------------------------------------------------------------------------------------

    def send(self, message: ToOne) -> None:
        """Send a message of the scheduler's, and what is needed to carry it out here."""
        pieces: list[bytes | memoryview] = []
        added: list[Assignment] = []
        if isinstance(message, RunBatch):
            for work in message.tasks:
                added.append(assignment := self.assignments.add(work))
                pieces += self._inline(assignment)
                self._arrays.update([row[4] for row in work.extents if row[4] is not None])
        elif isinstance(message, Write):
            self.assignments.placed(message)
        elif isinstance(message, Drop):
            self.assignments.unwanted(message.tasks)
        elif isinstance(message, Cancel):
            self.assignments.unwanted([message.task])
        self._write(*pieces, encode(message))  # together: the node is woken once
        for assignment in added:
            assignment.look_ahead()

    def forget(self, message: Forget) -> None:
        """Send that extents or arrays are gone."""
        self._arrays.difference_update(message.arrays)
        self.say(message)

    def _inline(self, assignment: Assignment) -> list[bytes | memoryview]:
        """Return frames, in pieces, with a task's operands where these are small and the node has not been sent them
        yet: it spares a round trip.
        """
        left = INLINE_BYTES
        found: list[Operand] = []
        for operand in assignment.operands():
            left -= operand.nbytes
            if left < 0 or len(found) >= _MAX_INLINE:
                return []
            if not self._sent.has(operand):
                found.append(operand)
        pieces: list[bytes | memoryview] = []
        try:
            for file, start, nbytes, _ in found:
                raw = self.memory(file)[start : start + nbytes]
                pieces += binary_frame(Bytes(extent=file.name, offset=start), raw)
        except (OSError, ValueError) as error:  # the node asks for them, and is told that they are gone
            log.error("small operands of task %s cannot be read: %s", assignment.work.task, error)  # noqa: TRY400
            return []
        for operand in found:
            self._sent.add(operand)
            self.count_fetched(operand.nbytes)
        return pieces

    def say(self, message: BaseModel) -> None:
        """Send one message."""
        self._write(encode(message))

    def _write(self, *pieces: bytes | memoryview) -> None:
        if not self._over:
            self._writer.write(*pieces)

    def refuse(self, refusal: Refused) -> None:
        """Say why it may not join, and close."""
        log.warning("a worker at %s may not join: %s", self.address, refusal.detail)
        self.say(refusal)
        self._executor.counts.refused += 1
        self._over = True
        self._transport.close()

    # -- its tasks --------------------------------------------------------------------------------------------------

    def write(self, asked: WriteResult, row: int, at: int, piece: memoryview) -> None:
        """Copy a piece of a result to its place: of the rows of `row` bytes each, what comes `at` bytes after their
        beginning. Raises Stale, Elsewhere, and has copied nothing then; OSError, ValueError.
        """
        file = self.assignments.writes(asked, row)
        self._count_returned(len(piece))
        by_file = asked.rows == 1 and row > _MAPPED
        while len(piece):
            number, column = divmod(at, row)
            count = min(row - column, len(piece))
            start = asked.offset + number * asked.stride + column
            self._executor.write(file, start, piece[:count], by_file=by_file)
            self.assignments.came(asked, start, start + count)
            piece = piece[count:]
            at += count

    def memory(self, file: File) -> memoryview:
        """Return the bytes of a file of the store. Raises OSError, ValueError."""
        return self._executor.memory(file)

    def soon(self, callback: Callable[[], None]) -> None:
        """Have something go on in the next turn of the event loop."""
        self._executor.soon(callback)

    # -- its data connections ---------------------------------------------------------------------------------------

    def enter(self, exchange: Exchange) -> bool:
        """Take in a data connection; False if there are too many."""
        if self._over or len(self._exchanges) >= MAX_EXCHANGES:
            return False
        self._exchanges.add(exchange)
        return True

    def leave(self, exchange: Exchange) -> None:
        """Note that a data connection has ended."""
        self._exchanges.discard(exchange)

    def _look(self) -> None:
        for exchange in list(self._exchanges):
            exchange.look()

    # -- counts -----------------------------------------------------------------------------------------------------

    def count_fetched(self, nbytes: int) -> None:
        """Count bytes of operands."""
        self._executor.counts.fetched_bytes += nbytes
        if self.worker is not None and self.worker.link is not None:
            self.worker.link.fetched_bytes += nbytes

    def _count_returned(self, nbytes: int) -> None:
        self._executor.counts.returned_bytes += nbytes
        if self.worker is not None and self.worker.link is not None:
            self.worker.link.returned_bytes += nbytes

    def count_stale(self) -> None:
        """Count a result that was refused."""
        self._executor.counts.stale_results += 1
        if self.worker is not None and self.worker.link is not None:
            self.worker.link.stale_results += 1

    # -- its end ----------------------------------------------------------------------------------------------------

    def paused(self, paused: bool) -> None:
        """Note that the transport has enough, or takes more."""
        if paused != self._paused:
            self.took = time.monotonic()
        self._paused = paused

    @property
    def stuck_since(self) -> float | None:
        """Time since which the node has not taken what it was sent (time.monotonic); None: it has."""
        return self.took if self._paused else None

    def end(self, last: Stop | None = None) -> None:
        """End it: from this moment on nothing that the node sends is taken."""
        if last is not None:
            self.say(last)
        if self._over and self.worker is None:
            self._transport.close()
            return
        self._over = True
        self.assignments.clear()
        for exchange in list(self._exchanges):
            exchange.link_ended()
        self._executor.disconnected(self)
        if last is not None:
            self._transport.close()
        else:
            self._transport.abort()

    def lost(self) -> None:
        """Note that the connection is gone."""
        self.end()


def _result_in(head: bytes) -> WriteResult:
    """Return what the head of a binary frame asks for. Raises ProtocolError, ValueError for one of anything else."""
    message = FROM_AGENT.validate_json(head)
    if not isinstance(message, ResultBytes):
        raise ProtocolError("bytes behind a message that has none")
    return WriteResult(message.task, message.attempt, message.extent, message.offset)
