"""Copies between host and device: copies of operands, forms prepared of those that are used again, results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels import Operand, plan, prepare
from gemmserve_kernels.device.caching import cached
from gemmserve_kernels.problem.arrays import ArrayKey
from gemmserve_service.executor.worker.cuda.pinned_ring import CupyLink, Staging, flat
from gemmserve_service.executor.worker.memory.residency import Residency
from gemmserve_service.products import build

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from gemmserve_kernels import DeviceSpec
    from gemmserve_service.executor.worker.backend import HostArray
    from gemmserve_service.schemas import GemmParams, GemmReduceParams

_DIRECT: Final = 1 << 20
"""Bytes below which the driver's own way is as fast as the ring of pinned memory."""
_AGAIN: Final = 2
"""Uses of a copy from which on it pays to prepare it: one is no reason to expect another."""


class DeviceCopies:
    """Copies on one device, of which `budget` bytes are kept. Everything is enqueued on the caller's current stream."""

    def __init__(self, cupy: Any, ordinal: int, spec: DeviceSpec, budget: int) -> None:
        self.resident = Residency(budget)
        self._cupy = cupy
        self._spec = spec
        self._staging = Staging(CupyLink(cupy, ordinal))

    def load(self, operand: HostArray) -> Any:
        """An operand's copy, or the one that is there. The host array has been read when this returns."""
        data = operand.data
        return self.resident.get(operand.cache_id, data.nbytes, lambda: self.fresh(data))

    def fresh(self, data: np.ndarray[Any, Any]) -> Any:
        """A copy of its own. The host array has been read when this returns."""
        array = self._cupy.empty(data.shape, data.dtype, order=order_of(data))
        memory = flat(data) if data.nbytes >= _DIRECT else None
        if memory is not None:
            self._staging.to_device(array.data.ptr, memory, self._cupy.cuda.get_current_stream())
        elif data.size:
            array.set(data)
        return array

    def begin(self, data: np.ndarray[Any, Any]) -> Any:
        """Room for a copy that `extend` fills."""
        return self._cupy.empty(data.shape, data.dtype, order=order_of(data))

    def extend(self, copy: Any, data: np.ndarray[Any, Any], start: int, stop: int) -> None:
        """Copies those bytes of an array that lies in one piece; returns when they are on the device."""
        memory = flat(data)
        assert memory is not None  # as every stored array does
        stream = self._cupy.cuda.get_current_stream()
        self._staging.to_device(copy.data.ptr + start, memory[start:stop], stream)
        stream.synchronize()

    def kept(self, operand: HostArray) -> bool:
        """Whether its copy is here for others, too."""
        return operand.cache_id is not None and self.resident.holds(operand.cache_id)

    def store(self, array: Any, out: np.ndarray[Any, Any]) -> None:
        """Copies an array of the device to the host; returns when it is there."""
        memory = flat(out) if out.nbytes >= _DIRECT else None
        if memory is not None and _lies_as(array, out):
            self._staging.to_host(memory, array.data.ptr, self._cupy.cuda.get_current_stream())
        elif out.flags.c_contiguous or out.flags.f_contiguous:
            if out.size:
                array.get(out=out, order=order_of(out))
        else:  # part of a result
            out[...] = array.get(order=order_of(out))

    def prepared(
        self, params: GemmParams | GemmReduceParams, operands: Mapping[str, HostArray], copies: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`copies`, with what was prepared of A and B in the place of those that come again and again.

        A product of prepared operands has the same bits.
        """
        found = dict(copies)
        sides = [
            side
            for side in ("a", "b")
            # Where both would not be kept, it would be prepared each time.
            if self.resident.uses(operands[side].cache_id) >= _AGAIN and 2 * copies[side].nbytes <= self.resident.budget
        ]
        if not sides:
            return found
        keys = tuple((name, ArrayKey.of(operand.data)) for name, operand in operands.items())
        takes_prepared: bool = cached(_takes_prepared, params, keys, self._spec)
        for side in sides if takes_prepared else ():
            found[side] = self._form(side, params, operands[side], copies[side])
        return found

    def _form(self, side: str, params: GemmParams | GemmReduceParams, operand: HostArray, copy: Any) -> Any:
        trans = params.trans_a if side == "a" else params.trans_b
        options = {"side": side, "compute": params.compute, "trans": trans, "layout": params.layout}
        return self.resident.get(
            operand.cache_id,
            copy.nbytes,
            lambda: prepare(copy, **options),
            form=tuple(options.values()),
            measure=lambda form: form.nbytes,
        )


def order_of(array: np.ndarray[Any, Any]) -> str:
    """Return the order of an array's memory; of a part of an array, that of the whole."""
    if array.flags.c_contiguous or array.ndim < 2:
        return "C"
    return "F" if array.flags.f_contiguous or array.strides[-2] < array.strides[-1] else "C"


def _lies_as(array: Any, out: np.ndarray[Any, Any]) -> bool:
    return bool(array.dtype == out.dtype and array.strides == out.strides)


def _takes_prepared(
    params: GemmParams | GemmReduceParams, operands: tuple[tuple[str, ArrayKey], ...], spec: DeviceSpec
) -> bool:
    return plan(build(params, {name: Operand.of(key) for name, key in operands}), spec).takes_prepared
