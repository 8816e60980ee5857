"""AMD SMI's figures in our units, by a stand-in for its library: no AMD GPU has been asked yet."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from gemmserve_service.executor.worker.health.amd import open_amd_smi
from gemmserve_service.schemas import DeviceHealth

ANSWERS = {
    "amdsmi_get_gpu_activity": {"gfx_activity": 87, "umc_activity": 41, "mm_activity": "N/A"},
    "amdsmi_get_power_info": {"current_socket_power": "N/A", "average_socket_power": 612},
    "amdsmi_get_power_cap_info": {"power_cap": 750_000_000},
    "amdsmi_get_temp_metric": 61,
    "amdsmi_get_clock_info": {"clk": 2100},
    "amdsmi_get_gpu_total_ecc_count": {"correctable_count": 9, "uncorrectable_count": 0},
}


@pytest.fixture
def gpu(monkeypatch):
    def make(**answers):
        def function(name):
            def call(handle, *args):
                assert handle == "second"
                if isinstance(found := (ANSWERS | answers)[name], Exception):
                    raise found
                return found

            return call

        smi = SimpleNamespace(
            amdsmi_init=lambda: None,
            amdsmi_get_processor_handles=lambda: ["first", "second"],
            amdsmi_get_gpu_device_bdf={"first": "0000:03:00.0", "second": "0000:C3:00.0"}.get,
            AmdSmiTemperatureType=SimpleNamespace(HOTSPOT=1, EDGE=0),
            AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
            AmdSmiClkType=SimpleNamespace(GFX=1),
            **{name: function(name) for name in ANSWERS},
        )
        monkeypatch.setitem(sys.modules, "amdsmi", smi)
        return open_amd_smi("0000:c3:00.0")

    return make


def test_a_healthy_gpu(gpu) -> None:
    found = gpu()().model_dump()
    assert found.pop("warnings") == ()
    assert found == pytest.approx(
        {
            "utilisation": 0.87,
            "memory_utilisation": 0.41,
            "power_watts": 612,
            "power_limit_watts": 750,
            "temperature_celsius": 61,
            "clock_hertz": 2.1e9,
        }
    )


def test_errors_of_memory(gpu) -> None:
    read = gpu(amdsmi_get_gpu_total_ecc_count={"uncorrectable_count": 2})
    assert read().warnings == ("ECC: 2 uncorrected memory errors",)


def test_what_it_does_not_tell_is_null(gpu) -> None:
    read = gpu(**dict.fromkeys(ANSWERS, RuntimeError("AMDSMI_STATUS_NO_PERM")))
    assert read() == DeviceHealth()
    read = gpu(amdsmi_get_temp_metric="N/A", amdsmi_get_power_info={"socket_power": "N/A"})
    found = read()
    assert (found.temperature_celsius, found.power_watts, found.clock_hertz) == (None, None, 2.1e9)


def test_no_such_gpu(gpu) -> None:
    gpu()
    with pytest.raises(LookupError):
        open_amd_smi("0000:99:00.0")
