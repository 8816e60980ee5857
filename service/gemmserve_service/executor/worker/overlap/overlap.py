"""The tasks of a worker in two lanes, of which one passes the other."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from gemmserve_service.errors import JobCancelled
from gemmserve_service.executor.protocol import Done
from gemmserve_service.executor.worker.compilation import Compilation, CompilingBackend
from gemmserve_service.executor.worker.overlap.grid import GridTask
from gemmserve_service.executor.worker.overlap.lane import Lane
from gemmserve_service.executor.worker.overlap.product import ProductTask
from gemmserve_service.executor.worker.overlap.resident import resident_task
from gemmserve_service.executor.worker.overlap.task import NoRoomBesideError
from gemmserve_service.executor.worker.overlap.tiny import TinyTask
from gemmserve_service.executor.worker.overlap.whole import WholeTask
from gemmserve_service.executor.worker.runner import failed
from gemmserve_service.executor.worker.unpack import Run, count_of
from gemmserve_service.schemas import ProgramParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.executor.protocol import Failed, Work
    from gemmserve_service.executor.worker.overlap.staged import OverlappingBackend
    from gemmserve_service.executor.worker.overlap.task import Task
    from gemmserve_service.executor.worker.runner import Runner
    from gemmserve_service.executor.worker.unpack import Form

log = logging.getLogger(__name__)


class Overlap:
    """The tasks of a worker in two lanes: express ones, and all others, which they pass.

    In each they run in the order in which they came; `answer` is told of each, in that order. What finds too little
    memory waits until it is alone in the lane of the long ones, and what was loaded ahead there is let go; if that is
    not enough, until the other lane is empty, too, which no more tasks enter meanwhile. A task whose
    kernels are not compiled yet waits for them before it enters its lane; `tell(task, compiling)` hears of the
    beginning and the end of that. The thread that makes this and starts tasks computes tiny ones itself, while nothing
    else is under way: on a device with a shorter way for them (`TinyBackend`) all of them, else express ones. Express
    products whose operands are on the device and whose results stay there it has the device compute
    (`ResidentBackend`), one behind the other, and answers them when it is told to `settle`.
    """

    def __init__(
        self,
        runner: Runner,
        backend: OverlappingBackend,
        answer: Callable[[Done | Failed], None],
        tell: Callable[[str, bool], None] = lambda _, __: None,
    ) -> None:
        self._runner = runner
        self._compilation = Compilation(backend, tell) if isinstance(backend, CompilingBackend) else None
        self._long = Lane(runner, backend, answer, express=False)
        self._express = Lane(runner.beside(), backend, answer, express=True)
        self._long.beside = self._express
        self._answer = answer
        self._owner = threading.get_ident()
        backend.enter(express=True)

    @property
    def at(self) -> tuple[str | None, int]:
        """The oldest task of the lane that has stood still for longest, and a number that grows while it gets on."""
        lanes = self._long, self._express
        for lane in lanes:
            lane.look()
        busy = [lane for lane in lanes if lane.oldest is not None]
        if not busy:
            return (None, self._long.steps) if self._compilation is None else self._compilation.at
        stillest = min(busy, key=lambda lane: lane.moved)
        return stillest.oldest, stillest.steps

    def start(self, message: Run | Work) -> None:
        """Takes a task on. Raises ValueError for a form that is none."""
        if isinstance(message, Run):
            self._enter(message, 0.0)
            return
        if threading.get_ident() == self._owner and self._at_once(message):
            return
        unpacked = self._runner.unpacked(message)
        if self._compilation is None:
            self._enter(unpacked, 0.0)
            return
        self._compilation.put(
            message.task,
            self._runner.forms(message),
            lambda compile_s: self._enter(unpacked, compile_s),
            checked=message.verify,
        )

    @property
    def begun(self) -> bool:
        """Whether the thread that starts tasks has something to `settle`."""
        return self._express.pipeline.begun

    def settle(self, *, wait: bool = True) -> bool:
        """Wait for the oldest product that this thread has begun in `start`; answer it, and those behind it that are
        over by then. Not to `wait`: answer those that are over. False: there was none, or another thread will.
        """
        pipeline = self._express.pipeline
        if self._long.pipeline.idle:
            return pipeline.settle(lambda task: task.over, wait=wait)
        pipeline.leave()  # the device has something else, and messages are to be read
        return False

    def _at_once(self, work: Work) -> bool:
        """Begin a product of operands that the device has and whose result stays there, or compute a tiny one from
        beginning to end, in this thread; False: it is none, its operands are yet to be brought to the device and kept
        there, or something else is under way beside a tiny one, and nothing has happened.
        """
        form = self._simple(work)
        if form is None:
            return False
        express = self._express
        if express.held:
            return False
        if work.express and (resident := self._runner.resident(form)) is not None:
            task = resident_task(express, work, form, resident)
            if task is not None:
                settles = task.short and self._long.pipeline.idle
                begun = express.pipeline.begin(task, self._ended, settles=settles)
                if not begun and settles and self.settle():  # there was no room behind those before it
                    begun = express.pipeline.begin(task, self._ended, settles=settles)
                if not begun:
                    express.wake()
                    express.pipeline.put(task, self._ended)
                return True
        if (product := self._runner.tiny(form)) is None or not self._long.pipeline.idle:
            return False
        if self._runner.is_cancelled(work.task):
            return False
        while express.pipeline.begun:
            if not self.settle():
                return False
        tiny = TinyTask(express, work, form, product)
        return tiny.find() and express.pipeline.run(tiny, self._ended)

    def _simple(self, work: Work) -> Form | None:
        """Return the form of a task of one product without a check whose kernels are compiled; None: it is none. Raises
        ValueError for a form that is none.
        """
        if work.verify or work.block is not None or len(work.parts) != 1:
            return None
        (part,) = work.parts
        form = self._runner.form(part.form)
        compiled = self._compilation is None or False in form.compiled
        return form if compiled and count_of(part) == 1 else None

    def _enter(self, message: Run | Work, compile_s: float) -> None:
        lane = self._express if message.express and not self._express.held else self._long
        here = lane.express and threading.get_ident() == self._owner and self._long.pipeline.idle
        self._put(lane, message, compile_s, here=here)

    def _put(self, lane: Lane, message: Run | Work, compile_s: float, *, here: bool = False) -> None:
        """Put a task that has waited for the compiler so long into a lane. `here`: this thread may do a tiny one."""
        lane.wake()
        combines = isinstance(message, Run) and message.block is not None and message.block.combine
        if isinstance(message, Run) and not isinstance(message.params, ProgramParams) and not combines:
            if message.block is None and (grid := lane.runner.grid(message)) is not None:
                GridTask(lane, message, grid, self._ended, compile_s).begin()
                return
            task: Task = ProductTask(lane, message, message.params)
        else:
            task = WholeTask(lane, message)
        task.compile_s = compile_s
        if not (here and task.tiny and lane.pipeline.run(task, self._ended)):
            lane.pipeline.put(task, self._ended)

    def abandon(self) -> None:
        """Cancel what is under way; return when it has ended."""
        if self._compilation is not None:
            self._compilation.abandon()
        for lane in (self._express, self._long):
            lane.cancel()
        self.close()

    def close(self) -> None:
        """Returns when what was taken on has ended."""
        if self._compilation is not None:
            self._compilation.close()
        self._express.pipeline.close()  # first: what it has no room for goes to the other
        self._long.pipeline.close()

    def _ended(self, task: Task, error: BaseException | None) -> None:
        answer = task.answer
        task.release()
        if error is not None:
            if not isinstance(error, Exception):  # the interpreter's own end
                raise error
            if isinstance(error, NoRoomBesideError):
                self._put(self._long, self._runner.unpacked(task.message), task.compile_s)
                return
            if isinstance(error, JobCancelled):
                log.info("task %s stopped", task.name)
            answer = failed(task.message, error)
        self._runner.over(task.name)
        if not task.answered:
            assert answer is not None
            if isinstance(answer, Done) and task.compile_s:
                answer.timings.compile_s += task.compile_s
            self._answer(answer)
