"""Pre-pass and fallback on the CPU shim, against the NumPy model bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_models import splits as plane_models
from simt_cases import ShimMachine, random, strided
from simt_shim import ShimLauncher
from simt_shim.module import Order

from gemmserve_kernels.algorithms.common import verdict
from gemmserve_kernels.algorithms.common.splits import is_wide
from gemmserve_kernels.algorithms.mma import gemm as mma
from gemmserve_kernels.algorithms.splits import gemm as tensor_core
from gemmserve_kernels.algorithms.splits import split
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.device.struct_params import StoredArray
from gemmserve_kernels.dispatch.prepare import prepare_on
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

A100 = KNOWN["A100"]  # no clusters: the portable form of the kernels


@pytest.fixture
def launcher():
    return ShimLauncher(A100)


def op(x, trans):
    x = x.swapaxes(-1, -2) if trans in "TC" else x
    return x.conj() if trans in "CR" else x


def run_split(launcher, array, scheme, name, trans="N", *, planar=False):
    """The operand, and the word that says whether a vector is flagged."""
    stored, base = StoredArray.of(launcher, array)
    batch = stored.shape[1:-2] if planar else stored.shape[:-2]
    side = split.SplitSide.of(stored, batch, trans, left=name == "a", planar=planar)
    words = launcher.zeros((4 + verdict.words(side.matrices, side.rows),), np.dtype(np.int32))
    deficits = None if is_wide(scheme) else verdict.Deficits(words, 4)
    operand = split.allocate(launcher, scheme, side, name, deficits)
    left = name == "a"
    split.run(launcher, operand if left else None, None if left else operand, base, base, launcher.pointer(words))
    return operand, words


def stored_planes(operand, scheme):
    """As numbers."""
    data = operand.planes.data
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if is_wide(scheme) else data


def check_split(launcher, array, scheme, name, trans="N", *, logical=None, planar=False):
    operand, words = run_split(launcher, array, scheme, name, trans, planar=planar)
    vectors = op(np.array(array) if logical is None else logical, trans)
    vectors = vectors if name == "a" else vectors.swapaxes(-1, -2)
    vectors = vectors.reshape(-1, *vectors.shape[-2:])
    k = vectors.shape[-1]
    flagged, doubted = False, 0
    for matrix, rows in enumerate(vectors):
        model = plane_models.split(np.ascontiguousarray(rows), scheme, name)
        planes = stored_planes(operand, scheme)[matrix]
        usable = np.isfinite(rows).all(1) if scheme != "6xbf16" else ~np.isnan(rows).any(1)
        np.testing.assert_array_equal(planes[:, usable, :k], model.planes[:, usable])
        assert not planes[:, usable, k:].any()
        np.testing.assert_array_equal(operand.planes.exponents[matrix][usable], model.exponents[usable])
        if is_wide(scheme):
            np.testing.assert_array_equal(operand.flags[matrix], model.flags)
            flagged |= bool((model.flags & verdict.DEEP).any())
            continue
        groups = verdict.groups(len(rows))
        found = words[5:].reshape(-1, verdict.GROUP_WORDS)[matrix * groups :][:groups]
        expected = plane_models.group_counts(model.counts)[:: verdict.GROUP]
        np.testing.assert_array_equal(found, expected)
        doubted += int(verdict.is_doubtful(model.counts, k).sum())
    assert bool(words[0]) == flagged
    if not is_wide(scheme):
        assert words[4] == doubted
    return operand


SCHEMES = [
    ("3xfp16", "complex64"), ("3xfp16", "float32"), ("3xfp16-3m", "complex64"), ("1xfp16", "complex64"),
    ("6xbf16", "complex64"), ("6xbf16", "float32"), ("3xbf16", "complex64"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("trans", ["R", "C"])
@pytest.mark.parametrize(("scheme", "dtype"), SCHEMES)
def test_planes_are_the_models(launcher, scheme, dtype, trans, name):
    array = random(1, dtype, 37, 150) * np.exp2(np.arange(37, dtype=np.float32) * 5 - 100)[:, None]
    check_split(launcher, launcher.array(array.astype(dtype)), scheme, name, trans)


@pytest.mark.parametrize("how", ["fortran", "reversed", "gaps"])
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_any_strides(launcher, dtype, how):
    check_split(launcher, launcher.array(strided(random(2, dtype, 19, 70), how)), "3xfp16", "a")


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
@pytest.mark.parametrize("trans", ["N", "T"])
def test_one_element_off_alignment(launcher, dtype, trans):
    wide = launcher.array(random(3, dtype, 21, 131))
    check_split(launcher, wide[:, 1:], "3xfp16", "a", trans)
    check_split(launcher, wide[1:, 1:130], "3xfp16", "b", trans)


@pytest.mark.parametrize("name", ["a", "b"])
def test_planar_batches(launcher, name):
    array = random(4, "float32", 2, 3, 18, 66)
    check_split(launcher, launcher.array(array), "3xfp16", name, "C", logical=array[0] + 1j * array[1], planar=True)


@pytest.mark.parametrize("trans", ["N", "T"])
def test_k_beyond_one_chunk(launcher, trans):
    check_split(launcher, launcher.array(random(5, "complex64", 5, 2100)), "3xfp16", "a", trans)
    check_split(launcher, launcher.array(random(6, "complex64", 2100, 5)), "3xfp16", "a", trans)


def extremes():
    x = random(7, "complex64", 24, 200)
    x[0], x[1], x[2] = 0, x[1] * np.float32(1e-42), x[2] * np.float32(1e38 / 4)
    x[3, 5], x[4, 6], x[5, 7] = np.nan, np.inf, complex(1, -np.inf)
    x[6] = x[6].real + np.complex64(1e-9j) * x[6].imag  # imaginary parts that drown
    x[7, 1:] = 0
    x[8] = x[8].real
    x[9, 0], x[9, 1:] = 1e9, 9e-4
    x[10, 3:9] *= np.float32(1e-7)
    x[11, 0], x[11, 1] = 1e30, 1e-3
    x[12, 0], x[12, 1] = 1e-12, 1e-45  # the smallest subnormal
    return x


@pytest.mark.parametrize("trans", ["N", "T"])
@pytest.mark.parametrize("scheme", ["3xfp16", "6xbf16"])
def test_extremes(launcher, scheme, trans):
    side = "a" if trans == "N" else "b"
    operand = check_split(launcher, launcher.array(extremes()), scheme, side, trans)
    model = plane_models.split(extremes(), scheme, side)
    if scheme == "6xbf16":
        assert np.flatnonzero(operand.flags[0] & verdict.DEEP).tolist() == [11, 12]
        assert np.flatnonzero(operand.flags[0] == verdict.UNFIT).tolist() == [11]  # what is not finite has its place
        return
    assert (model.counts[[3, 4, 5], :2] == verdict.NEVER).all()
    assert (model.counts[[7, 9], :2].max(1) >= 199).all()
    assert model.counts[6].tolist()[1:] == [200, 200, 3]  # all of the imaginary part is lost
    assert model.counts[8].tolist()[1:] == [200, 0, 1]
    assert not model.counts[0].any()
    few = np.delete(model.counts, [0, 3, 4, 5, 6, 7, 8, 9, 11, 12], axis=0)
    assert (few[:, :3] < 40).all()


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
@pytest.mark.parametrize("trans", ["N", "T"])
@pytest.mark.parametrize("k", [1, 63, 65, 250, 300, 513])
def test_padding_is_not_counted(launcher, k, trans, dtype):
    x = random(k, dtype, 33, k)
    x[np.random.default_rng(1).random(x.shape) < 0.3] = 0
    check_split(launcher, launcher.array(x), "3xfp16", "a" if trans == "N" else "b", trans)


@pytest.mark.parametrize("trans", ["N", "T"])
def test_groups_of_vectors(launcher, trans):
    x = random(3, "float32", 2, 530, 40)
    x[0, 255, 1:], x[0, 256, 3:], x[1, 529, 0] = 0, 1e-9, np.inf
    x = x if trans == "N" else np.ascontiguousarray(x.swapaxes(1, 2))
    check_split(launcher, launcher.array(x), "3xfp16", "a", trans)


@pytest.mark.parametrize("gate", [0, 1])
def test_a_gate_that_is_shut(launcher, gate):
    array = launcher.array(random(1, "float32", 20, 70))
    stored, base = StoredArray.of(launcher, array)
    side = split.SplitSide.of(stored, (), "N", left=True, planar=False)
    words = launcher.zeros((6,), np.dtype(np.int32))
    words[4] = gate
    operand = split.allocate(launcher, "6xbf16", side, "a", None)
    operand.planes.data[:] = 7
    status = launcher.pointer(words)
    split.run(launcher, operand, None, base, base, status, status + 16)
    assert bool((operand.planes.data == 7).all()) == (gate == 0)


def test_no_races(launcher):
    checked = ShimLauncher(A100, checked=True)
    check_split(checked, checked.array(random(8, "complex64", 20, 70)), "3xfp16", "a")
    check_split(checked, checked.array(random(8, "complex64", 70, 20)), "3xfp16", "b")


@pytest.mark.parametrize("trans", ["N", "T"])
def test_few_blocks_take_unit_after_unit(trans):
    launcher = ShimLauncher(replace(A100, sm_count=1))
    array = random(9, "complex64", 3, 83, 70)
    stored, _ = StoredArray.of(launcher, array)
    side = split.SplitSide.of(stored, (3,), trans, left=True, planar=False)
    how = split.plan(launcher.spec, "3xfp16", side, None)
    assert how.grid < how.params.a.units * 3
    check_split(launcher, launcher.array(array), "3xfp16", "a", trans)


@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
def test_blocks_help_with_the_other_operand(trans):
    """Both operands in one launch, of a device that holds two blocks."""
    launcher = ShimLauncher(replace(A100, sm_count=1), order=Order("shuffled", 1))
    k, shapes, operands, bases = 150, [(90, 150), (150, 40)], [], []
    words = launcher.zeros((14,), np.dtype(np.int32))
    arrays = []
    for i, name in enumerate("ab"):
        shape = shapes[i] if trans[i] == "N" else shapes[i][::-1]
        arrays.append(launcher.array(random(i, "float32", *shape)))
        stored, base = StoredArray.of(launcher, arrays[i])
        side = split.SplitSide.of(stored, (), trans[i], left=name == "a", planar=False)
        operands.append(split.allocate(launcher, "3xfp16", side, name, verdict.Deficits(words, 4 + 5 * i)))
        bases.append(base)
    split.run(launcher, *operands, *bases, launcher.pointer(words))
    for i, name in enumerate("ab"):
        vectors = op(np.array(arrays[i]), trans[i])
        model = plane_models.split(np.ascontiguousarray(vectors if name == "a" else vectors.T), "3xfp16", name)
        np.testing.assert_array_equal(operands[i].planes.data[0, ..., :k], model.planes)
        np.testing.assert_array_equal(operands[i].planes.exponents[0], model.exponents)
        assert words[4 + 5 * i] == 0
        assert words[5 + 5 * i] == model.counts[:, 0].max()


# ---- all of a product, its multiplication being NumPy's


def _multiply(launcher, problem, tile, a, b, c, out):
    for index in np.ndindex(*problem.batch_shape):
        first = sum(i * s for i, s in zip(index, a.batch_strides, strict=True))
        second = sum(i * s for i, s in zip(index, b.batch_strides, strict=True))
        with np.errstate(all="ignore"):
            found = plane_models.multiply(a.data[first][..., : a.k], b.data[second][..., : b.k], a.scheme)
            exponents = np.add.outer(a.exponents[first], b.exponents[second])
            found = found.astype(np.complex128) * np.exp2(exponents.astype(float)) * problem.alpha
        if c is not None:
            found = found + problem.beta * np.broadcast_to(c, out.shape)[index]
        out[index] = found.astype(out.dtype) if out.dtype.kind == "c" else found.real


@pytest.fixture
def numpy_multiply(monkeypatch):
    monkeypatch.setattr(mma, "multiply", _multiply)
    monkeypatch.setattr(tensor_core, "widening_module", lambda *_: None)


def run(launcher, a, b, c=None, *, compute="3xfp16", prepare=False, **options):
    machine = ShimMachine(launcher)
    problem = GemmProblem.build(
        Operand.of(a), Operand.of(b), None if c is None else Operand.of(c), compute=compute, **options
    )
    assert tensor_core.supports(problem, launcher.spec) is None
    out = launcher.empty(problem.result_shape, problem.result_dtype)
    held = [machine.put(a), machine.put(b)]
    if prepare:
        held = [
            prepare_on(launcher, x, side, compute, trans=options.get(f"trans_{side}", "N"))
            for x, side in zip(held, "ab", strict=True)
        ]
    before = launcher.counts()
    tensor_core.run_gemm(
        launcher, problem, GemmConfig(algorithm="mma"), *held, None if c is None else machine.put(c), out
    )
    counts = launcher.counts() - before
    assert (counts.total, counts.wide) == (out.size, 0)
    return problem, np.array(out), counts.fallback_share


def served_share(a, b, scheme="3xfp16"):
    """Return the model's share."""
    left, right = plane_models.split(a, scheme, "a"), plane_models.split(np.ascontiguousarray(b.T), scheme, "b")
    return plane_models.served(left, right, a.shape[1]).mean()


def graded(m, n, k, dtype, binades=40):
    power = np.exp2(binades * np.arange(k) / k)
    return (random(1, dtype, m, k) * power).astype(dtype), (random(2, dtype, k, n) / power[:, None]).astype(dtype)


def worst(d, a, b, c=None, alpha=1, beta=0):
    """The largest elementwise error of any part, in units of float32's last place."""
    wide = alpha * (a.astype(complex) @ b.astype(complex)) + (0 if c is None else beta * c)
    size = abs(alpha) * (np.abs(a).astype(float) @ np.abs(b).astype(float)) + (
        0 if c is None else abs(beta) * np.abs(c)
    )
    return float((np.abs(d - wide)[size > 0] / size[size > 0]).max() * 2**24)


@pytest.mark.usefixtures("numpy_multiply")
class TestProducts:
    """Where there is no wide way, as here, what is not served is plain FP32's."""

    @pytest.mark.parametrize("dtype", ["complex64", "float32"])
    def test_normal_data_never_fall_back(self, launcher, dtype):
        a, b, c = random(1, dtype, 40, 90), random(2, dtype, 90, 50), random(3, dtype, 40, 50)
        _, d, share = run(launcher, a, b, c, alpha=2, beta=-1)
        assert share == 0
        assert worst(d, a, b, c, 2, -1) < 4

    @pytest.mark.parametrize("kind", ["graded", "diagonal", "spikes"])
    def test_what_is_not_served_falls_back(self, launcher, kind):
        k = 200
        a, b = graded(30, 26, k, "complex64")
        if kind == "diagonal":
            a = np.diag(np.exp2(np.arange(64, dtype=np.float32)))
            b = (random(2, "float32", 64, 20) / np.exp2(np.arange(64))[:, None]).astype(np.float32)
        elif kind == "spikes":
            a, b = random(1, "float32", 30, k), random(2, "float32", k, 26)
            a[np.arange(30), np.arange(30)] = 1e9
        _, d, share = run(launcher, a, b)
        assert share == 1 - served_share(a, b) == 1
        assert worst(d, a, b) < 32

    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize("dtype", ["complex64", "float32"])
    def test_tiles_alone_fall_back(self, launcher, dtype, order):
        a, b, c = (random(s, dtype, *shape) for s, shape in ((1, (300, 70)), (2, (70, 270)), (3, (300, 270))))
        a[4, 3], b[6, 260] = np.nan, np.inf
        with np.errstate(all="ignore"):
            problem, d, share = run(launcher, a, b, c, beta=2, order=order)
            expected = a @ b + 2 * c
        whole = np.zeros((300, 270), bool)
        whole[:256], whole[:, 256:] = True, True
        assert share == whole.mean()
        bad = np.zeros((300, 270), bool)
        bad[4], bad[:, 260] = True, True
        assert not np.isfinite(d[bad]).any()
        np.testing.assert_allclose(d[~bad], expected[~bad], rtol=1e-5, atol=1e-4)
        assert problem.m == 300

    @pytest.mark.parametrize("kind", ["normal", "graded", "one graded"])
    def test_prepared_operands_give_the_same_bits(self, launcher, kind):
        a, b = graded(20, 24, 150, "complex64", 0 if kind == "normal" else 40)
        if kind == "one graded":
            b = random(5, "complex64", 150, 24)
        _, plain, _ = run(launcher, a, b)
        _, ready, _ = run(launcher, a, b, prepare=True)
        np.testing.assert_array_equal(ready, plain)

    def test_batches_broadcast_and_are_cut(self, launcher, monkeypatch):
        a, b = random(1, "complex64", 3, 1, 17, 66), random(2, "complex64", 2, 66, 9)
        a[1, 0, 3, 5] = 1e9
        problem, whole, _ = run(launcher, a, b)
        monkeypatch.setattr(tensor_core, "_WORKSPACE", 20000)
        _, parts, _ = run(launcher, a, b)
        np.testing.assert_array_equal(parts, whole)
        assert reference.errors(whole, reference.oracle_gemm(problem, a, b)).rel_fro < 3e-7
