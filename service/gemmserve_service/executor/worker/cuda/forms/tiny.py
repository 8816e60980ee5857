"""Tiny products of one form on a device: everything that does not depend on their arrays is worked out once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels import Operand, plan, read_element_counts
from gemmserve_kernels.device.compiler import waited_s
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_service.executor.worker.checks import element_counts
from gemmserve_service.products import build, options
from gemmserve_service.schemas import Timings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gemmserve_kernels.device.element_counts import Reading
    from gemmserve_service.executor.protocol import Kind
    from gemmserve_service.executor.worker.cuda.backend import CupyBackend
    from gemmserve_service.schemas import Elements, GemmParams, GemmReduceParams

    Arrays = Mapping[str, Any]


def tiny_products(
    backend: CupyBackend,
    params: GemmParams | GemmReduceParams,
    operands: Mapping[str, Kind],
    results: Mapping[str, Kind],
) -> TinyProducts | None:
    """Return what computes tiny products of these kinds of arrays; None: they have to go through their stages, where
    operands are prepared, or somebody is told why there can be no such product.
    """
    given = {name: Operand.contiguous(kind.shape, np.dtype(kind.dtype), kind.order) for name, kind in operands.items()}
    try:
        if plan(build(params, given), backend.spec).takes_prepared:
            return None
    except KernelError:
        return None
    return TinyProducts(backend, params, operands, results)


class TinyProducts:
    """Products of one form, one after the other (`TinyProduct`), in one thread, on its stream.

    The host waits for the device once: kernels and copies follow each other there. Nothing of a product is under way
    when `finish` has returned.
    """

    def __init__(
        self,
        backend: CupyBackend,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, Kind],
        results: Mapping[str, Kind],
    ) -> None:
        self._backend = backend
        self._cuda = backend.cupy.cuda
        self._array = backend.cupy.ndarray
        self._copies = backend.copies
        self._params = params
        self._given = options(params)
        self._operands = [(name, kind.shape, np.dtype(kind.dtype), kind.order) for name, kind in operands.items()]
        self._results = [(name, kind.shape, np.dtype(kind.dtype), kind.order) for name, kind in results.items()]
        self._begun, self._start, self._stop, self._stored = (self._cuda.Event() for _ in range(4))
        """Events before what is brought, before and after the kernels, and when all is stored. The last is waited for
        before any is recorded again."""
        self._there: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        self._memory: list[Any] = []
        self._counts: tuple[Reading, Reading] | None = None
        self._compile_s = 0.0
        self._brings = False

    def resident(self, arrays: Sequence[str]) -> list[Any] | None:
        """Return the device's copies of these arrays, in use from now on; None: it has not got all of them."""
        return self._copies.resident.use(arrays)

    def begin(self, operands: Sequence[Any]) -> None:
        """Enqueue a product of operands in the form's order: copies of `resident`, or bytes of arrays of the host,
        which are brought first. Raises what a launch raises, and `out_of_memory`.
        """
        try:
            there = self._brought(operands)
            before, waited = read_element_counts(), waited_s()
            made = {name: self._array(shape, dtype, order=order) for name, shape, dtype, order in self._results}
            self._start.record()
            self._backend.call(self._params, there, made, self._given)
            self._stop.record()
            self._counts = before, read_element_counts()
        except BaseException:
            self._wait()  # for what is being read
            raise
        self._compile_s = waited_s() - waited
        self._there, self._made = there, made

    def _brought(self, operands: Sequence[Any]) -> dict[str, Any]:
        self._brings = any(isinstance(operand, np.ndarray) for operand in operands)
        if self._brings:
            self._begun.record()
        there: dict[str, Any] = {}
        for (name, shape, dtype, order), operand in zip(self._operands, operands, strict=True):
            there[name] = operand
            if isinstance(operand, np.ndarray):
                there[name] = self._array(shape, dtype, order=order)
                self._memory.append(operand)  # which must stay mapped meanwhile
                self._copies.start_load(there[name], operand)
        return there

    def store(self, name: str, memory: np.ndarray[Any, Any]) -> None:
        """Start to copy a result to the host's memory, as it lies."""
        self._memory.append(memory)  # likewise
        self._copies.start_store(self._made[name], memory)

    def finish(self, kept: Mapping[str, str]) -> tuple[Timings, Elements | None]:
        """Wait for all of it; the operands are let go, and results that are not `kept`, by their arrays' ids."""
        made, counts = self._made, self._counts
        self._wait()
        assert counts is not None
        timings = Timings(
            compile_s=self._compile_s,
            h2d_s=self._seconds(self._begun, self._start) if self._brings else 0.0,
            kernel_s=max(self._seconds(self._start, self._stop) - self._compile_s, 0.0),
            d2h_s=self._seconds(self._stop, self._stored),
        )
        for name, array in kept.items():
            self._copies.resident.put(array, made[name], made[name].nbytes)
        return timings, element_counts.between(*counts)

    def _wait(self) -> None:
        try:
            self._stored.record()
            self._stored.synchronize()
        finally:
            self._there, self._made, self._counts = {}, {}, None
            self._memory.clear()

    def _seconds(self, start: Any, stop: Any) -> float:
        return float(self._cuda.get_elapsed_time(start, stop)) / 1e3
