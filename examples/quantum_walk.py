"""A quantum walk on a ring, by repeated squaring: ten products take it to 1,024 times its first step in time.

One particle hops between neighbouring sites, H = -(|j><j+1| + |j+1><j|). Its propagator over a short time is uploaded
once; each product doubles the time, and the walker's amplitudes after every doubling are read off on the way. All of it
is one program: the propagators stay on the device, only the amplitudes come back. The truth is the analytic solution on
the ring, a Fourier sum: psi_j(t) = 1/n sum_k exp(2 i t cos(2 pi k / n) + 2 pi i j k / n).

    python examples/quantum_walk.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys

import numpy as np
from truth import check, gamma, relative_error

from gemmserve import Client


def amplitudes(sites: int, time: float) -> np.ndarray:
    """The walker at `time`, started on site 0."""
    k = 2 * np.pi * np.arange(sites) / sites
    return np.fft.ifft(np.exp(2j * time * np.cos(k)))


def propagator(sites: int, time: float) -> np.ndarray:
    """exp(-i H time): column j is the walker that started on site j."""
    index = np.arange(sites)
    return amplitudes(sites, time)[(index[:, None] - index) % sites]


def main(client: Client, sites: int = 256, doublings: int = 10, time: float = 1 / 16) -> np.ndarray:
    """Runs the walk on the server; returns the amplitudes at each time. Raises TruthError when one of them is off."""
    start = np.zeros((sites, 1), np.complex128)
    start[0] = 1
    with client.put(propagator(sites, time)) as first, client.put(start) as site:
        with client.program() as p:
            power, walkers = first, []
            for _ in range(doublings):
                power = p.gemm(power, power)  # stays on the device, and goes when the next one is there
                walkers.append(power @ site)
        found = [walker.numpy()[:, 0] for walker in walkers]
        for walker in walkers:
            walker.delete()
    print(f"quantum walk on a ring of {sites} sites: {len(p.job.info.steps)} steps in one job")
    place = (np.arange(sites) + sites // 2) % sites - sites // 2
    bound = gamma(1, "float64")
    for doubling, walker in enumerate(found, 1):
        now = time * 2**doubling
        # |U| |U| <= ||U||_F^2 = n: a product errs by gamma(n) n in norm, beside ||U||_F = sqrt(n), and squaring doubles
        # what was there. A column's share of that is at most all of it, sqrt(n) times its own norm.
        bound = 2 * bound + gamma(sites, "float64") * np.sqrt(sites)
        spread = np.sqrt(np.sum(np.abs(walker) ** 2 * place**2))
        check(
            f"t = {now:7.3f}, spread {spread:5.1f}", relative_error(walker, amplitudes(sites, now)), bound * sites**0.5
        )
    return np.array(found)


if __name__ == "__main__":
    with Client(*sys.argv[1:2]) as connected:
        main(connected)
