"""Outliers that are multiplied apart: which they are, and what becomes of them, on the CPU shim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fresh_rng import fresh_rng
from kernel_models import ozaki as ozaki_model
from ozaki_cases import Case, run
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels.algorithms.dmma import gemm as dmma
from gemmserve_kernels.algorithms.ozaki import bound
from gemmserve_kernels.algorithms.ozaki import gemm as ozaki
from gemmserve_kernels.algorithms.ozaki.moduli import Moduli, needed
from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.problem import GemmProblem, Operand

MOST = 16
DTYPES = ("complex128", "float64")


def shim(**options):
    return ShimLauncher(KNOWN["H200"], optimize="-O2", **options)  # small kernels, long products


def lines(kind, n, k, dtype, rng):
    """Lines along k, as rows."""
    x = rng.standard_normal((n, k))
    if dtype == "complex128":
        x = x + 1j * rng.standard_normal((n, k))
    spots = rng.random((n, k)) < 3 / k
    if kind == "spikes":
        x = np.where(spots, 1e3, 1e-6 * x)
    elif kind == "decades":
        x = np.where(spots, x * 10.0 ** rng.integers(3, 150, (n, k)), x)
    elif kind == "huge":
        x = np.where(spots, x * 2.0**1018, x * 2.0**-500)
    elif kind == "tiny":
        x = np.where(spots, x, x * 2.0**-1030)
    elif kind == "few":
        x = np.where(spots, x, 0)
    elif kind == "one class":
        x[:, 5::32] = np.where(rng.random((n, len(x[0, 5::32]))) < 0.5, 1e9, x[:, 5::32])
    elif kind == "some lines":
        x[::7, 3] = 1e9
        x[3] = 0
    elif kind == "many":
        x[:, 1 :: k // (2 * MOST)] = 1e9
    elif kind == "exponents":
        x = x * np.exp(6 * rng.standard_normal((n, k)))
    return x.astype(dtype)


def product(a, b, launcher=None, *, prepared="", most=MOST, c=None, **changes):
    """A B by `ozaki`, and the tile."""
    launcher, scalars = launcher or shim(), {} if c is None else {"alpha": 2, "beta": -1}
    operands = [Operand.of(x) for x in (a, b) + (() if c is None else (c,))]
    problem = GemmProblem.build(*operands, compute="ozaki", **scalars)
    tile = replace(ozaki.resolve(None, problem, launcher.spec), **{"plain": True, "outliers": most, **changes})
    arrays = [launcher.array(a), launcher.array(b)]
    for i, side in enumerate("ab"):
        if side in prepared:
            arrays[i] = ozaki.prepare_operand(launcher, arrays[i], side, moduli=tile.moduli, outliers=most)
    out = launcher.empty(problem.result_shape, a.dtype)
    ozaki.run_gemm(launcher, problem, tile, *arrays, None if c is None else launcher.array(c), out)
    return np.array(out)


def native(a, b):
    launcher = shim()
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="fp64")
    out = launcher.empty(problem.result_shape, a.dtype)
    dmma.run_gemm(launcher, problem, None, launcher.array(a), launcher.array(b), None, out)
    return np.array(out)


def units(d, a, b):
    """The worst |D - A B| over |A| |B|, in units of 2^-53, where no product underflows."""
    wide = np.clongdouble if a.dtype.kind == "c" else np.longdouble
    a, b = a.astype(wide), b.astype(wide)
    size, off = np.abs(a) @ np.abs(b), np.abs(d - a @ b)
    return float(np.where(size == 0, off, off / np.where(size == 0, 1, size)).max() * 2**53)


KINDS = ("spikes", "decades", "huge", "tiny", "few", "one class", "some lines", "many", "exponents", "normal")


@pytest.mark.parametrize("trans", ["N", "T"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_outliers_and_scales_are_the_models(kind, dtype, trans):
    rng = fresh_rng()
    n, k = 40, 403
    x = lines(kind, n, k, dtype, rng)
    moduli = Moduli.first(needed(k, np.dtype(dtype)), complex_=dtype == "complex128")
    launcher = shim()
    stored = launcher.array(np.ascontiguousarray(x.T) if trans == "T" else x)
    prepared = ozaki.prepare_operand(launcher, stored, "a", trans, outliers=MOST)
    apart = ozaki_model.outliers(x, moduli, MOST)
    if kind != "exponents":  # a line in a hundred
        assert apart.any() == (kind not in {"many", "normal"})
    records = np.asarray(prepared.apart)[0]
    above, counts = records[:, :2].copy().view(np.float64)[:, 0], records[:, 2]
    np.testing.assert_array_equal(counts, apart.sum(axis=1))
    size = np.max([np.abs(p) for p in ozaki_model.parts(x)], axis=0)
    for i, mask in enumerate(apart):
        np.testing.assert_array_equal(records[i, 4 : 4 + counts[i]], np.flatnonzero(mask))
        np.testing.assert_array_equal(size[i] > above[i], mask)
    codes = ozaki_model.codes(np.where(apart, 0, x), moduli)
    np.testing.assert_array_equal(np.asarray(prepared.codes)[0], codes)
    if kind != "exponents":  # of lines that lack too much nobody is told
        assert bool(int(np.asarray(prepared.deficits)[-1]) & 2) == bool(apart.any())


@pytest.mark.parametrize("order", ["CC", "FF"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["spikes", "decades", "few", "one class", "some lines"])
def test_elements_are_accurate_to_their_last_place(kind, dtype, order):
    """Every tile is made of residues, none natively: a fraction of what plain arithmetic loses of such data."""
    rng = fresh_rng()
    m, n, k = 135, 40, 403
    for left, right in ((kind, kind), (kind, "normal"), ("normal", kind)):
        a, b = lines(left, m, k, dtype, rng), lines(right, n, k, dtype, rng).T
        a, b = np.array(a, order=order[0]), np.array(b, order=order[1])
        launcher = shim()
        assert units(product(a, b, launcher), a, b) <= 4
        assert launcher.counts().plain == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_and_tiny_lines(dtype):
    rng = fresh_rng()
    a, b = lines("huge", 60, 300, dtype, rng), lines("normal", 50, 300, dtype, rng).T * 2.0**-30
    assert units(product(a, b), a, b) <= 4
    a, b = lines("tiny", 60, 300, dtype, rng), lines("normal", 50, 300, dtype, rng).T * 2.0**60
    assert units(product(a, b), a, b) <= 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_shows_in_no_bit(dtype):
    """Panels, prepared operands, how operands lie, the order of threads, what else is in a batch."""
    rng = fresh_rng()
    a = np.stack([lines(kind, 20, 160, dtype, rng) for kind in ("spikes", "some lines")])
    b = np.stack([lines(kind, 280, 160, dtype, rng).T for kind in ("few", "spikes")])
    found = product(a, b)
    assert units(found[0], a[0], b[0]) <= 4
    assert units(found[1], a[1], b[1]) <= 4
    others = {
        "panels": product(a, b, workspace=1 << 20),
        "an order of memory": product(np.asfortranarray(a), b),
        **{f"prepared {sides}": product(a, b, prepared=sides) for sides in ("a", "b", "ab")},
        **{f"order {order}": product(a, b, shim(order=order)) for order in ORDERS},
    }
    for name, other in others.items():
        np.testing.assert_array_equal(other, found, err_msg=name)
    shared = product(a[:1], b)
    np.testing.assert_array_equal(shared[0], found[0])
    np.testing.assert_array_equal(shared[1], product(a[0], b[1]))
    np.testing.assert_array_equal(product(a, b[:1], prepared="b")[1], product(a[1], b[0]))


@pytest.mark.parametrize("cluster", [1, 2])
def test_the_tensor_cores_give_the_same_bits(cluster):
    rng = fresh_rng()
    a, b = lines("spikes", 130, 160, "float64", rng), lines("few", 20, 160, "float64", rng).T
    np.testing.assert_array_equal(product(a, b, plain=False, cluster=cluster), product(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_data_have_the_bits_they_had(dtype):
    """With and without; too many outliers are left to plain arithmetic."""
    rng = fresh_rng()
    for kind in ("normal", "exponents", "many"):
        a, b = lines(kind, 40, 403, dtype, rng), lines(kind, 40, 403, dtype, rng).T
        found = product(a, b)
        np.testing.assert_array_equal(found, product(a, b, most=0))
        if kind != "normal":
            np.testing.assert_array_equal(found, native(a, b))


def test_a_line_of_too_many_spoils_its_tiles_alone():
    rng = fresh_rng()
    a, b = lines("spikes", 140, 403, "float64", rng), lines("normal", 40, 403, "float64", rng).T
    good = product(a, b)
    a[130, : MOST + 1] = 1e9
    found = product(a, b)
    np.testing.assert_array_equal(found[:128], good[:128])
    np.testing.assert_array_equal(found[128:], native(a, b)[128:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_permutations_and_gates_are_exact(dtype):
    rng = fresh_rng()
    k = 160
    x = lines("spikes", 20, k, dtype, rng).T
    for gate in (np.eye(k)[rng.permutation(k)], np.kron(np.eye(k // 2), np.array([[1, 1], [1, -1]]))):
        a = gate.astype(dtype)
        np.testing.assert_array_equal(product(a, x), a @ x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_ends_where_plain_arithmetic_has_it(dtype):
    rng = fresh_rng()
    a, b = lines("spikes", 140, 260, dtype, rng), lines("spikes", 60, 260, dtype, rng).T
    a[3, 7], a[5, 9], b[11, 20] = np.nan, np.inf, -np.inf
    found, launcher = product(a, b), shim()
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="fp64")
    plain = launcher.empty((140, 60), np.dtype(dtype))
    simt.run_gemm(launcher, problem, None, launcher.array(a), launcher.array(b), None, plain)
    assert not np.isfinite(plain).all()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(plain))
    finite = np.isfinite(plain)
    np.testing.assert_allclose(found[finite], np.asarray(plain)[finite], rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("options", [{"trans_a": "C", "trans_b": "R"}, {"trans_a": "T", "trans_b": "C"}], ids=str)
def test_conjugates_scalars_and_c(options):
    rng = fresh_rng()
    m, n, k = 40, 30, 300
    a, b = lines("spikes", m, k, "complex128", rng), lines("decades", n, k, "complex128", rng).T
    stored = [
        {"N": x, "T": x.T, "C": x.conj().T, "R": x.conj()}[options[t]] for x, t in ((a, "trans_a"), (b, "trans_b"))
    ]
    c = rng.standard_normal((m, n)) + 0j
    launcher = shim()
    problem = GemmProblem.build(*(Operand.of(x) for x in (*stored, c)), alpha=2, beta=-1, compute="ozaki", **options)
    tile = replace(ozaki.resolve(None, problem, launcher.spec), plain=True, outliers=MOST)
    out = launcher.empty((m, n), c.dtype)
    ozaki.run_gemm(launcher, problem, tile, *(launcher.array(x) for x in (*stored, c)), out)
    exact = 2 * (a.astype(np.clongdouble) @ b) - c
    assert (np.abs(out - exact) <= 6 * 2.0**-53 * (2 * np.abs(a) @ np.abs(b) + np.abs(c))).all()
    np.testing.assert_array_equal(out, product(a, b, c=c))


def test_planar_operands():
    rng = fresh_rng()
    m, n, k = 40, 30, 300
    a, b = lines("spikes", m, k, "complex128", rng), lines("spikes", n, k, "complex128", rng).T
    planes = [np.stack([x.real, x.imag]) for x in (a, b)]
    launcher = shim()
    problem = GemmProblem.build(*(Operand.of(x) for x in planes), layout="planar", compute="ozaki")
    tile = replace(ozaki.resolve(None, problem, launcher.spec), plain=True, outliers=MOST)
    out = launcher.empty((2, m, n), np.dtype(np.float64))
    ozaki.run_gemm(launcher, problem, tile, *(launcher.array(x) for x in planes), None, out)
    np.testing.assert_array_equal(out[0] + 1j * out[1], product(a, b))


def test_an_operand_prepared_with_other_outliers_is_not_used():
    rng = fresh_rng()
    launcher = shim()
    a, b = lines("spikes", 40, 300, "float64", rng), lines("normal", 30, 300, "float64", rng).T
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="ozaki")
    tile = replace(ozaki.resolve(None, problem, launcher.spec), plain=True, outliers=MOST)
    other = ozaki.prepare_operand(launcher, launcher.array(a), "a", outliers=0)
    assert not other.serves(problem, 0, tile)
    out = launcher.empty((40, 30), a.dtype)
    ozaki.run_gemm(launcher, problem, tile, other, launcher.array(b), None, out)
    np.testing.assert_array_equal(out, product(a, b))
    kept = ozaki.prepare_operand(launcher, launcher.array(a), "a", outliers=MOST)
    assert kept.with_arrays(kept.array, kept.arrays) == kept


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_races_and_no_stray_accesses(dtype):
    result = run(
        launcher := shim(checked=True), Case((40, 300), (300, 60), dtype, "spiky", tile={"outliers": MOST}),
        launcher.array, np.array, plain=True,
    )  # fmt: skip
    assert units(result.stored, *result.arrays[:2]) <= 4


def test_how_many_are_asked_for():
    spec, x = KNOWN["H200"], Operand.contiguous((1024, 8192), "complex128")
    problem = GemmProblem.build(x, Operand.contiguous((8192, 1024), "complex128"), compute="ozaki")
    assert ozaki.resolve(None, problem, spec).outliers == bound.most_outliers(8192, np.dtype("complex128"))
    assert ozaki.resolve(GemmConfig(outliers=0), problem, spec).outliers == 0
    assert ozaki.resolve(GemmConfig(outliers=3), problem, spec).outliers == 3
    for count in (-1, bound.MOST_OUTLIERS + 1):
        with pytest.raises(ConfigInfeasible, match="outliers"):
            ozaki.resolve(GemmConfig(outliers=count), problem, spec)
    single = GemmProblem.build(*(Operand.contiguous((200, 200), "complex64") for _ in "ab"), compute="ozaki")
    assert ozaki.resolve(None, single, spec).outliers == 0
    assert ozaki.resolve(GemmConfig(outliers=1), single, spec).outliers == 1
