"""Checks of a product where its arrays are: Freivalds' by norms, and a few elements computed again."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.device.replay import record
from gemmserve_kernels.device.spec import device_errors
from gemmserve_kernels.dispatch.planned_call import fresh_key, key_argument, operand_key
from gemmserve_kernels.freivalds import device, host, sampled, sampled_device, sampled_host
from gemmserve_kernels.freivalds.finding import Finding, judged
from gemmserve_kernels.problem.arrays import on_elements, same_library
from gemmserve_kernels.problem.operand import Operand

if TYPE_CHECKING:
    from gemmserve_kernels.device.replay import LaunchRecorder, Program
    from gemmserve_kernels.dispatch.planned_call import Key
    from gemmserve_kernels.problem.problem import GemmProblem

    Figures = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    """Figures of the rows, and of the elements."""


def freivalds_check(problem: GemmProblem, a: Any, b: Any, c: Any | None, d: Any, seed: int) -> Finding:
    """Return how far `d` is from alpha op(a) op(b) + beta c, without a product: O(mk + kn + mn), every array read once,
    and some hundred elements computed again, for what norms cannot see.

    Arrays are NumPy's, or CuPy's on the current device, where a few numbers for each product come to the host, all at
    once. `seed` (64 bits) chooses the vectors and the elements, the same on the host and on any device. Raises
    DeviceError, OutOfDeviceMemory.
    """
    on_host = same_library({"a": a, "b": b, "c": c, "d": d}) == "numpy"
    if 0 in problem.result_shape:
        return Finding(0.0, 0.0)
    if on_host:
        arrays = np.asarray(a), np.asarray(b), None if c is None else np.asarray(c), np.asarray(d)
        with np.errstate(all="ignore"):
            of_rows, of_elements = (x.figures(problem, *arrays, seed) for x in (host, sampled_host))
            return _finding(problem, of_rows, of_elements)
    with device_errors():
        a, b, c, d = (None if x is None else on_elements(x) for x in (a, b, c if problem.beta else None, d))
        return _finding(problem, *_on_device(problem, [a, b, d] if c is None else [a, b, d, c], seed))


def _finding(problem: GemmProblem, of_rows: np.ndarray[Any, Any], of_elements: np.ndarray[Any, Any]) -> Finding:
    return replace(judged(problem, of_rows), element=sampled.worst(of_elements))


def _on_device(problem: GemmProblem, arrays: list[Any], seed: int) -> Figures:
    """The figures on the host."""
    import cupy

    launcher = CupyLauncher.current()
    vectors = cupy.empty((device.vectors_size(problem),), np.float64)
    out = cupy.empty((_size(problem),), np.float64)
    device.fill_signs(launcher, problem, vectors, seed)
    program = _program(launcher, problem, tuple(operand_key(array) for array in arrays))
    launcher.run(program, [array.data.ptr for array in (vectors, out, *arrays)])
    found = out.get()
    rows = math.prod(device.figures_shape(problem))
    return (
        found[:rows].reshape(device.figures_shape(problem)),
        found[rows:].reshape(sampled_device.figures_shape(problem)),
    )


def _size(problem: GemmProblem) -> int:
    return math.prod(device.figures_shape(problem)) + math.prod(sampled_device.figures_shape(problem))


@lru_cache(maxsize=1024)
def _program(launcher: CupyLauncher, problem: GemmProblem, keys: tuple[Key, ...]) -> Program:
    """The launches for arrays A, B, D and perhaps C that lie like `keys`; before those, the vectors and the figures."""

    def run(recorder: LaunchRecorder) -> int:
        sizes = device.vectors_size(problem), _size(problem)
        vectors, out = (
            key_argument(recorder, fresh_key(Operand.contiguous((size,), np.dtype(np.float64)))) for size in sizes
        )
        a, b, d, *rest = (key_argument(recorder, key) for key in keys)
        c = rest[0] if rest else None
        arguments = recorder.array_count
        figures, of_vectors = recorder.pointer(out), recorder.pointer(vectors)
        device.run(recorder, problem, a, b, c, d, vectors, figures)
        figures += 8 * math.prod(device.figures_shape(problem))
        sampled_device.run(recorder, problem, a, b, c, d, device.seed_address(problem, of_vectors), figures)
        return arguments

    return record(launcher.spec, launcher.max_grid, run)
