"""The quantum Fourier transform of n qubits, gate by gate.

Every gate is a 2^n x 2^n unitary that is uploaded once; the products are chained on the server, so that only the
finished circuit comes back. The truth is the analytic transform exp(2 pi i j k / 2^n) / sqrt(2^n).

    python examples/qft.py [http://127.0.0.1:8000]

Source of the circuit: Nielsen and Chuang, Quantum Computation and Quantum Information, figure 5.1.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
from truth import check, gamma, relative_error

from gemmserve import Client

if TYPE_CHECKING:
    from collections.abc import Iterator


def hadamard(n: int, qubit: int) -> np.ndarray:
    """H on one qubit of n; qubit 0 is the most significant bit of the index."""
    h = np.array([[1, 1], [1, -1]]) / np.sqrt(2)
    return np.kron(np.kron(np.eye(2**qubit), h), np.eye(2 ** (n - qubit - 1)))


def controlled_phase(n: int, control: int, target: int, angle: float) -> np.ndarray:
    """Multiplies by exp(i angle) where both qubits are 1."""
    index = np.arange(2**n)
    both = (index >> (n - 1 - control)) & (index >> (n - 1 - target)) & 1
    return np.diag(np.exp(1j * angle * both))


def swap(n: int, first: int, second: int) -> np.ndarray:
    """Exchanges two qubits."""
    index = np.arange(2**n)
    low, high = n - 1 - first, n - 1 - second
    differ = ((index >> low) ^ (index >> high)) & 1
    return np.eye(2**n)[index ^ (differ << low) ^ (differ << high)]


def circuit(n: int) -> Iterator[np.ndarray]:
    """The gates in the order in which they act. The swaps at the end undo the bit reversal of the cascade."""
    for target in range(n):
        yield hadamard(n, target)
        for control in range(target + 1, n):
            yield controlled_phase(n, control, target, 2 * np.pi / 2 ** (control - target + 1))
    for qubit in range(n // 2):
        yield swap(n, qubit, n - 1 - qubit)


def main(client: Client, qubits: int = 9) -> np.ndarray:
    """Runs the circuit on the server and returns its matrix. Raises TruthError when it is not the DFT."""
    size = 2**qubits
    unitary, gates = None, 0
    for gate in circuit(qubits):
        remote = client.put(gate.astype(np.complex64))
        if unitary is None:
            unitary = remote
        else:
            product = remote @ unitary  # stays on the server
            remote.delete()
            unitary.delete()
            unitary = product
        gates += 1
    result = unitary.numpy()
    unitary.delete()

    j = np.arange(size)
    dft = np.exp(2j * np.pi * np.outer(j, j) / size) / np.sqrt(size)
    print(f"QFT of {qubits} qubits: {gates} gates, each {size} x {size} complex64")
    # A row of a gate has at most two entries, and adding exact zeros is exact: a product errs by gamma(2) times the
    # gate's magnitudes, whose norm is at most sqrt(2); storing the gate in complex64 errs by less than gamma(1).
    check("circuit against the analytic DFT", relative_error(result, dft), gates * 2 * gamma(2, "float32"))
    return result


if __name__ == "__main__":
    with Client(*sys.argv[1:2]) as connected:
        main(connected)
