"""Sizes and rates of arrays in zstd: `python -m benchmarks.compression` writes docs/benchmarks/compression.json.

Rates are over the processor time of one thread, the best of five: other work on the machine costs them little. It pays
on a line that is slower than `pays_below`: there coding and sending what is left take less time than sending all
(decoding goes on meanwhile). Level 1, as servers and clients use it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

OUTPUT = Path(__file__).parents[1] / "docs" / "benchmarks" / "compression.json"
NBYTES = 32 * 2**20
LEVEL = 1
ROUNDS = 5


def arrays(rng):
    """Yield (what, complex64 array of 32 MiB)."""
    count = NBYTES // 8
    shape = (count // 64, 64)

    def noise(*of):
        return (rng.standard_normal(of) + 1j * rng.standard_normal(of)).astype(np.complex64)

    def integers(bits):
        return (rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (*shape, 2)).astype(np.float32)).view(np.complex64)

    yield "Gaussian noise", noise(*shape)
    wave = np.exp(1j * np.pi * np.sin(0.3) * np.arange(64)) * np.exp(2j * np.pi * rng.random((shape[0], 1)))
    yield "a plane wave at 64 antennas", wave.astype(np.complex64)
    yield "integers of 16 bits", integers(16)
    yield "integers of 8 bits", integers(8)
    yield "QPSK symbols", (rng.choice([-1.0, 1.0], (*shape, 2)).astype(np.float32)).view(np.complex64)
    yield "1 % of the elements not zero", np.where(rng.random(shape) < 0.01, noise(*shape), np.complex64(0))


def best(call):
    """Return (seconds of this thread's processor time, result) of the best of several calls."""
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        result = call()
        times.append(time.thread_time() - began)
    return min(times), result


def measured(array):
    """Return the share of bytes that is left and the rates, in bytes a second of the array."""
    data = array.tobytes()
    coding, coded = best(lambda: zstd.compress(data, level=LEVEL))
    decoding, decoded = best(lambda: zstd.decompress(coded))
    if decoded != data:
        raise AssertionError("what came back is another array")
    left = len(coded) / len(data)
    return {
        "left": left,
        "coded": len(data) / coding,
        "decoded": len(data) / decoding,
        "pays_below": (1 - left) * len(data) / coding,
    }


if __name__ == "__main__":
    rows = {what: measured(array) for what, array in arrays(np.random.default_rng(0))}
    report = {"nbytes": NBYTES, "level": LEVEL, "zstd": zstd.zstd_version, "rows": rows}
    OUTPUT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
