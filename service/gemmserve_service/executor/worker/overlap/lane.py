"""A pipeline of tasks on a device, and how far it is."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.executor.worker.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gemmserve_service.executor.protocol import Done, Failed
    from gemmserve_service.executor.worker.overlap.staged import OverlappingBackend
    from gemmserve_service.executor.worker.overlap.task import Task
    from gemmserve_service.executor.worker.runner import Runner

_PATIENCE_S: Final = 30.0
"""Seconds for which a task without memory waits for those of the other lane to end: they take milliseconds, but may
wait for the front to make room for their results."""
_LOOK_S: Final = 0.002


class Lane:
    """A pipeline of tasks, and how far it is."""

    def __init__(
        self, runner: Runner, backend: OverlappingBackend, answer: Callable[[Done | Failed], None], *, express: bool
    ) -> None:
        self.express = express
        self.runner = runner
        self.backend = backend
        self.answer = answer
        self.moved = time.monotonic()
        """Time at which it began with something, or something got on (time.monotonic)."""
        self.beside: Lane | None = None
        """Lane whose tasks pass those of this one."""
        self.held = False
        """Whether nothing more is to enter: a task of another lane finds too little memory beside those of this one."""
        self._steps = 0
        self._seen: tuple[str | None, int] = (None, 0)
        """Oldest task and steps when somebody looked last."""
        self.pipeline: Pipeline[Task] = Pipeline(
            lambda: backend.enter(express=express),
            loaded=lambda task: task.loaded,
            prompt=lambda task: task.prompt,
            brief=lambda task: task.brief,
            light=lambda task: task.light,
            short=lambda task: task.prompt,
            name="gemmserve-express" if express else "gemmserve",
        )

    @property
    def oldest(self) -> str | None:
        """The task that has been under way for longest."""
        oldest = next(iter(self.pipeline.under_way), None)
        return None if oldest is None else oldest.name

    @property
    def steps(self) -> int:
        """Steps that were taken here, or by the runner."""
        return self._steps + self.runner.progress

    def step(self) -> None:
        """Note that something gets on."""
        self._steps += 1
        self.moved = time.monotonic()

    def look(self) -> None:
        """Note what has got on by the runner alone since this was called last: programs and batches do."""
        at = self.oldest, self.steps
        if at != self._seen:
            self._seen = at
            self.moved = time.monotonic()

    def wake(self) -> None:
        """Note that something begins, if nothing is under way."""
        if self.pipeline.idle:
            self.moved = time.monotonic()

    @contextlib.contextmanager
    def alone_on_device(self, unless: Callable[[], bool]) -> Iterator[None]:
        """Let nothing enter the lane beside until the block ends, which begins when what is under way there has ended,
        and the memory that it holds is free; or `unless` is true, or that takes for ever.
        """
        beside = self.beside
        if beside is None:
            yield
            return
        beside.held = True
        try:
            until = time.monotonic() + _PATIENCE_S
            while not (beside.pipeline.idle or unless() or time.monotonic() > until):
                time.sleep(_LOOK_S)
            yield
        finally:
            beside.held = False

    def cancel(self) -> None:
        """Cancel what is under way."""
        for task in self.pipeline.under_way:
            self.runner.cancel(task.name)
