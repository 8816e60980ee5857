"""Freivalds' check of a product where its arrays are."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.arrays import on_elements, same_library
from gemmserve_kernels.call import fresh_key, key_argument, operand_key
from gemmserve_kernels.device import device_errors
from gemmserve_kernels.freivalds import device, host
from gemmserve_kernels.freivalds.finding import Finding, judged
from gemmserve_kernels.freivalds.signs import VECTORS
from gemmserve_kernels.launch import CupyLauncher
from gemmserve_kernels.operand import Operand
from gemmserve_kernels.trace import trace

if TYPE_CHECKING:
    from gemmserve_kernels.call import Key
    from gemmserve_kernels.problem import GemmProblem
    from gemmserve_kernels.trace import Program, Tracer


def freivalds_check(problem: GemmProblem, a: Any, b: Any, c: Any | None, d: Any, seed: int) -> Finding:
    """How far `d` is from alpha op(a) op(b) + beta c, without a product: O(mk + kn + mn), every array read once.

    Arrays are NumPy's, or CuPy's on the current device, where a few numbers for each product come to the host.
    `seed` (64 bits) chooses the vectors, the same on the host and on any device. Raises DeviceError, OutOfDeviceMemory.
    """
    if same_library({"a": a, "b": b, "c": c, "d": d}) == "numpy":
        return host.check(problem, np.asarray(a), np.asarray(b), None if c is None else np.asarray(c), d, seed)
    if 0 in problem.result_shape:
        return Finding(0.0, 0.0)
    with device_errors():
        a, b, c, d = (None if x is None else on_elements(x) for x in (a, b, c if problem.beta else None, d))
        return judged(problem, _on_device(problem, [a, b, d] if c is None else [a, b, d, c], seed))


def _on_device(problem: GemmProblem, arrays: list[Any], seed: int) -> np.ndarray[Any, Any]:
    """The figures on the host."""
    import cupy

    launcher = CupyLauncher.current()
    vectors = cupy.empty((VECTORS, problem.n), np.float64)
    out = cupy.empty(device.figures_shape(problem), np.float64)
    device.fill_signs(launcher, problem, vectors, seed)
    program = _program(launcher, problem, tuple(operand_key(array) for array in arrays))
    launcher.run(program, [array.data.ptr for array in (vectors, out, *arrays)])
    found: np.ndarray[Any, Any] = out.get()
    return found


@lru_cache(maxsize=1024)
def _program(launcher: CupyLauncher, problem: GemmProblem, keys: tuple[Key, ...]) -> Program:
    """The launches for arrays A, B, D and perhaps C that lie like `keys`; before those, the vectors and the figures."""

    def run(tracer: Tracer) -> int:
        of_vectors = Operand.contiguous((VECTORS, problem.n), np.float64)
        of_figures = Operand.contiguous(device.figures_shape(problem), np.float64)
        vectors, out = (key_argument(tracer, fresh_key(x)) for x in (of_vectors, of_figures))
        a, b, d, *c = (key_argument(tracer, key) for key in keys)
        arguments = tracer.symbols
        device.run(tracer, problem, a, b, c[0] if c else None, d, vectors, out)
        return arguments

    return trace(launcher.spec, launcher.max_grid, run)
