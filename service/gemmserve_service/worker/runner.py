"""One task: from a Run message to Done or Failed. An error of a task never ends the worker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels import GemmProblem, Operand
from gemmserve_service.errors import JobCancelled, ServiceError, describe
from gemmserve_service.executor.protocol import Done, Failed
from gemmserve_service.operations import build
from gemmserve_service.worker.device import HostArray
from gemmserve_service.worker.mappings import Mappings

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.executor.protocol import Run
    from gemmserve_service.schemas import GemmParams, GemmReduceParams
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
        self._mappings = Mappings()
        self._cancelled: set[str] = set()

    def cancel(self, task: str) -> None:
        """That task's result is wanted no more. May be called from another thread."""
        self._cancelled.add(task)

    def run(self, message: Run) -> Done | Failed:
        """Computes and answers. Raises ConnectionError if the front is gone."""
        self.task, self.progress = message.task, 0
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
            self.task = None
            self._cancelled.discard(message.task)

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
        return Done.model_construct(
            task=message.task,
            algorithm=message.algorithm,
            timings=timings,
            residual=_residual(message.params, operands, results) if message.verify else None,
            memory_used=self.backend.memory_used(),
        )


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


def _residual(
    params: GemmParams | GemmReduceParams, operands: dict[str, HostArray], results: dict[str, np.ndarray[Any, Any]]
) -> float | None:
    """How far the results are from right, relative to their size.

    A product by Freivalds' check, ||(D - (alpha A B + beta C)) x|| for random x, O(n^2); reductions by computing a few
    of their outputs again in double precision, the worst of them all.
    """
    from gemmserve_kernels.reference import freivalds, sampled_reduction_errors

    problem = build(params, {name: Operand.of(operand.data) for name, operand in operands.items()})
    if not isinstance(problem, GemmProblem):
        a, b = operands["a"].data, operands["b"].data
        return max(sampled_reduction_errors(problem, a, b, results, np.random.default_rng()).values())
    c = operands["c"].data if "c" in operands else None
    return float(freivalds(problem, operands["a"].data, operands["b"].data, c, results["d"], np.random.default_rng()))
