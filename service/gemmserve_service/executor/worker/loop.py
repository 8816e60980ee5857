"""A worker's conversation with the front: tasks and answers, word of cancellations, a heartbeat.

Where tasks run one at a time, the socket is looked at between panels; where several run at once, in threads of their
own, all the time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypeGuard

from gemmserve_service.executor.protocol import (
    TO_WORKER,
    Beat,
    Cancel,
    Compiling,
    Decoder,
    Deliver,
    Delivered,
    Done,
    Drop,
    Forget,
    Hello,
    Kept,
    RunBatch,
    Stop,
    Write,
    Written,
    encode,
)
from gemmserve_service.executor.worker.health.monitor import Monitor
from gemmserve_service.executor.worker.overlap.overlap import Overlap
from gemmserve_service.executor.worker.overlap.staged import OverlappingBackend

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel

    from gemmserve_service.executor.protocol import Failed, Work
    from gemmserve_service.executor.worker.backend import DeviceBackend
    from gemmserve_service.executor.worker.cuda.idleness import Idleness
    from gemmserve_service.executor.worker.memory.deliveries import Deliveries
    from gemmserve_service.executor.worker.memory.residency import Account
    from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
    from gemmserve_service.executor.worker.runner import Runner
    from gemmserve_service.schemas import DeviceHealth

Message = RunBatch | Forget | Write | Drop | Deliver | Stop
_RETRY_S: Final = 0.05
_PIECE: Final = 1 << 16
_BEATS: Final = 6  # in the time after which a silent worker is taken for hung
_MAX_BEAT_S: Final = 1.0  # readiness tells by them within seconds that a task does not get on
_LOOK_S: Final = 1e-3  # a call of the system costs up to a hundredth of that
_ACCOUNT_S: Final = 0.1
"""Seconds between two accounts of the device's copies that only say how often they were used: each costs as much as the
rest of an answer."""
_QUIET_MS: Final = 5
"""Milliseconds without a message after which the account is sent that an answer went without."""
_MAX_HOLD_S: Final = 1e-3  # for which an answer waits for those of the tasks behind it, so that they go as one
_AHEAD: Final = 3
"""Messages of tasks that a worker is sent before it is idle: one in each stage, and one that waits."""
BROKEN_CONTEXT: Final = 70
"""Exit status (EX_SOFTWARE) of a worker whose device context cannot be used any more."""

log = logging.getLogger(__name__)


def serve(path: Path, name: str, runner: Runner, verified_error: float, heartbeat_timeout_s: float) -> None:
    """Serves front after front: when one dies the worker keeps its context and connects to the next.

    Ends only by the supervisor's pipe or by a broken device context.
    """
    backend = runner.backend
    write_queue = _write_queue(backend)
    monitor = Monitor(getattr(backend, "open_probe", None))
    monitor.begin()
    beat_s = min(heartbeat_timeout_s / _BEATS, _MAX_BEAT_S)
    while True:
        with _connect(path) as connection:
            hello = Hello(
                worker=name,
                pid=os.getpid(),
                spec=backend.spec_fields(),
                verified_error=verified_error,
                memory_used=backend.memory_used(),
                interleaves=backend.cuts,
                ahead=_AHEAD if _overlaps(backend) else 0,
                express=_overlaps(backend),
                result_bytes=0 if write_queue is None else write_queue.offered,
                delivers=_deliveries(backend) is not None,
                planned_bytes=backend.planned_bytes,
            )
            try:
                connection.sendall(encode(hello))
                _converse(connection, runner, beat_s, monitor)
            except OSError as error:
                log.info("the connection to the front broke: %s", error)
        time.sleep(_RETRY_S)


def _connect(path: Path) -> socket.socket:
    """Waits for a front; the listening socket belongs to the supervisor, so this blocks only while none accepts."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            time.sleep(_RETRY_S)
        else:
            return connection


class _Held:
    """Answers of tasks of one message that the thread `thread` computes, until they are sent."""

    def __init__(self, thread: int, came: float) -> None:
        self.thread = thread
        self.began = self.since = came
        """Time at which the task that runs was begun, and at which the first of these was answered."""
        self.answers: list[Done | Failed] = []
        self._came = came

    def add(self, answer: Done | Failed) -> None:
        """Hold an answer, which says for how long others of the message were before it."""
        if not self.answers:
            self.since = time.perf_counter()
        if isinstance(answer, Done):
            answer.timings.queue_s += self.began - self._came
        self.answers.append(answer)

    def take(self) -> list[Done | Failed]:
        """Return what is held, and hold nothing."""
        taken, self.answers = self.answers, []
        return taken


class _State(NamedTuple):
    """State of the device's copies."""

    account: Account
    unwritten: int
    memory_used: int


def _kept(state: _State, came: list[str], went: list[str]) -> Kept:
    account = state.account
    return Kept(
        came=came,
        went=went,
        used=account.used,
        budget=account.budget,
        hits=account.hits,
        misses=account.misses,
        evictions=account.evictions,
        unwritten=state.unwritten,
        memory_used=state.memory_used,
    )


class _Line:
    """The connection, read by the task's own thread and written by the heartbeat's too."""

    def __init__(self, connection: socket.socket, runner: Runner) -> None:
        self._connection = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._runner = runner
        self._decoder = Decoder()
        self._pending: deque[Message] = deque()
        self._prompt: deque[RunBatch] = deque()
        """Messages of tasks that go between those of others."""
        self._sending = threading.Lock()
        self._passing = False
        self._held: _Held | None = None
        """Answers that this thread holds, while it is starting a task or settles."""
        self._begun_at = 0.0
        """Time at which the first product was begun that `overlap` is to settle (time.perf_counter)."""
        self._looked = 0.0
        backend = runner.backend
        self.overlap = Overlap(runner, backend, self._answer, self._compiles) if _overlaps(backend) else None
        """Runner of the tasks, where several run at once."""
        self.write_queue = _write_queue(backend)
        """Results that are to be written later, where there are such."""
        self._idleness: Idleness | None = getattr(backend, "idleness", None)
        if self._idleness is not None:
            self._idleness.follow(lambda: self.at[0] is not None)
        if (warm_up := getattr(backend, "warm_up", None)) is not None:
            warm_up.begin()
        self._account: _State | None = None
        """The account that the front was sent last."""
        self._account_sent = 0.0
        self._owes_account = False
        """Whether an answer went without it."""
        self.deliveries = _deliveries(backend)
        """Arrays that go straight to clients, where the device can do that."""
        if self.deliveries is not None:
            self.deliveries.begin(self._delivered, self._check_device)
        if self.write_queue is not None:
            self.write_queue.begin(self._settled, runner.place)
            self._account = self._state(self.write_queue)
            self.send(_kept(self._account, self.write_queue.resident.arrays(), []))

    @property
    def at(self) -> tuple[str | None, int]:
        """The task that runs, and its progress."""
        return (self._runner.task, self._runner.progress) if self.overlap is None else self.overlap.at

    def share_of(self, task: str | None) -> float:
        """Return the share of a task that is done, 0 to 1, as far as is known."""
        return self._runner.share_of(task)

    def send(self, *messages: BaseModel, prompt: bool = False) -> None:
        """Whole frames; before them what there is to tell of the device's copies. `prompt`: somebody waits for these,
        and copies that came or went are told of later.
        """
        with self._sending:
            if self.write_queue is not None and self._account is not None:
                now = time.monotonic()
                due = now - self._account_sent >= _ACCOUNT_S
                if prompt and not due and self.write_queue.nbytes == self._account.unwritten:
                    self._owes_account = True
                elif (kept := self._news(self.write_queue, now, due=due)) is not None:
                    messages = (kept, *messages)
            if messages:
                self._connection.sendall(b"".join(map(encode, messages)))

    def _news(self, write_queue: WriteQueue, now: float, *, due: bool) -> Kept | None:
        """Return the account of the device's copies, if there is anything new in it; it counts as sent."""
        self._owes_account = False
        came, went = write_queue.resident.news()
        moved = came or went or self._account is None or write_queue.nbytes != self._account.unwritten
        if not (due or moved):
            return None
        self._account_sent = now
        state = self._state(write_queue)
        if not (came or went) and state == self._account:
            return None
        self._account = state
        return _kept(state, came, went)

    def receive(self) -> Message | None:
        """The next message; None once the front is gone."""
        while not (self._pending or self._prompt):
            if self.overlap is not None and self.overlap.begun:
                held_s = time.perf_counter() - self._begun_at
                if (held_s > _MAX_HOLD_S or not self._readable.poll(0)) and self._settle(self.overlap):
                    continue
            # Who waits within recv() of a Unix socket is woken, too, when the other end has read an answer.
            if not self._readable.poll(_QUIET_MS if self._owes_account else None):
                self.send()
            elif not self._take():
                return None
        return self._prompt.popleft() if self._prompt else self._pending.popleft()

    def look(self) -> None:
        """Takes in what has come meanwhile, and lets short tasks pass. Raises ConnectionError if the front is gone.

        Not more often than every `_LOOK_S`: panels of small products are shorter than a look takes.
        """
        now = time.perf_counter()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        self._poll()
        while self._pending and not self._passing and not isinstance(self._pending[0], Stop):
            self._passing = True  # one of them lets no other pass
            try:
                self.handle(self._pending.popleft())
            finally:
                self._passing = False
            self._poll()

    def handle(self, message: Message) -> bool:
        """Execute a message; return False if it says to stop."""
        if isinstance(message, RunBatch):
            self._worked()
            if self.overlap is not None:
                self._start_all(self.overlap, message.tasks)
            elif len(message.tasks) == 1:
                self.send(self._run(message.tasks[0]))
            else:
                self._run_group(message.tasks)
        elif isinstance(message, Forget):
            self._runner.forget(message.extents, message.arrays, message.parents)
        elif isinstance(message, Write) and self.write_queue is not None:
            self.write_queue.write(message.task, message.places, urgent=message.urgent)
        elif isinstance(message, Drop) and self.write_queue is not None:
            self.write_queue.drop(self._dropped(message))
        elif isinstance(message, Deliver) and self.deliveries is not None:
            self.deliveries.put(message)
        return not isinstance(message, Stop)

    def _dropped(self, message: Drop) -> list[str]:
        """Return the tasks of a message, and of those like it that have come behind it: they are settled together."""
        tasks = list(message.tasks)
        while self._pending and isinstance(following := self._pending[0], Drop):
            self._pending.popleft()
            tasks += following.tasks
        return tasks

    def _run(self, work: Work) -> Done | Failed:
        return self._sound(self._runner.run(work))

    def _start_all(self, overlap: Overlap, works: list[Work]) -> None:
        """Start tasks, and after each a prompt message that has come meanwhile: one, so that neither waits for all of
        the other. Answers of those that this thread computes itself meanwhile go together.
        """
        began = time.perf_counter()
        if not overlap.begun:
            self._begun_at = began
        held = _Held(threading.get_ident(), began)
        try:
            for work in works:
                self._start(overlap, work, held)
                self._let_pass(overlap)
        finally:
            self._held = None
            self._send_answers(held.take(), prompt=True)

    def _let_pass(self, overlap: Overlap) -> None:
        """Start the tasks of the first prompt message, if there is one, and answer those that this thread computes."""
        if self._readable.poll(0):
            with contextlib.suppress(BlockingIOError):
                while self._take(socket.MSG_DONTWAIT):
                    pass
        if not self._prompt:
            return
        held = _Held(threading.get_ident(), time.perf_counter())
        for work in self._prompt.popleft().tasks:
            self._start(overlap, work, held)
        self._send_answers(held.take(), prompt=True)

    def _start(self, overlap: Overlap, work: Work, held: _Held) -> None:
        """Start a task. Its answer is held, if this thread computes it itself."""
        held.began = time.perf_counter()
        self._held = held
        count = len(held.answers)
        overlap.start(work)
        self._held = None
        now = time.perf_counter()
        if len(held.answers) == count or now - held.since > _MAX_HOLD_S:
            self._send_answers(held.take(), prompt=True)
        if overlap.begun and now - self._begun_at > _MAX_HOLD_S:
            self._settle(overlap, wait=False)

    def _settle(self, overlap: Overlap, *, wait: bool = True) -> bool:
        """Answer products that are over, together; where this is to `wait`, at least one. False: there was none, or
        another thread will.
        """
        held = self._held = _Held(threading.get_ident(), time.perf_counter())
        try:
            return overlap.settle(wait=wait)
        finally:
            self._held = None
            self._send_answers(held.take(), prompt=True)
            self._begun_at = time.perf_counter()

    def _answer(self, answer: Done | Failed) -> None:
        """Called by `overlap`, in a thread of its own or while it is given a task."""
        self._worked()
        answer = self._sound(answer)
        held = self._held
        if held is not None and held.thread == threading.get_ident():
            held.add(answer)
        else:
            self._send_answers([answer])

    def _send_answers(self, answers: list[Done | Failed], *, prompt: bool = False) -> None:
        try:
            if answers:
                self.send(*answers, prompt=prompt)
        except OSError:
            log.info("nobody is there any more for the answers of %d tasks, %s first", len(answers), answers[0].task)

    def _worked(self) -> None:
        """Note that a task came or is answered."""
        if self._idleness is not None:
            self._idleness.worked()

    @property
    def prepares(self) -> bool:
        """Whether kernels of likely products are still being loaded ahead."""
        warm_up = getattr(self._runner.backend, "warm_up", None)
        return warm_up is not None and not warm_up.over

    @property
    def registered_bytes(self) -> int:
        """Bytes of the host arena that the device copies to straight."""
        arena = getattr(self._runner.backend, "arena", None)
        return 0 if arena is None else int(arena.registered_bytes)

    def _compiles(self, task: str, compiling: bool) -> None:
        """Called by a thread of `overlap`: a task waits for the compiler, or no longer does."""
        try:
            self.send(Compiling(task=task, compiling=compiling))
        except OSError:
            log.info("nobody is there any more who would hear of task %s", task)

    def _settled(self, tasks: list[str], lost: list[str]) -> None:
        """Called by the queue's thread when results were written, or not."""
        if lost:
            self._check_device()
        try:
            self.send(Written(tasks=tasks, lost=lost))
        except OSError:
            log.info("nobody is there any more who would hear of the results of %d tasks", len(tasks) + len(lost))

    def _delivered(self, delivered: list[int], refused: list[int]) -> None:
        """Called by the delivering thread."""
        try:
            self.send(Delivered(numbers=delivered, refused=refused), prompt=True)
        except OSError:
            log.info("nobody is there any more who would hear of deliveries %s", [*delivered, *refused])

    def _check_device(self) -> None:
        """End the process, unanswered, if its device context is broken: what follows it begins anew."""
        if not _usable(self._runner.backend):
            log.error("the device context is broken: starting anew")
            os._exit(BROKEN_CONTEXT)

    def _state(self, write_queue: WriteQueue) -> _State:
        return _State(write_queue.resident.account(), write_queue.nbytes, self._runner.backend.memory_used())

    def _sound(self, answer: Done | Failed) -> Done | Failed:
        if answer.kind == "failed" and answer.status >= 500:
            self._check_device()  # unanswered, the task is tried again by the process that follows this one
        return answer

    def _run_group(self, works: list[Work]) -> None:
        """Run short tasks one after the other; what comes meanwhile waits for the last."""
        passing, self._passing = self._passing, True
        began = held_since = time.perf_counter()
        answers: list[Done | Failed] = []
        try:
            for work in works:
                waited_s = time.perf_counter() - began
                answer = self._run(work)
                if isinstance(answer, Done):
                    answer.timings.queue_s = waited_s
                answers.append(answer)
                if time.perf_counter() - held_since > _MAX_HOLD_S:
                    self.send(*answers)
                    answers.clear()
                    held_since = time.perf_counter()
        finally:
            self._passing = passing
        if answers:
            self.send(*answers)

    def _poll(self) -> None:
        try:
            while self._take(socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return
        raise ConnectionResetError("the front is gone, and with it everybody who wanted the result")

    def _take(self, flags: int = 0) -> bool:
        data = self._connection.recv(_PIECE, flags)
        for body in self._decoder.feed(data):
            message = TO_WORKER.validate_json(body)
            if isinstance(message, Cancel):
                self._runner.cancel(message.task)
            elif isinstance(message, RunBatch) and message.prompt:
                self._prompt.append(message)
            else:
                self._pending.append(message)
        return bool(data)


def _converse(connection: socket.socket, runner: Runner, beat_s: float, monitor: Monitor) -> None:
    runner.forget_all()  # an earlier front's memory went with it
    line = _Line(connection, runner)
    # Where tasks have threads of their own this one reads all the time, and must be the only one that does.
    runner.look = line.look if line.overlap is None else lambda: None
    over = threading.Event()
    heart = threading.Thread(target=_beat, args=(line, beat_s, over, monitor), name="gemmserve-heart", daemon=True)
    heart.start()
    try:
        while (message := line.receive()) is not None and line.handle(message):
            pass
        if line.overlap is not None and message is not None:  # told to stop, by a front that waits for the answers
            if line.write_queue is not None:
                line.write_queue.end()
            line.overlap.close()
    finally:
        if line.overlap is not None:
            line.overlap.abandon()
        if line.write_queue is not None:
            line.write_queue.abandon()
        if line.deliveries is not None:
            line.deliveries.abandon()
        over.set()
        heart.join()


def _beat(line: _Line, beat_s: float, over: threading.Event, monitor: Monitor) -> None:
    """Says every `beat_s` that this process lives, and what the device's sensors say. In a thread: BLAS and drivers
    hold no lock while they compute.
    """
    said: DeviceHealth | None = None
    while not over.wait(beat_s):
        try:
            task, progress = line.at
            health = monitor.latest
            news = None if health is said else health
            line.send(
                Beat(
                    task=task,
                    progress=progress,
                    share=line.share_of(task),
                    registered=line.registered_bytes,
                    prepares=line.prepares,
                    health=news,
                )
            )
            said = health
        except OSError:
            return  # the other thread notices too


def _overlaps(backend: DeviceBackend) -> TypeGuard[OverlappingBackend]:
    return isinstance(backend, OverlappingBackend)


def _write_queue(backend: DeviceBackend) -> WriteQueue | None:
    return getattr(backend, "write_queue", None)


def _deliveries(backend: DeviceBackend) -> Deliveries | None:
    return getattr(backend, "deliveries", None)


def _usable(backend: DeviceBackend) -> bool:
    check = getattr(backend, "usable", None)
    return check is None or bool(check())
