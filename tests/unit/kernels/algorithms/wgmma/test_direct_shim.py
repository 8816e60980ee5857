"""Products of float16 operands as they lie on the CPU shim's Hopper: the unmodified kernel and host code, against the
model bit for bit and against higher precision.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import simt_shim.launcher
from direct_cases import Case, check, lying, run
from kernel_models import direct as model
from simt_cases import ShimMachine, random, strided
from simt_shim import FORWARD, REVERSE, Order, ShimLauncher
from simt_shim.module import ShimError

from gemmserve_kernels.algorithms.wgmma.direct import gemm
from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.planned_call import program_of
from gemmserve_kernels.dispatch.routes import plan_gemm
from gemmserve_kernels.problem.arrays import ArrayKey
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

H200 = KNOWN["H200"]
SHUFFLED = Order("shuffled", 5)
SMALL = WgmmaTile("fp16", False, 64, 64, 64, 3, promote=0)
WIDE = WgmmaTile("fp16", False, 128, 256, 64, 2, 2, raster=2, promote=0)


def machine(order=SHUFFLED, sm_count=2):
    """Few multiprocessors, so that blocks walk over several tiles and come round their stages."""
    return ShimMachine(ShimLauncher(replace(H200, sm_count=sm_count), order=order, optimize="-O0"))


def logical(case, a, b):
    return (x.swapaxes(-1, -2) if t in "TC" else x for x, t in zip((a, b), case.trans, strict=True))


@pytest.mark.parametrize("promote", [0, 64])
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "CR"])
def test_the_models_bits(trans, promote):
    """Along k and across it on either side."""
    case = Case((72, 67, 200), trans, config=replace(SMALL, promote=promote))
    _, a, b, _, result = run(machine(), case)
    expected = model.product(*logical(case, a, b), promote)
    np.testing.assert_array_equal(result, expected.astype(np.float16))


@pytest.mark.parametrize("trans", ["NN", "TT"])
@pytest.mark.parametrize("tile", [WIDE, replace(WIDE, promote=64), replace(SMALL, block_k=16)], ids=str)
def test_every_tile_has_the_same_bits(tile, trans):
    """Two instructions side by side, columns that a cluster shares, short stages: k and its promotions alone decide."""
    case = Case((200, 264, 136), trans, config=tile)
    _, a, b, _, result = run(machine(sm_count=4), case)
    expected = model.product(*logical(case, a, b), tile.promote)
    np.testing.assert_array_equal(result, expected.astype(np.float16))


@pytest.mark.parametrize("order", [FORWARD, REVERSE, Order("shuffled", 6)], ids=str)
def test_threads_and_copies_in_any_order(order):
    """More stages of k than there are, and more tiles than blocks."""
    check(machine(order), Case((130, 130, 330), "TN", config=replace(SMALL, stages=2)))


@pytest.mark.parametrize(
    ("extents", "trans"),
    [((1, 1, 1), "NN"), ((65, 1, 17), "TN"), ((3, 129, 64), "NT"), ((1, 70, 9), "NN"), ((70, 1, 1), "TT")],
    ids=str,
)
def test_odd_sizes(extents, trans):
    check(machine(), Case(extents, trans, config=SMALL))


@pytest.mark.parametrize("how", ["plain", "shifted", "columns"])
def test_where_operands_begin_and_which_way_they_lie(how):
    """Off any 16-byte boundary, and the other way round than `trans` says."""
    extents = (72, 80, 40)
    for trans in ("NN", "TT"):
        check(machine(), Case(extents, trans, how=(how, how), config=SMALL))


@pytest.mark.parametrize(
    ("a", "b", "how"),
    [
        ((3,), (), ("between", "plain")),
        ((), (3,), ("plain", "backwards")),
        ((3,), (3,), ("backwards", "between")),
        ((2, 1, 2), (3, 1), ("aligned", "aligned")),
        ((2, 1, 2, 1, 2, 1), (2, 1, 2, 1, 2), ("aligned", "shifted")),
    ],
    ids=str,
)
def test_batches(a, b, how):
    """Matrices anywhere, by turns or the last one first; more axes than a launch has."""
    check(machine(), Case((24, 40, 16), a=a, b=b, how=how, config=SMALL))


@pytest.mark.parametrize("out", ["plain", "fortran", "reversed", "offset", "padded"])
def test_strides_of_the_result_with_c_and_both_factors(out):
    """Eight results at once, two, or one; the transposed product."""
    options = {"alpha": -1.5, "beta": 0.5}
    check(machine(), Case((66, 72, 40), a=(2, 1), b=(2,), c=(66, 1), out=out, config=SMALL, options=options))
    check(machine(), Case((66, 67, 40), c=(1, 67), out=out, config=SMALL, options=options))


@pytest.mark.parametrize("how", ["plain", "reversed", "gaps", "constant rows"])
@pytest.mark.parametrize("trans", ["NN", "TT"])
def test_what_the_engine_cannot_take_is_copied(trans, how):
    """Rows of odd lengths, backwards, with gaps, all the same; a batch of which one operand has one matrix."""
    a = strided(random(1, "float16", 2, 3, *((57, 70) if trans[0] == "T" else (70, 57))), how)
    b = strided(random(2, "float16", 3, *((33, 57) if trans[1] == "T" else (57, 33))), how)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), trans_a=trans[0], trans_b=trans[1])
    assert gemm.supports(problem, H200) is None
    on = machine()
    on.launcher.max_grid = 40  # the copies are cut
    out = on.put(np.full(problem.result_shape, np.nan, np.float16))
    gemm.run_gemm(on.launcher, problem, SMALL, on.put(a), on.put(b), None, out)
    assert on.launcher.launches.count("wgmma_pack") >= 2
    left, right = (x.swapaxes(-1, -2) if t == "T" else x for x, t in ((a, trans[0]), (b, trans[1])))
    for i, j in np.ndindex(2, 3):
        expected = model.product(left[i, j], right[j]).astype(np.float16)
        np.testing.assert_array_equal(on.get(out)[i, j], expected)


@pytest.mark.parametrize("how", [("plain", "shifted"), ("columns", "aligned"), ("odd", "backwards")], ids=str)
def test_programs_for_any_addresses(how):
    """What `gemm` keeps of a call: traced without the arrays, maps and copies included, and run twice."""
    on = machine()
    held = []
    for side, (name, shape) in enumerate(zip(how, ((3, 72, 40), (3, 40, 72)), strict=True)):
        x = random(side, "float16", *shape)
        memory, cut = (x[..., 1:], lambda y: y) if name == "odd" else lying(x, name)
        held.append(cut(on.put(memory)))
    a, b = held[0], held[1][:, 1:] if how[0] == "odd" else held[1]
    config = GemmConfig(algorithm="wgmma", block_m=64, block_n=64, split_k=1)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), config=config)
    plan = plan_gemm(problem, H200)
    assert plan.arithmetic == "fp16"
    out = on.put(np.full(problem.result_shape, np.nan, np.float16))
    keys = [(ArrayKey.of(x), on.launcher.pointer(x) % 16) for x in (a, b, out)]
    program = program_of(on.launcher, problem, plan, (keys[0], keys[1], None, keys[2]))
    expected = np.stack([model.product(x, y) for x, y in zip(a, b, strict=True)]).astype(np.float16)
    for _ in range(2):
        out[...] = np.nan
        program.run(on.launcher, [on.launcher.pointer(x) for x in (a, b, out)])
        np.testing.assert_array_equal(on.get(out), expected)


@pytest.mark.parametrize("split_k", [4, 6])
def test_split_k(split_k):
    """A cluster of 4, and one of 2 with three grids; more parts than blocks of k."""
    config = GemmConfig(block_m=64, block_n=64, split_k=split_k)
    for k in (456, 72):
        case = Case((72, 66, k), "TN", a=(2,), c=(2, 72, 66), config=config, options={"alpha": 0.5, "beta": -2})
        check(machine(), case)


def test_c_in_the_place_of_the_result():
    a, b, c = random(1, "float16", 70, 40), random(2, "float16", 40, 72), random(3, "float16", 70, 72)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c), beta=2)
    on = machine()
    place = on.put(c)
    gemm.run_gemm(on.launcher, problem, SMALL, on.put(a), on.put(b), place, place)
    expected = model.product(a, b) + np.float32(2) * c.astype(np.float32)
    np.testing.assert_array_equal(on.get(place), expected.astype(np.float16))


def test_what_is_not_finite_and_the_ends_of_the_range():
    """Only the row and the column of what is not finite; subnormal numbers count; what overflows is infinite."""
    a, b = random(1, "float16", 72, 40), random(2, "float16", 40, 72)
    a[3, 5], a[4, 5], b[7, 9] = np.nan, np.inf, -np.inf
    a[5], b[:, 5] = 2.0**-24, 2.0**-1
    a[6], b[:, 6] = 60000, 60000
    on = machine()
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    out = on.put(np.full((72, 72), 1, np.float16))
    gemm.run_gemm(on.launcher, problem, SMALL, on.put(a), on.put(b), None, out)
    found = on.get(out)
    with np.errstate(all="ignore"):
        wide = np.array([(row[:, None] * b.astype(np.float64)).sum(0) for row in a.astype(np.float64)])
        expected = wide.astype(np.float16)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isposinf(found), np.isposinf(expected))
    assert found[5, 5] == np.float16(40 * 2.0**-25)
    finite = np.isfinite(expected)
    error = np.abs(found[finite].astype(float) - wide[finite])
    with np.errstate(all="ignore"):
        sums = (np.abs(a.astype(float)) @ np.abs(b.astype(float)))[finite]
    assert (error <= 2.0**-11 * np.abs(wide[finite]) + 2.0**-25 + 1e-6 * sums).all()


FAULTS = {
    "an operand across k is read as if it lay along it": [
        ("SIGN, Config::LEFT_ACROSS, Config::RIGHT", "SIGN, 0, Config::RIGHT")
    ],
    "columns are looked for in the wrong place": [("COLUMN_STRIDE = DEPTH * 128 / 16", "COLUMN_STRIDE = 1024 / 16")],
    "steps of k are looked for in the wrong place": [("GROUP_STRIDE = 8 * 128 / 16", "GROUP_STRIDE = 8 * 64 / 16")],
    "a box begins off a multiple of 16 bytes": [("row + first, k);", "row + first + 4, k);")],
    "a column of a box is not fetched": [("first < ROWS; first += 64", "first < ROWS; first += 128")],
    "eight results go to the wrong lane": [("        transpose_quad(words, lane);\n", "")],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_be_seen(monkeypatch, fault):
    """The checks above fail for kernels that are wrong in these ways."""
    compiled = simt_shim.launcher.compile_source

    def broken(text, **options):
        for old, new in FAULTS[fault]:
            assert old in text
            text = text.replace(old, new)
        return compiled(text, **options)

    case = Case((136, 136, 72), "TN", how=("aligned", "aligned"), config=replace(SMALL, block_m=128, block_n=128))
    good = run(machine(), case)[-1]
    simt_shim.launcher._module.cache_clear()
    monkeypatch.setattr(simt_shim.launcher, "compile_source", broken)
    try:
        found = run(machine(FORWARD), case)[-1]
    except ShimError:
        return
    finally:
        simt_shim.launcher._module.cache_clear()
    assert not np.array_equal(found, good)
