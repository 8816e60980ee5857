"""The values of a program in a device's memory: stored operands come once, results go once, nothing else moves."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.device.compiler import waited_s
from gemmserve_kernels.problem.view import array_of_view
from gemmserve_service.executor.worker.checks import verification
from gemmserve_service.executor.worker.cuda.copies import order_of
from gemmserve_service.schemas import Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from gemmserve_service.executor.worker.backend import HostArray
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.executor.worker.cuda.copies import DeviceCopies
    from gemmserve_service.programs import Value
    from gemmserve_service.schemas import StepParams, View

_AHEAD: Final = 4
"""Steps that are set going before the first of them has ended: the device need not wait for the host, and a program
that is cancelled stops soon all the same."""


class DeviceValues:
    """`Values` on the device that CuPy uses in this thread.

    `call` enqueues a product of CuPy arrays on the current stream.
    """

    away = True

    def __init__(
        self,
        cupy: Any,
        checkpoint: Callable[[], None],
        *,
        call: Callable[[StepParams, Mapping[str, Any], Mapping[str, Any]], None],
        copies: DeviceCopies,
    ) -> None:
        self._cupy = cupy
        self._checkpoint = checkpoint
        self._call = call
        self._copies = copies
        self._under_way: deque[tuple[Any, Any, list[Any]]] = deque()
        self._shared: set[int] = set()
        """Identities (`id`) of copies that others may drop."""
        self._h2d_s = self._kernel_s = self._d2h_s = 0.0
        self._waited_s = waited_s()

    @property
    def under_way(self) -> int:
        """See `Values`: a few."""
        return len(self._under_way)

    def load(self, operand: HostArray) -> Any:
        """A copy, or the one that is there."""
        began = time.perf_counter()
        copy = self._copies.load(operand)
        if operand.cache_id is not None:  # kept, or kept until a moment ago
            self._shared.add(id(copy))
        self._h2d_s += time.perf_counter() - began
        return copy

    def view(self, value: Any, view: View) -> Any:
        """See `Values`."""
        seen = array_of_view(value, view)
        if view.conj:
            made = self._cupy.empty(seen.shape, seen.dtype)
            self._cupy.conjugate(seen, out=made)
            return made
        if id(value) in self._shared:  # its memory is that of a copy that others may drop
            self._shared.add(id(seen))
        return seen

    def empty(self, value: Value) -> Any:
        """Return room for a value that lies as `load` would have it, had it been stored: one extent that counts is C
        order and Fortran order.
        """
        array = self._cupy.empty(value.shape, value.dtype, order=value.order)
        return (
            array if value.order == "C" or not array.flags.c_contiguous else self._cupy.empty(value.shape, value.dtype)
        )

    def result(self, out: np.ndarray[Any, Any]) -> Any:
        """Its copy on the device."""
        return self._cupy.empty(out.shape, out.dtype, order=order_of(out))

    def run(self, params: StepParams, operands: Mapping[str, Any], made: Mapping[str, Any]) -> Callable[[], float]:
        """See `Values`. Waits for the step that was set going some steps before."""
        self._checkpoint()
        start, stop = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record()
        self._call(params, operands, made)
        stop.record()
        # A copy may be dropped for another task's operand while a step that uses it is under way.
        self._under_way.append((start, stop, [array for array in operands.values() if id(array) in self._shared]))
        if len(self._under_way) > _AHEAD:
            self._wait(1)
        return lambda: float(self._cupy.cuda.get_elapsed_time(start, stop)) / 1e3

    def deliver(self, value: Any, out: np.ndarray[Any, Any]) -> None:
        """Copies it to the host."""
        self._wait(len(self._under_way))
        began = time.perf_counter()
        self._copies.store(value, out)
        self._d2h_s += time.perf_counter() - began

    def check(
        self,
        params: StepParams,
        operands: Mapping[str, Any],
        made: Mapping[str, Any],
        what: str,
    ) -> Verdict:
        """Check on the device, after a wait for what is under way, so that it does not count as a part of the check."""
        self._wait(len(self._under_way))
        return verification.on_device(params, operands, made, lambda plain: self.run(plain, operands, made), what)

    def finish(self) -> Timings:
        """Waits for all that is under way."""
        self._wait(len(self._under_way))
        self._checkpoint()
        compile_s = waited_s() - self._waited_s
        kernel_s = max(self._kernel_s - compile_s, 0.0)
        return Timings(compile_s=compile_s, h2d_s=self._h2d_s, kernel_s=kernel_s, d2h_s=self._d2h_s)

    def _wait(self, count: int) -> None:
        for _ in range(count):
            start, stop, _ = self._under_way.popleft()
            stop.synchronize()
            self._kernel_s += float(self._cupy.cuda.get_elapsed_time(start, stop)) / 1e3
