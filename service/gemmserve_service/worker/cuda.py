"""The backend of one CUDA or ROCm device, through CuPy."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels import DeviceSpec, Operand
from gemmserve_kernels.errors import DeviceError, OutOfDeviceMemory
from gemmserve_service.executor.base import spec_adapter
from gemmserve_service.operations import build
from gemmserve_service.schemas import Timings
from gemmserve_service.worker.device import DeviceUnavailable, HostArray, call, go_on
from gemmserve_service.worker.memory import within_memory
from gemmserve_service.worker.panels import panels, plan_cut
from gemmserve_service.worker.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from gemmserve_service.schemas import GemmParams, GemmReduceParams

_IS_HIP: Final = {"cuda": False, "rocm": True}

log = logging.getLogger(__name__)


class CupyBackend:
    """Operands go to the device (or are there already), results come back into their mapping.

    Copies of operands stay within the share of memory that settings give them; a result goes to the host at once.
    """

    cuts = False

    def __init__(self, kind: str, ordinal: int, cache_share: float) -> None:
        try:
            import cupy
        except ImportError as error:
            raise DeviceUnavailable(f"{kind}:{ordinal} needs CuPy: pip install 'gemmserve[{_extra(kind)}]'") from error
        if bool(cupy.cuda.runtime.is_hip) != _IS_HIP[kind]:
            raise DeviceUnavailable(f"the installed CuPy is not built for {kind}")
        try:
            count = cupy.cuda.runtime.getDeviceCount()
            if ordinal >= count:
                raise DeviceUnavailable(f"there is no {kind}:{ordinal}: the driver knows {count} devices")
            cupy.cuda.Device(ordinal).use()
            self.spec = DeviceSpec.of(ordinal)
        except (cupy.cuda.runtime.CUDARuntimeError, DeviceError) as error:
            raise DeviceUnavailable(f"{kind}:{ordinal} cannot be used: {error}") from error
        self._cupy = cupy
        self._resident = Residency(int(self.spec.memory_bytes * cache_share))
        self._start = cupy.cuda.Event()
        self._stop = cupy.cuda.Event()

    def spec_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = spec_adapter().dump_python(self.spec, mode="json")
        return fields

    def memory_used(self) -> int:
        return int(self._cupy.get_default_memory_pool().total_bytes())

    def run(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None] = go_on,
    ) -> Timings:
        return within_memory(
            lambda: self._run(params, operands, results, checkpoint),
            lambda count: self._run_panels(params, operands, results, checkpoint, count),
            self._make_room,
            (self._cupy.cuda.memory.OutOfMemoryError, OutOfDeviceMemory),
        )

    def _make_room(self) -> None:
        self._resident.clear()
        self._cupy.get_default_memory_pool().free_all_blocks()

    def usable(self) -> bool:
        """Whether the context survived the last error; a sticky one ends it for good."""
        try:
            self._cupy.cuda.Device().synchronize()
            self._cupy.zeros(1).sum().get()
        except Exception:
            return False
        return True

    def _run(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None],
    ) -> Timings:
        cupy = self._cupy
        begin = time.perf_counter()
        checkpoint()
        device = {name: self._load(operand) for name, operand in operands.items()}
        cupy.cuda.get_current_stream().synchronize()
        checkpoint()
        loaded = time.perf_counter()
        outs = {name: cupy.empty(out.shape, out.dtype, order=_order(out)) for name, out in results.items()}
        self._start.record()
        call(params, device, outs)
        self._stop.record()
        self._stop.synchronize()
        kernel_s = cupy.cuda.get_elapsed_time(self._start, self._stop) / 1e3
        checkpoint()
        computed = time.perf_counter()
        for name, out in results.items():
            if out.flags.c_contiguous or out.flags.f_contiguous:
                if out.size:
                    outs[name].get(out=out, order=_order(out))
            else:  # part of a result
                out[...] = outs[name].get(order=_order(out))
        return Timings(h2d_s=loaded - begin, kernel_s=kernel_s, d2h_s=time.perf_counter() - computed)

    def _run_panels(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None],
        count: int,
    ) -> Timings | None:
        """In about `count` panels, one on the device at a time; None if the product cannot be cut into so many."""
        problem = build(params, {name: Operand.of(operand.data) for name, operand in operands.items()})
        cut, fewer = plan_cut(problem, count), plan_cut(problem, count // 2)
        if cut is None or (fewer is not None and len(fewer) == len(cut)):
            return None
        log.info("out of device memory: computing %d panels along %s", len(cut), cut.axis)
        total = Timings()
        names = {id(operand.data): operand.cache_id for operand in operands.values()}
        arrays = {name: operand.data for name, operand in operands.items()}
        for some, outs in panels(problem, cut, arrays, results):
            # What is not cut keeps its name: one copy of it serves every panel, as long as it fits.
            parts = {name: HostArray(array, names.get(id(array))) for name, array in some.items()}
            spent = self._run(params, parts, outs, checkpoint)
            total = Timings(
                h2d_s=total.h2d_s + spent.h2d_s,
                kernel_s=total.kernel_s + spent.kernel_s,
                d2h_s=total.d2h_s + spent.d2h_s,
            )
        return total

    def _load(self, operand: HostArray) -> Any:
        data = operand.data

        def load() -> Any:
            copy = self._cupy.empty(data.shape, data.dtype, order=_order(data))
            if data.size:
                copy.set(data)
            return copy

        return self._resident.get(operand.cache_id, data.nbytes, load)


def _order(array: np.ndarray[Any, Any]) -> str:
    """Of the memory; of a part of an array, that of the whole."""
    if array.flags.c_contiguous or array.ndim < 2:
        return "C"
    return "F" if array.flags.f_contiguous or array.strides[-2] < array.strides[-1] else "C"


def _extra(kind: str) -> str:
    return "rocm" if kind == "rocm" else "cuda13"
