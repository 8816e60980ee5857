"""Errors of a few sampled outputs of a reduction against those of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from host_products import array

from gemmserve_kernels import GemmReduceProblem, Operand, gemm_reduce
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.freivalds import sampled_reductions
from gemmserve_kernels.freivalds.sampled_reductions import sampled_reduction_errors
from gemmserve_kernels.numerics.reference import reduction_errors


@pytest.fixture
def rng():
    return np.random.default_rng(1)


@pytest.mark.parametrize("axis", ["m", "n", ["m", "batch"], ["n", "batch"]])
def test_errors_of_reductions(rng, axis):
    a, b = array(rng, (3, 40, 20), "c8"), array(rng, (20, 30), "c8")
    names = ["sum", "mean", "sumsq", "absmax", "argmax", "argmin"]
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce=names, axis=axis)
    results = gemm_reduce(a, b, reduce=names, axis=axis)
    for found in (
        reduction_errors(problem, a, b, results),
        sampled_reduction_errors(problem, a, b, results, rng, outputs=4),
    ):
        assert list(found) == names
        assert all(error < 1e-5 for error in found.values())
    results["argmax"] = results["argmin"]
    results["sum"] = results["sum"] * 1.01
    found = sampled_reduction_errors(problem, a, b, results, rng, outputs=4)
    assert found["argmax"] > 0.1
    assert found["sum"] == pytest.approx(0.01, rel=1e-3)


NAMES = ["sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin"]


@pytest.mark.parametrize("at_once", [30, 400, 1 << 19])
@pytest.mark.parametrize("axis", ["m", "n", ["m", "batch"], ["n", "batch"]])
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((3, 40, 5), (5, 30)), {}),
        (((40, 5), (2, 3, 5, 30)), {"alpha": 2 - 1j}),
        (((2, 1, 5, 40), (3, 30, 5)), {"trans_a": "C", "trans_b": "T"}),
        (((2, 3, 40, 5), (2, 5, 30)), {"layout": "planar", "trans_b": "R"}),
        (((9, 1), (1, 1)), {"pre_op": "square"}),
    ],
    ids=["broadcast", "alpha", "trans", "planar", "small"],
)
@pytest.mark.parametrize("dtype", ["c8", "f8"])
def test_errors_of_reductions_in_parts_are_those_of_the_whole(rng, shapes, axis, options, at_once, dtype, monkeypatch):
    for most in ("_SAMPLED", "_SAMPLED_EXACTLY"):
        monkeypatch.setattr(sampled_reductions, most, at_once)
    planar = options.get("layout") == "planar"
    if dtype == "f8":
        options = {name: value for name, value in options.items() if name != "alpha"}
    a, b = (array(rng, shape, "f4" if planar and dtype == "c8" else dtype) for shape in shapes)
    options = {"reduce": NAMES, "axis": axis, **options}
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), **options)
    results = gemm_reduce(a, b, **options)
    for wrong in (False, True):
        if wrong:
            results = {
                name: result[..., ::-1] * (1 if name.startswith("arg") else 1.5) for name, result in results.items()
            }
        whole = reduction_errors(problem, a, b, results)
        parts = sampled_reduction_errors(problem, a, b, results, rng, outputs=1000)
        assert list(parts) == NAMES
        for name in NAMES:
            assert parts[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-12), name


def test_an_index_that_points_nowhere_is_no_number(rng):
    a, b = array(rng, (40, 5), "f4"), array(rng, (5, 3), "f4")
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce="argmax")
    for nowhere in (-1, 40, 1 << 40):
        found = sampled_reduction_errors(problem, a, b, {"argmax": np.array([0, nowhere, 0])}, rng)
        assert np.isnan(found["argmax"])


@pytest.mark.parametrize("shapes", [((1 << 16, 8), (8, 4)), ((1 << 12, 16, 8), (8, 4)), ((4, 8), (1 << 12, 8, 16))])
def test_a_check_of_a_long_reduction_can_be_interrupted(rng, shapes, monkeypatch):
    """Eight million rows took three seconds, and nobody was asked."""
    monkeypatch.setattr(sampled_reductions, "_SAMPLED", 1 << 12)
    a, b = (array(rng, shape, "f4") for shape in shapes)
    axis = ["m", "batch"] if a.shape[-2] > 4 else ["n", "batch"]
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce=["sum", "argmax"], axis=axis)
    results = gemm_reduce(a, b, reduce=["sum", "argmax"], axis=axis)
    asked = []
    with interruptible(lambda: asked.append(None)):
        assert max(sampled_reduction_errors(problem, a, b, results, rng).values()) < 1e-4
    assert len(asked) >= (1 << 16) * 8 // (1 << 12)
