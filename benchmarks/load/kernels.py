"""Process that times the kernels by themselves, before there is a server: commands and answers are JSON lines.

    {"device": "cuda:0", "sizes": [64, 4096], "streams": [[3456, 4096, 4096]], "seconds": 1.0}

The answer has the environment, how many devices there are, the first one's compute modes, and for each extent n the
seconds of one `gemmserve_kernels.gemm` of resident complex64 operands: in a loop that waits for the last one alone
(`seconds`), and of single calls that are waited for (`single_s`, median). For each shape (m, n, k) of `streams` the
same of operands that are prepared ahead.
"""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np
from benchmarks.load.client import matrix
from benchmarks.service import driver

from gemmserve_kernels import DeviceSpec, gemm, prepare
from gemmserve_kernels.bench.environment import environment

WARM_S = 0.3
LEAST = 5
SINGLE = 20


def run(command):
    """Measure every size."""
    name = command["device"].partition(",")[0]
    if name == "cpu":
        spec, devices = DeviceSpec.cpu(), 1

        def to_device(array):
            return array

        def wait():
            """Return at once: NumPy's products are over when they return."""
    else:
        import cupy

        cupy.cuda.Device(int(name.partition(":")[2] or 0)).use()
        spec, devices = DeviceSpec.current(), len(DeviceSpec.all())
        to_device, wait = cupy.asarray, cupy.cuda.Device().synchronize
    products = {str(n): timed((n, n, n), to_device, wait, command["seconds"]) for n in command["sizes"]}
    streams = {
        "x".join(map(str, shape)): timed(shape, to_device, wait, command["seconds"], prepare)
        for shape in command["streams"]
    }
    about, modes = environment(spec), list(spec.compute_modes)
    return {"environment": about, "devices": devices, "modes": modes, "products": products, "streams": streams}


def timed(shape, to_device, wait, seconds, prepared=lambda array, _: array):
    """Return the times of products of that shape (m, n, k): two left and two right operands, two results in turns.
    `prepared(array, side)`: returns what is multiplied in an operand's place.
    """
    m, n, k = shape
    left = [prepared(to_device(matrix(k, seed=seed, rows=m)), "a") for seed in (1, 2)]
    right = [prepared(to_device(matrix(n, seed=seed, rows=k)), "b") for seed in (3, 4)]
    turns = itertools.cycle([(a, b, d) for a, b in itertools.product(left, right) for d in range(2)])
    results = [to_device(np.empty((m, n), np.complex64)) for _ in range(2)]

    def once():
        a, b, d = next(turns)
        gemm(a, b, out=results[d])

    def loop(count):
        began = time.perf_counter()
        for _ in range(count):
            once()
        wait()
        return (time.perf_counter() - began) / count

    once()
    wait()
    each = loop(2)
    each = loop(max(LEAST, int(WARM_S / each)))
    each = loop(max(LEAST, int(seconds / each)))
    return {"seconds": each, "single_s": statistics.median(loop(1) for _ in range(SINGLE))}


if __name__ == "__main__":
    driver.serve(run)
