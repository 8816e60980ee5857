"""Kernels that a check of a product takes on a device, without the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gemmserve_kernels.device.replay import LaunchRecorder
from gemmserve_kernels.dispatch.kernels import MAX_GRID, argument, launches
from gemmserve_kernels.freivalds import device as freivalds
from gemmserve_kernels.freivalds import sampled_device as sampled

if TYPE_CHECKING:
    from gemmserve_kernels.device.replay import RecordedLaunch
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem


def check_kernels_of(problem: GemmProblem, spec: DeviceSpec) -> tuple[RecordedLaunch, ...]:
    """Return the launches of a check of `problem` on `spec`, operands and result aligned as fresh arrays are."""
    recorder = LaunchRecorder(spec, MAX_GRID, 0)
    a, b, d = (argument(recorder, x) for x in (problem.a, problem.b, problem.result))
    c = None if problem.c is None or problem.beta == 0 else argument(recorder, problem.c)
    freivalds.figures(recorder, problem, a, b, c, d, seed=0)
    sampled.figures(recorder, problem, a, b, c, d, recorder.empty((1,), np.dtype(np.uint64)))
    return launches(recorder)
