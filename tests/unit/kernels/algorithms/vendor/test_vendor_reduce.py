"""Reductions of the vendor's products, its BLAS being a model, the passes on the CPU shim: every kind, axis, dtype."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reduce_cases import COMPLEX, REAL, build, exact, logical
from simt_cases import ShimMachine, assert_reduced, random, strided
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels import GemmReduceProblem, Operand
from gemmserve_kernels.algorithms.common import panels
from gemmserve_kernels.algorithms.vendor import gemm_reduce
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.planned_reduce import program_of, written_of
from gemmserve_kernels.dispatch.routes import Plan, taken_problem
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.arrays import ArrayKey

DTYPES = ("float16", "float32", "float64", "complex64", "complex128")
AXES = pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)


def machine(name="H200", **options):
    return ShimMachine(ShimLauncher(replace(KNOWN[name], sm_count=3), **{"optimize": "-O2"} | options))


@pytest.fixture
def small_panels(monkeypatch):
    """Panels of so many bytes."""

    def cut(nbytes):
        monkeypatch.setattr(panels, "PANEL", nbytes)
        gemm_reduce._unfit.cache_clear()

    yield cut
    gemm_reduce._unfit.cache_clear()


def readable(problem, a, b):
    """The operands as the BLAS reads them, as `readable_arrays` makes them of CuPy's."""
    found = []
    for side, array in (("a", a), ("b", b)):
        own, trans = getattr(problem, side), getattr(problem, f"trans_{side}")
        taken = getattr(gemm_reduce.as_readable(problem), side)
        if taken is own:
            found.append(array)
            continue
        matrix = logical(array, problem.planar)
        matrix = matrix.swapaxes(-1, -2) if trans in "TC" else matrix
        matrix = matrix.conj() if trans in "CR" else matrix
        found.append(np.ascontiguousarray(matrix.astype(taken.dtype)))
        assert found[-1].shape == taken.shape
    return found


def run(on, a, b, *, recorded=False, **options):
    """(problem, results on the host); they were full of NaN before."""
    problem = build(a, b, **options)
    assert gemm_reduce.supports(problem, on.launcher.spec) is None
    plan = Plan("vendor", None, None, "plain", reduces=True)
    taken = taken_problem(problem, plan)
    given = [on.put(x) for x in readable(problem, a, b)]
    written = written_of(taken)
    results = {
        name: on.put(np.full(shape, -7 if dtype.kind == "i" else np.nan, dtype))
        for name, (shape, dtype) in written.items()
    }
    if recorded:
        keys = tuple((ArrayKey.of(x), on.launcher.pointer(x) % 16) for x in given)
        program = program_of(on.launcher, taken, plan, keys, written)
        program.run(on.launcher, [on.launcher.pointer(x) for x in (*given, *results.values())])
    else:
        plan.run_gemm_reduce(on.launcher, taken, *given, results)
    found = {}
    for name, array in results.items():
        shape, dtype = problem.results[name]
        host = on.get(array)
        found[name] = host if host.dtype == dtype else np.stack([host.real, host.imag])
        assert (found[name].shape, found[name].dtype) == (shape, dtype)
    return problem, found


def check(a, b, on=None, **options):
    problem, results = run(on or machine(), a, b, **options)
    assert_reduced(problem, a, b, results)
    return results


@AXES
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reduction(dtype, axis):
    a, b = random(1, dtype, 2, 24, 40), random(2, dtype, 2, 40, 72)
    check(a, b, reduce=list(COMPLEX if dtype.startswith("complex") else REAL), axis=axis, alpha=-2)


@pytest.mark.parametrize("trans", [x + y for x in "NTCR" for y in "NTCR"])
@pytest.mark.parametrize("axis", ["m", "n"])
def test_operations(trans, axis):
    a = random(1, "complex64", *((20, 30) if trans[0] in "NR" else (30, 20)))
    b = random(2, "complex64", *((30, 25) if trans[1] in "NR" else (25, 30)))
    options = {"axis": axis, "trans_a": trans[0], "trans_b": trans[1], "alpha": 1 - 2j}
    check(a, b, reduce=["sum", "argmin"], pre_op="square", **options)
    check(a, b, reduce=["max", "argmax"], pre_op="abs", **options)


@pytest.mark.parametrize("axis", ["m", "n"])
def test_planes_are_joined_first(axis):
    a, b = random(1, "float64", 2, 3, 30, 20), random(2, "float64", 2, 3, 24, 30)
    options = {"axis": axis, "trans_a": "C", "trans_b": "T", "layout": "planar", "reduce": ["sum", "absmin", "mean"]}
    check(a, b, **options)
    check(a, b, return_c=True, **options)


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("views", [("fortran", "plain"), ("gaps", "reversed"), ("padded", "offset")])
def test_operands_of_any_strides(views, axis):
    a, b = strided(random(1, "float32", 40, 24), views[0]), strided(random(2, "float32", 24, 50), views[1])
    check(a, b, reduce=["max", "sumsq"], axis=axis)


@AXES
def test_other_types(axis):
    a, b = random(1, "float32", 2, 24, 32), random(2, "complex64", 32, 40)
    check(a, b, reduce=list(COMPLEX), axis=axis)
    check(a, b, reduce=list(COMPLEX), axis=axis, compute="fp64")


@AXES
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_the_product_is_returned(dtype, axis):
    a, b = random(1, dtype, 2, 200, 20), random(2, dtype, 20, 70)
    results = check(a, b, reduce=["sum", "sumsq", "absmax", "argmin"], axis=axis, return_c=True, alpha=0.5)
    along = (0, 1) if axis == ["m", "batch"] else (0, 2) if axis == ["n", "batch"] else 1 if axis == ["m"] else 2
    np.testing.assert_allclose(results["absmax"], np.abs(results["c"]).max(along), rtol=3e-7)


@AXES
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_panels_change_no_bit(small_panels, batch, axis):
    """The products are exact, whichever kernel the BLAS has for a panel."""
    a, b = exact(1, "float32", *batch, 300, 16), exact(2, "float32", *batch, 16, 290)
    names = ["sum", "sumsq", "max", "argmax", "argmin"]
    _, whole = run(machine(), a, b, reduce=names, axis=axis)
    small_panels(256 * 300 * 4 * (batch[1] if len(batch) > 1 else 1))  # a matrix, or one place of two axes, takes two
    on = machine()
    _, parts = run(on, a, b, reduce=names, axis=axis)
    assert on.launcher.launches.count("stored_reduce") == 2 * (batch[0] if batch else 1)
    for name in names:
        np.testing.assert_array_equal(whole[name], parts[name])


def test_long_rows_have_several_shares():
    a, b = random(1, "float32", 5, 8), random(2, "float32", 8, 5000)
    check(a, b, reduce=list(REAL), axis="n")
    check(b.T.copy(), a.T.copy(), reduce=list(REAL), axis="m")
    check(b.T.copy(), a.T.copy(), reduce=list(REAL), axis="m", return_c=True)


@pytest.mark.parametrize("extent", [1, 2, 3, 5, 8, 9, 17, 33, 65])
def test_short_rows_are_folded_by_few_lanes(extent):
    a, b = random(1, "float32", 3, 37, 8), random(2, "float32", 8, extent)
    for order in ORDERS:
        check(a, b, machine(order=order), reduce=list(REAL), axis="n")
        check(a, b, machine(order=order), reduce=["sum", "argmax"], axis=["n", "batch"])


def test_sums_without_an_order_have_one():
    a, b = random(1, "float64", 3, 20, 8), random(2, "float64", 8, 9000)
    check(a, b, reduce=["sum", "sumsq", "max"], axis=["n", "batch"], reproducible=False)


def test_batches_that_repeat():
    a, b = random(1, "float64", 3, 1, 20, 16), random(2, "float64", 2, 16, 30)
    for axis in (["m", "batch"], ["n"]):
        check(a, b, reduce=["max", "sum"], axis=axis)
    check(a[:, 0], b[0], reduce="absmin", axis="n")
    shape = (2, 1, 2, 1, 2, 1, 5, 6), (1, 2, 1, 2, 1, 2, 6, 7)
    a, b = random(1, "complex64", *shape[0]), random(2, "complex64", *shape[1])
    check(a, b, reduce=list(COMPLEX), axis=["m", "batch"])
    check(a, b, reduce=list(COMPLEX), axis=["n"])


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_parts_of_larger_reductions(dtype):
    a, b = random(1, dtype, 24, 40), random(2, dtype, 40, 72)
    names = [name for name in (COMPLEX if dtype == "complex64" else REAL) if name != "mean"]
    check(a, b, reduce=names, partial=True)


@pytest.mark.parametrize("return_c", [False, True])
@pytest.mark.parametrize("axis", ["m", "n"])
def test_ties_and_what_is_not_finite(axis, return_c):
    a, b = exact(1, "float32", 70, 30), exact(2, "float32", 30, 66)
    b[:, 3], b[0, 7], b[2, 40] = -np.inf, np.nan, np.inf
    a[:, :] = np.abs(a) + 1
    a[9, 4] = np.nan
    b[:, 50:60] = b[:, 50:51]
    names = ["max", "min", "argmax", "argmin", "absmax", "absmin"]
    problem, found = run(machine(), a, b, reduce=names, axis=axis, return_c=return_c)
    with np.errstate(all="ignore"):
        expected = reference.oracle_gemm_reduce(problem, a, b)
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name].astype(found[name].dtype), err_msg=name)


@pytest.mark.parametrize("name", ["MI300X", "RX7900XTX"])
def test_on_amd_devices(name):
    a, b = random(1, "complex64", 2, 24, 40), random(2, "complex64", 2, 40, 72)
    for axis in ("m", "n"):
        check(a, b, machine(name), reduce=list(COMPLEX), axis=axis)
        check(a, b, machine(name), reduce=list(COMPLEX), axis=axis, return_c=True)


@AXES
def test_a_program_has_the_bits_of_the_host_code(small_panels, axis):
    a, b = random(1, "complex64", 2, 300, 24), random(2, "complex64", 24, 90)
    small_panels(1 << 18)
    for options in ({}, {"return_c": True}):
        on = machine()
        _, first = run(on, a, b, reduce=list(COMPLEX), axis=axis, **options)
        assert options or on.launcher.launches.count("blas") > 1
        _, again = run(on, a, b, reduce=list(COMPLEX), axis=axis, recorded=True, **options)
        for name in first:
            np.testing.assert_array_equal(first[name], again[name], err_msg=name)


def test_panels_share_their_memory(small_panels):
    """The workspace of a program is what a block is planned with."""
    a, b = random(1, "float32", 3000, 8), random(2, "float32", 8, 500)
    small_panels(1 << 20)
    problem = build(a, b, reduce="max", axis="n")
    keys = tuple((ArrayKey.of(x), 0) for x in (a, b))
    plan = Plan("vendor", None, None, "plain", reduces=True)
    program = program_of(machine().launcher, problem, plan, keys, written_of(problem))
    assert panels.panel_bytes(problem, 4) == 1 << 20
    assert 0.5 * (1 << 20) < program.workspace < (1 << 20) + 4 * 3000 + 4096


def test_what_it_refuses(small_panels):
    spec = KNOWN["H200"]

    def reason(a, b, **options):
        return gemm_reduce.supports(build(a, b, **{"reduce": "absmax"} | options), spec)

    half, odd = random(1, "float16", 2, 16, 16), random(1, "float16", 2, 7, 7)
    assert reason(half, half) is None
    assert "returned in float16" in reason(half, half, return_c=True)
    assert "16 bytes" in reason(odd, odd)
    single = random(1, "complex64", 16, 16)
    assert "returned in complex64" in reason(single, single, compute="fp64", return_c=True)
    many = np.broadcast_to(random(1, "float32", 40, 50, 8, 8).transpose(1, 0, 2, 3), (50, 40, 8, 8))
    assert "calls" in reason(many, random(2, "float32", 8, 8))
    long = Operand.contiguous((1 << 21, 8), "float32"), Operand.contiguous((8, 4096), "float32")
    problem = GemmReduceProblem.build(*long, reduce="max", axis="m")
    assert gemm_reduce.supports(problem, spec) is None
    assert {rows for _, _, _, rows in panels.Panels.of(problem, 4)} == {128}
    small_panels(1000)
    assert "MiB" in reason(single, single)
