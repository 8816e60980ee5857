"""Gauges beside a measurement: processors that each kind of process kept busy, how busy the GPUs were."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time

SAMPLE_S = 0.05


class GpuSampler:
    """Thread that asks NVML for the utilisation of every GPU each `SAMPLE_S`; none where there is no NVML.

    NVML's utilisation is the share of its own last sample period (a sixth of a second to one) in which any kernel ran.
    """

    def __init__(self):
        self._over = threading.Event()
        self._samples = []
        self._thread = None

    def start(self):
        """Begin to sample, where `pynvml` and a driver are there."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except (ImportError, OSError):
            return
        except pynvml.NVMLError:
            return
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        self._thread = threading.Thread(target=self._run, args=(pynvml, handles), daemon=True)
        self._thread.start()

    def stop(self):
        """End; return the mean utilisation of each GPU in percent, None where it was never sampled."""
        self._over.set()
        if self._thread is None:
            return None
        self._thread.join()
        return [round(statistics.fmean(each), 1) for each in zip(*self._samples, strict=True)] or None

    def _run(self, pynvml, handles):
        while True:
            with contextlib.suppress(pynvml.NVMLError):  # a sample that cannot be had is not counted
                self._samples.append([pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles])
            if self._over.wait(SAMPLE_S):
                return


class Gauges:
    """Context manager around a measurement of a server; `document` says afterwards what was used meanwhile."""

    def __init__(self, server):
        self._server = server

    def __enter__(self):
        self._gpus = GpuSampler()
        self._gpus.start()
        self._cpu, self._began = self._server.cpu_by_role(), time.perf_counter()
        return self

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self._began
        cpu = self._server.cpu_by_role()
        self.cpu_s = {role: used - self._cpu[role] for role, used in cpu.items()}
        self.gpu = self._gpus.stop()

    def document(self):
        """Return {seconds, cpu (processors kept busy by kind of process), gpu_percent (mean of each GPU, or None),
        prepared (what the workers had prepared before, as `stage.settled` says; None: that was not waited for)}.
        """
        cpu = {role: round(used / self.seconds, 3) for role, used in self.cpu_s.items()}
        prepared = getattr(self._server, "prepared", None)
        return {"seconds": round(self.seconds, 3), "cpu": cpu, "gpu_percent": self.gpu, "prepared": prepared}
