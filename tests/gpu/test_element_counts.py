"""Elements that data keep from the planned way, as the device counts them: the numbers of the NumPy models."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_models import splits as plane_models
from simt_cases import random

from gemmserve_kernels import (
    DeviceSpec,
    ElementCounts,
    GemmConfig,
    GemmProblem,
    Operand,
    gemm,
    gemm_reduce,
    plan,
    prepare,
    read_element_counts,
)
from gemmserve_kernels.algorithms.ozaki.bound import LINES

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

M, N, K, BATCH = 700, 610, 520, 2
PLANES = ["wgmma", "mma", "mfma"]


def planes_of(algorithm):
    """The arguments that ask for float16 planes."""
    spec = DeviceSpec.current()
    x = np.empty((M, M), np.float32)
    config = GemmConfig(algorithm=algorithm)
    try:
        plan(GemmProblem.build(Operand.of(x), Operand.of(x), compute="3xfp16", config=config), spec)
    except ValueError as error:
        pytest.skip(f"{spec.name}: {error}")
    return {"config": config, "compute": "3xfp16"}


def counted(run):
    before = read_element_counts()
    run()
    after = read_element_counts()
    return after.counts() - before.counts()


def operands(dtype):
    """A batch with a row of spikes, and one right side for all of it."""
    a, b = random(1, dtype, BATCH, M, K), random(2, dtype, K, N)
    a[1, 300] *= 1e-6
    a[1, 300, ::100] = 1e4
    return a, b


def served(a, b):
    """Return how many elements the model serves."""
    right = plane_models.split(np.ascontiguousarray(b.T), "3xfp16", "b")
    return int(sum(plane_models.served(plane_models.split(x, "3xfp16", "a"), right, K).sum() for x in a))


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("algorithm", PLANES)
def test_products_from_planes(algorithm, dtype):
    options = planes_of(algorithm)
    a, b = operands(dtype)
    planned = served(a, b)
    assert planned == BATCH * M * N - 256 * N
    here, left, right = cupy.asarray(random(3, dtype, M, K)), cupy.asarray(a), cupy.asarray(b)
    assert counted(lambda: gemm(here, right, **options)) == ElementCounts(planned=M * N)
    rest = 0 if algorithm == "mfma" else 256 * N
    expected = ElementCounts(planned, rest, 256 * N - rest)
    for _ in range(3):
        assert counted(lambda: gemm(left, right, **options)) == expected
    assert counted(lambda: gemm(prepare(left, "a", "3xfp16"), right, order="F", **options)) == expected
    if algorithm != "mfma":
        for split_k in (2, 4):
            config = GemmConfig(algorithm=algorithm, split_k=split_k)
            assert counted(lambda config=config: gemm(left, right, **options | {"config": config})) == expected
    # A row that is deep and sparse: of its tiles it alone is plain, where there is the wide way.
    left[1, 300] = 0
    left[1, 300, 5:7] = cupy.asarray([2.0**60, 2.0**-50])
    plain = N if rest else 256 * N
    assert counted(lambda: gemm(left, right, **options)) == ElementCounts(planned, 256 * N - plain, plain)


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("algorithm", PLANES[:2])
def test_reductions_from_planes(algorithm, dtype, axis):
    options = planes_of(algorithm) | {"reduce": ["absmax"], "axis": axis}
    a, b = operands(dtype)
    here, left, right = cupy.asarray(random(3, dtype, M, K)), cupy.asarray(a), cupy.asarray(b)
    assert counted(lambda: gemm_reduce(here, right, **options)) == ElementCounts(planned=M * N)
    expected = ElementCounts(served(a, b), 256 * N, 0)
    assert counted(lambda: gemm_reduce(left, right, **options)) == expected
    assert counted(lambda: gemm_reduce(left, right, return_c=True, **options)) == expected
    # The outputs that a row which is deep and sparse has part in are computed again from all of their products.
    left[1, 300] = 0
    left[1, 300, 5:7] = cupy.asarray([2.0**60, 2.0**-50])
    for return_c in (False, True):
        found = counted(lambda return_c=return_c: gemm_reduce(left, right, return_c=return_c, **options))
        assert found.total == expected.total
        if axis == "m":
            assert (found.wide, found.plain) == (0, M * N)
        else:
            assert 0 < found.plain <= 64 * N
            assert found.wide == 256 * N - found.plain


@pytest.mark.parametrize("dtype", ["float64", "complex128", "float32", "complex64"])
def test_residues(dtype):
    """Tiles that they do not serve are computed in double, those of single precision the wide way."""
    if DeviceSpec.current().arch != "sm_90a":
        pytest.skip("no INT8 wgmma")
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((M, K)).astype(dtype), rng.standard_normal((K, N)).astype(dtype)
    if dtype.startswith("complex"):
        a, b = ((x + 1j * rng.standard_normal(x.shape)).astype(dtype) for x in (a, b))
    config = {"compute": "ozaki", "config": GemmConfig(outliers=0)}

    def other(elements):
        wide = elements if dtype in {"float32", "complex64"} else 0
        return ElementCounts(M * N - elements, wide, elements - wide)

    right = cupy.asarray(b)
    assert counted(lambda: gemm(cupy.asarray(a), right, **config)) == ElementCounts(planned=M * N)
    a[300] *= 1e-9
    a[300, ::100] = 1e6
    assert counted(lambda: gemm(cupy.asarray(a), right, **config)) == other(LINES * N)
    a[M - 1] = a[300]  # a group of lines that is not full
    rows = LINES + M % LINES
    assert counted(lambda: gemm(cupy.asarray(a), right, **config)) == other(rows * N)


def test_products_of_one_way_are_not_counted():
    a = cupy.asarray(random(1, "float32", M, M))
    before = read_element_counts()
    gemm(a, a, compute="fp32")
    gemm(a, a, compute="fp32", config=GemmConfig(algorithm="simt"))
    assert read_element_counts() is before


def test_streams_and_threads_add_up():
    options = planes_of("mma" if DeviceSpec.current().kind == "cuda" else "mfma")
    a, b = operands("float32")
    left, right = cupy.asarray(a), cupy.asarray(b)
    cupy.cuda.Device().synchronize()

    def run():
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
        for stream in streams:
            with stream:
                for _ in range(5):
                    gemm(left, right, **options)
        cupy.cuda.Device().synchronize()

    assert counted(run).total == 20 * BATCH * M * N
    once = counted(lambda: gemm(left, right, **options))
    many = counted(run)
    assert (many.wide, many.plain) == (20 * once.wide, 20 * once.plain)
