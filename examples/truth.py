"""How every example checks itself: a measured error against a bound that arithmetic gives, or a miss that stops it."""

from __future__ import annotations

import numpy as np


class TruthError(Exception):
    """A result is further from the truth than rounding explains."""


def gamma(terms: int, dtype: str) -> float:
    """Higham's gamma_n = n u / (1 - n u) for n complex terms: the rounding error of a sum of n products, relative to
    the sum of their magnitudes (Accuracy and Stability of Numerical Algorithms, sections 3.1 and 3.6)."""
    n_u = (terms + 2) * float(np.finfo(dtype).eps) / 2
    return np.sqrt(2) * n_u / (1 - n_u)


def relative_error(value: np.ndarray, truth: np.ndarray) -> float:
    """||value - truth||_F / ||truth||_F."""
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


def check(what: str, error: float, bound: float) -> None:
    """Prints the error beside its bound. Raises TruthError when it is larger (or NaN)."""
    print(f"  {what}: error {error:.1e}, bound {bound:.1e}", flush=True)
    if not error <= bound:
        raise TruthError(f"{what}: error {error:.3e} exceeds its bound {bound:.3e}")
