"""Sensors of an AMD GPU, through AMD SMI's Python library, which comes with ROCm.

Names and units are those of AMD SMI's "Python library usage and API": activities in percent, power in W, its cap in µW,
temperatures in °C, clocks in MHz; what a device does not tell is "N/A".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.schemas import DeviceHealth

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_POWERS: Final = ("socket_power", "current_socket_power", "average_socket_power")
_CLOCKS: Final = ("clk", "cur_clk")  # the second until ROCm 6.1
_SENSORS: Final = ("HOTSPOT", "EDGE")


def open_amd_smi(bus_id: str) -> Callable[[], DeviceHealth]:
    """Return what reads the sensors of the GPU at a PCI bus id, such as 0000:65:00.0.

    Raises ImportError without amdsmi, LookupError where it knows no such GPU, and AmdSmiException where it cannot be
    opened.
    """
    import amdsmi

    amdsmi.amdsmi_init()
    for handle in amdsmi.amdsmi_get_processor_handles():
        if str(amdsmi.amdsmi_get_gpu_device_bdf(handle)).lower() == bus_id.lower():
            return _Gpu(amdsmi, handle).read
    raise LookupError(f"AMD SMI knows no GPU at {bus_id}")


class _Gpu:
    """One GPU. What AMD SMI does not tell of it, or refuses to tell, is None."""

    def __init__(self, smi: Any, handle: Any) -> None:
        self._smi = smi
        self._handle = handle

    def read(self) -> DeviceHealth:
        """Read every sensor."""
        activity = self._ask("amdsmi_get_gpu_activity")
        power = self._ask("amdsmi_get_power_info")
        cap = self._ask("amdsmi_get_power_cap_info")
        clock = self._ask("amdsmi_get_clock_info", self._named("AmdSmiClkType", "GFX"))
        errors = _number(self._ask("amdsmi_get_gpu_total_ecc_count"), "uncorrectable_count")
        return DeviceHealth(
            utilisation=_number(activity, "gfx_activity", scale=1e-2),
            memory_utilisation=_number(activity, "umc_activity", scale=1e-2),
            power_watts=_number(power, *_POWERS),
            power_limit_watts=_number(cap, "power_cap", scale=1e-6),
            temperature_celsius=self._temperature(),
            clock_hertz=_number(clock, *_CLOCKS, scale=1e6),
            warnings=(f"ECC: {errors:.0f} uncorrected memory errors",) if errors else (),
        )

    def _temperature(self) -> float | None:
        current = self._named("AmdSmiTemperatureMetric", "CURRENT")
        for sensor in _SENSORS:
            found = self._ask("amdsmi_get_temp_metric", self._named("AmdSmiTemperatureType", sensor), current)
            if isinstance(found, int | float):
                return float(found)
        return None

    def _named(self, enumeration: str, name: str) -> Any:
        return getattr(getattr(self._smi, enumeration, None), name, None)

    def _ask(self, function: str, *args: Any) -> Any:
        """Return what AMD SMI says; None where it lacks it, or does not permit it."""
        try:
            return getattr(self._smi, function)(self._handle, *args)
        except Exception:
            return None


def _number(found: Mapping[str, Any] | None, *names: str, scale: float = 1.0) -> float | None:
    """Return the first of the fields that is a number, times `scale`."""
    for name in names:
        value = (found or {}).get(name)
        if isinstance(value, int | float):
            return value * scale
    return None
