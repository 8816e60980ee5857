"""MVDR beamforming: the weights that pass one direction and suppress everything else, for every direction at once.

Snapshots of an array of antennas go up, and one program does the rest where they are: the covariance of every frequency
bin with a loaded diagonal (herk), its Cholesky factor and the weights w = R^-1 v of all steering vectors (solve), and
the spectrum 1 / (v^H R^-1 v), whose peaks are the sources. Only weights and spectrum come back; covariances never do.
The truth is NumPy's, and both err by what the covariance's condition allows; and the directions, two of which
are too close for a conventional beamformer.

    python examples/mvdr.py [http://127.0.0.1:8000]

Source: J. Capon, High-resolution frequency-wavenumber spectrum analysis, Proc. IEEE 57 (1969).
"""

from __future__ import annotations

import sys

import numpy as np
from beamforming import peaks, steering
from truth import check, gamma

from gemmserve import Client

DIRECTIONS = (-30.0, 10.0, 13.0)
"""Degrees from broadside."""
LOADING = 1e-2
"""Loading of the diagonal, relative to the noise."""


def snapshots(rng: np.random.Generator, frequencies: np.ndarray, sensors: int, count: int) -> np.ndarray:
    """[bin, sensor, snapshot]: independent sources 10 dB above the noise at a sensor."""
    sources = rng.standard_normal((2, len(frequencies), len(DIRECTIONS), count)) * np.sqrt(10)
    noise = rng.standard_normal((2, len(frequencies), sensors, count))
    waves = steering(np.array(DIRECTIONS), frequencies, sensors)
    return waves @ (sources[0] + 1j * sources[1]) + noise[0] + 1j * noise[1]


def main(client: Client, sensors: int = 32, count: int = 512, bins: int = 8) -> np.ndarray:
    """Computes weights and spectrum; returns the directions found. Raises TruthError when anything is wrong."""
    rng = np.random.default_rng(7)
    angles = np.linspace(-90, 90, 721)
    frequencies = np.linspace(0.8, 1.0, bins)
    x = snapshots(rng, frequencies, sensors, count)
    v = steering(angles, frequencies, sensors)
    rx, rv = client.put(x), client.put(v)
    with client.program() as p:
        r = p.herk(rx, np.eye(sensors, dtype=complex), alpha=1 / count, beta=LOADING)
        w = p.solve(r, rv, assume="positive")
        power = (rv.conj() * w).sum(axis=-2)
        p.keep(w)
    weights, inverse = w.numpy(), power.numpy().real
    for array in (rx, rv, w, power):
        array.delete()
    print(
        f"MVDR: {bins} bins x {sensors} sensors x {count} snapshots, {len(angles)} directions;"
        f" {len(p.job.info.steps)} steps in one job"
    )

    covariance = x @ x.conj().swapaxes(-1, -2) / count + LOADING * np.eye(sensors)
    truth = np.linalg.solve(covariance, v)
    # The covariance errs by gamma(count) |X| |X|^H / count, at most gamma(count) times its trace in norm; a system's
    # solution by its condition times that and Cholesky's backward error (Higham, theorems 7.2 and 10.3).
    condition = np.linalg.cond(covariance).max()
    relative = sensors * gamma(count, "float64") + 4 * sensors * gamma(3 * sensors, "float64")
    error = np.linalg.norm(weights - truth, axis=-2) / np.linalg.norm(truth, axis=-2)
    check("weights against numpy.linalg.solve", float(error.max()), float(2 * condition * relative))

    spectrum = 1 / inverse
    found = peaks(angles, (spectrum / spectrum.max(-1, keepdims=True)).mean(0), len(DIRECTIONS))
    print(f"  directions found: {', '.join(f'{angle:+.2f}' for angle in found)} degrees")
    check("directions in degrees", float(np.abs(found - np.sort(DIRECTIONS)).max()), 2 * (angles[1] - angles[0]))
    return found


if __name__ == "__main__":
    with Client(*sys.argv[1:2]) as connected:
        main(connected)
