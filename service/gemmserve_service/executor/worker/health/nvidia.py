"""Sensors of an NVIDIA GPU, through NVML (nvidia-ml-py).

Units and meanings are those of the NVML API Reference Guide, "Device Queries", "NvmlClocksEventReasons" and "Event
Handling"; codes of Xid events those of NVIDIA's "Xid Errors".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.schemas import DeviceHealth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CLOCK_SM: Final = 1
_GPU_TEMPERATURE: Final = 0
_UNCORRECTED: Final = 1
_VOLATILE: Final = 0  # counted since the driver was loaded, not over the GPU's life
_XID_EVENT: Final = 8
_MAX_EVENTS: Final = 16  # of one reading; more are read with the next
_SLOWED: Final = {
    0x04: "throttled: the power limit is reached",
    0x20: "throttled: the GPU is too warm",
    0x40: "throttled by the hardware: the GPU is too hot",
    0x80: "throttled by the hardware: the power supply asks for it",
    0x10: "throttled: clocks follow another GPU (sync boost)",
    0x02: "clocks are held by a setting (nvidia-smi --lock-gpu-clocks, --applications-clocks)",
}
"""Reasons for which clocks are below their highest, in words; idleness and displays are no reasons to worry."""
_HARDWARE_SLOWDOWN: Final = 0x08
_HARDWARE_CAUSES: Final = 0x40 | 0x80
_XIDS: Final = {
    13: "an exception in a kernel",
    31: "a memory access fault in a kernel",
    43: "a program's kernels were stopped",
    45: "a program's kernels were removed",
    48: "an uncorrectable memory error: reset the GPU",
    62: "the GPU's microcontroller halted: reset the GPU",
    63: "a row of memory is to be remapped: reset the GPU",
    64: "a row of memory could not be remapped: reset the GPU; if it comes again, replace it",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus: restart the machine",
    92: "many corrected memory errors",
    94: "a memory error that was contained: its program ended",
    95: "a memory error that was not contained: reset the GPU",
    119: "the GPU's system processor does not answer: reset the GPU",
    120: "the GPU's system processor failed: reset the GPU",
}


def open_nvml(bus_id: str) -> Callable[[], DeviceHealth]:
    """Return what reads the sensors of the GPU at a PCI bus id, such as 0000:65:00.0; it is found by that, because
    CUDA numbers devices by other rules (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER).

    Raises ImportError without nvidia-ml-py, and pynvml.NVMLError where NVML or the device cannot be opened.
    """
    import pynvml

    pynvml.nvmlInit()
    return _Gpu(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)).read


class _Gpu:
    """One GPU. What NVML does not tell of it, or refuses to tell, is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._events = self._watch_events()
        self._last_xid: str | None = None

    def read(self) -> DeviceHealth:
        """Read every sensor. With MIG, use and power are the whole GPU's, not this instance's: they are left out."""
        mode = self._ask("nvmlDeviceGetMigMode")
        shared = mode is not None and bool(mode[0])
        rates = None if shared else self._ask("nvmlDeviceGetUtilizationRates")
        power = None if shared else self._ask("nvmlDeviceGetPowerUsage")
        limit = None if shared else self._ask("nvmlDeviceGetEnforcedPowerLimit")
        clock = self._ask("nvmlDeviceGetClockInfo", _CLOCK_SM)
        return DeviceHealth(
            utilisation=None if rates is None else rates.gpu / 100,
            memory_utilisation=None if rates is None else rates.memory / 100,
            power_watts=None if power is None else power / 1e3,
            power_limit_watts=None if limit is None else limit / 1e3,
            temperature_celsius=self._ask("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
            clock_hertz=None if clock is None else clock * 1e6,
            warnings=(*self._throttling(), *self._memory_errors(), *self._xids()),
        )

    def _ask(self, function: str, *args: Any) -> Any:
        """Return what NVML says; None where the driver or the library lacks it, or does not permit it."""
        try:
            return getattr(self._nvml, function)(self._handle, *args)
        except Exception:
            return None

    def _throttling(self) -> Iterator[str]:
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name before driver 535
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        for bit, text in _SLOWED.items():
            if reasons & bit:
                yield text
        if reasons & _HARDWARE_SLOWDOWN and not reasons & _HARDWARE_CAUSES:
            yield "throttled by the hardware"

    def _memory_errors(self) -> Iterator[str]:
        errors = self._ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE)
        if errors:
            yield f"ECC: {errors} uncorrected memory errors since the driver was loaded"
        rows = self._ask("nvmlDeviceGetRemappedRows")
        if rows is not None and rows[3]:
            yield "ECC: rows of memory could not be remapped: replace the GPU"
        elif rows is not None and rows[2]:
            yield "ECC: rows of memory wait to be remapped: reset the GPU"
        if self._ask("nvmlDeviceGetRetiredPagesPendingStatus"):
            yield "ECC: pages of memory wait to be retired: restart the machine"

    def _watch_events(self) -> Any:
        """Return NVML's set of events with this GPU's Xid errors; None where they cannot be watched."""
        try:
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(self._handle, _XID_EVENT, events)
        except Exception:
            return None
        return events

    def _xids(self) -> Iterator[str]:
        """Yield the last Xid error since this worker started."""
        for _ in range(0 if self._events is None else _MAX_EVENTS):
            try:
                code = int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData)
            except Exception:  # NVMLError_Timeout: no more have come
                break
            said = _XIDS.get(code, "see NVIDIA's list of Xid errors")
            self._last_xid = f"Xid {code}: {said}"
        if self._last_xid is not None:
            yield self._last_xid
