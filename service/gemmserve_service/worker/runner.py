"""One task: from a Run message to Done or Failed. An error of a task never ends the worker."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from gemmserve_service.errors import JobCancelled, ServiceError, describe
from gemmserve_service.executor.protocol import Done, Failed
from gemmserve_service.worker import verification
from gemmserve_service.worker.device import HostArray
from gemmserve_service.worker.mappings import Mappings

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from gemmserve_service.executor.protocol import Run
    from gemmserve_service.worker.device import DeviceBackend

log = logging.getLogger(__name__)


class Runner:
    """Runs tasks on one backend, one after the other."""

    def __init__(self, backend: DeviceBackend) -> None:
        self.backend = backend
        self.look: Callable[[], object] = lambda: None
        """Called between panels: where word of a cancellation may come from. What it raises ends the task unanswered
        if it is an OSError."""
        self.task: str | None = None
        """The task that runs."""
        self.progress = 0
        """Its panels that are done."""
        self._paused_s = 0.0
        """For how long the task has stood still while others passed."""
        self._mappings = Mappings()
        self._cancelled: set[str] = set()

    def cancel(self, task: str) -> None:
        """That task's result is wanted no more. May be called from another thread."""
        self._cancelled.add(task)

    def run(self, message: Run) -> Done | Failed:
        """Computes and answers. Raises ConnectionError if the front is gone.

        May be called by `look`, in the middle of another task, which then stands still.
        """
        outer, began = (self.task, self.progress, self._paused_s), time.perf_counter()
        self.task, self.progress, self._paused_s = message.task, 0, 0.0
        try:
            return self._run(message)
        except ConnectionError:
            raise
        except JobCancelled as error:
            log.info("task %s stopped after %d panels", message.task, self.progress)
            return _failed(message, error)
        except Exception as error:
            return _failed(message, error)
        finally:
            self._cancelled.discard(message.task)
            self.task, self.progress, self._paused_s = outer
            self._paused_s += time.perf_counter() - began

    def _checkpoint(self) -> None:
        self.look()
        if self.task in self._cancelled:
            raise JobCancelled("the job was cancelled")
        self.progress += 1

    def forget(self, extents: list[str]) -> None:
        """Drops mappings."""
        self._mappings.forget(extents)

    def forget_all(self) -> None:
        """Drops every mapping, and what an earlier front wanted no more."""
        self._mappings.clear()
        self._cancelled.clear()

    def _run(self, message: Run) -> Done:
        operands = {name: HostArray(self._mappings.array(ref), ref.cache_id) for name, ref in message.operands.items()}
        results = {name: self._mappings.array(ref, writable=True) for name, ref in message.results.items()}
        timings = self.backend.run(message.params, operands, results, self._checkpoint)
        if self._paused_s:
            timings = timings.model_copy(update={"kernel_s": max(timings.kernel_s - self._paused_s, 0.0)})
        done = Done.model_construct(
            task=message.task,
            algorithm=message.algorithm,
            timings=timings,
            residual=None,
            mismatch=None,
            memory_used=self.backend.memory_used(),
        )
        return self._verified(message, operands, results, done) if message.verify else done

    def _verified(
        self,
        message: Run,
        operands: dict[str, HostArray],
        results: dict[str, np.ndarray[Any, Any]],
        done: Done,
    ) -> Done:
        """The answer with the residual; after a second run in plain arithmetic where the first result was in doubt."""
        began = time.perf_counter()
        arrays = {name: operand.data for name, operand in operands.items()}
        found = verification.residual(message.params, arrays, results)
        mismatch = None
        if verification.doubtful(message.params, arrays, found):
            simple = verification.plain(message.params, arrays)
            self.backend.run(simple, operands, results, self._checkpoint)
            again = verification.residual(simple, arrays, results)
            if verification.was_wrong(found, again):
                log.error(
                    "task %s: %s was wrong by %.1e, plain arithmetic by %.1e",
                    message.task,
                    done.algorithm,
                    found,
                    again,
                )
                mismatch = found
            found = again
        timings = done.timings.model_copy(update={"verify_s": time.perf_counter() - began})
        known = None if math.isnan(found) else found
        return done.model_copy(update={"timings": timings, "residual": known, "mismatch": mismatch})


def _failed(message: Run, error: Exception) -> Failed:
    description = describe(error)
    if description.slug == ServiceError.slug:
        log.error("task %s failed", message.task, exc_info=error)
    return Failed(
        task=message.task,
        slug=description.slug,
        status=description.status,
        title=description.title,
        detail=description.detail,
        extra=description.extra,
    )
