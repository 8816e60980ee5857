"""A beamformer's power map: where do the signals come from?

A uniform linear array of antennas, half a wavelength apart at the top frequency, records snapshots in several
frequency bins. Each bin's snapshots are multiplied by the steering vectors of every direction, and only the sum of
|y|^2 and the largest |y| of each direction come back: the beams themselves (a thousand times as much data) are never
stored. The truth is known twice: the directions, and the power from the covariance matrix, v^H (X^H X) v, in float64.

    python examples/beamforming.py [http://127.0.0.1:8000]

Source of the method: Van Trees, Optimum Array Processing, section 2.5 (conventional beamformer).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from truth import check, gamma

from gemmserve import Client

DIRECTIONS = (-48.0, -12.0, 7.0, 33.0)
"""Degrees from broadside."""


@dataclass(frozen=True)
class PowerMap:
    """Mean power and peak magnitude, each [bin, angle]; `found` are the directions read off the map, in degrees."""

    angles: np.ndarray
    frequencies: np.ndarray
    power: np.ndarray
    peak: np.ndarray
    found: np.ndarray


def steering(angles: np.ndarray, frequencies: np.ndarray, sensors: int) -> np.ndarray:
    """[bin, sensor, angle]: the phase that a plane wave has at each sensor; `frequencies` relative to the top one."""
    delay = 0.5 * np.arange(sensors)[:, None] * np.sin(np.radians(angles))
    return np.exp(-2j * np.pi * frequencies[:, None, None] * delay)


def snapshots(rng: np.random.Generator, frequencies: np.ndarray, sensors: int, count: int) -> np.ndarray:
    """[bin, snapshot, sensor]: four independent sources in noise 10 dB stronger than each of them at a sensor."""
    sources = rng.standard_normal((2, len(frequencies), count, len(DIRECTIONS)))
    waves = steering(np.array(DIRECTIONS), frequencies, sensors).swapaxes(1, 2)
    noise = rng.standard_normal((2, len(frequencies), count, sensors)) * np.sqrt(10)
    return ((sources[0] + 1j * sources[1]) @ waves + noise[0] + 1j * noise[1]).astype(np.complex64)


def peaks(angles: np.ndarray, power: np.ndarray, count: int) -> np.ndarray:
    """The angles of the `count` highest local maxima of `power`, in rising order."""
    inner = power[1:-1]
    tops = 1 + np.flatnonzero((inner > power[:-2]) & (inner >= power[2:]))
    return np.sort(angles[tops[np.argsort(power[tops])[-count:]]])


def main(client: Client, sensors: int = 64, count: int = 1024, bins: int = 16) -> PowerMap:
    """Maps the power and finds the directions. Raises TruthError when power or directions are wrong."""
    rng = np.random.default_rng(7)
    angles = np.linspace(-90, 90, 721)
    frequencies = np.linspace(0.5, 1.0, bins)
    received = snapshots(rng, frequencies, sensors, count)
    beams = steering(angles, frequencies, sensors).conj().astype(np.complex64)

    reduced = client.gemm_reduce(client.put(received), client.put(beams), reduce=["sumsq", "absmax"], axis="m")
    power, peak = reduced["sumsq"].numpy(), reduced["absmax"].numpy()
    print(
        f"beamforming: {bins} bins x {count} snapshots x {sensors} sensors, {len(angles)} directions;"
        f" {received.nbytes + beams.nbytes >> 20} MiB up, {power.nbytes + peak.nbytes >> 10} KiB down"
    )

    x, v = received.astype(np.complex128), beams.astype(np.complex128)
    true_power = np.sum(v.conj() * (x.swapaxes(1, 2).conj() @ x @ v), axis=1).real
    # One beam y errs by at most d = gamma(sensors) sum |x|, since every |v| is 1; so its square by 2 |y| d + d^2, and
    # the sum of `count` squares by Cauchy-Schwarz as below, plus the rounding of that sum.
    d2 = np.sum((gamma(sensors, "float32") * np.abs(x).sum(2)) ** 2, axis=1)[:, None]
    bound = 2 * np.sqrt(true_power * d2) + d2 + gamma(count, "float32") * true_power
    worst = np.argmax(np.abs(power - true_power) / bound)
    scale = true_power.flat[worst]
    check("power against v^H R v", abs(power.flat[worst] - scale) / scale, bound.flat[worst] / scale)

    true_peak = np.abs(x[-1] @ v[-1]).max(0)
    check(
        "peak magnitude in the top bin",
        float(np.abs(peak[-1] - true_peak).max() / true_peak.max()),
        float(gamma(sensors, "float32") * np.abs(x[-1]).sum(1).max() / true_peak.max()),
    )

    # Each bin is normalised, then averaged: side lobes move with frequency, sources do not.
    mean_power = power / count / sensors**2
    found = peaks(angles, mean_power.mean(0), len(DIRECTIONS))
    print(f"  directions found: {', '.join(f'{angle:+.2f}' for angle in found)} degrees")
    # Half a step of the grid and the Cramer-Rao spread of these snapshots, which is far below a step.
    check("directions in degrees", float(np.abs(found - np.sort(DIRECTIONS)).max()), angles[1] - angles[0])
    return PowerMap(angles, frequencies, mean_power, peak / sensors, found)


if __name__ == "__main__":
    with Client(*sys.argv[1:2]) as connected:
        main(connected)
