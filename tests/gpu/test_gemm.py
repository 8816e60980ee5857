"""gemm on CuPy arrays against NumPy in double precision, by every algorithm that the device has."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from host_products import array, assert_close, join, on_device, op, products
from hypothesis import HealthCheck, given, settings

from gemmserve_kernels import (
    ComputeUnsupported,
    ConfigInfeasible,
    DeviceSpec,
    GemmConfig,
    GemmProblem,
    Operand,
    OutOfDeviceMemory,
    ParameterInvalid,
    gemm,
    plan,
)
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.freivalds import freivalds_check
from gemmserve_kernels.numerics.reference import bound, errors, oracle_gemm

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

# Every combination of dtypes, strides and tiles is a kernel to compile: a few hundred would take minutes.
few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def build(a, b, c=None, **options):
    return GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c) if c is not None else None, **options)


@pytest.mark.parametrize("algorithm", [None, "simt", "vendor"])
def test_everything_against_numpy(algorithm):
    config = GemmConfig(algorithm=algorithm) if algorithm else None

    @few
    @given(products())
    def check(drawn):
        a, b = on_device(drawn.a), on_device(drawn.b)
        c = on_device(drawn.c) if drawn.c is not None else None
        try:
            d = gemm(a, b, c, config=config, **drawn.options)
        except ConfigInfeasible:
            assert algorithm == "vendor"
            return
        assert isinstance(d, cupy.ndarray)
        assert d.flags.c_contiguous if drawn.options["order"] == "C" else d.flags.f_contiguous
        found = join(d.get()) if drawn.planar else d.get()
        assert found.dtype == drawn.dtype
        assert_close(found, drawn.expected, drawn.dtype, drawn.a.shape[-1] + drawn.a.shape[-2])
        out = cupy.repeat(cupy.full_like(d, cupy.nan), 2, axis=-1)[..., ::2]
        assert gemm(a, b, c, config=config, out=out, **drawn.options) is out
        assert_close(
            join(out.get()) if drawn.planar else out.get(),
            drawn.expected,
            drawn.dtype,
            drawn.a.shape[-1] + drawn.a.shape[-2],
        )

    check()


@pytest.mark.parametrize("algorithm", ["simt", "vendor"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_sizes_around_the_tiles(rng, dtype, algorithm):
    for m, n, k in [(127, 129, 65), (256, 64, 128), (1, 300, 7), (300, 1, 500), (64, 64, 1), (200, 136, 1000)]:
        a, b = array(rng, (m, k), dtype), array(rng, (k, n), dtype)
        d = gemm(cupy.asarray(a), cupy.asarray(b), config=GemmConfig(algorithm=algorithm))
        found = errors(d, oracle_gemm(build(a, b), a, b))
        limit = {"float16": 1e-3, "float32": 2e-6, "complex64": 2e-6}.get(dtype, 1e-14)
        assert found.rel_fro < limit, (m, n, k)
        difference = d.get() - oracle_gemm(build(a, b), a, b)
        allowed = bound(build(a, b), a, b)
        assert (np.abs(difference.real) <= allowed).all(), (m, n, k)
        assert (np.abs(difference.imag) <= allowed).all(), (m, n, k)


@pytest.mark.parametrize("algorithm", ["simt", "vendor"])
@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64"])
def test_non_finite_elements_spread_as_in_numpy(rng, dtype, algorithm):
    a, b = array(rng, (70, 40), dtype), array(rng, (40, 50), dtype)
    a[2, 3], a[55, 0], b[1, 46] = np.inf, np.nan, -np.inf
    with np.errstate(all="ignore"):
        expected = np.isfinite(a @ b)
    found = gemm(cupy.asarray(a), cupy.asarray(b), config=GemmConfig(algorithm=algorithm))
    assert np.array_equal(np.isfinite(found.get()), expected)


def test_alpha_0_still_multiplies():
    a = cupy.asarray([[np.nan, 1.0]], "f4")
    assert bool(cupy.isnan(gemm(a, cupy.ones((2, 2), "f4"), alpha=0)).all())


@pytest.mark.parametrize("algorithm", ["simt", "vendor"])
def test_c_is_not_read_where_beta_is_0(rng, algorithm):
    a, b = on_device(array(rng, (30, 40), "c8")), on_device(array(rng, (40, 50), "c8"))
    c = cupy.full((30, 50), np.nan, "c8")
    config = GemmConfig(algorithm=algorithm)
    assert cupy.array_equal(gemm(a, b, c, beta=0, config=config), gemm(a, b, config=config))


def test_empty_extents():
    c = cupy.ones((3, 5), "c8")
    assert cupy.array_equal(gemm(cupy.empty((3, 0), "c8"), cupy.empty((0, 5), "c8"), c, beta=2), 2 * c)
    for batch, m, n in [(0, 3, 4), (2, 0, 4), (2, 3, 0)]:
        assert gemm(cupy.ones((batch, m, 2), "f4"), cupy.ones((2, n), "f4")).shape == (batch, m, n)


@pytest.mark.parametrize("algorithm", ["simt", "vendor"])
def test_results_are_the_same_bit_for_bit(rng, algorithm):
    a, b = on_device(array(rng, (500, 700), "c8")), on_device(array(rng, (700, 300), "c8"))
    config = GemmConfig(algorithm=algorithm)
    first = gemm(a, b, config=config).get().tobytes()
    assert all(gemm(a, b, config=config).get().tobytes() == first for _ in range(5))


def test_tf32_has_its_error_class(rng):
    if "tf32" not in DeviceSpec.current().compute_modes:
        pytest.skip("this device has no TF32")
    for dtype in ("f4", "c8"):
        a, b = array(rng, (512, 1024), dtype), array(rng, (1024, 512), dtype)
        d = gemm(on_device(a), on_device(b), compute="tf32")
        assert 5e-5 < errors(d, oracle_gemm(build(a, b), a, b)).rel_fro < 6e-4


def test_fp64_on_single_data(rng):
    a, b = array(rng, (300, 400), "c8"), array(rng, (400, 280), "c8")
    for config in (None, GemmConfig(algorithm="simt"), GemmConfig(algorithm="vendor")):
        d = gemm(on_device(a), on_device(b), compute="fp64", config=config)
        assert d.dtype == np.complex64
        assert errors(d, oracle_gemm(build(a, b), a, b)).rel_fro < 5e-8


def test_modes_without_a_kernel_name_those_with_one():
    a = cupy.ones((4, 4), "f2")
    with pytest.raises(ComputeUnsupported) as error:
        gemm(a, a, compute="ozaki")
    assert "fp32" in error.value.available


def test_out_may_overlap_an_operand(rng):
    a, b = array(rng, (60, 60), "f8"), array(rng, (60, 60), "f8")
    device = on_device(a)
    assert gemm(device, on_device(b), device, beta=1, out=device) is device
    assert np.allclose(device.get(), a @ b + a)


def test_arrays_of_both_libraries_do_not_mix():
    with pytest.raises(ParameterInvalid, match="numpy"):
        gemm(cupy.ones((2, 2)), np.ones((2, 2)))


def test_a_result_larger_than_the_memory():
    a, b = cupy.ones((1 << 21, 1), "f8"), cupy.ones((1, 1 << 21), "f8")
    with pytest.raises(OutOfDeviceMemory):
        gemm(a, b)
    assert gemm(a[:2], b[:, :2]).get().tolist() == [[1, 1], [1, 1]]


def test_streams(rng):
    a, b = array(rng, (256, 256), "c8"), array(rng, (256, 256), "c8")
    for algorithm in ("simt", "vendor"):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            d = gemm(on_device(a), on_device(b), config=GemmConfig(algorithm=algorithm))
        stream.synchronize()
        assert np.allclose(d.get(), a @ b, atol=1e-3)


@pytest.mark.parametrize("trans", ["".join(pair) for pair in itertools.product("NTCR", repeat=2)])
def test_large_products_of_every_op(rng, trans):
    """Large enough for conjugated operands to be copied for the vendor's BLAS."""
    a, b = array(rng, (600, 600), "c8"), array(rng, (600, 600), "c8")
    d = gemm(on_device(a), on_device(b), trans_a=trans[0], trans_b=trans[1], alpha=2 - 1j)
    expected = (2 - 1j) * (op(a, trans[0]).astype("c16") @ op(b, trans[1]).astype("c16"))
    assert errors(d, expected).rel_fro < 2e-6


def test_large_planar_products(rng):
    a, b, c = (array(rng, (2, 512, 512), "f4") for _ in range(3))
    for config in (None, GemmConfig(algorithm="simt")):
        d = gemm(*map(on_device, (a, b, c)), layout="planar", beta=1j, trans_b="C", config=config)
        expected = join(a).astype("c16") @ op(join(b), "C").astype("c16") + 1j * join(c)
        assert errors(join(d.get()), expected).rel_fro < 2e-6


def test_freivalds_on_the_device(rng):
    a, b, c = (on_device(array(rng, (5, 200, 200), "c8")) for _ in range(3))
    options = {"trans_a": "C", "alpha": 1 - 2j, "beta": 0.5j}
    problem = build(a, b, c, **options)
    d = gemm(a, b, c, **options)
    assert 1e-8 < freivalds_check(problem, a, b, c, d, 0).residual < 3e-6
    d[3, 17, 5] += 10
    assert freivalds_check(problem, a, b, c, d, 0).residual > 1e-4


def test_the_driver_agrees_with_the_data_sheet():
    spec = DeviceSpec.current()
    known = next((known for known in KNOWN.values() if known.name in spec.name), None)
    if known is None:
        pytest.skip(f"no data sheet of {spec.name}")
    for field in ("kind", "arch", "sm_count", "warp_size", "shared_per_block", "shared_per_sm", "registers_per_sm"):
        assert getattr(spec, field) == getattr(known, field), field
    assert spec.compute_modes == known.compute_modes


@pytest.mark.parametrize("n", [24, 300, 1500])
@pytest.mark.parametrize("dtype", ["f2", "f4", "c8", "c16"])
def test_what_ran_is_what_was_planned(rng, dtype, n):
    a = on_device(array(rng, (n, n), dtype))
    chosen = plan(build(a, a), DeviceSpec.current())
    by_name = gemm(a, a, config=GemmConfig(algorithm=chosen.algorithm))
    np.testing.assert_array_equal(gemm(a, a).get(), by_name.get())
