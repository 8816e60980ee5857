"""Products of float16 planes on Hopper's tensor cores: schemes, tiles, splits and layouts against higher precision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from framed import Framed
from kernel_models import splits as plane_models
from simt_cases import CupyMachine, random
from wgmma_cases import IDS, LIMIT, SCHEMES, Case, check, planes_of, run

from gemmserve_kernels.algorithms.common.splits import PLANES, Planes
from gemmserve_kernels.algorithms.wgmma import gemm as wgmma
from gemmserve_kernels.algorithms.wgmma.candidates import _CANDIDATES
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.gpu

every_scheme = pytest.mark.parametrize(("scheme", "is_complex"), SCHEMES, ids=IDS)


@pytest.fixture
def machine():
    launcher = CupyLauncher.current()
    if launcher.spec.arch != "sm_90a":
        pytest.skip(f"needs a Hopper GPU, and this is {launcher.spec.name}")
    return CupyMachine(launcher)


@every_scheme
@pytest.mark.parametrize(
    "extents",
    [(1, 1, 1), (1, 300, 7), (131, 77, 201), (64, 64, 64), (257, 129, 65), (300, 1, 300), (130, 260, 1), (5, 9, 2000)],
    ids=str,
)
def test_odd_sizes(machine, scheme, is_complex, extents):
    check(machine, scheme, is_complex, Case(extents))


@pytest.mark.parametrize(
    ("scheme", "is_complex", "tile"),
    [(*key, candidate.tile(*key)) for key in SCHEMES for candidate in _CANDIDATES[key]],
    ids=lambda value: f"{value.block_m}x{value.block_n}x{value.block_k}" if hasattr(value, "block_m") else str(value),
)
def test_every_tile(machine, scheme, is_complex, tile):
    """Several tiles either way, more blocks of k than stages, tails everywhere."""
    check(machine, scheme, is_complex, Case((300, 600, 850), config=tile))


@every_scheme
def test_multicast(machine, scheme, is_complex):
    if not is_complex and scheme in {"6xbf16", "9xbf16"}:
        pytest.skip("two blocks do not share three planes evenly")
    config = GemmConfig(cluster=2, block_m=128, block_n=128, block_k=32)
    check(machine, scheme, is_complex, Case((300, 277, 390), config=config))


@every_scheme
@pytest.mark.parametrize("split_k", [2, 4, 3, 8, 24])
def test_split_k(machine, scheme, is_complex, split_k):
    """More parts than blocks of k too; with a batch, C and both factors."""
    case = Case(
        (100, 70, 700), a=(2,), c=(2, 100, 70), config=GemmConfig(split_k=split_k),
        options={"alpha": 0.5, "beta": -2},
    )  # fmt: skip
    check(machine, scheme, is_complex, case)


@pytest.mark.parametrize("out", ["fortran", "reversed", "gaps", "offset", "padded"])
@pytest.mark.parametrize(("scheme", "is_complex"), [("3xfp16", True), ("3xfp16-3m", True), ("3xfp16", False)])
def test_strides_of_the_result(machine, scheme, is_complex, out):
    case = Case((150, 90, 130), c=(150, 1), out=out, options={"alpha": -1.5, "beta": 0.5})
    check(machine, scheme, is_complex, case)


@pytest.mark.parametrize("split_k", [1, 2, 6])
@pytest.mark.parametrize("scheme", ["3xfp16", "3xfp16-3m", "1xfp16"])
def test_planar(machine, scheme, split_k):
    case = Case(
        (133, 71, 200), a=(2,), c=(133, 71), config=GemmConfig(split_k=split_k),
        options={"layout": "planar", "alpha": 1 - 2j, "beta": 0.5j},
    )  # fmt: skip
    check(machine, scheme, True, case)


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        ((3,), (), None),
        ((), (3,), (1, 1, 60)),
        ((4, 1, 2), (3, 1), (3, 1, 70, 60)),
        ((2, 1, 2, 1, 2, 1), (2, 1, 2, 1, 2), None),
        ((200,), (200,), (200, 70, 60)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("scheme", "is_complex"), [("3xfp16", True), ("1xfp16", False)])
def test_batches_with_broadcasting(machine, scheme, is_complex, a, b, c):
    options = {"alpha": 2, "beta": 1} if c else {}
    check(machine, scheme, is_complex, Case((70, 60, 90), a=a, b=b, c=c, options=options))


@every_scheme
def test_the_same_bits_every_time(machine, scheme, is_complex):
    for config in (None, GemmConfig(split_k=8)):
        case = Case((190, 170, 900), a=(2,), config=config)
        first, again = (run(machine, scheme, is_complex, case)[-1] for _ in range(2))
        np.testing.assert_array_equal(first, again)


def test_the_tile_does_not_show_in_the_bits(machine):
    tiles = [candidate.tile("3xfp16", True) for candidate in _CANDIDATES["3xfp16", True] if candidate.promote == 32]
    results = [run(machine, "3xfp16", True, Case((200, 150, 500), config=tile))[-1] for tile in tiles]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_c_is_not_read_where_beta_is_0(machine):
    m = n = k = 65
    a, b = random(1, "complex64", m, k), random(2, "complex64", k, n)
    c = np.full((m, n), np.nan, np.complex64)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c), beta=0)
    tile = wgmma.resolve(None, problem, machine.launcher.spec, "3xfp16")
    planes = [planes_of(x, "3xfp16", side, (), machine.put) for x, side in ((a, "a"), (b.T, "b"))]
    out = machine.put(np.full((m, n), np.nan, np.complex64))
    wgmma.multiply(machine.launcher, problem, tile, *planes, machine.put(c), out)
    assert np.isfinite(machine.get(out)).all()


@pytest.mark.parametrize("split_k", [1, 4, 12])
def test_exponents_of_every_size(machine, split_k):
    """Small integers are exact: the scaled result is the integer product, rounded once."""
    m, n, k = 70, 66, 128
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-3, 4, (rows, k)).astype(np.float32) for rows in (m, n))
    exponents = [np.linspace(-165, 115, rows).astype(np.int32) for rows in (m, n)]
    planes = []
    for x, side, exponent in ((a, "a", exponents[0]), (b, "b", exponents[1])):
        data = np.zeros((1, len(PLANES["3xfp16", False, side]), len(x), k), np.float16)
        data[0, 0] = x
        planes.append(
            Planes("3xfp16", False, side, machine.put(data), machine.put(exponent[None]), 1, len(x), k, k, ())
        )
    problem = GemmProblem.build(Operand.of(a), Operand.of(b.T))
    tile = wgmma.resolve(GemmConfig(split_k=split_k), problem, machine.launcher.spec, "3xfp16")
    out = machine.put(np.full((m, n), np.nan, np.float32))
    wgmma.multiply(machine.launcher, problem, tile, *planes, None, out)
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = np.ldexp(exact, exponents[0][:, None] + exponents[1]).astype(np.float32)
    np.testing.assert_array_equal(machine.get(out), expected)
    assert np.isinf(expected).any()
    assert ((expected != 0) & (np.abs(expected) < np.finfo(np.float32).tiny)).any()


@every_scheme
def test_large_k(machine, scheme, is_complex):
    check(machine, scheme, is_complex, Case((64, 64, 65536)))
    check(machine, scheme, is_complex, Case((200, 130, 16384)))


@every_scheme
def test_the_headline(machine, scheme, is_complex):
    """3456 x 4096 x 4096: rows here and there."""
    m, n, k = 3456, 4096, 4096
    dtype = "complex64" if is_complex else "float32"
    a, b = random(1, dtype, m, k), random(2, dtype, k, n)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    tile = wgmma.resolve(None, problem, machine.launcher.spec, scheme)
    planes = [planes_of(x, scheme, side, (), machine.put) for x, side in ((a, "a"), (b.T, "b"))]
    out = machine.put(np.full((m, n), np.nan, dtype))
    wgmma.multiply(machine.launcher, problem, tile, *planes, None, out)
    result = machine.get(out)
    assert np.isfinite(result).all()
    rows = np.array([0, 63, 64, 127, 128, 1000, 3327, 3328, 3455])
    wide = np.complex128 if is_complex else np.float64
    expected = a[rows].astype(wide) @ b.astype(wide)
    assert reference.errors(result[rows], expected).rel_fro <= LIMIT[scheme]


def test_a_result_of_more_than_two_to_the_31_elements(machine):
    """Offsets to the last rows need more than 32 bits."""
    import cupy

    m, n, k = 1 << 21, 1032, 16
    assert m * n > 1 << 31
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 2 * m * n * 4:
        pytest.skip(f"{free} bytes free on the device")
    rng = np.random.default_rng(3)
    few, b = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (1 << 10, n))
    small, right = (planes_of(x, "3xfp16", side, (), machine.put) for x, side in ((few, "a"), (b, "b")))
    copies = m // len(few)
    left = Planes(
        "3xfp16", False, "a", cupy.tile(small.data, (1, 1, copies, 1)), cupy.tile(small.exponents, (1, copies)),
        1, m, k, small.pitch, (),
    )  # fmt: skip
    shape = np.lib.stride_tricks.as_strided(np.empty(1, np.float32), (m, k), (4 * k, 4))
    problem = GemmProblem.build(Operand.of(shape), Operand.of(b.T))
    tile = wgmma.resolve(None, problem, machine.launcher.spec, "3xfp16")
    out = cupy.full((m, n), cupy.nan, cupy.float32)
    wgmma.multiply(machine.launcher, problem, tile, left, right, None, out)
    expected = few.astype(np.float64) @ b.T.astype(np.float64)
    for first in itertools.chain((0, m // 2), (m - len(few),)):
        found = reference.errors(out[first : first + len(few)].get(), expected)
        assert found.rel_fro <= LIMIT["3xfp16"], first


def test_planes_of_more_than_two_to_the_31_elements(machine):
    """The copy engine is told rows; the exponents of the last ones lie far out."""
    import cupy

    m, n, k = 1 << 20, 72, 1088
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 3 * 2 * 2 * m * k:
        pytest.skip(f"{free} bytes free on the device")
    rng = np.random.default_rng(4)
    few, b = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (1 << 9, n))
    small, right = (planes_of(x, "3xfp16", side, (), machine.put) for x, side in ((few, "a"), (b, "b")))
    copies = m // len(few)
    left = Planes(
        "3xfp16", False, "a", cupy.tile(small.data, (1, 1, copies, 1)), cupy.tile(small.exponents, (1, copies)),
        1, m, k, small.pitch, (),
    )  # fmt: skip
    assert left.data.size > 1 << 31
    shape = np.lib.stride_tricks.as_strided(np.empty(1, np.float32), (m, k), (4 * k, 4))
    problem = GemmProblem.build(Operand.of(shape), Operand.of(b.T))
    tile = wgmma.resolve(None, problem, machine.launcher.spec, "3xfp16")
    out = cupy.full((m, n), cupy.nan, cupy.float32)
    wgmma.multiply(machine.launcher, problem, tile, left, right, None, out)
    expected = few.astype(np.float64) @ b.T.astype(np.float64)
    for first in (0, m // 2, m - len(few)):
        assert reference.errors(out[first : first + len(few)].get(), expected).rel_fro <= LIMIT["3xfp16"], first


@pytest.mark.parametrize("split_k", [1, 4, 6])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("extents", [(65, 67, 300), (128, 128, 128), (1, 300, 64), (300, 1, 64)], ids=str)
def test_nothing_is_written_beside_the_result(machine, extents, order, split_k):
    """Rows that begin one element off any alignment, and C in the result's own place."""
    m, n, k = extents
    a, b, c = random(1, "complex64", 2, m, k), random(2, "complex64", k, n), random(3, "complex64", 2, m, n)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c), alpha=2, beta=-1)
    tile = wgmma.resolve(GemmConfig(split_k=split_k), problem, machine.launcher.spec, "3xfp16")
    left, right = (
        planes_of(x, "3xfp16", side, (2,), machine.put) for x, side in ((a, "a"), (np.ascontiguousarray(b.T), "b"))
    )
    out = Framed((2, m, n), "complex64", order=order).fill(c)
    wgmma.multiply(machine.launcher, problem, tile, left, right, out.array, out.array)
    assert reference.errors(out.get(), reference.oracle_gemm(problem, a, b, c)).rel_fro <= LIMIT["3xfp16"]


def test_a_batch_of_more_than_65535(machine):
    case = Case((5, 4, 16), a=(70_000,), b=(70_000,))
    check(machine, "3xfp16", True, case)


PARTS = [(512, "normal", 1.0), (512, "positive", 1.15), (1024, "normal", 1.0), (1024, "positive", 1.0)]
"""Extents of the result, data, slack: of one sign at k = 512 they come close to a BLAS that splits k."""


def of_kind(kind, dtype, *shapes):
    made = [random(seed, dtype, *shape) for seed, shape in enumerate(shapes, 1)]
    if kind == "normal":
        return made
    return [(np.abs(x.real) + (1j * np.abs(x.imag) if x.dtype.kind == "c" else 0)).astype(dtype) for x in made]


@pytest.mark.parametrize("k", [512, 1024, 4096, 8192, 16384])
@pytest.mark.parametrize(("extent", "kind", "slack"), PARTS, ids=[f"{kind}-{extent}" for extent, kind, _ in PARTS])
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
@pytest.mark.parametrize("conjugate", [False, True])
def test_each_part_is_as_accurate_as_the_vendors_float32(machine, dtype, extent, kind, slack, k, conjugate):
    """Conjugation changes which of the parts cancels."""
    import cupy

    if conjugate and dtype == "float32":
        pytest.skip("real data")
    a, b = of_kind(kind, dtype, (extent, k), (k, extent))
    a = a.conj() if conjugate else a
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    # Split as `auto` splits it: so does the vendor, and parts of a sum are more accurate than the whole.
    tile = wgmma.resolve(None, problem, machine.launcher.spec, "3xfp16")
    planes = [planes_of(x, "3xfp16", side, (), machine.put) for x, side in ((a, "a"), (np.ascontiguousarray(b.T), "b"))]
    out = cupy.full((extent, extent), cupy.nan, dtype)
    wgmma.multiply(machine.launcher, problem, tile, *planes, None, out)
    expected = a.astype(np.complex128) @ b.astype(np.complex128)
    expected = expected if dtype == "complex64" else expected.real
    found = reference.errors(out, expected)
    vendor = reference.errors(cupy.matmul(cupy.asarray(a), cupy.asarray(b)), expected)
    assert found.rel_fro <= 5e-7
    assert found.rel_real <= slack * vendor.rel_real, (found, vendor)
    assert found.rel_imag <= slack * vendor.rel_imag, (found, vendor)


@pytest.mark.parametrize("k", [64, 512, 4096])
@pytest.mark.parametrize("kind", ["normal", "positive"])
@every_scheme
def test_the_models_error(machine, record_property, scheme, is_complex, kind, k):
    """No part's error is larger than the model's by more than a fifth. The share of equal bits is written down."""
    a, b = of_kind(kind, "complex64" if is_complex else "float32", (96, k), (k, 80))
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    tile = wgmma.resolve(GemmConfig(split_k=1), problem, machine.launcher.spec, scheme)
    planes = [planes_of(x, scheme, side, (), machine.put) for x, side in ((a, "a"), (np.ascontiguousarray(b.T), "b"))]
    out = machine.put(np.full((96, 80), np.nan, a.dtype))
    wgmma.multiply(machine.launcher, problem, tile, *planes, None, out)
    result = machine.get(out)
    left, right = (x.data.get()[0][..., :k] for x in planes)
    scale = np.exp2(np.add.outer(*(x.exponents.get()[0] for x in planes)).astype(np.float32))
    model = plane_models.multiply(left, right, scheme, tile.promote or None) * scale
    record_property("equal_bits", float((model == result).mean()))
    expected = a.astype(np.complex128) @ b.astype(np.complex128)
    expected = expected if is_complex else expected.real
    found, modelled = reference.errors(result, expected), reference.errors(model.astype(a.dtype), expected)
    assert found.rel_real <= 1.2 * modelled.rel_real, (found, modelled)
    assert found.rel_imag <= 1.2 * modelled.rel_imag, (found, modelled)
