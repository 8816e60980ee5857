"""Grover's search, as one program: find one marked item among 2^n with about pi/4 sqrt(2^n) questions.

Oracle and diffusion are unitaries that are uploaded once; the state goes through them again and again without leaving
the device, and what comes back is the place and the size of its largest amplitude. The truth is Grover's rotation:
after k rounds the marked amplitude is sin((2 k + 1) asin(2^(-n/2))).

    python examples/grover.py [http://127.0.0.1:8000]

Source: L. K. Grover, A fast quantum mechanical algorithm for database search, STOC 1996.
"""

from __future__ import annotations

import sys

import numpy as np
from truth import TruthError, check, gamma

from gemmserve import Client


def oracle(size: int, marked: int) -> np.ndarray:
    """Turns the sign of the marked item's amplitude."""
    signs = np.ones(size)
    signs[marked] = -1
    return np.diag(signs)


def diffusion(size: int) -> np.ndarray:
    """Reflects every amplitude about their mean: 2 |s><s| - 1."""
    return np.full((size, size), 2 / size) - np.eye(size)


def main(client: Client, qubits: int = 9, marked: int = 300) -> int:
    """Searches on the server; returns the item found. Raises TruthError when it is not the marked one."""
    size = 2**qubits
    angle = np.arcsin(size**-0.5)
    rounds = int(np.pi / 4 / angle)
    gates = {"oracle": oracle(size, marked), "diffusion": diffusion(size)}
    remote = {name: client.put(gate.astype(np.complex64)) for name, gate in gates.items()}
    uniform = np.full((size, 1), size**-0.5, np.complex64)
    with client.program() as p:
        state = uniform
        for _ in range(rounds):
            asked = p.gemm(remote["oracle"], state)
            state = remote["diffusion"] @ asked
        # The last reflection once more, reduced as it is formed: the state itself need not come back.
        found = p.gemm_reduce(remote["diffusion"], asked, reduce=["argmax", "absmax"], axis="m")
    item, amplitude = int(found["argmax"].numpy()[0]), float(found["absmax"].numpy()[0])
    for array in (state, *found.values(), *remote.values()):
        array.delete()
    print(f"Grover's search among {size}: {rounds} rounds, {len(p.job.info.steps)} steps in one job, found {item}")
    if item != marked:
        raise TruthError(f"found {item}, marked {marked}")
    # The norm of |diffusion| is at most 3 and the state's is 1: a round errs by 3 gamma(size), the oracle by nothing,
    # and the entries of both are exact in complex64.
    error = abs(amplitude - np.sin((2 * rounds + 1) * angle))
    check("marked amplitude against Grover's rotation", error, rounds * 3 * gamma(size, "float32"))
    return item


if __name__ == "__main__":
    with Client(*sys.argv[1:2]) as connected:
        main(connected)
