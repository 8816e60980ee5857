"""What the model says of float16 products: which error is whose, and where promotion sets in."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_models import direct as model

from gemmserve_kernels.algorithms.wgmma.candidates import promotion


def operands(k, *, one_sign):
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((8, k), (k, 8)))
    return (np.abs(a), np.abs(b)) if one_sign else (a, b)


def error(found, exact):
    return np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("one_sign", [False, True], ids=["both signs", "one sign"])
@pytest.mark.parametrize("k", [16, 1000, 4096, 4112, 20000])
def test_rounding_to_float16_is_the_error(k, one_sign):
    a, b = operands(k, one_sign=one_sign)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    sums = model.product(a, b, promotion("fp16", False, k))
    assert error(sums.astype(np.float16), exact) <= 1.02 * error(exact.astype(np.float16), exact)


@pytest.mark.parametrize("k", [512, 4096, 20000])
def test_promoted_sums_are_float32s(k):
    """Sums of one sign, where truncation adds up: no worse than adding the products one after the other in float32."""
    a, b = operands(k, one_sign=True)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    plain = np.zeros(exact.shape, np.float32)
    for x, y in zip(a.T, b, strict=True):
        plain += np.outer(x.astype(np.float32), y.astype(np.float32))
    promoted = error(model.product(a, b, promotion("fp16", False, k, wide=True)), exact)
    assert promoted <= 5e-7
    assert promoted <= error(plain, exact)
    assert error(model.product(a, b), exact) > 10 * promoted


def test_small_integers_are_exact():
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-15, 16, shape).astype(np.float16) for shape in ((20, 200), (200, 20)))
    for promote in (0, 16, 64):
        np.testing.assert_array_equal(model.product(a, b, promote), a.astype("f4") @ b.astype("f4"))
