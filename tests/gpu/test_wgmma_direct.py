"""Products and reductions of float16 operands on Hopper's tensor cores, read as they lie: against higher precision."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from direct_cases import Case, check, run
from framed import Framed
from kernel_models import direct as model
from reduce_cases import REAL, check_exact, exact
from reduce_cases import check as check_reduce
from simt_cases import CupyMachine, random, strided

from gemmserve_kernels import gemm, gemm_reduce
from gemmserve_kernels.algorithms.wgmma.candidates import _CANDIDATES
from gemmserve_kernels.algorithms.wgmma.direct import gemm as direct
from gemmserve_kernels.algorithms.wgmma.direct.gemm_reduce import run_gemm_reduce
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.gpu

TILES = [candidate.tile("fp16", False) for candidate in _CANDIDATES["fp16", False]]
TRANS = ("NN", "NT", "TN", "TT")
WGMMA = GemmConfig(algorithm="wgmma")
every_trans = pytest.mark.parametrize("trans", TRANS)


@pytest.fixture
def machine():
    launcher = CupyLauncher.current()
    if launcher.spec.arch != "sm_90a":
        pytest.skip(f"needs a Hopper GPU, and this is {launcher.spec.name}")
    return CupyMachine(launcher)


@every_trans
@pytest.mark.parametrize(
    "extents",
    [(1, 1, 1), (1, 300, 7), (131, 77, 201), (64, 64, 64), (257, 129, 65), (300, 1, 300), (130, 260, 1), (5, 9, 2000)],
    ids=str,
)
def test_odd_sizes(machine, extents, trans):
    check(machine, Case(extents, trans))


@every_trans
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}-{tile.cluster}-{tile.promote}")
def test_every_tile(machine, tile, trans):
    """Several tiles either way, more blocks of k than stages, tails everywhere; the model's sums."""
    case = Case((300, 600, 850), trans, config=tile)
    check(machine, case)


@every_trans
@pytest.mark.parametrize("block_k", [16, 32])
def test_short_stages(machine, block_k, trans):
    tile = replace(TILES[0], block_k=block_k, stages=4)
    check(machine, Case((300, 600, 850), trans, config=tile))


@every_trans
@pytest.mark.parametrize("split_k", [2, 4, 3, 8, 24])
def test_split_k(machine, split_k, trans):
    """More parts than blocks of k too; with a batch, C and both factors."""
    case = Case(
        (104, 70, 700), trans, a=(2,), c=(2, 104, 70), config=GemmConfig(split_k=split_k),
        options={"alpha": 0.5, "beta": -2},
    )  # fmt: skip
    check(machine, case)


@pytest.mark.parametrize("how", list(itertools.product(("plain", "shifted", "columns"), repeat=2)), ids="-".join)
def test_where_operands_begin_and_which_way_they_lie(machine, how):
    for trans in ("NN", "TT"):
        check(machine, Case((136, 272, 200), trans, how=how))


@pytest.mark.parametrize(
    ("a", "b", "how"),
    [
        ((3,), (), ("between", "plain")),
        ((), (3,), ("plain", "backwards")),
        ((3,), (3,), ("backwards", "between")),
        ((4, 1, 2), (3, 1), ("aligned", "aligned")),
        ((2, 1, 2, 1, 2, 1), (2, 1, 2, 1, 2), ("aligned", "shifted")),
        ((200,), (200,), ("aligned", "columns")),
    ],
    ids=str,
)
def test_batches(machine, a, b, how):
    check(machine, Case((72, 64, 88), a=a, b=b, how=how))


def test_a_batch_of_more_than_65535(machine):
    check(machine, Case((5, 8, 16), a=(70_000,), b=(70_000,)))


@pytest.mark.parametrize("out", ["plain", "fortran", "reversed", "gaps", "offset", "padded"])
def test_strides_of_the_result(machine, out):
    options = {"alpha": -1.5, "beta": 0.5}
    for n in (96, 91):
        check(machine, Case((150, n, 130), c=(150, 1), out=out, options=options))


@pytest.mark.parametrize("how", ["plain", "reversed", "gaps", "offset", "constant rows"])
@every_trans
def test_what_the_engine_cannot_take_is_copied(machine, trans, how):
    a = strided(random(1, "float16", 2, 3, *((57, 270) if trans[0] == "T" else (270, 57))), how)
    b = strided(random(2, "float16", 3, *((133, 57) if trans[1] == "T" else (57, 133))), how)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), trans_a=trans[0], trans_b=trans[1])
    out = machine.put(np.full(problem.result_shape, np.nan, np.float16))
    direct.run_gemm(machine.launcher, problem, None, machine.put(a), machine.put(b), None, out)
    assert reference.errors(machine.get(out), reference.oracle_gemm(problem, a, b)).rel_fro <= 1e-3


@pytest.mark.parametrize("promote", [0, 64])
@pytest.mark.parametrize("k", [64, 1024, 8192])
@pytest.mark.parametrize("sign", ["both", "one"])
def test_the_models_error(machine, record_property, sign, k, promote):
    """Rounded to float16 nearly every element is the model's; the share of equal bits is written down."""
    case = Case((96, 80, k), "TN", config=replace(TILES[2], promote=promote))
    (a, cut_a), (b, cut_b) = case.operands()
    if sign == "one":
        a, b = (np.abs(x) / np.float16(8) for x in (a, b))
    problem = case.problem(cut_a(a), cut_b(b))
    out = machine.put(np.full((96, 80), np.nan, np.float16))
    operands = [cut(machine.put(x)) for x, cut in ((a, cut_a), (b, cut_b))]
    direct.run_gemm(machine.launcher, problem, case.config, *operands, None, out)
    expected = model.product(cut_a(a).T, cut_b(b), promote).astype(np.float16)
    found = machine.get(out)
    equal = float((found == expected).mean())
    record_property("equal_bits", equal)
    assert equal >= 0.99
    np.testing.assert_allclose(found.astype("f8"), expected.astype("f8"), rtol=2.0**-10, atol=2.0**-10)


def test_the_same_bits_every_time(machine):
    for config in (None, GemmConfig(split_k=8), TILES[0]):
        case = Case((190, 176, 900), "TN", a=(2,), config=config)
        first, again = (run(machine, case)[-1] for _ in range(2))
        np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("split_k", [1, 4, 6])
@pytest.mark.parametrize(("order", "gap"), [("C", 3), ("F", 3), ("C", 8)])
@pytest.mark.parametrize("extents", [(65, 72, 304), (128, 128, 128), (1, 304, 64), (304, 1, 64)], ids=str)
def test_nothing_is_written_beside_the_result(machine, extents, order, gap, split_k):
    """Rows that begin off any alignment, or on it, and C in the result's own place."""
    m, n, k = extents
    a, b, c = random(1, "float16", 2, m, k), random(2, "float16", k, n), random(3, "float16", 2, m, n)
    if n % 8:
        b = np.asfortranarray(b)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c), alpha=2, beta=-1)
    assert direct.supports(problem, machine.launcher.spec) is None
    shift = 0 if gap == 8 else 1
    out = Framed((2, m, n), "float16", shift=shift, gap=gap, order=order).fill(c)
    left, right = machine.put(a), machine.put(b)
    direct.run_gemm(machine.launcher, problem, GemmConfig(split_k=split_k), left, right, out.array, out.array)
    assert reference.errors(out.get(), reference.oracle_gemm(problem, a, b, c)).rel_fro <= 1e-3


def test_large_k_of_one_sign(machine):
    """Truncation without promotion would show."""
    a, b = (np.abs(random(seed, "float16", *shape)) / 64 for seed, shape in ((1, (64, 65536)), (2, (65536, 64))))
    a, b = a.astype(np.float16), b.astype(np.float16)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    out = machine.put(np.full((64, 64), np.nan, np.float16))
    config = GemmConfig(split_k=1)
    direct.run_gemm(machine.launcher, problem, config, machine.put(a), machine.put(b), None, out)
    exact_product = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(machine.get(out) / exact_product - 1).max() <= 2.0**-11 + 1e-6


def test_an_operand_of_more_than_two_to_the_31_elements(machine):
    """The copy engine is told rows; results beyond too."""
    import cupy

    m, n, k = 1 << 21, 72, 1032
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 3 * 2 * m * k:
        pytest.skip(f"{free} bytes free on the device")
    few, b = random(1, "float16", 1 << 9, k), random(2, "float16", k, n)
    a = cupy.tile(cupy.asarray(few), (m // len(few), 1))
    assert a.size > 1 << 31
    d = gemm(a, cupy.asarray(b), config=WGMMA)
    expected = few.astype(np.float64) @ b.astype(np.float64)
    for first in (0, m // 2, m - len(few)):
        assert reference.errors(d[first : first + len(few)].get(), expected).rel_fro <= 1e-3


def test_calls_through_views(machine):
    """Where an operand begins changes neither the algorithm nor the bits; replayed with other addresses."""
    import cupy

    memory = cupy.zeros((2, 136, 216), cupy.float16)
    a, b = random(1, "float16", 136, 200), random(2, "float16", 200, 72)
    whole = gemm(cupy.asarray(a), cupy.asarray(b), config=WGMMA)
    for first in range(9):
        for place in memory:
            view = place[:, first : first + 200]
            view[...] = cupy.asarray(a)
            assert (gemm(view, cupy.asarray(b), config=WGMMA) == whole).all()
    best = gemm_reduce(cupy.asarray(a), cupy.asarray(b), reduce="max", axis="n", config=WGMMA)
    wide = (a.astype(np.float64) @ b.astype(np.float64)).max(axis=1)
    np.testing.assert_allclose(best.get().astype("f8"), wide, rtol=2.0**-10)


@every_trans
@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
def test_every_reduction(machine, axis, trans):
    a = random(1, "float16", 3, *((304, 504) if trans[0] == "T" else (504, 304)))
    b = random(2, "float16", *((272, 304) if trans[1] == "T" else (304, 272)))
    options = {"trans_a": trans[0], "trans_b": trans[1], "axis": axis, "alpha": 2}
    check_reduce(machine, run_gemm_reduce, a, b, reduce=list(REAL), return_c=True, **options)
    check_reduce(machine, run_gemm_reduce, a, b, reduce=["max", "absmin", "argmin"], pre_op="abs", **options)
    check_reduce(machine, run_gemm_reduce, a, b, reduce=["sum", "max"], reproducible=False, **options)


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 304, 72), (304, 1, 8), (64, 64, 8192), (129, 264, 72)])
def test_extents_of_reductions(machine, axis, m, n, k):
    a, b = random(1, "float16", m, k), random(2, "float16", k, n)
    check_reduce(machine, run_gemm_reduce, a, np.asfortranarray(b), reduce=list(REAL), axis=axis)


@pytest.mark.parametrize("axis", ["m", "n"])
def test_ties_and_what_is_not_finite(machine, axis):
    a, b = exact(1, "float16", 3, 300, 8), exact(2, "float16", 3, 8, 296)
    names = ["max", "min", "argmax", "argmin"]
    check_exact(machine, run_gemm_reduce, a, b, reduce=names, axis=axis)
    a[1, 7, 3], b[2, 4, 100] = np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        check_exact(machine, run_gemm_reduce, a, b, reduce=names, axis=axis)


@pytest.mark.parametrize("tile", TILES[:3], ids=str)
def test_many_products(machine, tile):
    """The persistent grid over a batch of tiles, clusters with and without an empty half."""
    a, b = random(1, "float16", 40, 200, 264), random(2, "float16", 40, 264, 520)
    for axis in "mn":
        check_reduce(machine, run_gemm_reduce, a, b, reduce=["max", "argmin"], axis=axis, config=tile)
