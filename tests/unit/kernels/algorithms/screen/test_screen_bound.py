"""The bound of what float16 takes from an element, against exact products of data that come close to it."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_kernels.algorithms.screen.bound import MAX_K, accumulated, exponent, promotion


@pytest.mark.parametrize("numbers", [1, 2, 8, 100, 1024, 4096, MAX_K])
def test_norms_fit_float16(numbers):
    """The largest norm of a line, squared, and half a unit more of every number of it."""
    norm = np.sqrt(numbers) * 2.0 ** (exponent(numbers) + 1) * (1 + 2.0**-10)
    assert norm**2 < 65504
    assert norm > 30  # subnormal numbers are far from a line's largest


def test_truncation_is_less_than_the_bound():
    """Sums of 16 products of one sign, each truncated to 24 bits of the largest, as the tensor core's are at worst."""
    for numbers in (64, 1024, 2048, 8192):
        rng = np.random.default_rng(numbers)
        x, y = (rng.uniform(1, 2, numbers).astype(np.float16).astype(np.float64) for _ in range(2))
        terms = (x * y).reshape(-1, 16)
        run, total, partial = promotion(numbers) or numbers, np.float32(0), 0.0
        for step, sixteen in enumerate(terms, 1):
            unit = 2.0 ** (np.floor(np.log2(max(partial, sixteen.max()))) - 23)
            partial = (np.floor(sixteen / unit) * unit).sum() + np.floor(partial / unit) * unit
            unit = 2.0 ** (np.floor(np.log2(partial)) - 23)
            partial = np.floor(partial / unit) * unit
            if step * 16 % run == 0:
                total, partial = np.float32(total + np.float32(partial)), 0.0
        off = abs(float(total) + partial - terms.sum())
        assert 0 < off < accumulated(numbers, complex_=False) * np.linalg.norm(x) * np.linalg.norm(y)
