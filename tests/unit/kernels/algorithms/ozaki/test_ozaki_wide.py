"""Products of single precision through residues, whose other tiles go the wide way: who writes which element, its
error, and that panels, strips, batches and what was prepared show in no bit. On the CPU shim.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simt_shim import ShimLauncher

from gemmserve_kernels.algorithms.ozaki import gemm as ozaki
from gemmserve_kernels.algorithms.ozaki import wide
from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.algorithms.splits import gemm as splits
from gemmserve_kernels.algorithms.splits import prepass
from gemmserve_kernels.device.element_counts import ElementCounts
from gemmserve_kernels.device.replay import record
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.planned_call import fresh_key, key_argument
from gemmserve_kernels.dispatch.prepare import prepare_on
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.problem import GemmProblem, Operand

M, N, K = 300, 530, 70
"""Three rows and three columns of tiles, of which the last ones are not whole."""
UNIT = 2.0**-24


def shim(processors=3, **options):
    """Few multiprocessors, so that k is not cut for want of tiles."""
    return ShimLauncher(replace(KNOWN["H200"], sm_count=processors), optimize="-O2", **options)


def normal(shape, dtype, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else x).astype(dtype)


def product(launcher, a, b, c=None, *, order="C", prepared="", plain=True, **options):
    """The result, and the problem; `options` of the tile among those of the product."""
    changes = {name: options.pop(name) for name in ("workspace", "strips", "outliers", "cluster") if name in options}
    operands = [None if x is None else Operand.of(x) for x in (a, b, c)]
    problem = GemmProblem.build(*operands, compute="ozaki", order=order, **options)
    assert wide.serves(problem, launcher.spec)
    tile = replace(ozaki.resolve(None, problem, launcher.spec), plain=plain, **changes)
    out = launcher.array(np.full(problem.result_shape, np.nan, problem.result_dtype, order=order))
    sides = []
    for side, x, trans in zip("ab", (a, b), (problem.trans_a, problem.trans_b), strict=True):
        array = launcher.array(x)
        if side in prepared:
            array = ozaki.prepare_operand(
                launcher, array, side, trans, planar=problem.planar, moduli=tile.moduli, outliers=tile.outliers
            )
        sides.append(array)
    ozaki.run_gemm(launcher, problem, tile, *sides, None if c is None else launcher.array(c), out)
    return np.array(out), problem


def failing(kind, dtype, m=M, n=N):
    """A and B some of whose lines residues do not serve, and the rows and columns of A and B of such tiles."""
    a, b = normal((m, K), dtype), normal((K, n), dtype, 2)
    if kind == "none":
        return a, b, [], []
    if kind == "all":
        return a * np.exp2(np.linspace(-20, 20, K)).astype("f4"), b, range(m), []
    if kind == "a row":
        a[130] *= np.exp2(np.linspace(-30, 30, K)).astype("f4")
        return a, b, range(128, 256), []
    if kind == "the last row":
        a[-1, 3] = 1e9
        return a, b, range(m // 128 * 128, m), []
    if kind == "the last column":
        b[:, -1] = np.where(np.arange(K) < 3, b[:, -1], 0)
        return a, b, [], range(n // 256 * 256, n)
    if kind == "a row and a column":
        a[5], b[1:, 300] = np.where(np.arange(K) < 4, a[5], 0), 0
        return a, b, range(128), range(256, 512)
    if kind == "not finite":
        a[140, 4], b[2, 520], a[299, 0] = np.nan, np.inf, -np.inf
        return a, b, range(128, m), range(512, n)
    raise ValueError(kind)


KINDS = ("none", "all", "a row", "the last row", "the last column", "a row and a column", "not finite")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_each_tile_is_written_by_the_one_whose_it_is(dtype, kind, order):
    """Tiles that pass have the bits of residues, as without the lines that fail; the others those of `6xbf16`; all are
    counted.
    """
    a, b, rows, columns = failing(kind, dtype)
    launcher = shim()
    found, problem = product(launcher, a, b, order=order)
    counts = launcher.counts()
    lost = np.zeros((M, N), bool)
    lost[list(rows)] = True
    lost[:, list(columns)] = True
    assert counts == ElementCounts(M * N - lost.sum(), counts.wide, counts.plain)
    assert counts.wide + counts.plain == lost.sum()
    clean_a, clean_b = normal((M, K), dtype), normal((K, N), dtype, 2)
    of_residues, _ = product(launcher, clean_a, clean_b, order=order)
    np.testing.assert_array_equal(found[~lost], of_residues[~lost])
    other = GemmProblem.build(Operand.of(a), Operand.of(b), compute="6xbf16", order=order)
    of_planes = launcher.array(np.full((M, N), np.nan, dtype, order=order))
    config = GemmConfig(algorithm="wgmma", block_n=128)
    splits.run_gemm(launcher, other, config, launcher.array(a), launcher.array(b), None, of_planes)
    np.testing.assert_array_equal(found[lost], np.asarray(of_planes)[lost])
    if kind == "not finite":
        plain = launcher.empty((M, N), np.dtype(dtype))
        simt.run_gemm(launcher, problem, None, launcher.array(a), launcher.array(b), None, plain)
        np.testing.assert_allclose(found, np.asarray(plain), rtol=0, atol=1e-3)
        return
    exact = reference.oracle_gemm(problem, a, b)
    size = np.abs(a).astype(np.float64) @ np.abs(b)
    assert (np.abs(found - exact) <= 8 * UNIT * size).all()


DEEP = 2.0**-100
"""So far below the largest of a vector, bfloat16 planes do not hold an element."""


def deep(dtype):
    """Data of which some pairs are for plain arithmetic: in tiles that fail, and in tiles that residues have."""
    a, b = normal((M, K), dtype), normal((K, N), dtype, 2)
    a[140, ::2] *= DEEP  # does not pass, and is deep and sparse
    a[3, 5] *= DEEP  # passes
    b[: K // 2 + 2, 40] *= DEEP  # does not pass
    b[7, 270] *= DEEP  # passes
    return a, b


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_what_bfloat16_does_not_hold_is_replaced_in_those_tiles_alone(dtype, order):
    a, b = deep(dtype)
    launcher = shim()
    found, problem = product(launcher, a, b, order=order)
    counts = launcher.counts()
    assert counts.plain > 0
    assert counts.wide > 0
    assert counts.total == M * N
    exact = reference.oracle_gemm(problem, a, b)
    size = np.abs(a).astype(np.float64) @ np.abs(b)
    assert (np.abs(found - exact) <= 8 * UNIT * size).all()
    # Rows 0..127 by columns 256.. pass, with the deep ones among them: as if nothing had failed.
    a[140], b[:, 40] = normal(K, dtype), normal(K, dtype)
    alone, _ = product(launcher, a, b, order=order)
    np.testing.assert_array_equal(found[:128, 256:], alone[:128, 256:])


@pytest.mark.parametrize("kind", ["none", "a row", "all", "not finite", "deep"])
def test_panels_strips_and_what_was_prepared_show_in_no_bit(kind):
    dtype = "complex64"
    a, b = deep(dtype) if kind == "deep" else failing(kind, dtype)[:2]
    launcher = shim()
    whole, _ = product(launcher, a, b)
    for options in (
        {"workspace": 1 << 20},
        {"workspace": 1 << 16},
        {"strips": 2},
        {"strips": 6},
        {"strips": 3, "prepared": "a"},
        {"prepared": "ab"},
        {"prepared": "b", "workspace": 1 << 20},
        {"plain": False},
        {"plain": False, "cluster": 1},
    ):
        before = launcher.counts()
        np.testing.assert_array_equal(product(launcher, a, b, **options)[0], whole, err_msg=str(options))
        assert (launcher.counts() - before).total == M * N
    np.testing.assert_array_equal(product(launcher, np.asfortranarray(a), b)[0], whole)
    np.testing.assert_array_equal(product(launcher, a.T, b.T, trans_a="T", trans_b="T")[0], whole)


@pytest.mark.parametrize("shared", ["", "a", "b", "both"])
@pytest.mark.parametrize("prepared", ["", "ab"])
def test_batches(shared, prepared):
    """Each product of a batch by its own tiles, in panels of a few matrices, in shares of the batch, and prepared."""
    rng = np.random.default_rng(3)
    m, n = 140, 280
    a, b = normal((2, 3, m, K), "complex64"), normal((2, 3, K, n), "complex64", 2)
    a, b = (
        (a[:1] if shared == "both" else a[:1, :1] if shared == "a" else a),
        (b[:, :1] if shared == "both" else b[:1, :1] if shared == "b" else b),
    )
    for x, axis in ((a, -1), (b, -2)):
        index = [int(rng.integers(extent)) for extent in x.shape]
        index[axis] = slice(None)
        x[tuple(index)] *= np.where(np.arange(K) < 45, 2.0**-95, 1).astype("f4")
    launcher = shim()
    given = prepared if shared != "both" else ""  # a batch of its own is not prepared
    found, problem = product(launcher, a, b, prepared=given)
    assert launcher.counts().wide > 0
    assert launcher.counts().plain > 0
    for workspace in (1 << 22, 1 << 19):
        np.testing.assert_array_equal(product(launcher, a, b, prepared=given, workspace=workspace)[0], found)
    each_a, each_b = (np.broadcast_to(x, (2, 3, *x.shape[-2:])) for x in (a, b))
    for index in np.ndindex(2, 3):
        alone, _ = product(launcher, each_a[index].copy(), each_b[index].copy())
        np.testing.assert_array_equal(found[index], alone)
    exact = reference.oracle_gemm(problem, a, b)
    assert (np.abs(found - exact) <= 8 * UNIT * (np.abs(a).astype(np.float64) @ np.abs(b))).all()


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 2 - 1j, "beta": 0.5j},
        {"trans_a": "C", "trans_b": "R", "beta": -1},
        {"trans_a": "T", "trans_b": "C", "alpha": -1},
        {"trans_a": "R", "trans_b": "T", "beta": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_scalars_c_and_conjugates(options, order):
    a, b = deep("complex64")
    a, b = (x.T.copy() if options.get(name, "N") in {"T", "C"} else x for x, name in ((a, "trans_a"), (b, "trans_b")))
    c = normal((1, N) if order == "F" else (M, N), "complex64", 5) if "beta" in options else None
    launcher = shim()
    found, problem = product(launcher, a, b, c, order=order, **options)
    counts = launcher.counts()
    assert counts.wide > 0
    assert counts.plain > 0
    exact = reference.oracle_gemm(problem, a, b, c)
    assert (np.abs(found - exact) <= reference.bound(problem, a, b, c)).all()
    np.testing.assert_array_equal(product(launcher, a, b, c, order=order, strips=4, **options)[0], found)
    np.testing.assert_array_equal(product(launcher, a, b, c, order=order, prepared="ab", **options)[0], found)


@pytest.mark.parametrize("order", ["C", "F"])
def test_planar_operands(order):
    """Also where the copy engine cannot fetch them, so that plain FP32 has what bfloat16 does not hold."""
    a, b = deep("complex64")
    launcher = shim()
    for k in (K, K - 1):
        planar = [np.stack([x.real, x.imag]) for x in (a[:, :k], b[:k])]
        found, problem = product(launcher, *planar, order=order, layout="planar")
        exact = reference.oracle_gemm(problem, *planar)
        value = found[0] + 1j * found[1].astype(np.float64)
        assert (np.abs(value - exact) <= 8 * UNIT * (np.abs(a[:, :k]).astype(np.float64) @ np.abs(b[:k]))).all()
        before = launcher.counts()
        np.testing.assert_array_equal(product(launcher, *planar, order=order, layout="planar", strips=4)[0], found)
        assert (launcher.counts() - before).plain > 0


def test_no_planes_are_made_where_all_tiles_pass():
    """What usual data cost: the kernels of the wide way leave their memory as it was."""
    launcher, marked = shim(), []

    def empty(shape, dtype, make=launcher.empty):
        array = make(shape, dtype)
        if dtype == np.float16:
            np.asarray(array).view(np.uint16)[...] = 0x5A5A
            marked.append(array)
        return array

    launcher.empty = empty
    a, b, *_ = failing("none", "complex64")
    product(launcher, a, b)
    assert len(marked) == 2
    for planes in marked:
        assert (np.asarray(planes).view(np.uint16) == 0x5A5A).all()
    assert launcher.launches.count("split") == launcher.launches.count("wgmma_gemm") == 1
    assert "dmma_tiles" not in launcher.launches
    a[130] *= np.exp2(np.linspace(-30, 30, K)).astype("f4")
    product(launcher, a, b)
    assert not (np.asarray(marked[2]).view(np.uint16) == 0x5A5A).all()


def test_planes_lie_where_residues_were():
    """A recorded product takes no more memory than its residues and what is small."""
    n = 4096
    operand = Operand.contiguous((n, n), np.dtype("complex64"))
    problem = GemmProblem.build(operand, operand, compute="ozaki")

    def run(recorder):
        a, b, out = (key_argument(recorder, fresh_key(operand)) for _ in range(3))
        ozaki.run_gemm(recorder, problem, None, a, b, None, out)
        return 3

    program = record(KNOWN["H200"], 2**31 - 1, run)
    residues = 16 * 3 * n * n
    lines = 2 * n * 4 * 68
    assert residues <= program.workspace <= residues + 2 * lines


@pytest.mark.parametrize("strips", [0, -1])
def test_strips_are_at_least_one(strips):
    problem = GemmProblem.build(*(Operand.contiguous((64, 64), np.dtype("complex64")),) * 2, compute="ozaki")
    with pytest.raises(ConfigInfeasible, match="strips"):
        ozaki.resolve(GemmConfig(strips=strips), problem, KNOWN["H200"])
    assert ozaki.resolve(GemmConfig(strips=4), problem, KNOWN["H200"]).strips == 4


class PreparedError(Exception):
    """Raised where an operand would be prepared."""


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize(
    ("shape", "dtype", "options", "expected"),
    [
        ((4096, 4096), "complex64", {}, "residues"),
        ((3, 4096, 4096), "complex64", {}, "residues"),
        ((4096, 4096), "complex64", {"trans": "C"}, "residues"),
        ((2, 4096, 4096), "float32", {"layout": "planar"}, "residues"),
        ((4096, 4096), "complex64", {"compute": "3xfp16"}, "planes"),
        ((1024, 1024), "complex64", {}, "planes"),
        ((8192, 1024), "complex64", {}, "planes"),
        ((8192, 1024), "complex64", {"trans": "T"}, "planes"),
        ((8192, 8192), "float32", {}, "planes"),
        ((1024, 1024), "complex64", {"compute": "ozaki"}, "residues"),
    ],
)
def test_operands_are_prepared_for_partners_of_their_own_size(monkeypatch, shape, dtype, options, expected, side):
    """Residues where `auto` multiplies large ones by residues, planes elsewhere."""

    def made(what):
        def prepare(*args, **kwargs):
            raise PreparedError(what)

        return prepare

    monkeypatch.setattr(ozaki, "prepare_operand", made("residues"))
    monkeypatch.setattr(prepass, "prepare_operand", made("planes"))
    strides = [stride * np.dtype(dtype).itemsize for stride in Operand.contiguous(shape, dtype).strides]
    array = np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, strides)
    with pytest.raises(PreparedError, match=expected):
        prepare_on(shim(132), array, side, **options)
