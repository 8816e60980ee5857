"""Equalisation of a MIMO-OFDM channel: on every subcarrier the antennas' mixture is undone by an LMMSE filter.

Per subcarrier f: received Y = H X + noise; the filter is W = (H^H H + s I)^-1 H^H, with s the noise's power. The
products are batches over the subcarriers: the Gram matrix with its regularisation is one gemm with beta, H^H is a
flag. The truth: no symbol is decided wrongly, and the float64 solution of the least-squares problem by NumPy.

    python examples/channel_equalisation.py [http://127.0.0.1:8000]

Source of the method: Tse and Viswanath, Fundamentals of Wireless Communication, section 8.3.3.
"""

from __future__ import annotations

import sys

import numpy as np
from truth import check, gamma, relative_error

from gemmserve import Client

QPSK = np.array([1 + 1j, 1 - 1j, -1 + 1j, -1 - 1j]) / np.sqrt(2)


def main(client: Client, subcarriers: int = 256, antennas: int = 16, layers: int = 4, symbols: int = 140) -> None:
    """Equalises one frame. Raises TruthError when a symbol or the filter is wrong."""
    rng = np.random.default_rng(11)

    def gaussian(*shape: int) -> np.ndarray:
        return ((rng.standard_normal(shape) + 1j * rng.standard_normal(shape)) / np.sqrt(2)).astype(np.complex64)

    noise_power = 0.01
    sent = rng.integers(4, size=(subcarriers, layers, symbols))
    channel = gaussian(subcarriers, antennas, layers)
    received = channel @ QPSK[sent].astype(np.complex64)
    received += np.float32(np.sqrt(noise_power)) * gaussian(subcarriers, antennas, symbols)

    remote_channel = client.put(channel)
    identity = np.eye(layers, dtype=np.complex64)
    gram = client.gemm(channel, channel, identity, trans_a="C", beta=noise_power)
    matched = (remote_channel.H @ client.put(received)).numpy()
    equalised = client.gemm(np.linalg.inv(gram), matched)

    print(f"equalisation: {subcarriers} subcarriers, {layers} layers on {antennas} antennas, {symbols} symbols each")
    h, y = channel.astype(np.complex128), received.astype(np.complex128)
    h_h = h.swapaxes(1, 2).conj()
    true_gram = h_h @ h + noise_power * np.eye(layers)
    reference = np.linalg.solve(true_gram, h_h @ y)
    # Forming and inverting the normal equations multiplies rounding by their condition (Higham, chapter 20).
    condition = float(np.linalg.cond(true_gram).max())
    check("against float64", relative_error(equalised, reference), condition * gamma(antennas + layers, "float32"))
    decided = np.argmin(np.abs(equalised[..., None] - QPSK), axis=-1)
    check("symbols decided wrongly", float(np.mean(decided != sent)), 0.0)


if __name__ == "__main__":
    with Client(*sys.argv[1:2]) as connected:
        main(connected)
