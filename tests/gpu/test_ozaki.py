"""Products through residues on the device: every case of the shim, sizes that fill it, the promised accuracy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reduce_cases
from framed import Framed
from ozaki_cases import CASES, Case, run
from reduce_cases import COMPLEX, REAL
from simt_cases import CupyMachine, assert_reduced, random

from gemmserve_kernels.algorithms.common import panels
from gemmserve_kernels.algorithms.ozaki import gemm as ozaki
from gemmserve_kernels.algorithms.ozaki import gemm_reduce
from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.gpu

EPSILON = {"complex128": 3e-15, "float64": 3e-15, "complex64": 3e-7, "float32": 3e-7}


@pytest.fixture
def launcher():
    made = CupyLauncher.current()
    if made.spec.arch != "sm_90a":
        pytest.skip(f"INT8 wgmma: this is {made.spec.arch}")
    return made


def on_device(launcher, case, **options):
    import cupy

    def put(x):
        # cupy.asarray keeps no strides but these.
        return cupy.asarray(x, order="F" if x.flags.f_contiguous and not x.flags.c_contiguous else "C")

    return run(launcher, case, put, lambda x: x.get(), **options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case(launcher, case):
    assert on_device(launcher, case).errors.rel_fro <= EPSILON[case.dtype]


@pytest.mark.parametrize("name", ["normal", "float64", "AC BR", "planar", "batch", "scalars and C"])
def test_the_tensor_cores_give_the_bits_of_the_plain_kernel(launcher, name):
    fast, slow = (on_device(launcher, CASES[name], plain=plain).stored for plain in (False, True))
    np.testing.assert_array_equal(fast, slow)


@pytest.mark.parametrize("shape", [(300, 700, 130), (300, 520, 5000), (129, 100, 70_000)], ids=str)
@pytest.mark.parametrize("dtype", ["complex128", "float64"])
def test_clusters_show_in_no_bit(launcher, shape, dtype):
    m, n, k = shape
    alone, together = (
        on_device(launcher, Case((m, k), (k, n), dtype, tile={"cluster": cluster})).stored for cluster in (1, 2)
    )
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("kind", ["normal", "positive"])
def test_all_moduli_leave_nothing_but_the_roundings_of_scaled_elements_and_the_result(launcher, kind):
    """Each of the three is at most 2^-53 of what it rounds, and half of that on average: in norm below 2 of them."""
    result = on_device(launcher, Case((300, 3000), (3000, 200), "complex128", kind, tile={"moduli": 17}))
    assert result.errors.rel_fro <= 2.0**-52


def balanced(result, rows=slice(None), columns=slice(None)):
    """Errors of some rows and columns, each scaled by the norm of its line: small ones count as much as large ones."""
    a, b, _ = result.arrays
    a, b = a[rows], b[:, columns]
    weights = 1 / np.outer(
        np.linalg.norm(a.astype(np.clongdouble), axis=1), np.linalg.norm(b.astype(np.clongdouble), axis=0)
    )
    part = GemmProblem.build(Operand.of(a), Operand.of(b), compute="fp64")
    exact = reference.oracle_gemm(part, a, b) * weights.real
    return lambda d: reference.errors(d[rows, columns] * weights.real, exact).rel_fro


SHAPES = [(2, 3, 4096), (130, 258, 100), (256, 512, 128), (300, 700, 1000), (1111, 777, 513), (3, 5, 100_000)]


@pytest.mark.parametrize("dtype", ["complex128", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(launcher, shape, dtype):
    m, n, k = shape
    result = on_device(launcher, Case((m, k), (k, n), dtype))
    assert result.errors.rel_fro <= (3e-15 if m * n > 100 else 1e-14)  # few elements, one of which may be small
    np.testing.assert_array_equal(on_device(launcher, Case((m, k), (k, n), dtype)).stored, result.stored)


def test_sums_past_65536_steps_are_reduced_in_between(launcher):
    a = np.full((2, 200_000), 127.0)
    result = on_device(launcher, Case((3, 300_000), (300_000, 5), "float64", "positive"))
    assert result.errors.rel_fro <= 3e-15
    import cupy

    problem = GemmProblem.build(Operand.of(a), Operand.of(a.T), compute="ozaki")
    out = cupy.empty((2, 2))
    ozaki.run_gemm(launcher, problem, None, cupy.asarray(a), cupy.asarray(a).T, None, out)
    np.testing.assert_array_equal(out.get(), a @ a.T)


@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "rows", "graded"])
@pytest.mark.parametrize("dtype", ["complex128", "float64"])
def test_it_is_no_less_accurate_than_plain_arithmetic(launcher, kind, dtype):
    import cupy

    # Large enough that the vendor's BLAS does not cut k, which helps its accuracy.
    result = on_device(launcher, Case((1536, 2048), (2048, 1536), dtype, kind))
    native = cupy.matmul(*result.device[:2]).get()
    error = balanced(result, slice(0, 1536, 24), slice(0, 1536, 12))
    assert error(result.value) <= 3e-15
    # Wide and graded operands are multiplied natively, in runs of k, as the vendor cuts k.
    assert error(result.value) <= error(native)


@pytest.mark.parametrize("dtype", ["complex128", "float64"])
def test_what_is_not_finite_ends_where_plain_arithmetic_has_it(launcher, dtype):
    import cupy

    result = on_device(launcher, Case((300, 500), (500, 700), dtype, "nonfinite"))
    plain = cupy.empty((300, 700), dtype)
    simt.run_gemm(launcher, result.problem, None, *result.device, plain)
    assert not np.isfinite(result.stored).all()
    np.testing.assert_allclose(result.stored, plain.get(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("trans", ["NN", "TN", "NC", "RT"])
def test_prepared_operands_and_panels_change_no_bit(launcher, trans):
    a = (1000, 700) if trans[0] in "TC" else (700, 1000)
    b = (600, 1000) if trans[1] in "TC" else (1000, 600)
    options = {"trans_a": trans[0], "trans_b": trans[1]}
    whole = on_device(launcher, Case(a, b, options=options)).stored
    for prepared in ("a", "b", "ab"):
        np.testing.assert_array_equal(on_device(launcher, Case(a, b, options=options), prepared=prepared).stored, whole)
    small = Case(a, b, options=options, tile={"workspace": 32 << 20})
    for prepared in ("", "ab"):
        np.testing.assert_array_equal(on_device(launcher, small, prepared=prepared).stored, whole)


def test_every_element_of_a_view_between_others_is_written_and_nothing_else(launcher):
    import cupy

    rng = np.random.default_rng(5)
    store = cupy.asarray(rng.standard_normal(601 * 403 + 1))
    a = store[1:].reshape(601, 403)[::-2, 1::3]  # one element off any alignment, backwards
    b = cupy.asarray(rng.standard_normal((a.shape[1], 290)))
    whole = cupy.full((2 * a.shape[0], 600), 7.0)
    out = whole[1::2, 3:583:2]
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="ozaki")
    ozaki.run_gemm(launcher, problem, None, a, b, None, out)
    exact = reference.oracle_gemm(problem, a.get(), b.get())
    assert reference.errors(out.get(), exact).rel_fro <= 3e-15
    out[...] = 7.0
    assert (whole == 7.0).all()


def hostile(kind, shape, dtype, generator):
    """Data whose rows and columns are not of one size."""
    import cupy

    def normal():
        return generator.standard_normal(shape)

    x = normal() + 1j * normal() if dtype == "complex128" else normal()
    if kind == "spikes":
        return 1e-6 * x + 1e3 * (generator.random(shape) < 1e-4)
    if kind == "targets":
        return x * cupy.where(generator.random(shape) < 1e-3, 1e5, 1.0)
    if kind == "exponents":
        return x * cupy.exp(6 * normal())
    if kind == "heavy":
        return x / normal()
    if kind == "sparse":
        return x * (generator.random(shape) < 0.01)
    return x


@pytest.mark.parametrize("kind", ["normal", "spikes", "targets", "exponents", "heavy", "sparse"])
@pytest.mark.parametrize("shape", [(1100, 1300, 2048), (4096, 4096, 1000), (512, 300, 129)], ids=str)
@pytest.mark.parametrize("dtype", ["complex128", "float64"])
def test_every_element_is_as_accurate_as_the_vendors(launcher, dtype, shape, kind):
    import cupy

    m, n, k = shape
    generator = cupy.random.default_rng(np.random.SeedSequence().entropy)
    a, b = hostile(kind, (m, k), dtype, generator), hostile(kind, (k, n), dtype, generator)
    problem = GemmProblem.build(Operand.contiguous((m, k), dtype), Operand.contiguous((k, n), dtype), compute="ozaki")
    out = cupy.full((m, n), cupy.nan, dtype)
    ozaki.run_gemm(launcher, problem, None, a, b, None, out)
    native = cupy.matmul(a, b)
    rows, columns = np.unique(np.linspace(0, m - 1, 8).astype(int)), slice(n - 150, n)
    left, right = a[rows].get(), b[:, columns].get()
    exact = reference.oracle_gemm(GemmProblem.build(Operand.of(left), Operand.of(right), compute="fp64"), left, right)
    size = np.abs(left) @ np.abs(right) * 2.0**-53
    error, own = (
        float((np.abs(d[rows][:, columns].get() - exact) / np.where(size == 0, 1, size)).max()) for d in (out, native)
    )
    assert error <= max(4, 2 * own)


@pytest.mark.parametrize("dtype", ["complex128", "float64"])
def test_outliers_are_multiplied_apart(launcher, dtype):
    """To the last place and without a tile in plain arithmetic; however the product is made, with the same bits."""
    import cupy

    m, n, k, most = 300, 700, 3000, 16
    generator = cupy.random.default_rng(np.random.SeedSequence().entropy)
    a, b = hostile("targets", (m, k), dtype, generator), hostile("spikes", (k, n), dtype, generator)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="ozaki")
    tile = replace(ozaki.resolve(None, problem, launcher.spec), outliers=most)

    def product(left, right, **changes):
        out = cupy.full((m, n), cupy.nan, dtype)
        ozaki.run_gemm(launcher, problem, replace(tile, **changes), left, right, None, out)
        return out.get()

    found = product(a, b)
    exact = reference.oracle_gemm(problem, a.get(), b.get())
    assert (np.abs(found - exact) <= 4 * 2.0**-53 * (np.abs(a.get()) @ np.abs(b.get()))).all()
    sides = [ozaki.prepare_operand(launcher, x, side, outliers=most) for x, side in ((a, "a"), (b, "b"))]
    turned = cupy.asfortranarray(a)
    for other in (
        product(a, b), product(a, b, plain=True), product(a, b, workspace=1 << 22), product(a, b, cluster=1),
        product(sides[0], b), product(a, sides[1]), product(*sides), product(turned, b),
    ):  # fmt: skip
        np.testing.assert_array_equal(other, found)


def test_a_large_product_by_sampled_rows(launcher):
    import cupy

    n = 4096
    generator = cupy.random.default_rng(2)
    a, b = (generator.standard_normal((n, n)) + 1j * generator.standard_normal((n, n)) for _ in range(2))
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="ozaki")
    out = cupy.full((n, n), cupy.nan, np.complex128)
    ozaki.run_gemm(launcher, problem, None, a, b, None, out)
    rows, columns = [0, 1, 127, 128, 2047, n - 1], slice(n - 300, n)
    part = GemmProblem.build(Operand.of(a[rows]), Operand.of(b[:, columns]), compute="ozaki")
    exact = reference.oracle_gemm(part, a[rows].get(), b[:, columns].get())
    assert reference.errors(out[rows][:, columns].get(), exact).rel_fro <= 2e-15
    native = cupy.matmul(a, b)
    assert float(cupy.linalg.norm(out - native) / cupy.linalg.norm(native)) <= 5e-15


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(65, 67, 300), (128, 256, 128), (1, 300, 129), (300, 1, 129)], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_nothing_is_written_beside_the_result(launcher, dtype, shape, order):
    """All arrays begin one element off any alignment; C, and data that plain arithmetic has to patch."""
    m, n, k = shape
    rng = np.random.default_rng(2)

    def one(*extents):
        x = rng.standard_normal(extents)
        return x + 1j * rng.standard_normal(extents) if dtype == "complex128" else x

    a, b, c = one(2, m, k), one(1, k, n), one(2, m, n)
    grade = 2.0 ** (40 * np.arange(k) / k)
    a[1], b = a[1] * grade, b / grade[:, None]
    held = [Framed(x.shape, dtype).fill(x) for x in (a, b, c)]
    problem = GemmProblem.build(*(Operand.of(x) for x in (a, b, c)), alpha=2, beta=-1, compute="ozaki")
    out = Framed((2, m, n), dtype, order=order).fill(np.full((2, m, n), np.nan))
    ozaki.run_gemm(launcher, problem, None, *(x.array for x in held), out.array)
    exact = reference.oracle_gemm(problem, a, b, c)
    assert (np.abs(out.get() - exact) <= reference.bound(problem, a, b, c)).all()


def test_a_batch_of_more_than_65535(launcher):
    case = Case((70_000, 2, 40), (70_000, 40, 3), "float64")
    result = on_device(launcher, case)
    assert result.errors.rel_fro <= EPSILON["float64"]


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_the_same_bits_every_time(launcher, dtype):
    first, *others = (on_device(launcher, Case((2, 300, 500), (500, 400), dtype)).stored for _ in range(3))
    for again in others:
        np.testing.assert_array_equal(again, first)


def test_a_result_of_more_than_two_to_the_31_elements(launcher):
    """Panels, and offsets that need more than 32 bits."""
    import cupy

    m, n, k = 1 << 16, (1 << 15) + 64, 130
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 1.2 * 8 * m * n + (10 << 30):
        pytest.skip(f"{free} bytes free on the device")
    rng = cupy.random.default_rng(1)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    out = cupy.full((m, n), cupy.nan)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="ozaki")
    ozaki.run_gemm(launcher, problem, None, a, b, None, out)
    for first in (0, m // 2, m - 8):
        exact = reference.oracle_gemm(
            GemmProblem.build(Operand.of(a[:8]), Operand.of(b)), a[first : first + 8].get(), b.get()
        )
        assert reference.errors(out[first : first + 8].get(), exact).rel_fro <= 3e-15, first


@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_reductions_panel_by_panel(launcher, monkeypatch, dtype, axis):
    """Within the bounds of plain arithmetic, and of the same bits in panels as whole."""
    a, b = random(1, dtype, 2, 700, 300), random(2, dtype, 2, 300, 600)
    on, names = CupyMachine(launcher), list(COMPLEX if dtype == "complex128" else REAL)
    problem, whole = reduce_cases.run(on, gemm_reduce.run_gemm_reduce, a, b, reduce=names, axis=axis)
    assert_reduced(problem, a, b, whole)
    monkeypatch.setattr(panels, "PANEL", 256 * 700 * 16)
    _, parts = reduce_cases.run(on, gemm_reduce.run_gemm_reduce, a, b, reduce=names, axis=axis)
    for name in names:
        np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)
