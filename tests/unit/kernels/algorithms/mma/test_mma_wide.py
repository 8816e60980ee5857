"""bfloat16 planes and the wide way of the mma.sync kernel on the CPU shim: bits, tiles, hostile data, reductions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fresh_rng import fresh_rng
from kernel_models import splits as plane_models
from mma_cases import build
from reduce_cases import check as check_reduction
from simt_cases import ShimMachine, random
from simt_shim import REVERSE, ShimLauncher
from wgmma_cases import planes_of

from gemmserve_kernels.algorithms.common import verdict
from gemmserve_kernels.algorithms.common.splits import PLANES, Planes
from gemmserve_kernels.algorithms.common.verdict import Judged
from gemmserve_kernels.algorithms.mma import gemm as mma
from gemmserve_kernels.algorithms.splits import gemm as product
from gemmserve_kernels.algorithms.splits import gemm_reduce
from gemmserve_kernels.bench import kinds
from gemmserve_kernels.bench.elementwise import elementwise
from gemmserve_kernels.device.element_counts import ElementCounts
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

SMALL = GemmConfig(block_m=32, block_n=32, block_k=32, warp_m=16, warp_n=16, promote=32, stages=2)
SCHEMES = ["6xbf16", "9xbf16", "3xbf16"]
DTYPES = ["float32", "complex64"]
EVERY = np.float32(2.0**-24)


@pytest.fixture
def machine():
    """One multiprocessor: blocks that look for the rest of the tiles have several of them."""
    return ShimMachine(ShimLauncher(replace(KNOWN["A100"], sm_count=1), optimize="-O2"))  # long products


def run(machine, a, b, *, compute="3xfp16", config=None, c=None, **options):
    """The result on the host, and the shares of the wide way and of plain float32."""
    operands = [Operand.of(x) if x is not None else None for x in (a, b, c)]
    problem = GemmProblem.build(*operands, compute=compute, **options)
    out = machine.put(np.full(problem.result_shape, np.nan, problem.result_dtype))
    machine.launcher.launches.clear()
    before = machine.launcher.counts()
    on = [machine.put(x) if x is not None else None for x in (a, b, c)]
    product.run_gemm(machine.launcher, problem, config, *on, out)
    counts = machine.launcher.counts() - before
    assert counts.total == out.size
    return machine.get(out), (counts.wide_share, counts.fallback_share)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dominant_term_keeps_its_bound(machine, dtype):
    a, b = kinds.operands(np, "dominant-term", 64, 64, 64, dtype, 1)
    d, shares = run(machine, a, b, config=SMALL)
    assert shares == (0, 0)
    assert elementwise(np, a, b, {"": d})[""].modulus <= kinds.KINDS["dominant-term"].bound


def multiplied(machine, problem, scheme, planes, *, config=SMALL, c=None, judged=None):
    """By the kernel alone, into memory full of NaN."""
    tile = mma.resolve_planes(config, problem, scheme, machine.launcher.spec)
    out = machine.put(np.full(problem.result_shape, np.nan, problem.result_dtype))
    mma.multiply(machine.launcher, problem, tile, *planes, c, out, judged)
    return machine.get(out)


def both_sides(machine, a, b, scheme, batch=()):
    sides = (a, "a"), (np.ascontiguousarray(b.swapaxes(-1, -2)), "b")
    return tuple(planes_of(x, scheme, side, batch, machine.put) for x, side in sides)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_models_bits(machine, scheme, dtype):
    m, n, k = 35, 33, 96
    a, b = random(1, dtype, m, k), random(2, dtype, k, n)
    planes = both_sides(machine, a, b, scheme)
    found = multiplied(machine, build(a, b, compute="auto"), scheme, planes)
    order = np.arange(k).reshape(-1, 4, 2, 4).swapaxes(1, 2).reshape(-1)
    left, right = (
        (machine.get(side.data)[0][..., order].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        for side in planes
    )
    expected = plane_models.multiply(left, right, scheme, kernel="mma")
    exponents = np.add.outer(*(machine.get(side.exponents)[0] for side in planes))
    np.testing.assert_array_equal(found, expected * np.exp2(exponents.astype(np.float32)))


@pytest.mark.parametrize("split_k", [1, 3])
def test_small_integers_are_exact_whatever_the_exponents(machine, split_k):
    """From what vanishes to what overflows, subnormals rounded once."""
    m, n, k = 70, 66, 192
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-3, 4, (rows, k)).astype(np.float32) for rows in (m, n))
    exponents = [np.linspace(-179, 97, rows).astype(np.int32) for rows in (m, n)]
    planes = []
    for x, side, exponent in ((a, "a", exponents[0]), (b, "b", exponents[1])):
        data = np.zeros((1, len(PLANES["6xbf16", False, side]), len(x), k), np.uint16)
        data[0, 0] = (x * np.float32(2.0**29)).view(np.uint32) >> 16
        on = machine.put(data.view(np.float16)), machine.put(exponent[None])
        planes.append(Planes("6xbf16", False, side, *on, 1, len(x), k, k, ()))
    problem = build(a, np.ascontiguousarray(b.T), compute="auto")
    found = multiplied(machine, problem, "6xbf16", planes, config=replace(SMALL, split_k=split_k))
    with np.errstate(over="ignore"):
        exact = a.astype(np.float64) @ b.T.astype(np.float64)
        expected = np.ldexp(exact, 58 + np.add.outer(*exponents)).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


def mixed(machine, dtype, m=300, n=270, k=70, batch=()):
    """Operands of which the first group of rows and the last one of columns are hostile, and their deficits."""
    a, b = random(1, dtype, *batch, m, k), random(2, dtype, k, n)
    grade = np.exp2(np.linspace(0, 50, k)).astype(np.float32)
    a[..., :100, :] *= grade
    b[:, 256:] /= grade[:, None]
    return a, b


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_are_the_served_ones_or_the_rest(machine, dtype, split_k):
    """Each kernel writes its tiles, whole, with the bits that it has alone, and nothing else; parts of k agree."""
    config = replace(SMALL, block_m=64, block_n=64, warp_m=32, warp_n=32, split_k=split_k)
    a, b = mixed(machine, dtype, k=140, batch=(2,))
    a[1] = random(7, dtype, 300, 140)
    problem = build(a, b, compute="auto")
    left, right = (both_sides(machine, a, b, scheme, (2,)) for scheme in ("3xfp16", "6xbf16"))
    vectors = a.reshape(-1, *a.shape[1:]), b.T[None]
    words, grouped = [], []
    for matrices in vectors:
        each = [plane_models.group_counts(plane_models.split(x, "3xfp16", "a").counts) for x in matrices]
        grouped.append(np.stack(each))
        firsts = np.concatenate([x[:: verdict.GROUP] for x in each]).ravel()
        words.append(machine.put(np.concatenate([[1], firsts]).astype(np.int32)))
    words.append(machine.put(np.zeros(1, np.int32)))  # whether any tile is left to the wide way
    served = plane_models.is_served(grouped[0][:, :, None], grouped[1][0], 140)
    assert 0 < served[0].sum() < served[0].size
    assert 0 < served[1].sum() < served[1].size
    pointers = [*(machine.launcher.pointer(x) for x in words), machine.launcher.counters(2 * 300 * 270)]
    for scheme, planes, tiles, mine in (("3xfp16", left, "served", served), ("6xbf16", right, "rest", ~served)):
        options = {"config": config} if tiles == "served" else {"config": replace(config, stages=2)}
        whole = multiplied(machine, problem, scheme, planes, **options)
        found = multiplied(machine, problem, scheme, planes, judged=Judged(tiles, *pointers), **options)
        np.testing.assert_array_equal(found, np.where(mine, whole, np.full_like(whole, np.nan)))
    # Each tile once, whatever its parts of k; those that are served are not counted.
    assert machine.launcher.counts() == ElementCounts(served.sum(), (~served).sum(), 0)
    # Without a doubt nobody looks at the deficits: all is served, nothing is left.
    for x in words:
        x[0] = 0
    alone = multiplied(machine, problem, "3xfp16", left, judged=Judged("served", *pointers), config=config)
    np.testing.assert_array_equal(alone, multiplied(machine, problem, "3xfp16", left, config=config))
    assert np.isnan(
        multiplied(machine, problem, "6xbf16", right, judged=Judged("rest", *pointers), config=config)
    ).all()


def hostile(kind, dtype, m, n, k):
    a, b = random(1, dtype, m, k), random(2, dtype, k, n)
    rng = np.random.default_rng(3)
    if kind == "heavy tails":
        a, b = (x * np.exp(6 * rng.standard_normal(x.shape)) for x in (a, b))
    elif kind == "spikes":
        a, b = a.copy(), b.copy()
        a[:, k // 3] *= 2.0**40
        b[k // 2] *= 2.0**30
    elif kind == "sparse":
        a, b = (x * (rng.random(x.shape) < 0.05) for x in (a, b))
    elif kind == "60 binades":
        scale = np.exp2(np.linspace(0, 60, k))
        a, b = a * scale, b / scale[:, None]
    elif kind == "identity":
        a = np.eye(m, k)
        b = b * np.exp(6 * rng.standard_normal(b.shape))
    elif kind == "permutation":
        a = np.zeros((m, k))
        a[np.arange(m), rng.permutation(max(m, k))[:m] % k] = 1
    return a.astype(dtype), b.astype(dtype)


KINDS = ["heavy tails", "spikes", "sparse", "60 binades", "identity", "permutation"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_data(machine, dtype, kind):
    """Every element within a few units of the last place of (|A| |B|), nothing from plain arithmetic."""
    a, b = hostile(kind, dtype, 70, 66, 130)
    d, shares = run(machine, a, b)
    assert shares == (1, 0)
    exact = a.astype(complex) @ b.astype(complex)
    size = np.abs(a).astype(float) @ np.abs(b).astype(float)
    assert (np.abs(d - exact) <= 12 * EVERY * size).all()
    if kind in {"identity", "permutation"}:
        np.testing.assert_array_equal(d, exact)


@pytest.mark.parametrize(("dtype", "scheme"), [("float32", "6xbf16"), ("complex64", "6xbf16"), ("complex64", "9xbf16")])
def test_one_term_is_cut_once(machine, dtype, scheme):
    """A diagonal of any numbers: at most a unit of the last place and what the three smallest products are."""
    n = 64
    values = random(4, "float32", n)
    a, b = np.diag(values).astype(dtype), random(5, dtype, n, 40)
    d, _ = run(machine, a, b, compute=scheme)
    exact = values[:, None].astype(float) * b.astype(complex)
    for ours, theirs in ((d.real, exact.real), (d.imag, exact.imag)):
        assert (np.abs(ours - theirs) <= (2 if scheme == "9xbf16" else 2.5) * EVERY * np.abs(theirs)).all()


def test_usual_data_are_served(machine):
    a, b = random(1, "complex64", 70, 100), random(2, "complex64", 100, 66)
    d, shares = run(machine, a, b)
    assert shares == (0, 0)
    assert machine.launcher.launches == ["split_clear", "split", "mma_gemm", "split", "mma_gemm", "fallback"]
    assert np.linalg.norm(d - a.astype(complex) @ b) <= 4e-7 * np.linalg.norm(d)


def test_one_product_holds_its_class_on_hostile_data(machine):
    a, b = hostile("60 binades", "complex64", 70, 66, 130)
    d, shares = run(machine, a, b, compute="tf32")
    assert shares == (1, 0)
    size = np.abs(a).astype(float) @ np.abs(b).astype(float)
    assert (np.abs(d - a.astype(complex) @ b) <= 2.0**-11 * size).all()


@pytest.mark.parametrize("config", [None, replace(SMALL, split_k=2)], ids=["chosen", "split"])
def test_products_of_both_kinds_of_tiles(machine, config):
    """C, both factors, a batch whose operand b is shared."""
    a, b = mixed(machine, "complex64", batch=(2,))
    a[1] = random(7, "complex64", *a.shape[1:])
    c = random(3, "complex64", 2, 300, 270)
    d, (wide, plain) = run(machine, a, b, c=c, alpha=2, beta=-1j, config=config)
    # Of the first matrix all but the last rows by the first columns, of the other the last columns.
    assert wide == (300 * 270 - 44 * 256 + 300 * 14) / (2 * 300 * 270)
    assert plain == 0
    exact = 2 * (a.astype(complex) @ b) - 1j * c
    size = 2 * np.abs(a).astype(float) @ np.abs(b).astype(float) + np.abs(c)
    assert (np.abs(d - exact) <= 12 * EVERY * size).all()


def test_what_is_not_finite_is_plain(machine):
    a, b = random(1, "complex64", 70, 100), random(2, "complex64", 100, 66)
    a[3, 5], b[7, 2] = np.nan, np.inf
    d, shares = run(machine, a, b)
    assert shares == (1, 0)
    inside = np.ones(d.shape, bool)
    inside[3], inside[:, 2] = False, False
    assert np.isfinite(d[inside]).all()
    assert np.isnan(d[3]).all()
    assert not np.isfinite(d[:, 2]).any()


def classes(x):
    """0 finite, 1 NaN, 2 and 3 infinite; of parts."""
    parts = np.stack([x.real, x.imag])
    return np.select([np.isnan(parts), parts == np.inf, parts == -np.inf], [1, 2, 3], 0)


@pytest.mark.parametrize("scheme", ["6xbf16", "9xbf16", "3xfp16", "tf32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_meet_every_number(machine, dtype, scheme):
    """Zeros, infinities, NaN, numbers of one to three parts, of both signs, wherever they meet; nothing overflows."""
    rng = fresh_rng()
    numbers = np.array([0, -0.0, 1, -1, 1 / 3, -1 / 3, 2.0**-120, -(2.0**-140), 3e15, np.inf, -np.inf, np.nan])
    weights = np.array([4, 1, 4, 4, 4, 4, 0.3, 0.3, 1, 0.5, 0.5, 0.02])

    def draw(*shape):
        part = rng.choice(numbers, shape, p=weights / weights.sum()).astype("float32")
        return part if dtype == "float32" else (part + 1j * rng.choice(numbers[:9], shape)).astype(dtype)

    a, b = draw(40, 20), draw(20, 36)
    d, (_, plain) = run(machine, a, b, compute=scheme)
    if scheme == "6xbf16":
        assert plain < 1
    expected = np.zeros((40, 36), "complex64")
    with np.errstate(all="ignore"):
        for k in range(20):
            x, y = a[:, k, None], b[None, k]
            expected.real += x.real * y.real - (x.imag * y.imag if dtype == "complex64" else 0)
            if dtype == "complex64":
                expected.imag += x.real * y.imag + x.imag * y.real
    np.testing.assert_array_equal(classes(d), classes(expected))


def test_deep_vectors_by_others(machine):
    """Vectors over 120 binades: those that meet a sparse one take plain arithmetic, the others do not."""
    a, b = random(1, "float32", 64, 200), random(2, "float32", 200, 48)
    a[:8, ::10] *= np.float32(2.0**-42)
    a[:8, ::7] *= np.float32(2.0**-42)
    a[:8, 70] = 2.0**40
    a[4:8, 71:] = 0  # deep and sparse
    b[60:, 40:] = 0  # sparse
    d, (wide, plain) = run(machine, a, b, compute="6xbf16")
    assert wide == 0
    assert plain == (4 * 48 + 4 * 8) / (64 * 48)
    exact, size = a.astype(float) @ b, np.abs(a).astype(float) @ np.abs(b)
    assert (np.abs(d - exact) <= 12 * EVERY * size).all()


def test_every_access_is_inside_and_ordered():
    """Blocks that have one tile of the rest after another."""
    spec = replace(KNOWN["A100"], sm_count=1)
    machine = ShimMachine(ShimLauncher(spec, checked=True, order=REVERSE))
    a, b = mixed(machine, "float32", m=290, n=270, k=33)
    _, (wide, _) = run(machine, a, b)
    assert 0 < wide < 1


@pytest.mark.parametrize("axis", [["m"], ["n"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("config", [None, replace(SMALL, warp_n=32, split_k=2)], ids=["chosen", "other partials"])
def test_reductions(machine, axis, config):
    """Partials of both kinds of tiles lie where they are looked for."""
    a, b = mixed(machine, "complex64", k=140, batch=(2,))
    options = {"reduce": ["absmax", "sum", "argmax"], "axis": axis, "compute": "3xfp16", "config": config}
    check_reduction(machine, gemm_reduce.run_gemm_reduce, a, b, **options)
    counts = machine.launcher.counts()
    served = 2 * (300 - 256) * 256
    assert counts == ElementCounts(served, 2 * 300 * 270 - served, 0)
    assert machine.launcher.launches.count("mma_reduce") == 2


@pytest.mark.parametrize("axis", ["m", "n"])
def test_reductions_with_the_product(machine, axis):
    a, b = mixed(machine, "float32")
    a[3] = 0
    a[3, 4], a[3, 5] = 2.0**60, 2.0**-50  # deep and sparse
    options = {"reduce": ["absmax"], "axis": axis, "compute": "3xfp16", "return_c": True}
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), **options)
    results = {name: machine.put(np.zeros(shape, dtype)) for name, (shape, dtype) in problem.results.items()}
    gemm_reduce.run_gemm_reduce(machine.launcher, problem, None, machine.put(a), machine.put(b), results)
    c, largest = machine.get(results["c"]), machine.get(results["absmax"])
    # Plain, as whole blocks of outputs are that have the row among them, and the product's other rows are not.
    np.testing.assert_allclose(largest, np.abs(c).max(axis=0 if axis == "m" else 1), rtol=1e-6)
    # All products of the outputs that the row has part in are plain, once, and no longer of the way that they had.
    served = 44 * 256
    again = 32 * 270
    expected = (
        ElementCounts(0, 0, 300 * 270) if axis == "m" else ElementCounts(served, 300 * 270 - served - again, again)
    )
    assert machine.launcher.counts() == expected
    finite = np.delete(np.arange(300), 3)
    size = np.abs(a[finite]).astype(float) @ np.abs(b).astype(float)
    assert (np.abs(c[finite] - a[finite].astype(float) @ b) <= 12 * EVERY * size).all()


@pytest.mark.parametrize("scheme", ["6xbf16", "9xbf16"])
def test_reductions_of_the_wide_way_alone(machine, scheme):
    a, b = hostile("60 binades", "complex64", 70, 66, 130)
    options = {"reduce": ["absmax", "sum"], "axis": "n", "compute": scheme}
    check_reduction(machine, gemm_reduce.run_gemm_reduce, a, b, **options)


def test_all_of_a_product_the_wide_way(machine):
    a, b = hostile("heavy tails", "float32", 70, 66, 130)
    d, shares = run(machine, a, b, compute="6xbf16", config=replace(SMALL, split_k=2))
    assert shares == (0, 0)
    assert reference.errors(d, a.astype(float) @ b.astype(float)).rel_fro <= 4e-7


def test_tiles_that_no_group_holds_are_refused():
    a, b = random(1, "f4", 8, 8), random(2, "f4", 8, 8)
    problem = build(a, b, compute="auto")
    with pytest.raises(ConfigInfeasible, match="block_n"):
        mma.resolve_planes(replace(SMALL, block_n=96, warp_n=32), problem, "3xfp16", KNOWN["A100"])
