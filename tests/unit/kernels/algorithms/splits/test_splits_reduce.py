"""Reductions of products of float16 planes on the CPU shim: accuracy, what is flagged, shares of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from reduce_cases import COMPLEX, REAL, check, check_exact, exact, run
from simt_cases import ShimMachine, random
from simt_shim.launcher import ShimLauncher

from gemmserve_kernels import GemmConfig, GemmReduceProblem, Operand
from gemmserve_kernels.algorithms.splits import gemm as product
from gemmserve_kernels.algorithms.splits import gemm_reduce as planes
from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.prepare import prepare_on
from gemmserve_kernels.problem.errors import ConfigInfeasible

OPTIONS = {"compute": "3xfp16"}


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(KNOWN["A100"]))


@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_every_reduction(machine, dtype, axis):
    a, b = random(1, dtype, 3, 75, 40), random(2, dtype, 40, 81)
    names = COMPLEX if dtype == "complex64" else REAL
    check(machine, planes.run_gemm_reduce, a, b, reduce=list(names), axis=axis, alpha=2, **OPTIONS)


@pytest.mark.parametrize("axis", ["m", "n"])
def test_what_is_flagged_is_computed_again(machine, axis):
    """An infinity or NaN in one row or column of one product of the batch, in every place that one may be."""
    for side in range(2):
        a, b = exact(1, "float32", 3, 70, 5), exact(2, "float32", 3, 5, 66)
        (a if side == 0 else b)[1, 3, 2] = np.nan if side == 0 else -np.inf
        with np.errstate(invalid="ignore"):
            names = ["max", "min", "absmax", "argmax", "argmin"]
            check_exact(machine, planes.run_gemm_reduce, a, b, reduce=names, axis=axis, **OPTIONS)
            check_exact(machine, planes.run_gemm_reduce, a, b, reduce=names, axis=[axis, "batch"], **OPTIONS)
            _, sums = run(machine, planes.run_gemm_reduce, a, b, reduce=["sum", "sumsq"], axis=axis, **OPTIONS)
            product = a.astype("f8") @ b
        expected = product.sum(-2 if axis == "m" else -1)
        np.testing.assert_array_equal(sums["sum"], expected)
        assert not np.isfinite(sums["sumsq"]).all()


def test_data_graded_along_k(machine):
    """Planes alone would lose what matters here; the balancing, or the plain products behind it, do not."""
    k = 70
    a, b = random(1, "complex64", 2, 40, k), random(2, "complex64", 2, k, 50)
    grade = np.exp2(np.linspace(0, 60, k)).astype("f4")
    check(machine, planes.run_gemm_reduce, a * grade, b / grade[:, None], reduce=["absmax", "sum"], **OPTIONS)


@pytest.mark.parametrize("axis", ["m", "n"])
def test_with_the_product(machine, axis):
    a, b = random(1, "complex64", 2, 40, 33), random(2, "complex64", 2, 33, 50)
    a[0, 3, 4] = 0
    check(machine, planes.run_gemm_reduce, a, b, reduce=["absmax", "sum"], axis=axis, return_c=True, **OPTIONS)


def test_shares_of_a_batch_have_the_same_bits(machine, monkeypatch):
    a, b = random(1, "complex64", 5, 33, 40), random(2, "complex64", 5, 40, 50)
    for axis in (["m"], ["n", "batch"]):
        options = {"reduce": ["sum", "absmax", "argmin"], "axis": axis, "return_c": True, **OPTIONS}
        whole = check(machine, planes.run_gemm_reduce, a, b, **options)
        machine.launcher.launches.clear()
        monkeypatch.setattr(product, "_WORKSPACE", 105000)  # two matrices of five
        shares = check(machine, planes.run_gemm_reduce, a, b, **options)
        monkeypatch.undo()
        assert machine.launcher.launches.count("mma_reduce") == 6
        for name, result in whole.items():
            np.testing.assert_array_equal(result, shares[name])


def test_prepared_operands_have_the_same_bits(machine):
    a, b = random(1, "complex64", 40, 70), random(2, "complex64", 70, 30)
    options = {"reduce": ["sum", "argmax"], "axis": "n", **OPTIONS}
    _, plain = run(machine, planes.run_gemm_reduce, a, b, **options)
    ready = prepare_on(machine.launcher, machine.put(a), "a", "3xfp16")
    assert ready.payload is not None
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), **options)
    results = {name: machine.put(np.zeros(shape, dtype)) for name, (shape, dtype) in problem.results.items()}
    planes.run_gemm_reduce(machine.launcher, problem, None, ready, machine.put(b), results)
    for name, result in plain.items():
        np.testing.assert_array_equal(machine.get(results[name]), result)


def test_the_tile_on_hopper():
    """Within what the reducing kernel can do, whatever the product alone would take."""
    spec = KNOWN["H200"]

    def tile(m, n, k, dtype, config=None):
        a, b = Operand.contiguous((m, k), np.dtype(dtype)), Operand.contiguous((k, n), np.dtype(dtype))
        problem = GemmReduceProblem.build(a, b, reduce="sum", compute="3xfp16", config=config)
        return planes.resolve(config, problem, spec)

    for shape in ((4096, 4096, 4096, "f4"), (64, 64, 65536, "c8"), (2048, 1024, 2048, "c8")):
        found = tile(*shape)
        assert isinstance(found, WgmmaTile)
        assert found.parts == 1
        assert found.block_n <= 128
    assert tile(64, 64, 65536, "c8").split == 4
    with pytest.raises(ConfigInfeasible, match="split_k"):
        tile(64, 64, 65536, "c8", GemmConfig(split_k=16))
    with pytest.raises(ConfigInfeasible, match="block_n"):
        tile(4096, 4096, 4096, "f4", GemmConfig(block_n=256))
