"""The backend of a worker that has express products, on this machine's device."""

from __future__ import annotations

import pytest

from gemmserve_service.executor.worker.cuda.backend import CupyBackend


def express_backend() -> CupyBackend:
    """Backend whose calling thread has the stream of express products. Skips the test without CuPy."""
    cupy = pytest.importorskip("cupy")
    made = CupyBackend("rocm" if cupy.cuda.runtime.is_hip else "cuda", 0, 0.1)
    made.enter(express=True)
    return made
