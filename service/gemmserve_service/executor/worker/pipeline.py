"""Work in stages, each with a thread of its own: one product is computed while others come and go."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable


class Staged(Protocol):
    """Work in stages. What a stage raises ends it."""

    def load(self) -> None:
        """Brings what is needed."""

    def compute(self) -> None:
        """Do the work, or have a device do it."""

    def finish(self) -> None:
        """Wait for the device, and see to what it made."""

    def store(self) -> None:
        """Takes the result away."""


W = TypeVar("W", bound=Staged)
log = logging.getLogger(__name__)

_STAGES: Final = ("load", "compute", "finish", "store")
_COUNT: Final = len(_STAGES)
_LOADING: Final = 1  # the stage that does what the first is for, where that is not worth a thread
_FINISHING: Final = 2
_MOST_AHEAD: Final = 32  # light pieces that a device is given before the first of them is looked after


class _Entry(Generic[W]):
    """One piece of work on its way."""

    __slots__ = ("begun", "done", "error", "loads", "work")

    def __init__(self, work: W, done: Callable[[W, BaseException | None], None]) -> None:
        self.work = work
        self.done = done
        self.error: BaseException | None = None
        self.loads = False
        """Whether the second stage does what the first is for."""
        self.begun = False
        """Whether the thread that has begun it may do the other stages."""


class Pipeline(Generic[W]):
    """Work goes through every stage in the order in which it came, at most one piece in each stage at a time.

    A stage begins nothing while what it did last still waits for the next one, so that no more than one piece is held
    ahead of its time: a device has one product to compute, and the next one behind it. From thread to thread a piece
    takes longer than a small product: where there is nothing to overlap with, one thread does what four do otherwise.
    Work that brings nothing, and has a device do something, may be begun and finished by the thread that has it
    (`begin`, `settle`): the device has several pieces of it, one behind the other, and no thread is woken.
    """

    def __init__(
        self,
        enter: Callable[[], None] = lambda: None,
        *,
        loaded: Callable[[W], bool] = lambda _: False,
        prompt: Callable[[W], bool] = lambda _: False,
        brief: Callable[[W], bool] = lambda _: False,
        light: Callable[[W], bool] = lambda _: False,
        short: Callable[[W], bool] = lambda _: False,
        name: str = "gemmserve",
    ) -> None:
        """`enter` is called once in each thread before anything else. `loaded`: whether `load` has nothing to bring
        now. `prompt`: whether `finish`, asked after `compute`, takes no longer than to hand it on; `brief`: likewise
        `store`, asked after `finish`. `light`: whether it holds nothing that was brought, so that several pieces may be
        ahead. `short`: whether all stages together take no longer than two or three hand-overs:
        one thread does them while nothing else is under way. `name`: what its threads' names begin with.
        """
        self._loaded, self._light, self._short = loaded, light, short
        self._goes_on_after: dict[int, Callable[[W], bool]] = {_STAGES.index("compute"): prompt, _COUNT - 2: brief}
        lock = threading.Lock()
        self._turn = tuple(threading.Condition(lock) for _ in _STAGES)
        """Conditions, one for each stage's thread: there may be something for it to do."""
        self._changed = threading.Condition(lock)
        """Condition for everybody else."""
        self._waiting: tuple[deque[_Entry[W]], ...] = tuple(deque() for _ in _STAGES)
        self._busy: list[_Entry[W] | None] = [None for _ in _STAGES]
        self._begun = 0
        """Pieces whose next stage the thread that has begun them may do."""
        self._alone: _Entry[W] | None = None
        self._parked: list[_Entry[W]] = []
        """Work that is alone, or waits to be."""
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(stage, enter), name=f"{name}-{each}", daemon=True)
            for stage, each in enumerate(_STAGES)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, work: W, done: Callable[[W, BaseException | None], None]) -> bool:
        """Do all of short work in the calling thread, which has entered as those of the stages have. False: it is not
        short, or something is under way, and nothing has happened. `done(work, error)` is called as by `put`.
        """
        if not self._short(work):
            return False
        entry = _Entry(work, done)
        with self._changed:
            if self._any() or self._closed:
                return False
            self._busy[_LOADING] = entry
        for stage in range(_COUNT):
            self._do(entry, stage)
        self._end(entry)
        with self._changed:
            self._busy[_LOADING] = None
            if self._waiting[_LOADING]:
                self._turn[_LOADING].notify()
            self._changed.notify_all()
        return True

    def begin(self, work: W, done: Callable[[W, BaseException | None], None], *, settles: bool) -> bool:
        """Do the first stages of work in the calling thread, which has entered as those of the stages have: nothing but
        to have a device do something. False: other work is before it there, and nothing has happened. `settles`: this
        thread will do the others (`settle`), if none of the stages does. `done(work, error)` is called as by `put`.
        """
        entry = _Entry(work, done)
        entry.loads, entry.begun = True, settles
        busy, waiting = self._busy, self._waiting
        with self._changed:
            if waiting[0] or waiting[_LOADING] or busy[0] or busy[_LOADING] or self._parked or self._closed:
                return False
            if len(waiting[_FINISHING]) >= _MOST_AHEAD:
                return False
            busy[_LOADING] = entry
        self._do(entry, _LOADING)
        with self._changed:
            busy[_LOADING] = None
            waiting[_FINISHING].append(entry)
            self._begun += settles
            if not settles or self._parked or waiting[0] or waiting[_LOADING]:
                self._turn[_FINISHING].notify()
            self._changed.notify_all()
        return True

    @property
    def begun(self) -> bool:
        """Whether `settle` may have something to do."""
        return self._begun > 0

    def leave(self) -> None:
        """Leave to the stages' threads what `begin` has begun."""
        with self._changed:
            self._hand_on()

    def settle(self, over: Callable[[W], bool], *, wait: bool = True) -> bool:
        """Do the last stages of work that `begin` has begun for this, in the thread that has called it: of the oldest,
        and of those behind it that are `over`; unless it is to `wait`, of the oldest only if that is over, too. False:
        there is none that is this thread's to do.
        """
        count = 0
        while self.begun and (entry := self._begun_entry(None if wait and not count else over)) is not None:
            count += 1
            for stage in range(_FINISHING, _COUNT):
                self._do(entry, stage)
            self._end(entry)
            with self._changed:
                self._busy[_FINISHING] = None
                for stage in (_LOADING, _FINISHING):
                    if self._waiting[stage] and self._may_move(stage) and not self._waiting[stage][0].begun:
                        self._turn[stage].notify()
                self._changed.notify_all()
        return count > 0

    def put(self, work: W, done: Callable[[W, BaseException | None], None]) -> None:
        """Starts it when its turn comes. `done(work, error)` is called in one of the threads, in order."""
        entry = _Entry(work, done)
        loaded, short = self._loaded(work), self._short(work)
        with self._changed:
            before = (*self._waiting[0], self._busy[0], self._alone)
            entry.loads = (loaded and not any(before)) or (short and not self._any())
            stage = _LOADING if entry.loads else 0
            self._waiting[stage].append(entry)
            self._turn[stage].notify()
            self._hand_on()

    @property
    def under_way(self) -> list[W]:
        """Work that has not come to its end, oldest first."""
        with self._changed:
            return [entry.work for entry in self._entries()]

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        with self._changed:
            return not self._any()

    def alone(self, work: W, run: Callable[[list[W]], None]) -> None:
        """Called in a stage of `work`: `run(behind)` once everything before it is done and nothing else is moving.

        `behind` is what has come some of the way behind it, and may be told to let go of what it holds.
        """
        with self._changed:
            (entry,) = [entry for entry in self._busy if entry is not None and entry.work is work]
            self._parked.append(entry)
            self._hand_on()
            self._changed.notify_all()
            stage = self._busy.index(entry)
            # The oldest first, so that two that want to be alone do not wait for each other.
            while self._alone or any(self._waiting[later] or self._busy[later] for later in range(stage + 1, _COUNT)):
                self._changed.wait()
            self._alone = entry
            while any(other is not None and other not in self._parked for other in self._busy):
                self._changed.wait()
            behind = [other.work for other in self._entries() if other is not entry]
        try:
            run(behind)
        finally:
            with self._changed:
                self._alone = None
                self._parked.remove(entry)
                self._wake_all()

    def drain(self) -> None:
        """Waits until nothing is under way."""
        with self._changed:
            self._hand_on()
            while self._any():
                self._changed.wait()

    def close(self) -> None:
        """Ends the threads after what was put in."""
        self.drain()
        with self._changed:
            self._closed = True
            self._wake_all()
        for thread in self._threads:
            thread.join()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _any(self) -> bool:
        return any(self._busy) or any(self._waiting)

    def _entries(self) -> list[_Entry[W]]:
        found: list[_Entry[W]] = []
        for stage in reversed(range(_COUNT)):
            busy = self._busy[stage]
            found += ([] if busy is None else [busy]) + list(self._waiting[stage])
        return found

    def _hand_on(self) -> None:
        """Leave what was begun by `begin` to the thread of the next stage."""
        if self._begun:
            self._turn[_FINISHING].notify()

    def _begun_entry(self, over: Callable[[W], bool] | None) -> _Entry[W] | None:
        """Take the next entry for whoever has begun it; None: it is not `over`, or behind others."""
        with self._changed:
            waiting = self._waiting[_FINISHING]
            if any(self._busy[_FINISHING:]) or self._waiting[-1] or not waiting or not waiting[0].begun:
                self._hand_on()  # what is before it has threads of its own
                return None
            return self._pop(_FINISHING) if over is None or over(waiting[0].work) else None

    def _pop(self, stage: int) -> _Entry[W]:
        """Take the next entry of a stage, which has one."""
        entry = self._busy[stage] = self._waiting[stage].popleft()
        if stage == _FINISHING and entry.begun:
            self._begun -= 1
        return entry

    def _run(self, stage: int, enter: Callable[[], None]) -> None:
        enter()
        while (entry := self._take(stage)) is not None:
            self._go(entry, stage)

    def _go(self, entry: _Entry[W], stage: int) -> None:
        """Do a stage, and those behind it that the same thread may do; hand the entry on."""
        self._do(entry, stage)
        done = stage
        while self._goes_on(entry, stage, done):
            done += 1
            self._do(entry, done)
        last = done == _COUNT - 1
        if last:
            self._end(entry)
        with self._changed:
            self._busy[stage] = None
            if not last:
                self._waiting[done + 1].append(entry)
                self._turn[done + 1].notify()
            self._changed.notify_all()

    @staticmethod
    def _end(entry: _Entry[W]) -> None:
        try:
            entry.done(entry.work, entry.error)
        except Exception:
            log.exception("whoever wanted to be told of the end of a task failed")

    @staticmethod
    def _do(entry: _Entry[W], stage: int) -> None:
        if entry.error is None:
            try:
                if entry.loads and stage == _LOADING:
                    entry.work.load()
                getattr(entry.work, _STAGES[stage])()
            except BaseException as error:
                entry.error = error

    def _goes_on(self, entry: _Entry[W], stage: int, done: int) -> bool:
        """Whether the thread of `stage`, which has `done` a stage, may do the next one too: nothing is before it."""
        if done not in self._goes_on_after:
            return False
        with self._changed:
            if self._parked or any(self._waiting[later] or self._busy[later] for later in range(stage + 1, _COUNT)):
                return False
            single = len(self._entries()) == 1
        return entry.error is not None or self._goes_on_after[done](entry.work) or (single and self._short(entry.work))

    def _wake_all(self) -> None:
        for turn in self._turn:
            turn.notify()
        self._changed.notify_all()

    def _take(self, stage: int) -> _Entry[W] | None:
        """The next entry of a stage; None once there will be none."""
        with self._changed:
            while True:
                if self._waiting[stage] and self._may_move(stage):
                    entry = self._pop(stage)
                    if stage and self._waiting[stage - 1]:
                        self._turn[stage - 1].notify()  # may go on
                    self._changed.notify_all()
                    return entry
                if self._closed:
                    return None
                self._turn[stage].wait()

    def _may_move(self, stage: int) -> bool:
        """Whether a stage may take what waits: one piece ahead of the next stage, or a few light ones, and none behind
        what is alone or done by another thread (`run`).
        """
        if self._busy[stage] is not None:
            return False
        ahead = len(self._waiting[stage + 1]) if stage + 1 < _COUNT else 0
        if ahead >= (_MOST_AHEAD if stage == _LOADING and self._light(self._waiting[stage][0].work) else 1):
            return False
        return self._alone is None or stage > self._busy.index(self._alone)
