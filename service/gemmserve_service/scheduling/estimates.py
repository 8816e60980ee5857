"""Estimates of the seconds that a task keeps its device: a plain model, corrected by what the device has shown.

Serves fair sharing, where a wrong estimate is set right when the time is known, and the watchdog, which takes many
times the estimate. It chooses nothing: which algorithm runs is decided by the kernels' own, finer estimates. Of blocks
of large products these are the model, from the first one on: how many of them a worker has at once depends on it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from gemmserve_kernels import Plan
from gemmserve_service.programs import Program

if TYPE_CHECKING:
    from gemmserve_service.executor.port import Worker
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.schemas import Timings

# Operations and bytes per second, and seconds of every task: on the slow side of what processors and accelerators do.
_CPU: Final = (5e9, 2e9, 1e-4)
_ACCELERATOR: Final = (1e12, 4e9, 1e-4)
_SMOOTHING: Final = 0.2  # of the running mean of logarithms; no measurement behind the figure
_FACTOR: Final = math.log(1e4)  # what is corrected is at most so far from the model

Key = tuple[int, str]


class Estimates:
    """Seconds of a task on a worker's device; what one showed holds for all of its class."""

    def __init__(self) -> None:
        self._corrections: dict[Key, float] = {}
        self._factors: dict[Key, float] = {}
        """Their exponentials."""

    def seconds(self, task: Task, worker: Worker) -> float:
        """Expected device time, transfers included."""
        model_s, key = _model(task, worker)
        return model_s * self._factors.get(key, 1.0)

    def cautious_seconds(self, task: Task, worker: Worker) -> float:
        """Return seconds for the watchdog: at least the model's, however fast the device was with other products."""
        model_s, key = _model(task, worker)
        seconds = model_s * max(self._factors.get(key, 1.0), 1.0)
        return seconds if task.whole is task else max(seconds, _plain_seconds(task, worker))

    def busy_seconds(self, task: Task, worker: Worker, timings: Timings) -> float:
        """Return the seconds for which a task kept its device busy.

        Beside others it waits for what they compute: what was measured is no less than that, and what is expected no
        more.
        """
        measured = device_seconds(timings)
        return min(measured, self.seconds(task, worker)) if task.beside else measured

    def learn(self, task: Task, worker: Worker, timings: Timings) -> None:
        """Takes in what a task took; beside others, if that is less than expected."""
        seconds = device_seconds(timings)
        if seconds > 0 and not (task.beside and seconds >= self.seconds(task, worker)):
            model_s, key = _model(task, worker)
            found = math.log(seconds / model_s)
            if not -_FACTOR <= found <= _FACTOR:
                found = math.copysign(_FACTOR, found)
            mean = self._corrections.get(key, found)
            self._corrections[key] = correction = mean + _SMOOTHING * (found - mean)
            self._factors[key] = math.exp(correction)


def device_seconds(timings: Timings) -> float:
    """Return the seconds from when a device began with a task until it was done, transfers included."""
    return timings.h2d_s + timings.kernel_s + timings.d2h_s + timings.verify_s


def _model(task: Task, worker: Worker) -> tuple[float, Key]:
    """Seconds by the plain model, and whose correction applies; kept with the task for each plan."""
    chosen = task.plans.get(worker.device_class)
    known = task.models.get(worker.device_class)
    if known is None or known[0] is not chosen:
        known = task.models[worker.device_class] = (chosen, (_seconds(task, worker), _key(task, worker)))
    return known[1]


def _seconds(task: Task, worker: Worker) -> float:
    found = None if worker.spec is None else task.model_seconds(worker.spec)
    return _plain_seconds(task, worker) if found is None else found


def _plain_seconds(task: Task, worker: Worker) -> float:
    cpu = worker.spec is None or worker.spec.kind == "cpu"
    rate, bandwidth, base = _CPU if cpu else _ACCELERATOR
    nbytes, flops = task.size
    steps = len(task.problem) if isinstance(task.problem, Program) else 1
    return base * steps + flops / rate + nbytes / bandwidth


def _key(task: Task, worker: Worker) -> Key:
    chosen = task.plans.get(worker.device_class)
    algorithm = f"{chosen.algorithm}:{chosen.arithmetic}" if isinstance(chosen, Plan) else ""
    block = "" if task.whole is task else ":block"
    return worker.device_class, f"{task.problem.dtype.char}:{algorithm}{block}"
