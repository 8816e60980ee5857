"""Extremes that are looked for in float16, on the CPU shim's Hopper: against higher precision, and without the full
product where it is not to be needed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reduce_cases import build, check_exact, exact, run
from simt_cases import ShimMachine, assert_reduced, random, strided
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels.algorithms.dmma.gemm_reduce import ReducePlan
from gemmserve_kernels.algorithms.dmma.gemm_reduce import run_gemm_reduce as run_full
from gemmserve_kernels.algorithms.screen import gemm_reduce as screen
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.planned_reduce import program_of, written_of
from gemmserve_kernels.dispatch.routes import plan_gemm_reduce
from gemmserve_kernels.problem.arrays import ArrayKey
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

AXES = pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
NAMES = {"float64": ("max", "min", "absmax", "argmax", "argmin"), "complex128": ("absmax", "argmax")}


def machine(**options):
    return ShimMachine(ShimLauncher(replace(KNOWN["H200"], sm_count=3), **options))


@pytest.fixture
def alone(monkeypatch):
    """No full product: what is checked is what screen_rows has left."""
    monkeypatch.setattr(ReducePlan, "launch", lambda *arguments, **options: None)


def check(a, b, on=None, **options):
    on = on or machine()
    problem, results = run(on, screen.run_gemm_reduce, a, b, **options)
    assert screen.supports(problem, on.launcher.spec) is None
    assert_reduced(problem, a, b, results)
    return results


@AXES
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.usefixtures("alone")
def test_every_reduction(dtype, axis):
    a, b = random(1, dtype, 2, 75, 70), random(2, dtype, 2, 70, 81)
    check(a, b, reduce=list(NAMES[dtype]), axis=axis, alpha=-2)


@pytest.mark.parametrize("trans", ["TT", "CR", "RN", "NC"])
@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.usefixtures("alone")
def test_operations(trans, axis):
    a = random(1, "complex128", *((70, 33) if trans[0] in "NR" else (33, 70)))
    b = random(2, "complex128", *((33, 75) if trans[1] in "NR" else (75, 33)))
    check(a, b, reduce="absmax", axis=axis, trans_a=trans[0], trans_b=trans[1], alpha=1 - 2j)


@pytest.mark.usefixtures("alone")
def test_operations_on_planes():
    a, b = random(1, "float64", 2, 33, 70), random(2, "float64", 2, 80, 33)
    check(a, b, reduce=["absmax", "argmax"], axis="n", trans_a="C", trans_b="T", layout="planar")


@pytest.mark.parametrize("how", ["fortran", "reversed", "gaps", "offset"])
@pytest.mark.usefixtures("alone")
def test_how_operands_lie(how):
    a, b = (strided(random(seed, "float64", *shape), how) for seed, shape in ((1, (70, 45)), (2, (45, 67))))
    check(a, b, reduce=["max", "min"], axis="m")


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.usefixtures("alone")
def test_magnitudes(dtype):
    a, b = random(1, dtype, 70, 33), random(2, dtype, 33, 80)
    check(a, b, reduce=["max", "absmax", "argmax"], axis="n", pre_op="abs")


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("k", [1, 2, 7, 65, 600, 1100, 2100])
@pytest.mark.usefixtures("alone")
def test_lengths(k, axis):
    """Padded lines, sums that are promoted, and lines that come to shared memory in pieces."""
    a, b = random(1, "float64", 9, k), random(2, "float64", k, 66)
    check(*((a, b) if axis == "n" else (b.T, a.T)), reduce="max", axis=axis)
    check(*((a, b) if axis == "n" else (b.T.copy(), a.T.copy())), reduce="max", axis=axis)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.usefixtures("alone")
def test_more_columns_than_shared_memory_has(dtype):
    a, b = random(1, dtype, 20, 9), random(2, dtype, 9, 2300)
    b[:, 1030] *= 2.0**70  # what other columns are measured by
    a[3] = 0
    b[2, 2299] = np.nan
    names = list(NAMES[dtype])
    with np.errstate(all="ignore"):
        _, found = run(machine(), screen.run_gemm_reduce, a, b, reduce=names, axis="n")
    assert np.isnan(found["absmax"]).all()
    assert (found["argmax"] == 2299).all()
    b[2, 2299] = 1
    check(a, b, reduce=names, axis="n")


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("below", [60, 99, 100, 101, 300])
def test_columns_far_below_the_largest(dtype, below):
    """Every other row has zero where the large column is not: there the others have the extremes."""
    a, b = exact(1, dtype, 40, 6) + 0.0, exact(2, dtype, 6, 90) + 0.0
    a[:, 0], b[0] = 0, 0
    a[::2, 0], b[:, 7], b[0, 7] = 1, 0, 2.0**below
    _, found = run(machine(), screen.run_gemm_reduce, a, b, reduce=list(NAMES[dtype]), axis="n")
    _, full = run(machine(), run_full, a, b, reduce=list(NAMES[dtype]), axis="n")
    for name, values in full.items():
        np.testing.assert_array_equal(found[name], values)
    assert (found["absmax"][::2] == 2.0**below).all()
    assert (found["absmax"][1::2] < 2.0**60).all()


@pytest.mark.usefixtures("alone")
def test_columns_a_hundred_powers_of_two_apart_take_no_full_product():
    a, b = random(1, "float64", 70, 30), random(2, "float64", 30, 80)
    check(a, b * 2.0 ** np.linspace(0, -99, 80).round(), reduce=["max", "min", "argmax"], axis="n")


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.usefixtures("alone")
def test_a_few_ties_take_no_full_product(dtype, axis):
    a, b = random(1, dtype, 70, 30), random(2, dtype, 30, 70)
    lines = a if axis == "m" else b.T
    lines[12:20] = 4 * lines[20]
    found = check(a, b, reduce=["absmax", "argmax"], axis=axis)
    assert (found["argmax"] == 12).any()


@pytest.mark.usefixtures("alone")
def test_results_of_any_strides():
    on, a, b = machine(), random(1, "float64", 3, 70, 20), random(2, "float64", 3, 20, 90)
    problem = build(a, b, reduce=["max", "argmax"], axis="n")
    whole = {"max": on.put(np.zeros((3, 70, 2))), "argmax": on.put(np.zeros((70, 3), np.int64))}
    results = {"max": whole["max"][..., 1], "argmax": whole["argmax"].T}
    screen.run_gemm_reduce(on.launcher, problem, None, on.put(a), on.put(b), results)
    assert_reduced(problem, a, b, {name: on.get(x) for name, x in results.items()})
    assert not on.get(whole["max"])[..., 0].any()


@pytest.mark.usefixtures("alone")
def test_a_batch_that_repeats():
    a, b = random(1, "float64", 3, 1, 64, 40), random(2, "float64", 2, 40, 70)
    check(a, b, reduce=["max"], axis=["m", "batch"])
    check(a, b, reduce=["max"], axis="n")
    check(a[:, 0], b[0], reduce="max", axis="n")
    check(a[0, 0], b, reduce="max", axis="n")
    same = np.broadcast_to(b[0], (2, 40, 70))
    check(np.broadcast_to(a[0, 0], (2, 64, 40)), same, reduce="max", axis="n")


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.usefixtures("alone")
def test_lines_of_any_size(dtype):
    """Each row and column on a scale of its own, elements over six orders of magnitude within them."""
    rng = np.random.default_rng(5)
    a, b = random(1, dtype, 70, 50), random(2, dtype, 50, 90)
    a, b = a * np.exp(2 * rng.standard_normal(a.shape)), b * np.exp(2 * rng.standard_normal(b.shape))
    a *= 2.0 ** rng.integers(-400, 400, (70, 1))
    check(a, b * 2.0 ** rng.integers(-8, 8, (1, 90)), reduce=list(NAMES[dtype]), axis="n")


@pytest.mark.parametrize("axis", ["m", "n"])
def test_panels_change_no_bit(monkeypatch, axis):
    a, b = random(1, "complex128", 3, 600, 20), random(2, "complex128", 3, 20, 70)
    whole = check(a, b, reduce=["absmax", "argmax"], axis=axis)
    monkeypatch.setattr(screen, "WORKSPACE", 230_000)
    cut = list(screen.Sizes.of(build(a, b, reduce="absmax", axis=axis)).panels(3))
    assert len(cut) == 3 if axis == "m" else len(cut) > 6
    parts = check(a, b, reduce=["absmax", "argmax"], axis=axis)
    for name, found in whole.items():
        np.testing.assert_array_equal(found, parts[name])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_threads_in_any_order(order):
    a, b = random(1, "complex128", 70, 40), random(2, "complex128", 40, 70)
    b[:, 5:40] = b[:, 5:6]  # some rows fail, some do not
    check(a, b, machine(order=order), reduce=["absmax", "argmax"], axis="n")


class OwnChecked(ShimLauncher):
    """Watches the accesses of all kernels but the product's, whose barriers the checker does not know."""

    def launch(self, source, entry, **options):
        self.checked = not entry.startswith("wgmma")
        super().launch(source, entry, **options)


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize(("dtype", "n", "k"), [("float64", 90, 70), ("complex128", 70, 33), ("float64", 1050, 1100)])
def test_no_races_and_no_stray_accesses(dtype, n, k, axis):
    a, b = random(1, dtype, 70, k), random(2, dtype, k, n)
    checked = ShimMachine(OwnChecked(replace(KNOWN["H200"], sm_count=3)))
    check(a, b, checked, reduce=["absmax", "argmax"], axis=axis)


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("dtype", NAMES)
def test_ties_give_the_first_index(dtype, axis):
    """More of them than are made one by one, so that the full product is."""
    a, b = exact(1, dtype, 2, 70, 3), exact(2, dtype, 2, 3, 90)
    check_exact(machine(), screen.run_gemm_reduce, a, b, reduce=["argmax", "absmax"], axis=axis)


def test_rows_that_fail_have_the_full_products_bits():
    """And no other row of their tiles."""
    a, b = random(1, "float64", 300, 40), random(2, "float64", 40, 70)
    _, before = run(machine(), screen.run_gemm_reduce, a, b, reduce=["max", "argmax"], axis="n")
    b[:, 10:60] = b[:, 10:11]
    _, found = run(machine(), screen.run_gemm_reduce, a, b, reduce=["max", "argmax"], axis="n")
    _, full = run(machine(), run_full, a, b, reduce=["max", "argmax"], axis="n")
    fails = full["argmax"] == 10
    assert fails.any()
    np.testing.assert_array_equal(found["max"][fails], full["max"][fails])
    np.testing.assert_array_equal(found["argmax"], full["argmax"])
    same = ~fails & (full["argmax"] == before["argmax"])
    assert same.any()
    np.testing.assert_array_equal(found["max"][same], before["max"][same])
    np.testing.assert_allclose(found["max"], full["max"], rtol=1e-13)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("axis", ["m", "n"])
def test_not_finite(dtype, axis):
    a, b = exact(1, dtype, 90, 5) + 0.0, exact(2, dtype, 5, 70) + 0.0
    a[:, :] = np.abs(a) + 1
    b[:, 3], b[0, 7], b[2, 40] = -np.inf, np.nan, np.inf
    a[8, 1] = np.inf
    names = ["max", "min", "argmax", "argmin"] if dtype == "float64" else ["absmax", "argmax"]
    with np.errstate(all="ignore"):
        _, found = run(machine(), screen.run_gemm_reduce, a, b, reduce=names, axis=axis)
        _, full = run(machine(), run_full, a, b, reduce=names, axis=axis)
        if dtype == "float64":
            check_exact(machine(), screen.run_gemm_reduce, a, b, reduce=names, axis=axis)
    for name in names:
        np.testing.assert_array_equal(found[name], full[name])


@pytest.mark.usefixtures("alone")
def test_what_is_not_finite_in_few_columns_takes_no_full_product():
    a, b = random(1, "float64", 70, 30), random(2, "float64", 30, 80)
    b[4, 9], b[5, 11] = np.nan, -np.inf
    with np.errstate(all="ignore"):
        _, results = run(machine(), screen.run_gemm_reduce, a, b, reduce=["max", "argmax"], axis="n")
    assert np.isnan(results["max"]).all()
    assert (results["argmax"] == 9).all()


@pytest.mark.usefixtures("alone")
def test_rows_of_zeros_take_no_full_product():
    a, b = random(1, "float64", 70, 30), random(2, "float64", 30, 80)
    a[3], a[60] = 0, 0
    b[:, 0] = 0
    results = check(a, b, reduce=["max", "argmax", "min"], axis="n")
    assert results["max"][3] == 0
    assert results["argmax"][60] == 0


@pytest.mark.parametrize("scale", [2.0**600, 2.0**-600, 2.0**1000, 2.0**-1060])
def test_lines_that_no_power_of_two_helps(scale):
    a, b = random(1, "complex128", 70, 3), random(2, "complex128", 3, 70)
    a[5] *= scale
    with np.errstate(all="ignore"):
        check(a, b, reduce=["absmax", "argmax"], axis="n")


def test_what_is_recorded_does_the_same():
    """A program, run twice, of a matrix that fits and of one with rows that fail."""
    on, spec = machine(), KNOWN["H200"]
    a, b = random(1, "complex128", 80, 30), random(2, "complex128", 30, 90)
    config = GemmConfig(algorithm="screen")
    problem = build(a, b, reduce=["absmax", "argmax"], axis="n", config=config)
    plan, written = plan_gemm_reduce(problem, replace(spec, sm_count=3)), written_of(problem)
    arrays = [on.put(a), on.put(b), *(on.put(np.empty(shape, dtype)) for shape, dtype in written.values())]
    keys = [(ArrayKey.of(x), on.launcher.pointer(x) % 16) for x in arrays[:2]]
    program = program_of(on.launcher, problem, plan, (keys[0], keys[1]), written)
    for _ in range(2):
        program.run(on.launcher, [on.launcher.pointer(x) for x in arrays])
        results = dict(zip(written, (on.get(x) for x in arrays[2:]), strict=True))
        assert_reduced(problem, a, on.get(arrays[1]), results)
        arrays[1][:, 20:60] = arrays[1][:, 20:21]
        for x in arrays[2:]:
            x[...] = 0


def test_five_launches_of_which_those_beside_which_there_is_room_may_start_early():
    """Not the one that looks through the product, which would take room from the product's end. Nothing is cleared."""
    config = GemmConfig(algorithm="screen")
    problem = GemmReduceProblem.build(
        *(Operand.contiguous((8, 1024, 1024), "float64") for _ in range(2)), reduce="max", axis="m", config=config
    )
    spec = KNOWN["H200"]
    keys = [(ArrayKey(x.shape, x.dtype, x.strides), 0) for x in (np.empty((8, 1024, 1024)),) * 2]
    program = program_of(ShimLauncher(spec), problem, plan_gemm_reduce(problem, spec), keys, written_of(problem))
    assert [step.entry for step in program.steps] == [
        "screen_round", "wgmma_gemm", "screen_rows", "dmma_reduce", "gemm_reduce_finish",
    ]  # fmt: skip
    assert [step.dependent for step in program.steps] == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("dtype", "batch", "m", "expected"),
    [("float64", 8, 1024, 16), ("float64", 1, 4096, 8), ("float64", 1, 64, 8), ("complex128", 8, 1024, 8)],
)
def test_few_rows_are_spread_over_the_device(dtype, batch, m, expected):
    problem = extremes(dtype, batch, m, 1024, 512)
    assert screen.rows_of_block(problem, batch * m, KNOWN["H200"]) == expected


def extremes(dtype, batch, m, n, k):
    a, b = Operand.contiguous((batch, m, k), dtype), Operand.contiguous((batch, k, n), dtype)
    return GemmReduceProblem.build(a, b, reduce="absmax", axis="n")


@pytest.mark.parametrize(
    ("batch", "m", "n", "k", "expected"),
    [
        (8, 1024, 1024, 512, (128, 128)),
        (8, 2048, 1024, 1024, (128, 128)),
        (3, 901, 704, 80, (128, 128)),
        (1, 1024, 1024, 512, (128, 64)),  # no larger than others would have it
        (8, 1024, 1024, 1032, (128, 256)),
        (1, 4096, 4096, 4096, (128, 256)),
    ],
)
def test_products_with_a_short_k_have_no_large_tiles(batch, m, n, k, expected):
    a, b = Operand.contiguous((batch, m, k), "float16"), Operand.contiguous((batch, n, k), "float16")
    tile = screen.product_tile(GemmProblem.build(a, b, trans_b="T"), KNOWN["H200"])
    assert (tile.block_m, tile.block_n) == expected


@pytest.mark.parametrize("parts", [1, 2])
def test_lines_fit_shared_memory(parts):
    for k in (1, 31, 512 // parts, 513 // parts, 1024 // parts, 16384 // parts):
        lines, steps = screen.lines_of_block(k, parts)
        assert lines * parts * (steps + 1) * 8 * 3 <= KNOWN["H200"].shared_per_sm - 3 * 1024
        assert steps % 32 == 0
        assert steps >= k or lines * steps * parts == 8192
        assert lines == (16 if k * parts <= 512 else 8)


def test_what_it_refuses():
    a, b = random(1, "float64", 80, 30), random(2, "float64", 30, 80)
    spec = KNOWN["H200"]

    def reason(a=a, b=b, spec=spec, **options):
        return screen.supports(build(a, b, **{"reduce": "max"} | options), spec)

    assert reason() is None
    assert "Hopper" in reason(spec=KNOWN["A100"])
    assert "not made" in reason(return_c=True)
    assert "squares" in reason(pre_op="square")
    assert "absmin" in reason(reduce=["max", "absmin"])
    assert "argmin" in reason(a.astype("c16"), b.astype("c16"), reduce=["argmin"])
    assert "min" in reason(reduce=["min"], pre_op="abs")
    assert "sum" in reason(reduce=["max", "sum"])
    assert "alpha" in reason(alpha=1e300)
    assert "fewer" in reason(b=b[:, :60], axis="n")
    assert "float64" in reason(a.astype("f4"), b.astype("f4"))
    wide = np.lib.stride_tricks.as_strided(np.zeros(1), (80, 1 << 15), (0, 0))
    assert "k is" in reason(wide, wide.T)
    with pytest.raises(ConfigInfeasible, match="stages"):
        screen.resolve(GemmConfig(stages=3), build(a, b, reduce="max"), spec)
