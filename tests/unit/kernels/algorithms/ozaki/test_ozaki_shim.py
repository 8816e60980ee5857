"""The residue kernels on the CPU shim, mostly with the plain multiplying kernel: the models bits, and every case."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fresh_rng import fresh_rng
from kernel_models import ozaki as ozaki_model
from ozaki_cases import CASES, Case, run
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels.algorithms.dmma import gemm as dmma
from gemmserve_kernels.algorithms.ozaki import bound
from gemmserve_kernels.algorithms.ozaki import gemm as ozaki
from gemmserve_kernels.algorithms.ozaki.moduli import Moduli, available, needed
from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.algorithms.simt import tiled_kernel
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

DOUBLE = ("complex128", "float64")
DTYPES = (*DOUBLE, "complex64", "float32")
EPSILON = {"complex128": 3e-15, "float64": 3e-15, "complex64": 3e-7, "float32": 3e-7}


def shim(**options):
    return ShimLauncher(KNOWN["H200"], optimize="-O2", **options)  # small kernels, long products


def on_shim(case, launcher=None, *, plain=True, **options):
    launcher = launcher or shim()
    return run(launcher, case, launcher.array, np.array, plain=plain, **options)


def untiled(prepared, lines, k):
    """Residues as (planes, lines, k), out of the order of cuda/ozaki/layout.cuh."""
    return untiled_bytes(prepared.residues)[:, :lines], k


def untiled_bytes(residues):
    """The residues of the first matrix, (planes, lines, pitch)."""
    data = np.asarray(residues)[0]
    planes, padded, pitch = data.shape
    blocks = data.reshape(planes, padded // 128, pitch // 128, 128, 8, 16)
    row = np.arange(128)
    swizzled = np.arange(8)[None, :] ^ (row & 7)[:, None]
    plain = blocks[:, :, :, row[:, None], swizzled].transpose(0, 1, 3, 2, 4, 5)
    return plain.reshape(planes, padded, pitch)


@pytest.mark.parametrize("trans", ["N", "T"])
@pytest.mark.parametrize("dtype", ["complex128", "float64", "float32"])
@pytest.mark.parametrize("kind", ["normal", "wide", "huge", "zeros"])
def test_codes_and_residues_are_the_models(kind, dtype, trans):
    if dtype == "float32" and kind == "huge":
        pytest.skip("beyond its range")
    x, *_ = Case((20, 137), (137, 3), dtype, kind).arrays()
    complex_ = dtype == "complex128"
    count = len(available(complex_=complex_))
    launcher, moduli = shim(), Moduli.first(count, complex_=complex_)
    stored = launcher.array(np.ascontiguousarray(x.T) if trans == "T" else x)
    prepared = ozaki.prepare_operand(launcher, stored, "a", trans, moduli=count)
    codes = ozaki_model.codes(x, moduli)
    np.testing.assert_array_equal(prepared.codes[0], codes)
    found, k = untiled(prepared, 20, 137)
    whole = ozaki_model.integers(x, codes)
    pairs = zip(moduli.moduli, moduli.roots, strict=True)
    expected = np.stack([r % p for p, root in pairs for r in ozaki_model.residues(whole, p, root)])
    if 255 in moduli.moduli:  # it stands for 0 (`params.inverse_of`)
        number = moduli.moduli.index(255)
        found = found.copy()
        found[number] %= 255
    np.testing.assert_array_equal(found[:, :, :k], expected)
    assert not found[:, :, k:].any()


@pytest.mark.parametrize("kind", ["normal", "rows", "integers"])
@pytest.mark.parametrize("dtype", ["complex128", "float64"])
def test_the_result_has_the_models_bits(kind, dtype):
    for count in {needed(150, np.dtype(dtype)), len(available(complex_=dtype == "complex128"))}:
        result = on_shim(Case((21, 150), (150, 18), dtype, kind, tile={"moduli": count}))
        a, b, _ = result.arrays
        moduli = Moduli.first(count, complex_=dtype == "complex128")
        np.testing.assert_array_equal(result.value, ozaki_model.gemm(a, b, moduli))


@pytest.mark.parametrize("k", [1200, 1400, 2048])
@pytest.mark.parametrize("dtype", ["complex128", "float64"])
def test_all_moduli_leave_one_rounding(dtype, k):
    """Whatever the norms of lines: the result is as good as the exact one rounded to nearest, and made of residues."""
    case = Case((9, k), (k, 9), dtype, tile={"moduli": len(available(complex_=dtype == "complex128"))})
    launcher = shim()
    result = on_shim(case, launcher)
    nearest = reference.errors(result.exact.astype(dtype), result.exact)
    assert result.errors.rel_fro <= 1.1 * nearest.rel_fro
    native = launcher.empty((9, 9), np.dtype(dtype))
    dmma.run_gemm(launcher, result.problem, None, *result.device[:2], None, native)
    assert (np.asarray(native) != result.value).any()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case(case):
    assert on_shim(case).errors.rel_fro <= EPSILON[case.dtype]


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", ["normal", "batch"])
def test_the_tensor_cores_give_the_bits_of_the_plain_kernel(name, order, cluster):
    """Hopper's copies, barriers and INT8 products as the shim plays them, on fewer blocks than there are tiles."""
    launcher = ShimLauncher(replace(KNOWN["H200"], sm_count=3), optimize="-O2", order=order)
    fast = on_shim(replace(CASES[name], tile={"cluster": cluster}), launcher, plain=False)
    assert "ozaki_multiply" in launcher.launches
    np.testing.assert_array_equal(fast.stored, on_shim(CASES[name]).stored)


@pytest.mark.parametrize("cluster", [1, 2])
def test_the_tensor_cores_on_long_lines_and_several_tiles(cluster):
    case = Case((130, 300), (300, 260), "float64", tile={"stages": 2, "moduli": 14, "cluster": cluster})
    fast, slow = (on_shim(case, plain=plain).stored for plain in (False, True))
    np.testing.assert_array_equal(fast, slow)


@pytest.mark.parametrize("cluster", [1, 2])
def test_the_stages_go_round(cluster):
    """More steps of k than there are stages, several tiles a block."""
    launcher = ShimLauncher(replace(KNOWN["H200"], sm_count=3), optimize="-O2")
    tile = {"moduli": 4, "cluster": cluster}
    fast = on_shim(Case((140, 700), (700, 20), "float64", tile=tile), launcher, plain=False)
    slow = on_shim(Case((140, 700), (700, 20), "float64", tile=tile))
    np.testing.assert_array_equal(fast.stored, slow.stored)


@pytest.mark.parametrize("name", ["AC BR", "planar", "batch", "broadcast batch", "scaled rows"])
def test_prepared_operands_give_the_same_bits(name):
    plain = on_shim(CASES[name]).stored
    for prepared in ("a", "b", "ab"):
        np.testing.assert_array_equal(on_shim(CASES[name], prepared=prepared).stored, plain)


def test_an_operand_prepared_for_something_else_is_not_used():
    launcher, case = shim(), Case((50, 50), (50, 20), options={"trans_a": "T"})
    a, b, _ = case.arrays()
    expected = on_shim(case)
    other = ozaki.prepare_operand(launcher, launcher.array(a), "a", "N")
    out = launcher.empty((50, 20), np.dtype(np.complex128))
    ozaki.run_gemm(launcher, expected.problem, ozaki.OzakiTile(15, plain=True), other, launcher.array(b), None, out)
    np.testing.assert_array_equal(out, expected.stored)


def test_panels_do_not_change_a_bit():
    whole = on_shim(Case((300, 20), (20, 520), "float64"))
    for tile in ({"workspace": 1 << 20}, {"strips": 3}, {"strips": 6, "workspace": 1 << 20}):
        cut = on_shim(Case((300, 20), (20, 520), "float64", tile=tile))
        np.testing.assert_array_equal(cut.stored, whole.stored)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_ends_where_plain_arithmetic_has_it(dtype):
    launcher = shim()
    value = on_shim(Case((40, 50), (50, 70), dtype, "nonfinite"), launcher)
    plain = launcher.empty((40, 70), np.dtype(dtype))
    simt.run_gemm(launcher, value.problem, None, *value.device, plain)
    assert not np.isfinite(plain).all()
    assert np.isfinite(plain).any()
    np.testing.assert_allclose(value.stored, plain, rtol=0, atol=1e-12 if dtype in DOUBLE else 1e-4)


def hostile(kind, m, n, k, dtype, seed):
    rng = np.random.default_rng(seed)

    def one(*shape):
        x = rng.standard_normal(shape)
        return x + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else x

    a, b = one(m, k), one(k, n)
    if kind == "spikes":
        a, b = 1e-6 * a, 1e-6 * b
        a[:, 3], b[5] = 1e3, 1e3
    elif kind == "one spike":
        a[0, 3] *= 1e9
    elif kind == "exponents":
        a, b = a * np.exp(6 * rng.standard_normal(a.shape)), b * np.exp(6 * rng.standard_normal(b.shape))
    elif kind == "heavy":
        a, b = a / rng.standard_normal(a.shape), b / rng.standard_normal(b.shape)
    elif kind == "sparse":
        a = a * (rng.random(a.shape) < 0.05)
    elif kind == "graded":
        grade = 2.0 ** (60 * np.arange(k) / k)
        a, b = a * grade, b / grade[:, None]
    elif kind == "subnormal":
        a = a * (2.0**-1040 if dtype in DOUBLE else 2.0**-137)
    return a.astype(dtype), b.astype(dtype)


KINDS = ("spikes", "one spike", "exponents", "heavy", "sparse", "graded", "subnormal")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_element_is_as_accurate_as_in_plain_arithmetic(monkeypatch, kind, dtype):
    """Plain arithmetic as it is of large products: one long sum."""
    monkeypatch.setattr(tiled_kernel, "is_small", lambda problem: False)
    tiled_kernel.tiled_plan.cache_clear()
    m, n, k = 140, 20, 160
    a, b = hostile(kind, m, n, k, dtype, np.random.SeedSequence().entropy)
    launcher = shim()
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="ozaki")
    found = launcher.empty((m, n), np.dtype(dtype))
    arrays = launcher.array(a), launcher.array(b)
    ozaki.run_gemm(
        launcher, problem, replace(ozaki.resolve(None, problem, launcher.spec), plain=True), *arrays, None, found
    )
    plain = launcher.empty((m, n), np.dtype(dtype))
    simt.run_gemm(launcher, problem, None, *arrays, None, plain)
    tiled_kernel.tiled_plan.cache_clear()
    exact = reference.oracle_gemm(problem, a, b)
    size = np.abs(a).astype(np.longdouble) @ np.abs(b).astype(np.longdouble)
    unit, smallest = (2.0**-53, 2.0**-1074) if dtype in DOUBLE else (2.0**-24, 2.0**-149)
    size = np.where(size == 0, 1, size) * unit + (smallest if kind == "subnormal" else 0)
    error, own = (float((np.abs(np.asarray(d) - exact) / size).max()) for d in (found, plain))
    assert error <= max(4, 2 * own)


@pytest.mark.parametrize("dtype", DTYPES)
def test_permutations_and_gates_are_exact(dtype):
    """In single precision sums of two terms are off by what tensor cores cut from those of bfloat16 parts."""
    rng = fresh_rng()
    k = 160
    x = rng.standard_normal((k, 20)).astype(dtype)
    permutation = np.eye(k)[rng.permutation(k)]
    for gate in (permutation, np.kron(np.eye(k // 2), np.array([[1, 1], [1, -1]]))):
        launcher, a = shim(), gate.astype(dtype)
        problem = GemmProblem.build(Operand.of(a), Operand.of(x), compute="ozaki")
        out = launcher.empty((k, 20), np.dtype(dtype))
        tile = replace(ozaki.resolve(None, problem, launcher.spec), plain=True)
        ozaki.run_gemm(launcher, problem, tile, launcher.array(a), launcher.array(x), None, out)
        if dtype in DOUBLE or gate is permutation:
            np.testing.assert_array_equal(out, a @ x)
        else:
            exact = a.astype(np.complex128) @ x
            assert (np.abs(np.asarray(out) - exact) <= 4 * 2.0**-24 * (np.abs(a) @ np.abs(x))).all()


@pytest.mark.parametrize(("plain", "cluster"), [(True, 1), (False, 1), (False, 2)])
@pytest.mark.parametrize("prepared", ["", "ab"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_only_tiles_that_do_not_pass_are_made_natively(dtype, prepared, plain, cluster):
    """One bad line of a batch: residues for all but its tiles, whatever was prepared, however panels lie."""
    case = Case((2, 140, 150), (150, 270), dtype)
    a, b, _ = case.arrays()
    bad = a.copy()
    bad[1, 130, 7] = 1e12
    launcher = shim()
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="ozaki")
    tile = ozaki.resolve(GemmConfig(cluster=cluster), problem, launcher.spec)
    tile = replace(tile, plain=plain, workspace=1 << 20)

    def product(x):
        operands = [launcher.array(x), launcher.array(b)]
        for i, side in enumerate(prepared):
            operands[i] = ozaki.prepare_operand(launcher, operands[i], side, moduli=tile.moduli)
        out = launcher.zeros((2, 140, 270), np.dtype(dtype))
        ozaki.run_gemm(launcher, problem, tile, *operands, None, out)
        return np.array(out)

    good, found = product(a), product(bad)
    np.testing.assert_array_equal(found[0], good[0])
    np.testing.assert_array_equal(found[1, :128], good[1, :128])
    assert (found[1, 128:] != good[1, 128:]).any()
    exact = reference.oracle_gemm(problem, bad, b)
    size = np.abs(bad).astype(np.longdouble) @ np.abs(b).astype(np.longdouble)
    assert (np.abs(found - exact) <= 20 * (2.0**-53 if dtype in DOUBLE else 2.0**-24) * size).all()


def outliers(shape, rng, rows):
    """Float64 of which one element in each of `rows` is 1e9 times the others."""
    x = 1e-6 * rng.standard_normal(shape)
    x[..., rows, rng.integers(shape[-1], size=len(rows))] = 1e3
    return x


LOST = {
    "every line of both": (range(300), range(280)),
    "every line of A": (range(300), ()),
    "every line of B": ((), range(280)),
    "a line of every group of A": ((0, 128, 256), ()),
    "lines late in their groups": ((127, 250, 299), (100, 279)),
    "a group of A and one of B": ((5,), (140, 141)),
}


@pytest.mark.parametrize(("processors", "order"), [(1, "C"), (132, "F")])
@pytest.mark.parametrize("kind", LOST)
def test_what_norms_tell_of_shows_in_no_bit(kind, processors, order):
    """Groups of lines that are not converted: the same bits as from operands that were prepared without a look at the
    other side, and those of native arithmetic where no tile passes.
    """
    rng = fresh_rng()
    a, b = outliers((300, 260), rng, list(LOST[kind][0])), outliers((280, 260), rng, list(LOST[kind][1])).T
    a, b = (np.array(x, order=order) for x in (a, b))
    launcher = ShimLauncher(replace(KNOWN["H200"], sm_count=processors), optimize="-O2")
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="ozaki")

    def product(prepared="", **changes):
        tile = replace(ozaki.resolve(None, problem, launcher.spec), **{"plain": True, **changes})
        operands = [launcher.array(a), launcher.array(b)]
        for i, side in enumerate("ab"):
            if side in prepared:
                operands[i] = ozaki.prepare_operand(launcher, operands[i], side, moduli=tile.moduli)
        out = launcher.empty((300, 280), np.dtype(np.float64))
        ozaki.run_gemm(launcher, problem, tile, *operands, None, out)
        return np.array(out)

    found = product()
    panels, fast, alone = product(workspace=1 << 20), product(plain=False), product(plain=False, cluster=1)
    for other in (product("a"), product("b"), product("ab"), panels, fast, alone):
        np.testing.assert_array_equal(found, other)
    error = np.abs(found - a.astype(np.longdouble) @ b) / (np.abs(a) @ np.abs(b))
    assert error.max() <= 64 * 2.0**-53
    if kind.startswith("every"):
        native = launcher.empty((300, 280), np.dtype(np.float64))
        dmma.run_gemm(launcher, problem, None, launcher.array(a), launcher.array(b), None, native)
        np.testing.assert_array_equal(found, native)


@pytest.mark.parametrize("shared", ["a", "b", ""])
def test_norms_of_a_batch_tell_of_its_own_matrices(shared):
    """Outliers in one matrix of a batch: the others are made of residues, as without it; a shared operand is converted
    for them.
    """
    rng = fresh_rng()
    a, b = rng.standard_normal((2, 130, 260)), rng.standard_normal((2, 260, 40))
    if shared == "a":
        a = a[:1]
        b[1, 3] = 1e12
    elif shared == "b":
        b = b[:1]
        a[1, :, 3] = 1e12
    else:
        a[1, :, 3] = b[1, 7] = 1e12
    launcher = shim()

    def product(x, y):
        problem = GemmProblem.build(Operand.of(x), Operand.of(y), compute="ozaki")
        tile = replace(ozaki.resolve(None, problem, launcher.spec), plain=True)
        out = launcher.empty(problem.result_shape, np.dtype(np.float64))
        ozaki.run_gemm(launcher, problem, tile, launcher.array(x), launcher.array(y), None, out)
        return np.array(out)

    found = product(a, b)
    for i in range(2):
        np.testing.assert_array_equal(found[i], product(a[min(i, len(a) - 1)], b[min(i, len(b) - 1)]))
    exact = a.astype(np.longdouble) @ b
    assert (np.abs(found - exact) <= 64 * 2.0**-53 * (np.abs(a) @ np.abs(b))).all()


def test_nothing_is_converted_where_no_tile_passes():
    """What the hostile case costs: planes and products of residues stay as they were."""
    rng = fresh_rng()
    a, b = outliers((140, 260), rng, list(range(140))), rng.standard_normal((260, 140))
    for x, y in ((a, b), (b.T.copy(), a.T.copy())):
        launcher = shim()
        marked = []

        def empty(shape, dtype, make=launcher.empty, marked=marked):
            array = make(shape, dtype)
            if dtype == np.uint8:
                np.asarray(array)[...] = 77
                marked.append(array)
            return array

        launcher.empty = empty
        problem = GemmProblem.build(Operand.of(x), Operand.of(y), compute="ozaki")
        out = launcher.array(np.empty((140, 140)))
        tile = replace(ozaki.resolve(None, problem, launcher.spec), plain=False)
        ozaki.run_gemm(launcher, problem, tile, launcher.array(x), launcher.array(y), None, out)
        # The residues of both, padded by lines of zeros that are converted, and the products.
        assert len(marked) == 3
        for residues in marked[:2]:
            assert (untiled_bytes(residues)[:, :140] == 77).all()
        assert (np.asarray(marked[2]) == 77).all()


@pytest.mark.parametrize("trans", ["N", "T"])
@pytest.mark.parametrize("kind", ["normal", "zeros", "wide", "nonfinite"])
def test_deficits_are_the_models(kind, trans):
    x, *_ = Case((300, 203), (203, 8), "complex128", kind).arrays()
    launcher, moduli = shim(), Moduli.first(15, complex_=True)
    stored = launcher.array(np.ascontiguousarray(x.T) if trans == "T" else x)
    words = np.array(ozaki.prepare_operand(launcher, stored, "a", trans, moduli=15).deficits)
    finite = np.isfinite(x).all(axis=1)
    x = np.where(finite[:, None], x, 0)
    codes = ozaki_model.codes(x, moduli)
    parts = [np.ldexp(p, (codes >> 3)[:, None]) * ((codes & 7) / 4)[:, None] for p in ozaki_model.parts(x)]
    exact = np.where(
        finite[:, None],
        ozaki_model.deficits(parts, bound.whole(moduli, 203, complex_=True)) * bound.WHOLE,
        ozaki_model.NEVER,
    )
    least, found, doubt = words[:16].reshape(4, 4), words[16:-1].reshape(4, 3).astype(np.int64), words[-1]
    for group in range(3):
        worst = exact[group * 128 : group * 128 + 128].max(axis=0)
        assert least[group].max() <= found[group, 2]
        if least[group].max() > bound.limit(203):  # nothing was counted
            worst = np.full(3, ozaki_model.NEVER)
        # Every four elements are rounded down to a 64th.
        assert (worst - 51 <= found[group]).all()
        assert (found[group] <= worst + 51 + 1e-3 * worst).all()
    assert not found[3].any()
    assert (doubt != 0) == (2 * found[:, 0] > bound.limit(203)).any()


def test_grading_along_k_is_found_and_done_in_plain_arithmetic():
    case = Case((40, 50), (50, 70), kind="graded")
    assert on_shim(case).errors.rel_fro <= 1e-15
    a, b, _ = case.arrays()
    without = ozaki_model.gemm(a, b, Moduli.first(needed(a.shape[1], a.dtype), complex_=True))
    # Had it not been found: the test would show nothing.
    assert np.linalg.norm(without - a @ b) > 1e-8 * np.linalg.norm(a @ b)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_c_is_not_read_where_beta_is_0(value):
    launcher, case = shim(), Case((9, 20), (20, 12), c=(9, 12), options={"beta": 0})
    expected = on_shim(case)
    a, b, c = case.arrays()
    out = launcher.empty((9, 12), np.dtype(np.complex128))
    operands = [launcher.array(x) for x in (a, b, np.full_like(c, value))]
    ozaki.run_gemm(launcher, expected.problem, ozaki.OzakiTile(15, plain=True), *operands, out)
    np.testing.assert_array_equal(out, expected.stored)


def test_sums_past_32768_steps_are_reduced_in_between():
    # Of 70,000 products of residues up to 255 the sum passes 2**31, and 2**32.
    a = np.full((2, 70_000), 127.0)
    launcher = shim()
    result = on_shim(Case((2, 70_000), (70_000, 2), "float64", "positive"), launcher)
    assert result.errors.rel_fro <= 3e-15
    out = launcher.empty((2, 2), np.dtype(np.float64))
    ozaki.run_gemm(
        launcher, result.problem, ozaki.OzakiTile(14, plain=True), launcher.array(a), launcher.array(a.T), None, out
    )
    np.testing.assert_array_equal(out, a @ a.T)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_thread_orders_do_not_matter(order):
    case = Case((21, 150), (150, 18), kind="nonfinite")
    np.testing.assert_array_equal(on_shim(case, shim(order=order)).stored, on_shim(case).stored)


@pytest.mark.parametrize("name", ["AC BR", "planar"])
def test_no_races_and_no_stray_accesses(name):
    assert on_shim(CASES[name], shim(checked=True)).errors.rel_fro <= 3e-15
