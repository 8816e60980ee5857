"""Products of one form whose operands are on a device and whose results stay there: enqueued one behind the other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels import Operand, plan, read_element_counts
from gemmserve_kernels.device.compiler import waited_s
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_service.executor.worker.checks import element_counts
from gemmserve_service.executor.worker.cuda.copies import AGAIN, form_key
from gemmserve_service.products import build, options
from gemmserve_service.schemas import Timings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gemmserve_kernels.device.element_counts import Reading
    from gemmserve_service.executor.protocol import Kind
    from gemmserve_service.executor.worker.cuda.backend import CupyBackend
    from gemmserve_service.schemas import Elements, GemmParams, GemmReduceParams

    Events = tuple[Any, Any]


def resident_products(
    backend: CupyBackend,
    params: GemmParams | GemmReduceParams,
    operands: Mapping[str, Kind],
    results: Mapping[str, Kind],
) -> ResidentProducts | None:
    """Return what computes products of these kinds of arrays; None: somebody is to be told why there can be none."""
    given = {name: Operand.contiguous(kind.shape, np.dtype(kind.dtype), kind.order) for name, kind in operands.items()}
    try:
        prepared_by = plan(build(params, given), backend.spec).prepared_by(params.compute)
    except KernelError:
        return None
    return ResidentProducts(backend, params, operands, results, prepared_by=prepared_by)


class ResidentProducts:
    """Products of one form (`ResidentProduct`), each begun on the stream of whoever does it."""

    def __init__(
        self,
        backend: CupyBackend,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, Kind],
        results: Mapping[str, Kind],
        *,
        prepared_by: str | None,
    ) -> None:
        """`prepared_by`: mode by which A and B are prepared so that products take them, with the same bits; None: they
        take none.
        """
        self._backend = backend
        self._event = backend.cupy.cuda.Event
        self._elapsed = backend.cupy.cuda.get_elapsed_time
        self._array = backend.cupy.ndarray
        self._resident = backend.copies.resident
        self._params = params
        self._given = options(params)
        self._operands = tuple(operands)
        self._results = [(name, kind.shape, np.dtype(kind.dtype), kind.order) for name, kind in results.items()]
        self._forms = [
            form_key(side, params, prepared_by)
            if prepared_by is not None and backend.copies.keeps_form(_nbytes(operands[side]), prepared_by)
            else None
            for side in ("a", "b")
        ]
        self._spare: list[Events] = []
        """Events of products that are over."""

    def resident(self, arrays: Sequence[str]) -> list[Any] | None:
        """Return the device's copies of these arrays, or what was prepared of them, in use from now on; None: it has
        not got all of them, or one is yet to be prepared.
        """
        return self._resident.use(arrays, self._forms, again=AGAIN)

    def begin(self, operands: Sequence[Any]) -> BegunProduct:
        """Enqueue a product of operands of `resident`. Raises what a launch raises, and `out_of_memory`."""
        start, stop = self._events()
        before, waited = read_element_counts(), waited_s()
        try:
            made = {name: self._array(shape, dtype, order=order) for name, shape, dtype, order in self._results}
            start.record()
            self._backend.call(self._params, dict(zip(self._operands, operands, strict=True)), made, self._given)
            stop.record()
            after = read_element_counts()
        except BaseException:
            stop.record()
            stop.synchronize()  # for what is being read
            raise
        return BegunProduct(self, operands, made, (start, stop), (before, after), waited_s() - waited)

    def _events(self) -> Events:
        try:
            return self._spare.pop()
        except IndexError:
            return self._event(), self._event()

    def over(self, events: Events) -> float:
        """Return the seconds between events that have passed; they are recorded again for another product, perhaps by
        another thread, and not before.
        """
        seconds = float(self._elapsed(*events)) / 1e3
        self._spare.append(events)
        return seconds


class BegunProduct:
    """One of them, under way: `operands` are in use until it is over."""

    __slots__ = ("_compile_s", "_counts", "_events", "_operands", "_products", "made")

    def __init__(
        self,
        products: ResidentProducts,
        operands: Sequence[Any],
        made: dict[str, Any],
        events: Events,
        counts: tuple[Reading, Reading],
        compile_s: float,
    ) -> None:
        self.made = made
        self._products, self._operands = products, operands
        self._events, self._counts = events, counts
        self._compile_s = compile_s

    @property
    def over(self) -> bool:
        """Whether `finish` need not wait."""
        return bool(self._events[1].done)

    def finish(self) -> tuple[Timings, Elements | None]:
        """Wait for the device, in any thread; seconds by phase, and how the elements were computed."""
        self._events[1].synchronize()
        self._operands = ()
        kernel_s = max(self._products.over(self._events) - self._compile_s, 0.0)
        return Timings(compile_s=self._compile_s, kernel_s=kernel_s), element_counts.between(*self._counts)


def _nbytes(kind: Kind) -> int:
    return math.prod(kind.shape) * np.dtype(kind.dtype).itemsize
