"""Double precision on tensor cores on the device: every layout, all tiles, no element beside the result."""

from __future__ import annotations

import numpy as np
import pytest
from dmma_cases import CASES, Case, excess, run

from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.numerics import reference

pytestmark = pytest.mark.gpu


@pytest.fixture
def launcher():
    made = CupyLauncher.current()
    if made.spec.kind != "cuda" or int("".join(filter(str.isdigit, made.spec.arch))) < 80:
        pytest.skip(f"mma.sync in double: this is {made.spec.arch}")
    return made


def on_device(launcher, case, tile, **options):
    import cupy

    def put(x):
        return cupy.asarray(x, order="F" if x.flags.f_contiguous and not x.flags.c_contiguous else "C")

    return run(launcher, case, tile, put, lambda x: x.get(), **options)


def tiles_of(launcher, case):
    return [tile for tile in case.tiles().values() if tile.shared_bytes <= launcher.spec.shared_per_block]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_layout(launcher, case):
    for tile in tiles_of(launcher, case):
        assert excess(*on_device(launcher, case, tile)) <= 1, tile


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("shape", [(2000, 1500, 700), (1, 3000, 5000), (3000, 1, 129), (257, 1025, 33)], ids=str)
def test_shapes(launcher, shape, dtype):
    m, n, k = shape
    case = Case((m, k), (k, n), dtype)
    problem, arrays, value = on_device(launcher, case, None)
    assert excess(problem, arrays, value) <= 1
    np.testing.assert_array_equal(on_device(launcher, case, None)[2], value)


@pytest.mark.parametrize("k", [255, 256, 257, 1000, 4100])
@pytest.mark.parametrize("name", ["float64", "complex128", "planar"])
def test_runs_of_k(launcher, name, k):
    dtype, options = ("float64", {"layout": "planar"}) if name == "planar" else (name, {})
    case = Case((200, k), (k, 190), dtype, options=options)
    for tile in tiles_of(launcher, case):
        problem, arrays, value = on_device(launcher, case, tile)
        assert excess(problem, arrays, value) <= 1, tile
        np.testing.assert_array_equal(on_device(launcher, case, tile)[2], value)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_long_sums_of_one_sign_round_as_short_ones(launcher, dtype):
    """One chain of k = 20,000 multiply-adds has errors of 50 u and more; runs of 256 and their sum, a tenth."""
    case = Case((130, 20_000), (20_000, 70), dtype)
    a, b, _ = (x if x is None else np.abs(x).astype(dtype) for x in case.arrays())
    size = np.abs(a) @ np.abs(b) * 2.0**-53
    for tile in tiles_of(launcher, case):
        problem, arrays, value = on_device(launcher, case, tile, arrays=(a, b, None))
        assert (np.abs(value - reference.oracle_gemm(problem, *arrays)) / size).max() <= 16, tile


@pytest.mark.parametrize("trans", ["NN", "TN", "NT", "TT"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_the_copy_engine_and_threads_copy_the_same(launcher, dtype, trans):
    """An operand one element off an aligned address, or with an odd stride, has the bits of an aligned one."""
    import cupy

    rng = np.random.default_rng(3)
    m, n, k = 300, 290, 700
    a, b = ((m, k) if trans[0] == "N" else (k, m)), ((k, n) if trans[1] == "N" else (n, k))
    case = Case(a, b, dtype, options={"trans_a": trans[0], "trans_b": trans[1]})
    arrays = case.arrays(rng.integers(1 << 30))

    def odd(x):
        rows, columns = x.shape
        # No stride of complex128 but one of 2 elements is unfit for the copy engine.
        whole = cupy.empty((rows, 2 * columns + 1), x.dtype)
        view = whole[:, 1 : columns + 1] if dtype == "float64" else whole[:, :-1:2]
        view[...] = cupy.asarray(x)
        return view

    for tile in tiles_of(launcher, case):
        aligned = on_device(launcher, case, tile, arrays=arrays)
        assert excess(*aligned) <= 1
        _, _, value = run(launcher, case, tile, odd, lambda x: x.get(), arrays=arrays)
        np.testing.assert_array_equal(value, aligned[2])


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("shape", [(128, 130, 600), (2100, 2050, 520)], ids=str)
def test_a_batch_has_the_bits_of_its_products(launcher, shape, dtype):
    """Where the runs are the same: of how many results a product has, all of a batch count."""
    m, n, k = shape
    case = Case((3, 1, m, k), (2, k, n), dtype)
    a, b, _ = case.arrays()
    value = on_device(launcher, case, None, arrays=(a, b, None))[2]
    one = Case((m, k), (k, n), dtype)
    for i, j in np.ndindex(3, 2):
        np.testing.assert_array_equal(on_device(launcher, one, None, arrays=(a[i, 0], b[j], None))[2], value[i, j])


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_a_matrix_that_repeats_and_one_that_runs_backwards(launcher, dtype):
    """Strides of 0 along the batch, and negative ones, which no tensor map has."""
    import cupy

    case = Case((4, 150, 300), (4, 300, 170), dtype)
    a, b, _ = case.arrays()

    def backwards(x):
        return cupy.asarray(np.ascontiguousarray(x[::-1]))[::-1]

    forwards = on_device(launcher, case, None, arrays=(a, b, None))[2]
    value = run(launcher, case, None, backwards, lambda x: x.get(), arrays=(a, b, None))[2]
    np.testing.assert_array_equal(value, forwards)
    one = Case((150, 300), (4, 300, 170), dtype)
    repeated = on_device(launcher, one, None, arrays=(a[1], b, None))[2]
    same = on_device(launcher, case, None, arrays=(np.broadcast_to(a[1], a.shape), b, None))[2]
    np.testing.assert_array_equal(repeated, same)
