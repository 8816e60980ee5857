"""The fallback in double on tensor cores, as the CPU shim plays them: every layout, flags, counters, races."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dmma_cases import Case
from fallback_cases import ALIGNED, CASES, HALF_WIDE, SOME_GROUPS, UNTOUCHED, Marks, build, check, run, tiles
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels.algorithms.splits import dmma_fallback, fallback
from gemmserve_kernels.device.element_counts import ElementCounts
from gemmserve_kernels.device.replay import record
from gemmserve_kernels.device.spec import KNOWN


def shim(**options):
    return ShimLauncher(replace(KNOWN["H200"], sm_count=3), **options)


def on_shim(case, launcher=None, **options):
    launcher = launcher or shim()
    return run(launcher, case, launcher.array, np.array, **options)


class Fetching(ShimLauncher):
    """Counts the copy engine's maps."""

    maps = 0

    def tensor_map(self, box, address):
        self.maps += 1
        return super().tensor_map(box, address)


EVERY = CASES | ALIGNED


@pytest.mark.parametrize("name", EVERY)
def test_every_layout(name):
    """Tiles, and either way of copying where the copy engine can, agree in every bit; what is flagged is counted."""
    case = EVERY[name]
    large, *others = tiles(case)
    launcher = Fetching(replace(KNOWN["H200"], sm_count=3))
    problem, arrays, marks, value = on_shim(case, launcher, tile=large)
    check(problem, arrays, marks, value)
    assert launcher.counts().plain == marks.unfit.sum() > 0
    if name in ALIGNED:
        assert launcher.maps == 2
    for tile in others:
        np.testing.assert_array_equal(on_shim(case, tile=tile)[3], value)
    if not case.planar:
        launcher = Fetching(launcher.spec)
        np.testing.assert_array_equal(on_shim(case, launcher, copied=True)[3], value)
        assert launcher.maps == 0


@pytest.mark.parametrize(
    "name", ["float32", "complex64 AC BR", "complex64, C", "batch", "float32 TN", "float32 planar NN", "order F, C"]
)
def test_all_of_a_product(name):
    check(*on_shim(EVERY[name], marks=Marks.every))


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_tiles_that_deficits_name(order, widened):
    """Without the wide way they are computed anew; with it they are counted another way where they are flagged."""

    def marks(problem):
        found = Marks.random(problem) if widened else Marks.none(problem)
        if not widened:
            found.rows[3], found.columns[7] = 3, 3
        return replace(found, groups=SOME_GROUPS, widened=widened)

    launcher = shim()
    problem, arrays, marked, value = on_shim(replace(HALF_WIDE, order=order), launcher, marks=marks)
    check(problem, arrays, marked, value)
    counts, unfit = launcher.counts(), marked.unfit
    wide = -int((unfit & marked.rest).sum()) if widened else 0
    assert (counts.wide, counts.plain) == (wide % 2**64, int(unfit.sum()))
    plain = shim()
    on_shim(replace(HALF_WIDE, order=order), plain, marks=marked, plain=True)
    assert plain.counts() == counts


def test_nothing_is_touched_where_nothing_is_flagged():
    launcher = shim()
    value = on_shim(CASES["complex64"], launcher, marks=Marks.none)[3]
    assert (value == UNTOUCHED).all()
    assert launcher.counts().plain == 0


@pytest.mark.parametrize("which", ["row", "column"])
def test_a_single_vector_is_shared_out(which):
    """The tiles of one row or column alone, of many: each once, by whatever block, in every place of the table."""
    case = Case((300, 20), (20, 2100), "float32")

    def marks(problem):
        found = Marks.none(problem)
        (found.rows if which == "row" else found.columns)[-1] = 3
        return found

    for tile in tiles(case):
        launcher = shim()
        found = on_shim(case, launcher, marks=marks, tile=tile)
        check(*found)
        assert launcher.counts().plain == found[2].unfit.sum()


@pytest.mark.parametrize("name", ["float32 NN", "float32 TN", "complex64 CT", "complex64 NN", "float32 planar RC"])
def test_what_is_flagged_has_the_bits_of_whole_tiles(name):
    """Pieces of a tile: those alone are computed that have flagged elements."""
    case = ALIGNED[name]

    def few(problem):
        found = Marks.none(problem)
        found.rows[[5, 70, 131]], found.columns[[3, 60]] = 3, 3
        found.rows[100], found.columns[[17, 74]] = 1, 2
        return found

    for tile in tiles(case):
        whole = on_shim(case, marks=Marks.every, tile=tile)[3]
        problem, arrays, marks, found = on_shim(case, marks=few, tile=tile)
        check(problem, arrays, marks, found)
        np.testing.assert_array_equal(found[..., marks.unfit], whole[..., marks.unfit])


@pytest.mark.parametrize("places", [2, 3, 64])
def test_tiles_that_share_a_place(monkeypatch, places):
    monkeypatch.setattr(dmma_fallback, "_PLACES", places)
    dmma_fallback._plan.cache_clear()
    case = Case((5, 130, 20), (5, 20, 200), "complex64")

    def marks(problem):
        found = Marks.none(problem)
        found.rows[2, 129], found.columns[4, 3] = 3, 3
        return found

    launcher = shim()
    try:
        found = on_shim(case, launcher, marks=marks)
    finally:
        dmma_fallback._plan.cache_clear()
    check(*found)
    assert launcher.counts().plain == 200 + 130


def test_places_are_enough():
    for rows, columns in ((1, 1), (1000, 1048), (1000, 1049), (1, 10**9), (10**6, 10**6)):
        shift, first = dmma_fallback._places(rows, columns)
        assert (rows - 1) >> shift < first
        assert first + ((columns - 1) >> shift) < dmma_fallback._PLACES
    assert dmma_fallback._places(1000, 1048)[0] == 0


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_what_is_not_finite_ends_where_plain_arithmetic_has_it(dtype):
    case = Case((40, 50), (50, 70), dtype)
    a, b, _ = case.arrays()
    a[3, 5], b[2, 7], a[-1, 0] = np.nan, np.inf, -np.inf
    plain, ours = (on_shim(case, arrays=(a, b, None), marks=Marks.every, plain=plain)[3] for plain in (True, False))
    assert not np.isfinite(plain).all()
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_nothing_overflows_or_vanishes_on_the_way():
    case = Case((2, 3), (3, 2), "float32")
    a = np.array([[3e38, 1e30, -3e38], [1e-30, 1e-45, 1e-30]], np.float32)
    b = np.array([[2.0, 1e-30], [1e-15, 1e-15], [2.0, 1e-10]], np.float32)
    value = on_shim(case, arrays=(a, b, None), marks=Marks.every)[3]
    np.testing.assert_array_equal(value, (a.astype(float) @ b.astype(float)).astype(np.float32))
    assert np.isfinite(value).all()
    case = Case((1, 1), (1, 1), "float32", options={"alpha": 1e-30})
    arrays = np.full((1, 1), 2e30, np.float32), np.full((1, 1), 3e30, np.float32), None
    value = on_shim(case, arrays=arrays, marks=Marks.every)[3]
    np.testing.assert_array_equal(value, (1e-30 * arrays[0].astype(float) * arrays[1]).astype(np.float32))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", ["float32 NN", "complex64 CT", "float32 planar RC", "complex64 AR"])
def test_thread_orders_do_not_matter(name, order):
    case = EVERY[name]
    launcher = shim(order=order)
    np.testing.assert_array_equal(on_shim(case, launcher)[3], on_shim(case)[3])


@pytest.mark.parametrize("name", ["float32, strided", "complex64 AT BC", "float32, C"])
def test_no_races_and_no_stray_accesses(name):
    """Threads copy: the checker follows no copy engine. Orders of threads and of its copies are tried above."""
    case = CASES[name]
    for tile in tiles(case):
        check(*on_shim(case, shim(checked=True), tile=tile, copied=not case.strided))


def test_what_it_leaves_to_plain_arithmetic():
    """Other devices, and planes that the copy engine cannot fetch: fallback.run has another kernel."""
    for case, arch in ((CASES["float32"], "sm_90"), (replace(ALIGNED["float32 planar NN"], b=(52, 75)), "sm_90a")):
        launcher = shim()
        launcher.spec = replace(launcher.spec, arch=arch)
        arrays = [launcher.array(x) for x in case.arrays()[:2]]
        problem = build(case, (*arrays, None))
        out = launcher.array(np.full(problem.result_shape, UNTOUCHED, problem.result_dtype))
        flags, _held = Marks.every(problem).on(launcher, launcher.array, problem)
        assert not dmma_fallback.run(launcher, problem, *arrays, None, out, flags)
        assert (out == UNTOUCHED).all()
        fallback.run(launcher, problem, *arrays, None, out, flags)
        assert launcher.launches == ["fallback"]
        assert (out != UNTOUCHED).all()


def test_a_program_fetches_what_it_is_given():
    """The copy engine's maps, and the rest, are of the arrays of the moment."""
    case = Case((130, 48), (48, 72), "complex64")
    launcher, seeds = shim(), (1, 2)
    sets = [case.arrays(seed)[:2] for seed in seeds]
    problem = build(case, (*sets[0], None))
    marks = Marks.random(problem)
    flags, _held = marks.on(launcher, launcher.array, problem)
    traced_flags = replace(flags, counters=0)

    def traced(recorder):
        a, b, out = (
            recorder.argument(x.shape, x.dtype, x.strides) for x in (*sets[0], np.empty((130, 72), np.complex64))
        )
        dmma_fallback.run(recorder, problem, a, b, None, out, traced_flags)
        return 3

    program = record(launcher.spec, launcher.max_grid, traced)
    assert program.maps
    for a, b in sets:
        on = [launcher.array(x) for x in (a, b, np.full((130, 72), UNTOUCHED, np.complex64))]
        program.run(launcher, [launcher.pointer(x) for x in on])
        check(problem, (a, b, None), marks, np.array(on[2]))


def test_what_is_counted_is_what_is_flagged_in_a_batch():
    launcher = shim()
    marks = on_shim(CASES["broadcast batch"], launcher)[2]
    unfit = int(marks.unfit.sum())
    assert launcher.counts() == ElementCounts(marks.unfit.size - unfit, 0, unfit)
