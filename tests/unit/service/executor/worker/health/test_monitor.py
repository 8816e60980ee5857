"""The thread that reads a device's sensors: what fails or hangs there is missing figures, and nothing else."""

from __future__ import annotations

import threading

from gemmserve_service.executor.worker.health import monitor as module
from gemmserve_service.executor.worker.health.monitor import Monitor
from gemmserve_service.executor.worker.health.processor import open_processor
from gemmserve_service.schemas import DeviceHealth

WARM = DeviceHealth(temperature_celsius=40.0)


class Stepped:
    """Probe that a test lets read one by one."""

    def __init__(self, *readings) -> None:
        self.readings = list(readings)
        self.turns = threading.Semaphore(0)
        self.read = threading.Semaphore(0)

    def __call__(self):
        self.read.release()
        assert self.turns.acquire(timeout=60)
        reading = self.readings.pop(0)
        if isinstance(reading, Exception):
            raise reading
        return reading

    def take(self, count=1):
        """Lets it read so often, and waits until it is about to read once more."""
        assert self.read.acquire(timeout=60)
        for _ in range(count):
            self.turns.release()
            assert self.read.acquire(timeout=60)
        self.read.release()


def test_it_has_the_last_reading() -> None:
    probe = Stepped(WARM, DeviceHealth(temperature_celsius=41.0))
    monitor = Monitor(lambda: probe, period_s=0.0)
    monitor.begin()
    probe.take()
    assert monitor._reading == WARM
    probe.take()
    assert monitor._reading.temperature_celsius == 41.0


def test_a_reading_that_fails_is_one_without_figures(monkeypatch) -> None:
    probe = Stepped(WARM, RuntimeError("GPU is lost"), WARM)
    monitor = Monitor(lambda: probe, period_s=0.0)
    monitor.begin()
    probe.take()
    assert monitor._reading == WARM
    probe.take()
    assert monitor._reading == DeviceHealth()
    probe.take()
    assert monitor._reading == WARM, "the next one is read all the same"


def test_a_driver_that_hangs_leaves_no_old_figures(monkeypatch) -> None:
    """The probe's second call does not return; the first reading counts for three periods."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    probe = Stepped(WARM)
    monitor = Monitor(lambda: probe, period_s=5.0)
    monitor.begin()
    probe.take()
    now[0] += 14.9
    assert monitor.latest == WARM
    now[0] += 0.2
    assert monitor.latest == DeviceHealth()


def test_sensors_that_cannot_be_opened_end_the_thread() -> None:
    opened = threading.Event()

    def refuse():
        opened.set()
        raise ImportError("No module named 'pynvml'")

    monitor = Monitor(refuse)
    monitor.begin()
    assert opened.wait(60)
    for thread in threading.enumerate():
        if thread.name == "gemmserve-health" and thread._target == monitor._run:
            thread.join(60)
            assert not thread.is_alive()
    assert monitor.latest == DeviceHealth()


def test_a_device_without_sensors_has_no_thread() -> None:
    before = threading.active_count()
    monitor = Monitor(None)
    monitor.begin()
    assert (threading.active_count(), monitor.latest) == (before, DeviceHealth())


def test_a_processor_tells_how_much_of_it_is_used(monkeypatch) -> None:
    from gemmserve_service.executor.worker.health import processor

    clocks = {"wall": 0.0, "used": 0.0}
    monkeypatch.setattr(processor.time, "perf_counter", lambda: clocks["wall"])
    monkeypatch.setattr(processor.time, "process_time", lambda: clocks["used"])
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    read = open_processor()
    assert read() == DeviceHealth(), "no time has passed"
    clocks.update(wall=5.0, used=10.0)
    assert read().utilisation == 0.5
    clocks.update(wall=10.0, used=31.0)
    assert read().utilisation == 1.0
    clocks.update(wall=15.0)
    assert read().utilisation == 0.0
