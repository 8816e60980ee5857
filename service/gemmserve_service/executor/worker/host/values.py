"""The values of a program in the worker's own memory: results are made where they belong, all else on pages here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil

from gemmserve_kernels.device.interruption import interruptible, pieces
from gemmserve_kernels.problem.view import array_of_view
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.executor.worker.checks import verification
from gemmserve_service.programs import Value
from gemmserve_service.schemas import Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gemmserve_service.executor.worker.backend import DeviceBackend
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.schemas import StepParams, View

_PAGE: Final = 4096
_PIECE: Final = 1 << 24  # bytes that are conjugated between two moments at which a program can be stopped
_LARGE: Final = 1 << 24  # bytes from which it is worth asking how much memory is left


class HostValues:
    """`Values` of a backend that takes each step from host memory to host memory, as it would a job of its own."""

    away = False
    under_way = 0
    """Steps that are not over when `run` returns: none."""

    def __init__(self, backend: DeviceBackend, checkpoint: Callable[[], None]) -> None:
        self._backend = backend
        self._checkpoint = checkpoint
        self._timings = Timings()
        self._stored: dict[int, tuple[np.ndarray[Any, Any], str | None]] = {}
        """Stored arrays and their ids, by identity."""

    def load(self, operand: HostArray) -> np.ndarray[Any, Any]:
        """The mapping itself, unless the device alone has it."""
        array = operand.read()
        self._stored[id(array)] = array, operand.cache_id
        return array

    def view(self, value: np.ndarray[Any, Any], view: View) -> np.ndarray[Any, Any]:
        """See `Values`. Raises MemoryError."""
        seen: np.ndarray[Any, Any] = array_of_view(value, view)
        if not view.conj:
            return seen
        made = self.empty(Value(seen.shape, seen.dtype, "C"))
        with interruptible(self._checkpoint):
            for source, target in zip(pieces(seen, _PIECE), pieces(made, _PIECE), strict=True):
                np.conjugate(source, out=target)
        return made

    def empty(self, value: Value) -> np.ndarray[Any, Any]:
        """Aligned to a page, as a mapping is: nothing about it differs from a stored array. Raises MemoryError."""
        if value.nbytes >= _LARGE and value.nbytes > (left := psutil.virtual_memory().available):
            # The system would grant it, and end some process once it is filled.
            raise MemoryError(f"{value.nbytes} bytes for a value of a program, and {left} are left")
        memory = np.empty(value.nbytes + _PAGE, np.uint8)
        start = -memory.ctypes.data % _PAGE
        flat = memory[start : start + value.nbytes].view(value.dtype)
        return flat.reshape(value.shape, order="F" if value.order == "F" else "C")

    def result(self, out: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The mapping itself."""
        return out

    def run(self, params: StepParams, operands: Mapping[str, Any], made: Mapping[str, Any]) -> Callable[[], float]:
        """See `Values`."""
        arrays = {
            name: HostArray(array, self._stored.get(id(array), (None, None))[1]) for name, array in operands.items()
        }
        spent = self._backend.run(params, arrays, made, self._checkpoint)
        total = self._timings
        self._timings = Timings(
            h2d_s=total.h2d_s + spent.h2d_s,
            kernel_s=total.kernel_s + spent.kernel_s,
            d2h_s=total.d2h_s + spent.d2h_s,
        )
        return lambda: spent.kernel_s

    def deliver(self, value: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        """Do nothing: the value is at its place."""

    def check(
        self,
        params: StepParams,
        operands: Mapping[str, Any],
        made: Mapping[str, Any],
        what: str,
    ) -> Verdict:
        """See `Values`."""
        with interruptible(self._checkpoint):
            return verification.on_host(params, operands, made, lambda plain: self.run(plain, operands, made), what)

    def finish(self) -> Timings:
        """Return the timings: nothing is under way."""
        return self._timings
