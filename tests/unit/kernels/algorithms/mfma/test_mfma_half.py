"""float16 and its planes by the other instructions: gfx950's of 16 steps, gfx1100's WMMA on waves of 32 lanes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reduce_cases
from kernel_models import mfma as model
from kernel_models.splits import split
from mfma_cases import SMALL, check, run
from simt_cases import ShimMachine, random, strided
from simt_shim import ORDERS, ShimLauncher, compile_source

from gemmserve_kernels.algorithms.mfma.gemm_reduce import run_gemm_reduce
from gemmserve_kernels.algorithms.splits import gemm as planes
from gemmserve_kernels.algorithms.splits import gemm_reduce as planes_reduce
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

SPECS = {"gfx950": KNOWN["MI355X"], "gfx1100": KNOWN["RX7900XTX"]}
PLANES = GemmConfig(algorithm="mfma", block_m=64, block_n=32, warp_m=32)
"""The compiler keeps fewer sums of complex data in RDNA 3's registers: `warp_n` follows."""


def machine_of(arch, **options):
    return ShimMachine(ShimLauncher(SPECS[arch], **{"optimize": "-O1", **options}))


@pytest.fixture
def machine():
    """RDNA 3: what the instruction of 16 steps changes on gfx950 shows in the bits and in reductions."""
    return machine_of("gfx1100")


@pytest.mark.parametrize("trans", ["NN", "TC", "CT"])
def test_operations(machine, trans):
    m, n, k = 70, 41, 37
    a = random(1, "float16", *((k, m) if trans[0] in "TC" else (m, k)))
    b = random(2, "float16", *((n, k) if trans[1] in "TC" else (k, n)))
    check(machine, a, b, random(3, "float16", m, n), trans_a=trans[0], trans_b=trans[1], alpha=1.5, beta=-0.5)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (64, 64, 32), (65, 1, 7), (1, 90, 33), (33, 31, 129)])
def test_extents(machine, m, n, k):
    check(machine, random(1, "float16", m, k), random(2, "float16", k, n))


def test_batches_and_strides(machine):
    a, b = strided(random(1, "float16", 3, 40, 48), "padded"), strided(random(2, "float16", 48, 56), "reversed")
    check(machine, a, b, random(3, "float16", 3, 40, 56), beta=1, out="fortran")


def test_non_finite_values_stay_in_their_rows_and_columns(machine):
    a, b = random(1, "float16", 41, 40), random(2, "float16", 40, 38)
    a[3, 4], a[19, 33], b[8, 7], b[2, 17] = np.nan, np.inf, -np.inf, np.nan
    _, result = run(machine, a, b)
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    np.testing.assert_array_equal(result[np.isinf(expected)], expected[np.isinf(expected)].astype("f2"))


@pytest.mark.parametrize("arch", SPECS)
def test_the_models_bits(arch):
    a, b = random(1, "float16", 35, 77), random(2, "float16", 77, 33, scale=2.0**-13)
    _, result = run(machine_of(arch), a, b)
    np.testing.assert_array_equal(result, model.product_fp16(a, b, arch).astype(np.float16))


@pytest.mark.parametrize(("arch", "axis"), [("gfx1100", ["m"]), ("gfx1100", ["n", "batch"]), ("gfx950", ["m"])])
def test_reductions(arch, axis):
    machine = machine_of(arch)
    a, b = random(1, "float16", 3, 75, 40), random(2, "float16", 3, 40, 81)
    options = {"reduce": list(reduce_cases.REAL), "axis": axis, "alpha": 2, "return_c": True, "config": SMALL}
    first = reduce_cases.check(machine, run_gemm_reduce, a, b, **options)
    _, again = reduce_cases.run(machine_of(arch, order=ORDERS[-1]), run_gemm_reduce, a, b, **options)
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])


@pytest.mark.parametrize("stages", [1, 2])
def test_every_access_is_inside_and_ordered(stages):
    """Bounds, races and reads of shared memory that nothing wrote."""
    machine = machine_of("gfx1100", checked=True, optimize="-O2")
    a, config = strided(random(1, "float16", 33, 50), "fortran"), dataclasses.replace(SMALL, stages=stages)
    check(machine, a, random(2, "float16", 50, 70), config=config)


# ---- planes


def product(machine, compute, a, b, c=None, **options):
    problem = GemmProblem.build(*(None if x is None else Operand.of(x) for x in (a, b, c)), compute=compute, **options)
    out = machine.put(np.full(problem.result_shape, np.nan, problem.result_dtype))
    held = [None if x is None else machine.put(x) for x in (a, b, c)]
    planes.run_gemm(machine.launcher, problem, PLANES, *held, out)
    return problem, machine.get(out)


@pytest.mark.parametrize(
    ("arch", "dtype", "scheme"),
    [
        ("gfx1100", "float32", "3xfp16"),
        ("gfx1100", "complex64", "3xfp16"),
        ("gfx1100", "complex64", "1xfp16"),
        ("gfx950", "complex64", "3xfp16"),
    ],
)
def test_the_models_bits_of_planes(arch, dtype, scheme):
    machine, compute = machine_of(arch, optimize="-O0"), "tf32" if scheme == "1xfp16" else scheme
    a, b = random(1, dtype, 70, 100), random(2, dtype, 100, 44)
    problem, result = product(machine, compute, a, b)
    assert machine.launcher.launches == ["split_clear", "split", "mfma_gemm", "fallback"]
    left, right = split(a, scheme, "a"), split(np.ascontiguousarray(b.T), scheme, "b")
    found = model.multiply(left.planes, right.planes, scheme, arch)
    scale = np.exp2((left.exponents[:, None] + right.exponents).astype(np.float32))
    np.testing.assert_array_equal(result, found * scale)
    errors = reference.errors(result, reference.oracle_gemm(problem, a, b, None))
    assert errors.rel_fro <= {"3xfp16": 4e-7, "tf32": 5e-4}[compute]


def test_products_of_planes():
    """Rows of very different sizes, what is not finite, a batch that shares B, alpha and beta."""
    machine = machine_of("gfx1100", optimize="-O0")
    a, b, c = random(1, "float32", 2, 70, 100), random(2, "float32", 100, 44), random(3, "float32", 2, 70, 44)
    a[:, 3] *= 1e-30
    b[:, 5] *= 1e20
    a[1, 9, 7] = np.inf
    problem, result = product(machine, "3xfp16", a, b, c, alpha=2, beta=-1)
    assert np.isinf(result[1, 9]).all()
    a[1, 9] = 0
    expected, result[1, 9] = reference.oracle_gemm(problem, a, b, c), -c[1, 9]
    norms = np.linalg.norm(a.astype("f8"), axis=-1), np.linalg.norm(b.astype("f8"), axis=0)
    assert (np.abs(result - expected) <= 4 * 4e-7 * (2 * norms[0][..., None] * norms[1] + np.abs(c))).all()


@pytest.mark.parametrize("axis", ["m", "n"])
def test_reductions_of_planes(axis):
    machine = machine_of("gfx1100", optimize="-O0")
    a, b = random(1, "complex64", 2, 70, 60), random(2, "complex64", 60, 44)
    options = {"reduce": list(reduce_cases.COMPLEX), "axis": axis, "return_c": True, "compute": "3xfp16"}
    reduce_cases.check(machine, planes_reduce.run_gemm_reduce, a, b, config=PLANES, **options)


# ---- what the emulation insists on

WMMA = """
extern "C" __global__ void product(const Half* a, const Half* b, float* d, int broken) {
    const int lane = static_cast<int>(threadIdx.x);
    Vector<Half, 16> left, right;
    for (int k = 0; k < 16; ++k) {
        left.at[k] = a[lane % 16 * 16 + k];
        right.at[k] = b[k * 16 + lane % 16];
    }
    if (lane == broken) left.at[3].bits ^= 1;
    WmmaF16::Sums sums{};
    WmmaF16::run(sums, left, right);
    for (int i = 0; i < 8; ++i) d[WmmaF16::row(i, lane) * 16 + lane % 16] = sums[i];
}
"""


@pytest.mark.parametrize("broken", [-1, 4, 20])
def test_wmma_wants_both_halves_of_the_wave_to_hold_the_same(broken):
    text = compiler._flatten("mfma/instructions.cuh", set()) + WMMA
    module = compile_source(text, warp_size=32, optimize="-O0")
    a, b, d = random(1, "float16", 16, 16), random(2, "float16", 16, 16), np.zeros((16, 16), "f4")
    for order in ORDERS:
        module.launch("product", (1,), (32,), (a, b, d, broken), order=order)
        if broken >= 0:
            assert np.isnan(d[4]).all()
            d[4] = a[4].astype("f4") @ b.astype("f4")
        np.testing.assert_allclose(d, a.astype("f4") @ b.astype("f4"), rtol=1e-5, atol=1e-5)
