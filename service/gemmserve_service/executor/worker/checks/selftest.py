"""The product that a worker must get right before it takes any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_service.executor.worker.backend import DeviceUnavailable, HostArray
from gemmserve_service.schemas import GemmParams

if TYPE_CHECKING:
    from gemmserve_service.executor.worker.backend import DeviceBackend

_SHAPE: Final = (67, 45, 83)  # m, n, k: multiples of no tile
# Rounding in FP32 over k = 83 stays near 1e-7 (Higham, Accuracy and Stability of Numerical Algorithms, 3.5).
_BOUND: Final = 5e-6


def verified_error(backend: DeviceBackend) -> float:
    """Relative Frobenius error of a small complex64 product against complex128. Raises DeviceUnavailable past 5e-6."""
    rng = np.random.default_rng(67_45_83)
    m, n, k = _SHAPE
    a = (rng.standard_normal((k, m)) + 1j * rng.standard_normal((k, m))).astype(np.complex64)
    b = (rng.standard_normal((k, n)) + 1j * rng.standard_normal((k, n))).astype(np.complex64)
    c = (rng.standard_normal((m, n)) + 1j * rng.standard_normal((m, n))).astype(np.complex64)
    d = np.full((m, n), np.nan, np.complex64)
    params = GemmParams(alpha=1.5 - 0.5j, beta=0.25j, trans_a="C")
    backend.run(params, {"a": HostArray(a), "b": HostArray(b), "c": HostArray(c)}, {"d": d})
    wide = (1.5 - 0.5j) * a.astype(np.complex128).conj().T @ b.astype(np.complex128) + 0.25j * c.astype(np.complex128)
    error = float(np.linalg.norm(d - wide) / np.linalg.norm(wide))
    if not error <= _BOUND:
        raise DeviceUnavailable(f"{backend.spec.name}: a product came out wrong (relative error {error:.2e})")
    return error
