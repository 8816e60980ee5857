"""One amplitude of a random quantum circuit of 24 qubits, as one job: a tensor network of some hundred small tensors.

Layers of random gates on every qubit, and controlled-Z gates between neighbours on a grid in turn, as in experiments
that sample from such circuits. <x|U|0> is a sum over paths; `einsum` contracts it two tensors at a time, in an order
that keeps the largest intermediate result small, where the state itself would have 2^24 elements. A controlled-Z gate
is diagonal: its labels stay, and are in three tensors and more. NumPy then goes through the same order, and the norms
of its intermediate results bound the error of both.

    python examples/quantum_circuit.py [http://127.0.0.1:8000]

Source: I. L. Markov, Y. Shi, Simulating quantum computation by contracting tensor networks, SIAM J. Comput. 38, 2008.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from truth import check, gamma

import gemmserve
from gemmserve import Client


def circuit(rows: int, columns: int, layers: int, seed: int) -> tuple[list[np.ndarray], list[list[int]]]:
    """The tensors of the amplitude of a random outcome, and the labels of their axes."""
    rng = np.random.default_rng(seed)
    qubits = rows * columns
    label = list(range(qubits))  # of each qubit's line, where it is now
    tensors: list[np.ndarray] = [np.array([1, 0], complex)] * qubits
    labels = [[each] for each in label]
    controlled_z = np.array([[1, 1], [1, -1]], complex)
    for layer in range(layers):
        for qubit in range(qubits):
            new = qubits * (layer + 1) + qubit
            tensors.append(random_unitary(rng))
            labels.append([new, label[qubit]])
            label[qubit] = new
        for one, other in neighbours(rows, columns, layer % 4):
            tensors.append(controlled_z)
            labels.append([label[one], label[other]])
    for qubit in range(qubits):
        tensors.append(np.eye(2, dtype=complex)[rng.integers(2)])
        labels.append([label[qubit]])
    return tensors, labels


def random_unitary(rng: np.random.Generator) -> np.ndarray:
    """A 2 x 2 unitary, by Haar measure (F. Mezzadri, Notices AMS 54, 2007)."""
    q, r = np.linalg.qr(rng.standard_normal((2, 2)) + 1j * rng.standard_normal((2, 2)))
    return q * (np.diagonal(r) / np.abs(np.diagonal(r)))


def neighbours(rows: int, columns: int, pattern: int) -> list[tuple[int, int]]:
    """Pairs of qubits beside each other, every fourth of all; 0 and 1: in a row, 2 and 3: in a column."""
    down = pattern >= 2
    return [
        (row * columns + column, (row + down) * columns + column + (not down))
        for row in range(rows - down)
        for column in range(columns - (not down))
        if (row if down else column) % 2 == pattern % 2
    ]


def on_this_machine(
    tensors: list[np.ndarray], labels: list[list[int]], path: list[tuple[int, ...]], dtype: str
) -> tuple[complex, float]:
    """The amplitude by NumPy, in that order; and a bound on the error of the same in arithmetic of that dtype.

    Each contraction errs by gamma ||a|| ||b|| at most, and passes on what its operands err by: the norms are those of
    Frobenius, measured as it goes.
    """
    left = [(tensor, [*each], 0.0) for tensor, each in zip(tensors, labels, strict=True)]
    for one, other in path:
        (a, of_a, error_a), (b, of_b, error_b) = left[one], left[other]
        left = [each for number, each in enumerate(left) if number not in {one, other}]
        elsewhere = {label for _, each, _ in left for label in each}
        kept = [label for label in dict.fromkeys([*of_a, *of_b]) if label in elsewhere]
        terms = np.prod([2 for label in {*of_a, *of_b} if label not in kept], dtype=int)
        short = {label: number for number, label in enumerate(dict.fromkeys([*of_a, *of_b]))}
        made = np.einsum(
            a, [short[label] for label in of_a], b, [short[label] for label in of_b],
            [short[label] for label in kept], optimize=True,
        )  # fmt: skip
        norm_a, norm_b = np.linalg.norm(a), np.linalg.norm(b)
        error = (norm_a + error_a) * (norm_b + error_b) * (1 + gamma(int(terms), dtype)) - norm_a * norm_b
        left.append((made, kept, float(error)))
    ((amplitude, _, error),) = left
    return complex(amplitude), error


def main(client: Client, rows: int = 4, columns: int = 6, layers: int = 12, seed: int = 1) -> complex:
    """Computes the amplitude on the server; returns it. Raises TruthError when NumPy disagrees."""
    tensors, labels = circuit(rows, columns, layers, seed)
    arguments = [each for pair in zip(tensors, labels, strict=True) for each in pair]
    start = time.perf_counter()
    path, report = gemmserve.einsum_path(*arguments, [], optimize="greedy")
    planned = time.perf_counter()
    amplitude = complex(client.einsum(*arguments, [], optimize=path))
    served = time.perf_counter()
    truth, bound = on_this_machine(tensors, labels, path[1:], "float64")
    done = time.perf_counter()
    print(f"amplitude of {rows * columns} qubits after {layers} layers: {len(tensors)} tensors")
    print("  " + report.replace("\n", "\n  "))
    print(
        f"  {planned - start:.2f} s to find the order, {served - planned:.2f} s for the job with all transfers, "
        f"{done - served:.2f} s by NumPy in the same order"
    )
    # The bound of the order's norms holds for both results.
    check(f"amplitude {amplitude:.6e} against NumPy's", abs(amplitude - truth), 2 * bound)
    return amplitude


if __name__ == "__main__":
    with Client(*sys.argv[1:2]) as connected:
        main(connected)
