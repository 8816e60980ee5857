"""The backend of one CUDA or ROCm device, through CuPy."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels import DeviceSpec
from gemmserve_kernels.errors import DeviceError, OutOfDeviceMemory
from gemmserve_service.executor.base import spec_adapter
from gemmserve_service.schemas import Timings
from gemmserve_service.worker.device import DeviceUnavailable, call
from gemmserve_service.worker.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from gemmserve_service.schemas import GemmParams, GemmReduceParams
    from gemmserve_service.worker.device import HostArray

_IS_HIP: Final = {"cuda": False, "rocm": True}


class CupyBackend:
    """Operands go to the device (or are there already), results come back into their mapping.

    Copies of operands stay within the share of memory that settings give them; a result goes to the host at once.
    """

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
    ) -> Timings:
        out_of_memory = self._cupy.cuda.memory.OutOfMemoryError
        with contextlib.suppress(out_of_memory, OutOfDeviceMemory):
            return self._run(params, operands, results)
        # Only here, where the failed attempt's frames are gone, nothing refers to its arrays any more.
        self._resident.clear()
        self._cupy.get_default_memory_pool().free_all_blocks()
        try:
            return self._run(params, operands, results)
        except out_of_memory as error:
            raise OutOfDeviceMemory(f"the product does not fit into the device's memory: {error}") from error

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
    ) -> Timings:
        cupy = self._cupy
        begin = time.perf_counter()
        device = {name: self._load(operand) for name, operand in operands.items()}
        cupy.cuda.get_current_stream().synchronize()
        loaded = time.perf_counter()
        outs = {name: cupy.empty(out.shape, out.dtype, order=_order(out)) for name, out in results.items()}
        self._start.record()
        call(params, device, outs)
        self._stop.record()
        self._stop.synchronize()
        kernel_s = cupy.cuda.get_elapsed_time(self._start, self._stop) / 1e3
        computed = time.perf_counter()
        for name, out in results.items():
            if out.size:
                outs[name].get(out=out, order=_order(out))
        return Timings(h2d_s=loaded - begin, kernel_s=kernel_s, d2h_s=time.perf_counter() - computed)

    def _load(self, operand: HostArray) -> Any:
        data = operand.data

        def load() -> Any:
            copy = self._cupy.empty(data.shape, data.dtype, order=_order(data))
            if data.size:
                copy.set(data)
            return copy

        return self._resident.get(operand.cache_id, data.nbytes, load)


def _order(array: np.ndarray[Any, Any]) -> str:
    return "C" if array.flags.c_contiguous else "F"


def _extra(kind: str) -> str:
    return "rocm" if kind == "rocm" else "cuda13"
