"""The models' error classes: those measured on the hardware, and the reasons for them."""

from __future__ import annotations

import numpy as np
import pytest
from host_products import array
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_kernels.numerics import models
from gemmserve_kernels.numerics.reference import errors


def error(mode, k, dtype="complex64", *, positive=False, seed=0, **options):
    rng = np.random.default_rng(seed)
    a, b = array(rng, (24, k), dtype), array(rng, (k, 20), dtype)
    if positive:
        a, b = (abs(x) if dtype == "float32" else (abs(x.real) + 1j * abs(x.imag)).astype(dtype) for x in (a, b))
    return errors(models.product(a, b, mode, **options), a.astype(complex) @ b.astype(complex)).rel_fro


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_error_classes_at_4096(dtype):
    """cuBLAS TF32 2.6e-4, CUTLASS 3xTF32 4.0e-7, 3xFP16 promoted every 32 k 3.0e-7 on an H200."""
    assert 2e-4 < error("1xtf32", 4096, dtype) < 4e-4
    assert 1e-7 < error("3xtf32", 4096, dtype) < 6e-7
    assert 1e-7 < error("3xfp16", 4096, dtype) < 3.5e-7
    assert error("fp32", 4096, dtype) < 1e-6


def test_promotion_is_what_makes_3xfp16_accurate():
    by_interval = [error("3xfp16", 2048, promote=p) for p in (32, 256, 512, 2048)]
    assert by_interval == sorted(by_interval)
    assert by_interval[-1] > 10 * by_interval[0]


def test_same_sign_data_do_not_cancel_the_bias():
    assert error("3xfp16", 2048, positive=True, promote=512) > 3 * error("3xfp16", 2048, positive=True, promote=32)


# ---- one matrix instruction


def steps(accumulator, products, unit=models.HOPPER):
    """One element: the accumulator and products with 1."""
    x = np.array([products], float)
    return float(models.step(np.full((1, 1), accumulator, float), x, np.ones((len(products), 1)), unit)[0, 0])


def test_addends_are_cut_below_the_largest():
    """Two extra bits on Hopper and one on Ampere (Khattak and Mikaitis): what each has below them is lost."""
    assert steps(1, [2.0**-24] * 8) == 1 + 2.0**-21
    assert steps(1, [2.0**-25] * 8) == 1 + 2.0**-22
    assert steps(1, [2.0**-26] * 15) == 1
    assert steps(1, [2.0**-25] * 8, models.AMPERE) == 1
    assert steps(1, [-(2.0**-24)]) == 1 - 2.0**-24


def test_the_sum_is_cut_towards_zero():
    assert steps(1, [2.0**-24] * 3) == 1 + 2.0**-23
    assert steps(-1, [-(2.0**-24)] * 3) == -1 - 2.0**-23
    assert steps(0, [0.0] * 4) == 0


def test_the_largest_counts_before_it_is_normalised():
    """1.5 x 1.5 has two bits before the point, and is aligned as if it had one."""
    x, y = np.array([[1.5, 2.0**-13]]), np.array([[1.5], [2.0**-12]])
    assert models.step(np.zeros((1, 1)), x, y, models.HOPPER)[0, 0] == 2.25
    y[1, 0] = 2.0**-9
    assert models.step(np.zeros((1, 1)), x, y, models.HOPPER)[0, 0] == 2.25 + 2.0**-22


@given(st.integers(0, 2**32 - 1))
def test_exact_sums_stay_exact(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.integers(-30, 31, (3, 16)).astype(float), rng.integers(-30, 31, (16, 2)).astype(float)
    start = rng.integers(-1000, 1001, (3, 2)).astype(float)
    np.testing.assert_array_equal(models.step(start, x, y, models.HOPPER), start + x @ y)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_what_is_given_back(count):
    x = np.random.default_rng(0).standard_normal(10000).astype(np.float32)
    more = models.restored(x, count)
    share = (np.abs(more.astype(float)) / np.abs(x) - 1)[x.view(np.uint32) & 7 != 0]
    assert (share > 0).all()
    assert share.max() <= (2 if count <= 4 else 4) * 2.0**-23
    integers = np.arange(-(2**21), 2**21, 7, dtype=np.float32)
    np.testing.assert_array_equal(models.restored(integers, count), integers)


@pytest.mark.parametrize("style", models.ROUNDINGS)
def test_every_rounding_of_the_parts_compensates(style):
    assert error("3xtf32", 512, big=style, small=style) < 1e-6


def test_rounding_to_nearest_beats_truncation():
    assert error("1xtf32", 512, small="nearest") < 0.7 * error("1xtf32", 512, small="toward_zero")


@given(st.floats(width=32, allow_nan=False), st.sampled_from(models.ROUNDINGS))
def test_tf32_keeps_ten_bits(value, style):
    x = np.array([value], np.float32)
    rounded = models.round_tf32(x, style)
    assert rounded.view(np.uint32)[0] & 0x1FFF == 0 or np.isinf(x[0])
    if np.isfinite(rounded[0]):
        unit = np.ldexp(1.0, max(int(np.frexp(abs(np.float64(value)))[1]) - 11, -136))
        limit = unit if style == "toward_zero" or abs(value) < np.finfo("f4").tiny else unit / 2
        assert abs(np.float64(rounded[0]) - np.float64(value)) <= limit


def test_ties_by_style():
    tie = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11], np.float32)
    up, step = 1 + 2.0**-10, 2.0**-10
    assert models.round_tf32(tie, "nearest").tolist() == [1, 1 + 2 * step, -1]
    assert models.round_tf32(tie, "half_ulp_truncate").tolist() == [up, 1 + 2 * step, -up]
    assert models.round_tf32(tie, "toward_zero").tolist() == [1, up, -1]
    tiny = np.array([0x1FFF], np.uint32).view(np.float32)
    assert models.round_tf32(tiny, "half_ulp_truncate")[0] > 0
    assert models.round_tf32(tiny, "half_ulp_truncate_flush")[0] == 0


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e38, max_value=1e38))
def test_truncation_goes_towards_zero(value):
    cut = models.truncate(np.array([value]))[0]
    assert abs(cut) <= abs(value)
    if abs(value) > np.finfo("f4").tiny:
        assert np.float32(cut) == cut
        assert abs(value) - abs(cut) < 2.0**-23 * abs(value)


def test_powers_of_two_make_3xfp16_scale_free():
    rng = np.random.default_rng(0)
    a, b = array(rng, (8, 64), "c8"), array(rng, (64, 8), "c8")
    rows = np.ldexp(np.float32(1), np.arange(-20, 20, 5))[:, None]
    plain = models.product(a, b, "3xfp16")
    assert np.array_equal(models.product(a * rows, b, "3xfp16"), plain * rows)


@pytest.mark.parametrize("mode", models.MODES)
def test_non_finite_elements_give_what_fp32_gives(mode):
    rng = np.random.default_rng(0)
    a, b = array(rng, (6, 32), "f4"), array(rng, (32, 5), "f4")
    a[1, 3], b[4, 2] = np.inf, np.nan
    with np.errstate(all="ignore"):
        expected = a @ b
    found = models.product(a, b, mode)
    assert np.array_equal(found[1], expected[1], equal_nan=True)
    assert np.array_equal(found[:, 2], expected[:, 2], equal_nan=True)
    assert np.isfinite(found[[0, 2, 3, 4, 5]][:, [0, 1, 3, 4]]).all()


def test_unknown_words():
    a = np.ones((2, 2), "f4")
    with pytest.raises(ValueError, match="mode"):
        models.product(a, a, "bf16")
    with pytest.raises(ValueError, match="rounding"):
        models.round_tf32(a, "up")
