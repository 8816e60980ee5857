"""Products from planes on the device: accuracy by kind of data, what goes the wide way, prepared operands."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_models import splits as plane_models
from simt_cases import CupyMachine, random

from gemmserve_kernels import read_element_counts
from gemmserve_kernels.algorithms.common import verdict
from gemmserve_kernels.algorithms.common.splits import is_wide
from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.algorithms.splits import gemm as tensor_core
from gemmserve_kernels.algorithms.splits import split
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.device.struct_params import StoredArray
from gemmserve_kernels.dispatch.prepare import prepare
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.gpu

ALGORITHMS = ["wgmma", "mma", "mfma"]


def on_device(array):
    return CupyMachine(None).put(array)


@pytest.fixture
def launcher():
    return CupyLauncher.current()


def power(k, binades=40, *, shuffled=False):
    exponents = binades * np.arange(k) / k
    return np.exp2(np.random.default_rng(9).permutation(exponents) if shuffled else exponents)


def operands(kind, m, n, k, dtype):
    a, b = random(1, dtype, m, k), random(2, dtype, k, n)
    rng = np.random.default_rng(3)
    if kind == "positive":
        a, b = (np.abs(x.real) + (1j * np.abs(x.imag) if x.dtype.kind == "c" else 0) for x in (a, b))
    if kind == "wide":
        a, b = (x / np.abs(x) * np.exp2(rng.uniform(-12, 12, x.shape)) for x in (a, b))
    if kind.startswith("graded"):
        scale = power(k, shuffled=kind.endswith("shuffled"))
        a, b = a * scale, b / scale[:, None]
    if kind == "ill-scaled":
        a, b = a * np.exp2(rng.integers(-30, 30, (m, 1))), b * np.exp2(rng.integers(-30, 30, (1, n)))
    if kind == "faint imaginary":
        a, b = (x.real + 2.0**-20 * 1j * x.imag for x in (a, b))
    if kind == "spike":
        a[:, k // 3] *= 2.0**25
    if kind == "huge":
        a, b = a * 1e17, b * 1e17
    if kind == "permutation":
        a = np.zeros((m, k))
        a[np.arange(m), rng.integers(0, k, m)] = 1
    return a.astype(dtype), b.astype(dtype)


def run(launcher, a, b, *, algorithm=None, compute="3xfp16", put=on_device, config=None, c=None, **options):
    import cupy

    problem = GemmProblem.build(
        Operand.of(a), Operand.of(b), None if c is None else Operand.of(c), compute=compute, **options
    )
    config = config or GemmConfig(algorithm=algorithm)
    if reason := tensor_core.supports(problem, launcher.spec):
        pytest.skip(reason)
    if algorithm == "wgmma" and launcher.spec.arch != "sm_90a":
        pytest.skip("not a Hopper GPU")
    if algorithm is not None and (algorithm == "mfma") != (launcher.spec.kind == "rocm"):
        pytest.skip(f"{launcher.spec.name} has no {algorithm}")
    out = cupy.empty(problem.result_shape, problem.result_dtype)
    out.view(cupy.uint8)[...] = 0xFF
    device_c = None if c is None else on_device(c)
    before = read_element_counts()
    tensor_core.run_gemm(launcher, problem, config, put(a), put(b), device_c, out)
    counts = read_element_counts().counts() - before.counts()
    return problem, out.get(), (counts.wide_share, counts.fallback_share)


KINDS = [
    "normal",
    "positive",
    "wide",
    "graded",
    "graded shuffled",
    "ill-scaled",
    "faint imaginary",
    "spike",
    "huge",
    "permutation",
]
SERVED = {"normal", "positive", "ill-scaled", "huge"}
"""By float16 planes; the others go the wide way where there is one."""


@pytest.mark.parametrize("k", [512, 4096, 16384])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_accuracy_by_kind_of_data(launcher, algorithm, dtype, kind, k):
    a, b = operands(kind, 96, 80, k, dtype)
    problem, d, share = run(launcher, a, b, algorithm=algorithm)
    found = reference.errors(d, reference.oracle_gemm(problem, a, b))
    assert found.rel_fro <= 5e-7
    assert max(found.rel_real, found.rel_imag) <= 5e-7
    if kind in SERVED:
        assert share == (0, 0)
    elif kind in {"graded", "graded shuffled", "permutation"}:
        assert share == ((0, 1) if algorithm == "mfma" else (1, 0))
    if kind == "permutation":
        np.testing.assert_array_equal(d, a.astype(complex) @ b.astype(complex))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_product_is_of_the_class_of_tf32(launcher, algorithm):
    a, b = operands("normal", 130, 140, 1024, "complex64")
    problem, d, share = run(launcher, a, b, algorithm=algorithm, compute="tf32")
    assert reference.errors(d, reference.oracle_gemm(problem, a, b)).rel_fro < 4e-4
    assert share == (0, 0)


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
@pytest.mark.parametrize("algorithm", ["wgmma", "mma"])
def test_one_product_holds_its_class_on_hostile_data(launcher, algorithm, dtype):
    a, b = operands("graded", 300, 280, 1000, dtype)
    _, d, share = run(launcher, a, b, algorithm=algorithm, compute="tf32")
    assert share == (1, 0)
    size = np.abs(a).astype(float) @ np.abs(b).astype(float)
    assert (np.abs(d - a.astype(complex) @ b) <= 2.0**-11 * size).all()


@pytest.mark.parametrize("kind", ["normal", "wide", "graded"])
def test_three_products(launcher, kind):
    a, b = operands(kind, 130, 140, 2048, "complex64")
    problem, d, share = run(launcher, a, b, algorithm="wgmma", compute="3xfp16-3m")
    assert reference.errors(d, reference.oracle_gemm(problem, a, b)).rel_fro < 5e-7
    assert share == ((0, 0) if kind == "normal" else (1, 0))


@pytest.mark.parametrize("k", [70, 130, 260, 1000, 2000, 4096, 8000, 16000, 40000])
@pytest.mark.parametrize("trans", "NC")
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("3xfp16", "complex64"), ("3xfp16", "float32"), ("3xfp16-3m", "complex64"), ("1xfp16", "complex64"),
        ("6xbf16", "complex64"), ("6xbf16", "float32"), ("3xbf16", "float32"),
    ],
)  # fmt: skip
def test_planes_are_the_models(launcher, scheme, dtype, trans, k):
    """The form for this architecture: clusters that share a strip, copies that bypass registers."""
    import cupy

    shape = (45, k) if trans == "N" else (k, 45)
    array = random(1, dtype, *shape)
    vectors = array if trans == "N" else array.T
    vectors[3, 5], vectors[4, 6], vectors[5] = np.nan, np.inf, 0
    vectors[6, 1:], vectors[7, :20] = 0, np.float32(1e-9) * vectors[7, :20]
    vectors[8, 0], vectors[9, 0] = 1e32, 1e-45
    stored, base = StoredArray.of(launcher, device := cupy.asarray(array))
    assert device.size
    side = split.SplitSide.of(stored, (), trans, left=True, planar=False)
    words = cupy.zeros(4 + verdict.words(1, 45), np.int32)
    operand = split.allocate(launcher, scheme, side, "a", None if is_wide(scheme) else verdict.Deficits(words, 4))
    split.run(launcher, operand, None, base, base, words.data.ptr)
    model = plane_models.split(np.ascontiguousarray(array if trans == "N" else array.conj().T), scheme, "a")
    usable = np.isfinite(vectors).all(1)
    found = operand.planes.data.get()[0, :, :, :k]
    if is_wide(scheme):
        found = (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(operand.flags.get()[0], model.flags)
        assert words.get()[0] == (model.flags & verdict.DEEP != 0).sum()
    else:
        largest = plane_models.group_counts(model.counts)[0]
        assert words.get()[4] == verdict.is_doubtful(model.counts, k).sum()
        np.testing.assert_array_equal(words.get()[5:], largest)
    np.testing.assert_array_equal(found[:, usable], model.planes[:, usable])
    np.testing.assert_array_equal(operand.planes.exponents.get()[0][usable], model.exponents[usable])


@pytest.mark.parametrize("k", [64, 600, 3000, 8192])
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
def test_blocks_take_unit_after_unit(launcher, trans, k):
    """Both operands in one launch, far more than the device holds at once, checked in full where they are."""
    import cupy

    matrices, m, n = (40, 300, 500) if k < 1000 else (2, 3500, 2900)
    each = verdict.words(matrices, max(m, n))
    words = cupy.zeros(4 + 2 * each, np.int32)
    arrays, operands, bases = [], [], []
    for i, (name, extent) in enumerate((("a", (m, k)), ("b", (k, n)))):
        shape = (2, matrices, *(extent if trans[i] == "N" else extent[::-1]))
        x = cupy.random.standard_normal(shape, dtype=np.float32)
        arrays.append(x[0] + 1j * x[1])
        stored, base = StoredArray.of(launcher, arrays[i])
        side = split.SplitSide.of(stored, (matrices,), trans[i], left=name == "a", planar=False)
        operands.append(split.allocate(launcher, "3xfp16", side, name, verdict.Deficits(words, 4 + i * each)))
        operands[i].planes.data.view(np.uint16)[...] = 0x7E01
        bases.append(base)
    split.run(launcher, *operands, *bases, words.data.ptr)
    for i, operand in enumerate(operands):
        x = arrays[i].swapaxes(-1, -2) if (trans[i] == "T") == (i == 0) else arrays[i]
        magnitude = cupy.maximum(abs(x.real), abs(x.imag))
        exponents = cupy.frexp(magnitude.max(axis=2))[1] - 15
        assert bool((operand.planes.exponents == exponents).all())
        rows = x.shape[1]
        groups = verdict.groups(rows)
        found = words[4 + i * each :][: verdict.words(matrices, rows)].get()
        parts, lossy = [], cupy.zeros((matrices, rows), np.int64)
        for part in (x.real, x.imag):
            scaled = abs(cupy.ldexp(cupy.ascontiguousarray(part), -exponents[..., None]))
            parts.append((scaled.astype(np.float16) < 256).sum(axis=2))
            lossy += ((scaled > 0) & (scaled < 2.0**-4 - 2.0**-16)).sum(axis=2)
        named = [cupy.minimum(*parts), cupy.maximum(*parts), lossy, cupy.full_like(lossy, 3)]
        counts = np.zeros((matrices, groups * verdict.GROUP, 4), np.int64)
        counts[:, :rows] = cupy.stack(named, axis=-1).get()
        assert found[0] == int(verdict.is_doubtful(counts, k).sum())
        largest = counts.reshape(matrices, groups, verdict.GROUP, 4).max(axis=2)
        np.testing.assert_array_equal(found[1:].reshape(matrices, groups, 4), largest)
        for p, part in enumerate((x.real, x.imag)):
            scaled = cupy.ldexp(cupy.ascontiguousarray(part), -exponents[..., None])
            high = scaled.astype(np.float16)
            low = (scaled - high.astype(np.float32)).astype(np.float16)
            for plane, expected in ((p, high), (2 + p, low)):
                data = operand.planes.data[:, plane]
                assert bool((data[..., :k].view(np.uint16) == expected.view(np.uint16)).all())
                assert not bool(data[..., k:].view(np.uint16).any())


def test_kernels_that_start_early_wait(launcher):
    """Each of many products in a row reads what the one before it wrote."""
    import cupy

    if launcher.spec.arch != "sm_90a":
        pytest.skip("not a Hopper GPU")
    n = 300
    a = on_device(random(1, "complex64", n, n) / np.float32(n))
    one = GemmProblem.build(Operand.of(a), Operand.of(a), compute="3xfp16")
    first, second = a.copy(), cupy.empty_like(a)
    results = []
    for _ in range(3):
        first[...] = a
        for _ in range(20):
            tensor_core.run_gemm(launcher, one, GemmConfig(algorithm="wgmma"), a, first, None, second)
            first, second = second, first
            first /= abs(first).max()
        results.append(first.get())
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])
    assert np.isfinite(results[0]).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_not_finite_gives_what_plain_arithmetic_gives(launcher, algorithm):
    import cupy

    a, b, c = (random(s, "complex64", *shape) for s, shape in ((1, (150, 300)), (2, (300, 90)), (3, (150, 90))))
    a[7, 11], b[13, 17], c[0, 0] = np.nan, -np.inf, np.nan
    problem, d, share = run(launcher, a, b, algorithm=algorithm, c=c, beta=-1)
    plain = cupy.empty_like(cupy.asarray(c))
    simt.run_gemm(launcher, problem, None, cupy.asarray(a), cupy.asarray(b), cupy.asarray(c), plain)
    np.testing.assert_array_equal(np.isnan(d.view("f4")), np.isnan(plain.get().view("f4")))
    assert share == ((0, 1) if algorithm == "mfma" else (1, 0))


@pytest.mark.parametrize("kind", ["normal", "graded", "faint imaginary"])
@pytest.mark.parametrize("compute", ["3xfp16", "tf32"])
def test_prepared_operands_give_the_same_bits(launcher, compute, kind):
    a, b = operands(kind, 200, 300, 700, "complex64")
    _, plain, _ = run(launcher, a, b, compute=compute)
    _, again, _ = run(launcher, a, b, compute=compute)
    np.testing.assert_array_equal(again, plain)
    sides = iter("ab")
    _, ready, _ = run(launcher, a, b, compute=compute, put=lambda x: prepare(on_device(x), next(sides), compute))
    np.testing.assert_array_equal(ready, plain)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_batches_broadcast_and_are_cut(launcher, algorithm, monkeypatch):
    a, b = random(1, "complex64", 3, 1, 70, 130), random(2, "complex64", 2, 130, 90)
    problem, whole, _ = run(launcher, a, b, algorithm=algorithm, alpha=2j)
    assert reference.errors(whole, reference.oracle_gemm(problem, a, b)).rel_fro < 5e-7
    monkeypatch.setattr(tensor_core, "_WORKSPACE", 400000)
    _, parts, _ = run(launcher, a, b, algorithm=algorithm, alpha=2j)
    np.testing.assert_array_equal(parts, whole)
