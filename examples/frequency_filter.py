"""Filtering in the frequency domain: many channels of a recording through one filter, kept on the server.

The filter is the operator F^H diag(h) F, with F the unitary DFT matrix and h the frequency response. It is built once
from two remote arrays (F^H is a flag, not a copy) and then applied to every block that arrives. The truth is NumPy's
FFT in float64.

    python examples/frequency_filter.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys

import numpy as np
from truth import check, gamma, relative_error

from gemmserve import Client


def band_pass(size: int, low: float, high: float) -> np.ndarray:
    """Frequency response with raised-cosine edges; `low` and `high` in cycles per sample."""
    frequency = np.abs(np.fft.fftfreq(size))
    edge = 0.02

    def rise(at: float) -> np.ndarray:
        return 0.5 - 0.5 * np.cos(np.pi * np.clip((frequency - at) / edge + 0.5, 0, 1))

    return rise(low) * (1 - rise(high))


def main(client: Client, size: int = 512, channels: int = 64, blocks: int = 3) -> None:
    """Filters `blocks` blocks of [size, channels] samples. Raises TruthError when one differs from the FFT."""
    rng = np.random.default_rng(3)
    index = np.arange(size)
    dft = np.exp(-2j * np.pi * np.outer(index, index) / size) / np.sqrt(size)
    response = band_pass(size, 0.1, 0.3)

    remote_dft = client.put(dft.astype(np.complex64))
    weighted = client.put((response[:, None] * dft).astype(np.complex64))
    operator = remote_dft.H @ weighted  # F^H diag(h) F, never downloaded

    print(f"frequency filter: {blocks} blocks of {channels} channels x {size} samples")
    for block in range(blocks):
        samples = rng.standard_normal((size, channels)).astype(np.float32)
        filtered = (operator @ client.put(samples.astype(np.complex64))).numpy()
        truth = np.fft.ifft(response[:, None] * np.fft.fft(samples.astype(np.float64), axis=0), axis=0)
        # Three roundings of the operator and the data, each gamma(size) times magnitudes: the operator's |F^H| |F|
        # has norm size, but errors of random sign leave its square root (Higham and Mary, 2019).
        bound = 3 * np.sqrt(size) * gamma(int(np.sqrt(size)), "float32")
        check(f"block {block} against the FFT", relative_error(filtered, truth), bound)


if __name__ == "__main__":
    with Client(*sys.argv[1:2]) as connected:
        main(connected)
