"""The vendor's BLAS behind our contract: every op, order, dtype, batch and copy that the plans ask for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from host_products import array, join, on_device, op

from gemmserve_kernels import ConfigInfeasible, DeviceError, GemmConfig, GemmProblem, Operand, gemm
from gemmserve_kernels.algorithms.vendor import gemm as vendor
from gemmserve_kernels.algorithms.vendor.blas import lower
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.run import measure
from gemmserve_kernels.bench.targets import GpuTarget
from gemmserve_kernels.numerics.reference import errors

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

VENDOR = GemmConfig(algorithm="vendor")
LIMITS = {"float16": 1e-3, "float32": 2e-6, "complex64": 2e-6, "float64": 1e-14, "complex128": 1e-14}


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def check(a, b, c=None, **options):
    d = gemm(
        on_device(a), on_device(b), on_device(c) if c is not None else None, config=VENDOR, **options
    ).get()  # fmt: skip
    planar = options.get("layout") == "planar"
    join_if = join if planar else lambda x: x
    wide = np.complex128 if planar or np.result_type(a, b).kind == "c" else np.float64
    a, b = op(join_if(a), options.get("trans_a", "N")), op(join_if(b), options.get("trans_b", "N"))
    expected = options.get("alpha", 1) * (a.astype(wide) @ b.astype(wide))
    if c is not None:
        expected = expected + options["beta"] * join_if(c)
    found = errors(join_if(d), np.asarray(expected))
    assert found.rel_fro < LIMITS[join_if(d).dtype.name]
    return d


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_op(rng, dtype, order):
    for trans_a, trans_b in itertools.product("NTCR", repeat=2):
        for view_a, view_b in itertools.product("CF", repeat=2):
            a = array(rng, (40, 56) if trans_a in "NR" else (56, 40), dtype, view_a)
            b = array(rng, (56, 24) if trans_b in "NR" else (24, 56), dtype, view_b)
            check(a, b, trans_a=trans_a, trans_b=trans_b, order=order)


def test_order_of_a_fresh_result(rng):
    a, b = on_device(array(rng, (3, 40, 56), "f4")), on_device(array(rng, (56, 24), "f4"))
    assert gemm(a, b, config=VENDOR, order="F").flags.f_contiguous
    assert gemm(a, b, config=VENDOR, order="C").flags.c_contiguous


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_batches_and_beta(rng, dtype):
    imaginary = 1j if dtype.startswith("complex") else 0
    a, b, c = array(rng, (6, 16, 24), dtype), array(rng, (24, 32), dtype), array(rng, (16, 32), dtype)
    check(a, b, c, alpha=2 - imaginary, beta=-0.5 + imaginary)
    a, b = array(rng, (3, 1, 16, 24), dtype), array(rng, (5, 24, 32), dtype)
    check(a, b, c, beta=1)
    check(array(rng, (4, 40, 64), dtype)[::2], array(rng, (4, 64, 32), dtype)[1::2])


def test_float16_at_odd_addresses(rng):
    """Batches whose first element is not at 16 bytes, as slices of larger arrays are."""
    whole_a, whole_b = array(rng, (5, 16, 24 + 8), "f2"), array(rng, (5, 24, 32), "f2")
    for start in range(1, 8):
        a = cupy.asarray(whole_a)[:, :, start : start + 24]
        d = gemm(a, cupy.asarray(whole_b), config=VENDOR).get()
        expected = whole_a[:, :, start : start + 24].astype("f8") @ whole_b.astype("f8")
        assert errors(d, expected).rel_fro < 1e-3


def test_operands_that_are_copied(rng):
    check(array(rng, (40, 56), "f4"), array(rng, (56, 24), "c8"), trans_b="R")
    check(array(rng, (40, 56), "c8", "gaps"), array(rng, (56, 24), "c8", "reversed"), trans_a="R")
    planes = array(rng, (2, 40, 56), "f4"), array(rng, (2, 24, 56), "f4"), array(rng, (2, 40, 24), "f4")
    check(*planes, trans_b="C", layout="planar", beta=1j)
    check(array(rng, (3, 40, 56), "f4"), array(rng, (56, 24), "f4"), order="F")


def test_vectors(rng):
    for m, n, k in itertools.product([1, 5], repeat=3):
        for view in ("C", "F", "gaps"):
            check(array(rng, (m, k), "c8", view), array(rng, (k, n), "c8", view), trans_a="N", trans_b="N")


def test_the_handle_is_left_as_it_was(rng):
    from cupy.cuda import cublas, device

    handle = device.get_cublas_handle()
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_DEVICE)
    try:
        check(array(rng, (8, 8), "f4"), array(rng, (8, 8), "f4"))
        assert cublas.getPointerMode(handle) == cublas.CUBLAS_POINTER_MODE_DEVICE
    finally:
        cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)


def test_a_status_of_the_blas_is_a_device_error(rng, monkeypatch):
    a, b = on_device(array(rng, (8, 8), "f4")), on_device(array(rng, (8, 8), "f4"))
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    monkeypatch.setattr(vendor, "_compute_type", lambda *_: (-1, -1))
    with pytest.raises(DeviceError, match="BLAS"):
        vendor.run_gemm(problem, lower(problem), a, b, None, cupy.empty((8, 8), "f4"))


def test_what_it_cannot_express_is_said():
    a = cupy.ones((3, 0), "f4")
    with pytest.raises(ConfigInfeasible, match="empty"):
        gemm(a, a.T, config=VENDOR)


@pytest.mark.parametrize(
    "case",
    [
        Case(m=256, n=256, k=256),
        Case(m=64, n=64, k=64, batch=16, dtype="float16"),
        Case(m=4096, n=16, k=256, trans_a="R"),
        Case(op="gemm_reduce", m=256, n=128, k=64, reduce=("absmax", "sum"), batch=4),
    ],
)
def test_the_benchmark_measures_both(case):
    rows = measure(case, GpuTarget(0), warmup=1, iterations=3)
    assert len(rows) == 2
    for row in rows:
        assert row.rel_fro < (1e-3 if case.dtype == "float16" else 1e-5)
        assert row.seconds > 0
