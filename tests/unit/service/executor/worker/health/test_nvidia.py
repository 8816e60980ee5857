"""NVML's figures in our units, by a stand-in for its library."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pynvml
import pytest

from gemmserve_service.executor.worker.health.nvidia import open_nvml
from gemmserve_service.schemas import DeviceHealth

BUS_ID = "0000:65:00.0"
DEFAULT = {
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87, memory=41),
    "nvmlDeviceGetPowerUsage": 612_400,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetClockInfo": 1830,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x01,
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    "nvmlDeviceGetRetiredPagesPendingStatus": 0,
}
ARGUMENTS = {
    "nvmlDeviceGetTemperature": (pynvml.NVML_TEMPERATURE_GPU,),
    "nvmlDeviceGetClockInfo": (pynvml.NVML_CLOCK_SM,),
    "nvmlDeviceGetTotalEccErrors": (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
}


class NVMLError(Exception):
    pass


class Nvml:
    """NVML of one GPU; a function whose answer is an exception raises it, and one without an answer is not there."""

    def __init__(self, **answers) -> None:
        self.answers = DEFAULT | answers
        self.xids = []

    def nvmlInit(self):  # noqa: N802
        if "init" in self.answers:
            raise self.answers["init"]

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):  # noqa: N802
        if bus_id != BUS_ID:
            raise NVMLError("Not Found")
        return "handle"

    def nvmlEventSetCreate(self):  # noqa: N802
        if "events" in self.answers:
            raise self.answers["events"]
        return "events"

    def nvmlDeviceRegisterEvents(self, handle, kinds, events):  # noqa: N802
        assert (handle, kinds, events) == ("handle", pynvml.nvmlEventTypeXidCriticalError, "events")

    def nvmlEventSetWait_v2(self, events, timeout_ms):  # noqa: N802
        assert (events, timeout_ms) == ("events", 0), "nobody waits here"
        if not self.xids:
            raise NVMLError("Timeout")
        return SimpleNamespace(eventData=self.xids.pop(0))

    def __getattr__(self, name):
        if name not in self.answers or self.answers[name] is None:
            raise AttributeError(name)

        def answer(handle, *args):
            assert (handle, args) == ("handle", ARGUMENTS.get(name, ()))
            if isinstance(self.answers[name], Exception):
                raise self.answers[name]
            return self.answers[name]

        return answer


@pytest.fixture
def gpu(monkeypatch):
    def make(**answers):
        nvml = Nvml(**answers)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return open_nvml(BUS_ID), nvml

    return make


def test_a_healthy_gpu(gpu) -> None:
    read, _ = gpu()
    assert read() == DeviceHealth(
        utilisation=0.87,
        memory_utilisation=0.41,
        power_watts=612.4,
        power_limit_watts=700.0,
        temperature_celsius=61,
        clock_hertz=1.83e9,
    )


def test_the_stand_in_has_names_of_the_library() -> None:
    for name in (*DEFAULT, "nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"):
        assert callable(getattr(pynvml, name))


def test_what_is_not_permitted_or_not_there_is_null(gpu) -> None:
    read, _ = gpu(**dict.fromkeys(DEFAULT, NVMLError("Insufficient Permissions")), events=NVMLError("Not Supported"))
    assert read() == DeviceHealth()
    read, _ = gpu(**dict.fromkeys(DEFAULT))
    assert read() == DeviceHealth()


def test_one_figure_that_fails_leaves_the_others(gpu) -> None:
    read, _ = gpu(nvmlDeviceGetPowerUsage=NVMLError("Unknown Error"))
    found = read()
    assert (found.power_watts, found.utilisation, found.temperature_celsius) == (None, 0.87, 61)


def test_with_mig_the_whole_gpus_use_is_not_taken_for_the_instances(gpu) -> None:
    read, _ = gpu(nvmlDeviceGetMigMode=[1, 1])
    found = read()
    assert (found.utilisation, found.memory_utilisation, found.power_watts, found.power_limit_watts) == (None,) * 4
    assert found.temperature_celsius == 61


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (0x01, []),
        (0x04, ["throttled: the power limit is reached"]),
        (0x24, ["throttled: the power limit is reached", "throttled: the GPU is too warm"]),
        (0x08, ["throttled by the hardware"]),
        (0x48, ["throttled by the hardware: the GPU is too hot"]),
    ],
)
def test_throttling_in_words(gpu, reasons, said) -> None:
    read, _ = gpu(nvmlDeviceGetCurrentClocksEventReasons=reasons)
    assert list(read().warnings) == said


def test_throttling_by_the_name_that_older_drivers_have(gpu) -> None:
    read, _ = gpu(
        nvmlDeviceGetCurrentClocksEventReasons=NVMLError("Function Not Found"),
        nvmlDeviceGetCurrentClocksThrottleReasons=0x04,
    )
    assert read().warnings == ("throttled: the power limit is reached",)


def test_memory_errors_in_words(gpu) -> None:
    read, _ = gpu(nvmlDeviceGetTotalEccErrors=3, nvmlDeviceGetRemappedRows=(1, 1, 1, 0))
    assert read().warnings == (
        "ECC: 3 uncorrected memory errors since the driver was loaded",
        "ECC: rows of memory wait to be remapped: reset the GPU",
    )
    read, _ = gpu(nvmlDeviceGetRemappedRows=(1, 1, 1, 1), nvmlDeviceGetRetiredPagesPendingStatus=1)
    assert read().warnings == (
        "ECC: rows of memory could not be remapped: replace the GPU",
        "ECC: pages of memory wait to be retired: restart the machine",
    )


def test_the_last_xid_stays(gpu) -> None:
    read, nvml = gpu()
    assert read().warnings == ()
    nvml.xids += [13, 79]
    assert read().warnings == ("Xid 79: the GPU has fallen off the bus: restart the machine",)
    assert read().warnings == ("Xid 79: the GPU has fallen off the bus: restart the machine",)
    nvml.xids.append(999)
    assert read().warnings == ("Xid 999: see NVIDIA's list of Xid errors",)


def test_a_storm_of_events_ends(gpu) -> None:
    read, nvml = gpu()
    nvml.xids += [31] * 100
    read()
    assert 0 < len(nvml.xids) < 100


def test_no_gpu_at_that_place(gpu) -> None:
    gpu()
    with pytest.raises(NVMLError, match="Not Found"):
        open_nvml("0000:99:00.0")
    with pytest.raises(NVMLError, match="Driver Not Loaded"):
        gpu(init=NVMLError("Driver Not Loaded"))
