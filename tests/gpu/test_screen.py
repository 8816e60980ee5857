"""Extremes that are looked for in float16, on the device: the full product's, on data of every kind."""

from __future__ import annotations

import numpy as np
import pytest
from host_products import array, on_device

from gemmserve_kernels import GemmConfig, GemmReduceProblem, Operand, gemm_reduce
from gemmserve_kernels.algorithms.screen.gemm_reduce import supports
from gemmserve_kernels.device.spec import DeviceSpec

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

SCREEN, FULL = GemmConfig(algorithm="screen"), GemmConfig(algorithm="product")


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def check(a, b, names, **options):
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce=names, **options)
    if reason := supports(problem, DeviceSpec.current()):
        pytest.skip(reason)
    on = on_device(a), on_device(b)
    found, again = (gemm_reduce(*on, reduce=names, config=SCREEN, **options) for _ in range(2))
    full = gemm_reduce(*on, reduce=names, config=FULL, **options)
    for name in names:
        assert found[name].get().tobytes() == again[name].get().tobytes()
        np.testing.assert_allclose(found[name].get(), full[name].get(), rtol=1e-12 if "arg" not in name else 0)


@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_every_dtype_and_axis(rng, dtype, axis):
    names = ["max", "min", "argmax"] if dtype == "float64" else ["absmax", "argmax"]
    check(array(rng, (3, 700, 70), dtype), array(rng, (3, 70, 900), dtype), names, axis=axis, alpha=-2)


@pytest.mark.parametrize("trans", ["NN", "TN", "NT", "CR"])
@pytest.mark.parametrize("k", [1, 33, 512, 1500])
def test_operations_and_lengths(rng, trans, k):
    a = array(rng, (300, k) if trans[0] in "NR" else (k, 300), "complex128")
    b = array(rng, (k, 333) if trans[1] in "NR" else (333, k), "complex128")
    check(a, b, ["absmax", "argmax"], axis="n", trans_a=trans[0], trans_b=trans[1])


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_more_columns_and_longer_lines_than_shared_memory_has(rng, dtype, axis):
    a, b = array(rng, (40, 2100), dtype), array(rng, (2100, 2300), dtype)
    a, b = (a, b) if axis == "n" else (b.T, a.T)
    check(a, b, ["absmax", "argmax"], axis=axis)
    check(a.copy(), b.copy(), ["absmax", "argmax"], axis=axis)


@pytest.mark.parametrize("kind", ["spiky", "scaled", "ties", "zeros", "not finite"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_kinds_of_data(rng, dtype, kind):
    a, b = array(rng, (300, 200), dtype), array(rng, (200, 520), dtype)
    if kind == "spiky":
        a, b = (x * np.exp(2 * rng.standard_normal(x.shape)) for x in (a, b))
    elif kind == "scaled":
        a, b = a * 2.0 ** rng.integers(-300, 300, (300, 1)), b * 2.0 ** rng.integers(-300, 300, (1, 520))
    elif kind == "ties":
        b[:, 100:400] = b[:, 100:101]
    elif kind == "zeros":
        a[::3], b[:, ::5] = 0, 0
    else:
        a[7, 2], b[3, 5], b[0, 519] = np.inf, np.nan, -np.inf
    check(a, b, ["absmax", "argmax"], axis="n")
