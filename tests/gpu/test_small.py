"""The kernel for small products on the device: the shim's cases, tensor cores, large batches, alignment, repeats."""

from __future__ import annotations

import numpy as np
import pytest
from framed import Framed
from simt_cases import COMPLEX_ALPHA, CupyMachine, random
from small_cases import SMALL_CASES, TF32, check_non_finite_and_tiny, check_small, product, run_small

from gemmserve_kernels.algorithms.small import gemm as small
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.gpu


@pytest.fixture
def machine():
    return CupyMachine(CupyLauncher.current())


def tensor_cores(machine):
    problem = GemmProblem.build(*(Operand.contiguous((64, 64), "complex64"),) * 2, **TF32)
    if small.supports(problem, machine.launcher.spec):
        pytest.skip("no TF32 tensor cores")


@pytest.mark.parametrize("case", SMALL_CASES.values(), ids=SMALL_CASES)
def test_every_case(machine, case):
    check_small(machine, case)


@pytest.mark.parametrize("sizes", [(33, 33, 33), (64, 64, 64), (50, 3, 41), (1, 64, 40), (48, 40, 64), (64, 20, 1)])
@pytest.mark.parametrize("trans", ["NN", "CT", "TR"])
def test_tensor_cores(machine, sizes, trans):
    tensor_cores(machine)
    m, n, k = sizes
    check_small(machine, product(m, n, k, (17,), trans, c=(17, m, n), options=COMPLEX_ALPHA | TF32))


@pytest.mark.parametrize("how", [("fortran", "plain", "fortran"), ("gaps", "reversed", "gaps"), ("offset",) * 3])
def test_tensor_cores_of_strided_operands(machine, how):
    tensor_cores(machine)
    check_small(machine, product(40, 36, 50, (5,), strides=how[:2], out=how[2], options=TF32))
    check_small(machine, product(40, 36, 50, (2, 5), dtypes=("float32",), options={"layout": "planar"} | TF32))


@pytest.mark.parametrize("n", [33, 48, 64])
@pytest.mark.parametrize("kind", ["normal", "positive", "graded along k"])
def test_tensor_cores_are_as_accurate_as_the_vendors_float32(machine, n, kind):
    """Each part's error against its own norm. A part that cancels (positive data) may lose a tenth at small k."""
    import cupy

    tensor_cores(machine)
    a, b = (random(seed, "complex64", 200, n, n) for seed in (1, 2))
    if kind == "positive":
        a, b = ((np.abs(x.real) + 1j * np.abs(x.imag)).astype(np.complex64) for x in (a, b))
    if kind == "graded along k":
        grade = 2.0 ** (40 * np.arange(n) / n)
        a, b = (a * grade).astype(np.complex64), (b / grade[:, None]).astype(np.complex64)
    problem, *_, result = run_small(machine, product(n, n, n, (200,), options=TF32), (a, b, None))
    expected = reference.oracle_gemm(problem, a, b)
    found = reference.errors(result, expected)
    vendor = reference.errors(cupy.matmul(cupy.asarray(a), cupy.asarray(b)), expected)
    slack = 1.1 if kind == "positive" else 1.0
    assert found.rel_fro <= vendor.rel_fro
    assert found.rel_real <= slack * vendor.rel_real
    assert found.rel_imag <= slack * vendor.rel_imag


@pytest.mark.parametrize("options", [{}, TF32], ids=["plain", "tensor"])
def test_non_finite_and_tiny_values_give_what_float32_gives(machine, options):
    if options:
        tensor_cores(machine)
    check_non_finite_and_tiny(machine, options)


@pytest.mark.parametrize("batch", [1, 7, 100_000])
@pytest.mark.parametrize(("n", "dtype"), [(4, "complex64"), (5, "complex64"), (8, "float32"), (3, "float16")])
def test_batches(machine, batch, n, dtype):
    check_small(machine, product(n, n, n, (batch,), dtypes=(dtype,)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("n", [3, 4, 16, 32])
def test_bases_off_by_one_element(machine, dtype, n):
    """The same bits wherever the arrays begin; every element written, none beside."""
    import cupy

    a, b = (random(seed, dtype, 50, n, n) for seed in (1, 2))
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    results = []
    for shift in (0, 1):
        held = []
        for values in (a, b):
            room = cupy.zeros(values.size + 8, dtype)
            view = room[shift : shift + values.size].reshape(values.shape)
            view[...] = cupy.asarray(values)
            held.append(view)
        room = cupy.full(a.size + 8, np.nan, dtype)
        out = room[shift : shift + a.size].reshape(a.shape)
        small.run_gemm(machine.launcher, problem, None, *held, None, out)
        assert bool(cupy.isnan(room[:shift]).all())
        assert bool(cupy.isnan(room[shift + a.size :]).all())
        results.append(out.get())
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("n", [5, 16, 40])
def test_the_same_bits_every_time(machine, n):
    options = TF32 if n > small.LIMIT else {}
    if options:
        tensor_cores(machine)
    first, again = (run_small(machine, product(n, n, n, (3000,), options=options))[-1] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    a, b, _ = product(n, n, n, (3000,)).operands()
    alone = run_small(machine, product(n, n, n, (1,), options=options), (a[2999:], b[2999:], None))
    np.testing.assert_array_equal(alone[-1][0], first[2999])


def test_past_two_to_the_31_elements(machine):
    """Offsets of the last products need more than 32 bits."""
    import cupy

    n, batch = 8, (1 << 31) // 64 + 1000
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 3.2 * batch * n * n * 4:
        pytest.skip(f"{free} bytes free on the device")
    a, b = (cupy.random.default_rng(seed).standard_normal((batch, n, n), dtype=cupy.float32) for seed in (1, 2))
    out = cupy.full((batch, n, n), cupy.nan, cupy.float32)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    small.run_gemm(machine.launcher, problem, None, a, b, None, out)
    for part in (slice(0, 64), slice(batch // 2, batch // 2 + 64), slice(batch - 64, batch)):
        head, tail = a[part].get(), b[part].get()
        np.testing.assert_allclose(out[part].get(), head.astype(np.float64) @ tail, rtol=0, atol=1e-4)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("sizes", "options"), [((5, 7, 3), {}), ((16, 16, 16), {}), ((32, 31, 32), {}), ((40, 33, 50), TF32)]
)
def test_nothing_is_written_beside_the_result(machine, sizes, order, options):
    """Everything begins one element off any alignment, with gaps; C is the result's own place."""
    if options:
        tensor_cores(machine)
    m, n, k = sizes
    a, b, c = (random(seed, "complex64", 40, *each) for seed, each in enumerate([(m, k), (k, n), (m, n)]))
    held = [Framed(x.shape, "complex64").fill(x) for x in (a, b)]
    problem = GemmProblem.build(*(Operand.of(x) for x in (a, b, c)), alpha=2, beta=-1, **options)
    out = Framed(c.shape, "complex64", order=order).fill(c)
    small.run_gemm(machine.launcher, problem, None, *(x.array for x in held), out.array, out.array)
    expected = reference.oracle_gemm(problem, a, b, c)
    assert (np.abs(out.get() - expected) <= 2 * reference.bound(problem, a, b, c)).all()
