"""Panels: whatever way a product is cut, together they are the product, and no panel depends on chance."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from gemmserve_kernels import Operand
from gemmserve_service.executor.worker.backend import HostArray, call
from gemmserve_service.executor.worker.host import backend
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.panels import grid, panels, plan_cut, plan_grid
from gemmserve_service.products import build, outputs
from gemmserve_service.schemas import GemmParams, GemmReduceParams

M, N, K = 200, 150, 7


def integers(rng, *shape, dtype="c8", order="C"):
    """Small integers: every sum is exact, so that equal means equal whatever order a BLAS adds in."""
    values = rng.integers(-3, 4, shape).astype(np.dtype(dtype).char.lower() if dtype[0] != "c" else "f8")
    if dtype[0] == "c":
        values = values + 1j * rng.integers(-3, 4, shape)
    return np.asarray(values.astype(dtype), order=order)


def whole_and_in_panels(params, arrays, count):
    problem = build(params, {name: Operand.of(array) for name, array in arrays.items()})
    whole, pieces = (
        {name: np.full(shape, 77, dtype, order) for name, (shape, dtype, order) in outputs(problem).items()}
        for _ in range(2)
    )
    call(params, arrays, whole)
    cut = plan_cut(problem, count)
    if cut is not None:
        assert 2 <= len(cut) <= count
        for operands, results in panels(problem, cut, arrays, pieces):
            call(params, operands, results)
    return whole, pieces, cut


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("trans_a", "trans_b"), list(itertools.product("NTCR", repeat=2))[::3])
@pytest.mark.parametrize(
    "lead", [((), (), ()), ((5,), (5,), (5,)), ((3, 1), (4,), ()), ((1, 1), (1, 1), (1, 1)), ((2, 3), (), (3,))]
)
def test_a_product_is_its_panels(lead, trans_a, trans_b, order):
    rng = np.random.default_rng(1)
    shapes = {
        "a": (*lead[0], *((M, K) if trans_a in "NR" else (K, M))),
        "b": (*lead[1], *((K, N) if trans_b in "NR" else (N, K))),
        "c": (*lead[2], M, N),
    }
    arrays = {name: integers(rng, *shape) for name, shape in shapes.items()}
    params = GemmParams(trans_a=trans_a, trans_b=trans_b, order=order, beta=2, alpha=1j)
    whole, pieces, cut = whole_and_in_panels(params, arrays, 3)
    assert cut is not None
    np.testing.assert_array_equal(pieces["d"], whole["d"])


def test_a_broadcast_c_and_planar_arrays():
    rng = np.random.default_rng(2)
    a, b = integers(rng, M, K), integers(rng, K, N)
    for c in (integers(rng, 1, N), integers(rng, M, 1), integers(rng, 1, 1)):
        whole, pieces, _ = whole_and_in_panels(GemmParams(beta=1), {"a": a, "b": b, "c": c}, 4)
        np.testing.assert_array_equal(pieces["d"], whole["d"])
    planar = {"a": integers(rng, 2, 3, M, K, dtype="f4"), "b": integers(rng, 2, K, N, dtype="f4")}
    whole, pieces, cut = whole_and_in_panels(GemmParams(layout="planar"), planar, 3)
    assert cut.axis == "batch"
    np.testing.assert_array_equal(pieces["d"], whole["d"])
    flat = {name: array if name == "b" else array[:, 0] for name, array in planar.items()}
    whole, pieces, cut = whole_and_in_panels(GemmParams(layout="planar"), flat, 3)
    assert cut.axis == "n"  # three panels; along m they would be two
    np.testing.assert_array_equal(pieces["d"], whole["d"])


@pytest.mark.parametrize("axis", ["m", "n", ["m", "batch"], ["n", "batch"]])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("planar", [False, True])
def test_a_reduction_is_its_panels(axis, lead, planar):
    rng = np.random.default_rng(3)
    planes = (2,) if planar else ()
    dtype = "f4" if planar else "c8"
    arrays = {
        "a": integers(rng, *planes, *lead, M, K, dtype=dtype),
        "b": integers(rng, *planes, *lead, K, N, dtype=dtype),
    }
    params = GemmReduceParams(
        reduce=["sum", "absmax", "argmax"], axis=axis, return_c=True, layout="planar" if planar else "interleaved"
    )
    whole, pieces, cut = whole_and_in_panels(params, arrays, 3)
    assert cut is not None
    assert cut.axis in ({"m"} if "n" in axis else {"n"}) | ({"batch"} if axis in ("m", "n") else set())
    for name, value in whole.items():
        np.testing.assert_array_equal(pieces[name], value, name)


def test_what_cannot_be_cut_is_left_whole():
    rng = np.random.default_rng(4)
    a, b = integers(rng, 60, K), integers(rng, K, 50)
    assert whole_and_in_panels(GemmParams(), {"a": a, "b": b}, 9)[2] is None  # no longer than one step
    assert whole_and_in_panels(GemmParams(), {"a": a, "b": b}, 1)[2] is None
    empty = {"a": np.zeros((0, K), "c8"), "b": b}
    assert whole_and_in_panels(GemmParams(), empty, 9)[2] is None


@pytest.mark.parametrize("count", [2, 3, 4, 7, 100])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("params", [GemmParams(alpha=2), GemmReduceParams(reduce=["sum", "argmax"], axis="n")], ids=str)
def test_a_grid_of_panels(params, lead, count):
    """Every element once, whatever the number, and never many more panels than asked for."""
    rng = np.random.default_rng(6)
    arrays = {"a": integers(rng, *lead, M, K), "b": integers(rng, K, N)}
    problem = build(params, {name: Operand.of(array) for name, array in arrays.items()})
    whole, pieces = (
        {name: np.full(shape, 77, dtype, order) for name, (shape, dtype, order) in outputs(problem).items()}
        for _ in range(2)
    )
    call(params, arrays, whole)
    written = {name: np.zeros(array.shape, int) for name, array in pieces.items()}
    cuts = plan_grid(problem, count)
    for operands, results in grid(problem, cuts, arrays, pieces):
        call(params, operands, results)
    for _, results in grid(problem, cuts, arrays, written):
        for view in results.values():
            np.add(view, 1, out=view)
    for name, value in whole.items():
        np.testing.assert_array_equal(pieces[name], value, name)
        assert (written[name] == 1).all()
    assert 1 <= math.prod(len(cut) for cut in cuts) <= 2 * count
    assert len(cuts) >= 1


def test_panels_are_square():
    """Beside one another, not thin strips that read all of the other operand each."""
    shapes = {
        "a": Operand.contiguous((4096, 4096), np.dtype("c8")),
        "b": Operand.contiguous((4096, 4096), np.dtype("c8")),
    }
    columns, rows = plan_grid(build(GemmParams(), shapes), 256)
    assert (columns.axis, rows.axis) == ("n", "m")
    assert len(columns) == len(rows) == 16
    (only,) = plan_grid(build(GemmReduceParams(reduce="sum", axis="m"), shapes), 20)
    assert only.axis == "n"
    assert plan_grid(build(GemmParams(), shapes), 1) == ()


class StopError(Exception):
    pass


def test_the_cpu_backend_looks_up_between_panels(monkeypatch):
    monkeypatch.setattr(backend, "_PANEL_FLOPS", 8 * 64 * N * K)
    rng = np.random.default_rng(5)
    a, b = integers(rng, M, K), integers(rng, K, N)
    operands = {"a": HostArray(a), "b": HostArray(b)}
    looked = []
    d = np.zeros((M, N), "c8")
    CpuBackend().run(GemmParams(), operands, {"d": d}, lambda: looked.append(np.count_nonzero(d)))
    done = list(dict.fromkeys(looked))
    assert len(done) == 5  # before, and after each of four panels; within them more often
    assert done[0] == 0 < done[1] < done[2] < done[3] < done[4]
    np.testing.assert_array_equal(d, a @ b)

    def stop():
        if d.any():
            raise StopError

    d[:] = 0
    with pytest.raises(StopError):
        CpuBackend().run(GemmParams(), operands, {"d": d}, stop)
    assert np.count_nonzero(d) == done[1], "the second panel was never begun"
