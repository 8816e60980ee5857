"""Large products by blocks on the processor: the same bits with any memory, in any order, whole or block by block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from works import packed

from gemmserve_kernels import GemmProblem, Operand, gemm_reduce
from gemmserve_kernels.blocks.grid import Grid, GridRule
from gemmserve_kernels.blocks.memory_plan import plan_memory
from gemmserve_kernels.blocks.reduction import BlockReduction
from gemmserve_kernels.numerics.reference import bound, logical, oracle_gemm
from gemmserve_service.executor.protocol import TO_WORKER, ArrayRef, BlockOf, encode
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.executor.worker.blocks.gridded import Gridded
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.products import build
from gemmserve_service.schemas import GemmParams, GemmReduceParams
from gemmserve_service.store.extents.extents import ExtentPool

RULE = GridRule(16)
M, N, K = 72, 100, 130


def matrix(*shape, seed=0, dtype="c8"):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


A, B, C = matrix(M, K), matrix(K, N, seed=1), matrix(M, N, seed=2)
CASES = {
    "plain": (GemmParams(), {"a": A, "b": B}),
    "turned": (
        GemmParams(trans_a="C", trans_b="T", alpha=2 - 1j, order="F"),
        {"a": np.asfortranarray(A.conj().T), "b": B.T.copy()},
    ),
    "added": (GemmParams(beta=-1, alpha=3), {"a": A, "b": B, "c": C}),
    "planar": (GemmParams(layout="planar"), {"a": np.stack([A.real, A.imag]), "b": np.stack([B.real, B.imag])}),
    "batched": (GemmParams(), {"a": matrix(3, 24, 90), "b": matrix(90, 40, seed=3)}),
    "mixed": (GemmParams(), {"a": A.real.copy(), "b": B}),
}


def problem_of(params, arrays):
    problem = build(params, {name: Operand.of(array) for name, array in arrays.items()})
    assert isinstance(problem, GemmProblem)
    return problem


def results_of(params, arrays):
    problem = problem_of(params, arrays)
    return {"d": np.full(problem.result_shape, np.nan, problem.result_dtype, params.order)}


def compute(name, budget, order=None):
    """The result by blocks, and the panels' slots."""
    params, arrays = CASES[name]
    results = results_of(params, arrays)
    backend = CpuBackend(budget)
    gridded = Gridded.of(params, {key: HostArray(array) for key, array in arrays.items()}, results, rule=RULE)
    assert gridded is not None
    slots = backend.open_panels("p", gridded.grid)
    assert slots is not None
    for index in slots.plan.order if order is None else order(gridded.grid):
        work = gridded.work(index, slots)
        backend.run(work.params, work.operands, work.results)
    return results["d"], slots


BITS = {name: compute(name, None)[0].tobytes("A") for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_right(name) -> None:
    params, arrays = CASES[name]
    problem = problem_of(params, arrays)
    d, _ = compute(name, None)
    away = logical(problem, d) - oracle_gemm(problem, **arrays)
    assert (np.maximum(np.abs(away.real), np.abs(away.imag)) <= bound(problem, **arrays)).all()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.floats(0, 1.2), st.randoms(use_true_random=False))
def test_bits_depend_neither_on_memory_nor_on_order(name, share, random) -> None:
    """With every budget, in the plan's order and in any other; in the plan's, just that is copied which it says."""
    _, arrays = CASES[name]
    least = compute(name, None)[1].plan
    budget = least.needed_bytes + int(share * sum(array.nbytes for array in arrays.values()))
    d, slots = compute(name, budget)
    assert d.tobytes("A") == BITS[name]
    assert slots.plan.fits
    assert slots.uploaded_bytes == slots.plan.uploaded_bytes

    def shuffled(grid):
        order = list(grid.order)
        random.shuffle(order)
        return order

    assert compute(name, budget, shuffled)[0].tobytes("A") == BITS[name]


@pytest.fixture
def place(tmp_path):
    pool = ExtentPool(tmp_path, keep_bytes=0)

    def make(array, cache_id=None):
        extent = pool.take(array.nbytes)
        view = extent.view(array.nbytes)
        view[:] = array.tobytes(order="A")
        return ArrayRef(
            extent=extent.file[0], path=extent.path, capacity=extent.file[1], offset=extent.start, nbytes=array.nbytes,
            dtype=array.dtype.name, shape=array.shape, order="C" if array.flags.c_contiguous else "F",
            cache_id=cache_id,
        ), view  # fmt: skip

    return make


@pytest.fixture
def task(place):
    def make(name, **fields):
        params, arrays = CASES[name]
        out, view = place(results_of(params, arrays)["d"])
        operands = {key: place(array, f"id-{key}")[0] for key, array in arrays.items()}
        return Run("t", params, "numpy", operands, {"d": out}, **fields), view

    return make


@pytest.mark.parametrize("name", ["plain", "turned", "added", "batched"])
def test_a_whole_task_and_its_blocks_have_the_same_bits(name, task) -> None:
    message, view = task(name, verify=True)
    done = Runner(CpuBackend(), RULE).run(message)
    assert (done.kind, done.mismatch) == ("done", None)
    assert done.residual < 1e-5
    assert bytes(view) == BITS[name]

    message, view = task(name)
    params, arrays = CASES[name]
    grid = Gridded.of(params, {key: HostArray(x) for key, x in arrays.items()}, results_of(params, arrays), rule=RULE)
    assert grid is not None
    workers = [Runner(CpuBackend(1 << 20)), Runner(CpuBackend())]  # the rule is the front's
    for index in reversed(grid.grid.order):
        algorithm = "numpy" if index % 2 else None
        block = BlockOf(parent="t", sides=grid.grid.sides, index=index, algorithm=algorithm)
        batch = packed(replace(message, task=f"t/{index}", block=block, verify=True))
        (work,) = TO_WORKER.validate_json(encode(batch)[4:]).tasks
        done = workers[index % 2].run(work)
        assert (done.kind, done.task) == ("done", f"t/{index}")
        assert done.residual < 1e-5
    assert bytes(view) == BITS[name]
    for runner in workers:
        runner.forget([], parents=["t"])
        assert runner.backend.open_panels("t", grid.grid).uploads == 0  # others


def test_a_block_writes_its_window_alone(task) -> None:
    message, view = task("plain")
    block = BlockOf(parent="t", sides=(16, 16, 1), index=8)
    assert Runner(CpuBackend()).run(replace(message, block=block)).kind == "done"
    d = np.frombuffer(view, "c8").reshape(M, N)
    assert not np.isnan(d[16:32, 16:32]).any()
    assert np.isnan(d).sum() == d.size - 256


@pytest.mark.parametrize(
    ("params", "sides", "index"),
    [(GemmParams(), (16, 16, 1), 35), (GemmParams(), (0, 1, 1), 0), (GemmReduceParams(), (16, 16, 1), 0)],
)
def test_a_block_that_is_none_is_an_error_of_the_task(task, params, sides, index) -> None:
    message, view = task("plain")
    before = bytes(view)
    failed = Runner(CpuBackend()).run(
        replace(message, params=params, block=BlockOf(parent="t", sides=sides, index=index))
    )
    assert failed.kind == "failed"
    assert bytes(view) == before


def test_a_cancelled_product_stops_within_a_block(task) -> None:
    message, view = task("plain")
    runner = Runner(CpuBackend(), RULE)
    seen = []

    def look() -> None:
        seen.append(runner.progress)
        if len(seen) == 20:
            runner.cancel("t")

    runner.look = look
    failed = runner.run(message)
    assert failed.kind == "failed"
    assert len(seen) == 20
    d = np.frombuffer(view, "c8")
    assert 0 < np.isnan(d).sum() < d.size


def test_a_block_may_begin_while_another_stands_still() -> None:
    """The processor's worker takes what comes between two panels, in the same thread: nobody waits for a slot."""
    params, arrays = CASES["plain"]
    results = results_of(params, arrays)
    backend = CpuBackend()
    gridded = Gridded.of(params, {key: HostArray(array) for key, array in arrays.items()}, results, rule=RULE)
    slots = backend.open_panels("p", gridded.grid)
    todo = list(gridded.grid.order)

    def run_one() -> None:
        if todo:
            work = gridded.work(todo.pop(), slots)
            backend.run(work.params, work.operands, work.results, run_one)

    while todo:
        run_one()
    assert results["d"].tobytes() == BITS["plain"]


def test_small_products_and_others_have_no_grid() -> None:
    small = {"a": HostArray(A[:8, :8]), "b": HostArray(B[:8, :8])}
    assert Gridded.of(GemmParams(), small, {"d": np.zeros((8, 8))}, rule=RULE) is None
    read_once = {"a": HostArray(A[:, :64]), "b": HostArray(B[:64])}
    assert Gridded.of(GemmReduceParams(), read_once, {"sum": np.zeros(N)}, rule=RULE) is None


def test_memory_is_planned_for_the_least_unless_there_is_more() -> None:
    operand = Operand.contiguous((256, 256), np.dtype("f8"))
    grid = Grid.of(GemmProblem.build(operand, operand), RULE)
    assert grid is not None
    backend = CpuBackend()
    assert backend.open_panels("p", grid).plan == plan_memory(grid, backend.spec, 0)
    assert backend.open_panels("p", grid) is backend.open_panels("p", grid)
    more = CpuBackend(1 << 30).open_panels("p", grid).plan
    assert more.uploaded_bytes == 2 * operand.nbytes
    assert more.fits


# -- reductions -----------------------------------------------------------------------------------------------------

NAMES = ["sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin"]
REDUCTIONS = {
    "rows": (GemmReduceParams(reduce=NAMES), {"a": A, "b": B}),
    "columns": (GemmReduceParams(reduce=NAMES, axis="n", alpha=2 - 1j, return_c=True), {"a": A, "b": B}),
    "turned": (
        GemmReduceParams(reduce=["argmin", "max"], pre_op="abs", trans_a="C", trans_b="T"),
        {"a": np.asfortranarray(A.conj().T), "b": B.T.copy()},
    ),
    "planar": (
        GemmReduceParams(reduce=["sum", "argmax"], layout="planar"),
        {"a": np.stack([A.real, A.imag]), "b": np.stack([B.real, B.imag])},
    ),
    "batched": (
        GemmReduceParams(reduce=NAMES, axis=["n", "batch"]),
        {"a": matrix(3, 24, 90), "b": matrix(90, 40, seed=3)},
    ),
    "one": (GemmReduceParams(reduce="absmax"), {"a": A.real.copy(), "b": B}),
}


def reduction_of(name):
    params, arrays = REDUCTIONS[name]
    problem = build(params, {key: Operand.of(array) for key, array in arrays.items()})
    return Grid.of(problem, RULE), {key: np.full(shape, 0x55, dtype) for key, (shape, dtype) in problem.results.items()}


@pytest.fixture
def reduction_task(place):
    def make(name, *, partials, **fields):
        params, arrays = REDUCTIONS[name]
        grid, outs = reduction_of(name)
        placed = {key: place(array) for key, array in outs.items()}
        if partials:
            placed["partials"] = place(np.full(BlockReduction(grid).nbytes // 8, np.nan))
        operands = {key: place(array, f"id-{key}")[0] for key, array in arrays.items()}
        message = Run("t", params, "numpy", operands, {key: ref for key, (ref, _) in placed.items()}, **fields)
        return message, grid, {key: np.frombuffer(placed[key][1], out.dtype) for key, out in outs.items()}

    return make


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_whole_reduction_and_its_blocks_have_the_same_bits(name, reduction_task) -> None:
    """Blocks by two workers with different memory, backwards, some twice; then one of them puts them together."""
    whole, grid, found = reduction_task(name, partials=False, verify=True)
    done = Runner(CpuBackend(), RULE).run(whole)
    assert (done.kind, done.mismatch) == ("done", None)
    assert done.residual < 1e-5
    message, _, again = reduction_task(name, partials=True)
    workers = [Runner(CpuBackend(1 << 20)), Runner(CpuBackend())]  # the rule is the front's
    orders = [*reversed(grid.order), *grid.order[:3]]
    for number, index in enumerate(orders):
        block = BlockOf(parent="t", sides=grid.sides, index=index, algorithm="numpy")
        batch = packed(replace(message, task=f"t/{index}", block=block, verify=True))
        (work,) = TO_WORKER.validate_json(encode(batch)[4:]).tasks
        done = workers[number % 2].run(work)
        assert (done.kind, done.task) == ("done", f"t/{index}")
        assert done.residual < 1e-5
    combine = BlockOf(parent="t", sides=grid.sides, index=0, combine=True)
    done = workers[0].run(replace(message, task="t/all", block=combine, verify=True))
    assert (done.kind, done.task, done.residual) == ("done", "t/all", None)
    for key, array in found.items():
        assert array.tobytes() == again[key].tobytes(), key


def test_the_reduction_is_right(reduction_task) -> None:
    """Exact data: the very results of the whole, which nobody cuts with the usual rule."""
    rng = np.random.default_rng(0)
    params, _ = REDUCTIONS["rows"]
    a, b = (rng.integers(-3, 4, x.shape).astype("c8") for x in (A, B))
    problem = build(params, {"a": Operand.of(a), "b": Operand.of(b)})
    results = {key: np.empty(shape, dtype) for key, (shape, dtype) in problem.results.items()}
    gridded = Gridded.of(params, {"a": HostArray(a), "b": HostArray(b)}, results, rule=RULE)
    backend = CpuBackend()
    for index in gridded.grid.order:
        work = gridded.work(index, None)
        backend.run(work.params, work.operands, work.results)
    gridded.combine()
    for name, expected in gemm_reduce(a, b, reduce=NAMES).items():
        np.testing.assert_array_equal(results[name], expected)


@pytest.mark.parametrize("combine", [False, True])
def test_partial_results_need_their_place(reduction_task, combine) -> None:
    message, grid, _ = reduction_task("rows", partials=False)
    block = BlockOf(parent="t", sides=grid.sides, index=0, combine=combine)
    assert Runner(CpuBackend()).run(replace(message, block=block)).kind == "failed"
    message, grid, _ = reduction_task("rows", partials=True)
    short = replace(message.results["partials"], shape=(8,), nbytes=64)
    message = replace(message, results=message.results | {"partials": short})
    assert Runner(CpuBackend()).run(replace(message, block=block)).kind == "failed"


def test_blocks_of_products_are_not_put_together(task) -> None:
    message, _ = task("plain")
    block = BlockOf(parent="t", sides=(16, 16, 1), index=0, combine=True)
    assert Runner(CpuBackend()).run(replace(message, block=block)).kind == "failed"
