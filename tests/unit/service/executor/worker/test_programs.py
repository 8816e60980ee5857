"""A program inside a worker: the bits of each step, what lives how long, checks, cancellation, memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import TypeAdapter
from works import packed, unpacked

from gemmserve_kernels import Operand
from gemmserve_service import products
from gemmserve_service.errors import JobCancelled, StepInvalid, describe
from gemmserve_service.executor.protocol import TO_WORKER, ArrayRef, encode
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.executor.worker.host import values as host_values
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.host.values import HostValues
from gemmserve_service.executor.worker.programs import run_program
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.jobs.compile_program import compile_program
from gemmserve_service.programs import operands_of
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.schemas import JobRequest
from gemmserve_service.store.extents.extents import ExtentPool

REQUEST = TypeAdapter(JobRequest)
A, B = new_id("arr"), new_id("arr")
STAND_IN = Path(__file__).parents[4] / "support" / "device_program_script.py"


def gemm(step, a, b, **fields):
    return {"id": step, "op": "gemm", "a": a, "b": b, **fields}


def reduction(step, a, b, **fields):
    return {"id": step, "op": "gemm_reduce", "a": a, "b": b, **fields}


def elementwise(step, op, a, b=None, **fields):
    return {"id": step, "op": op, "a": a, **({} if b is None else {"b": b}), **fields}


def compiled(arrays, *steps, **fields):
    request = REQUEST.validate_python({"op": "program", "steps": list(steps), **fields}, strict=True)
    return compile_program(request, {name: Operand.of(array) for name, array in arrays.items()}, None)


def room_for(program):
    """Somewhere for every result, filled with what it must not keep."""
    return {name: np.full(value.shape, 77, value.dtype, order=value.order) for name, value in program.results.items()}


def run(program, arrays, values=None, **fields):
    backend = CpuBackend()
    results = room_for(program)
    operands = {name: HostArray(array) for name, array in arrays.items()}
    outcome = run_program(
        program.params, operands, results, values or HostValues(backend, lambda: None), backend.spec, **fields
    )
    return results, outcome


@pytest.fixture
def random():
    rng = np.random.default_rng(5)

    def make(*shape, dtype="c8"):
        real = rng.standard_normal(shape)
        return (real + 1j * rng.standard_normal(shape) if "c" in dtype else real).astype(dtype)

    return make


@pytest.fixture
def pool(tmp_path):
    return ExtentPool(tmp_path, keep_bytes=0)


def stored(pool, array):
    """The array as a worker finds it in the store: on pages of its own."""
    order = "C" if array.flags.c_contiguous else "F"
    if not array.nbytes:
        return np.empty(array.shape, array.dtype, order=order)
    extent = pool.take(array.nbytes)
    extent.view(array.nbytes)[:] = array.tobytes(order="A")
    return np.frombuffer(extent.view(array.nbytes), array.dtype).reshape(array.shape, order=order)


def one_by_one(program, arrays, pool):
    """Every step as a job of its own: its operands stored, its results too."""
    backend, alive = CpuBackend(), dict(arrays)
    for step, product, values in zip(program.params.steps, program.computations, program.values, strict=True):
        operands = {operand: HostArray(alive[name]) for operand, name in operands_of(step).items()}
        outs = {
            result: stored(pool, np.zeros(shape, dtype, order=order)).copy(order="K")
            for result, (shape, dtype, order) in products.outputs(product).items()
        }
        backend.run(step, operands, outs)
        for (name, _), out in zip(values.items(), outs.values(), strict=True):
            alive[name] = stored(pool, out)
    return alive


@pytest.mark.parametrize("under_way", [0, 2])
def test_it_says_how_far_it_is(random, monkeypatch, under_way):
    """Steps that a device was given, and has not done, do not count."""
    monkeypatch.setattr(HostValues, "under_way", under_way)
    arrays = {A: random(8, 8)}
    program = compiled(arrays, *(gemm(f"s{i}", A, f"$s{i - 1}" if i else A) for i in range(4)))
    shares = []
    run(program, arrays, done=shares.append)
    assert shares == [max(number - under_way, 0) / 4 for number in (1, 2, 3, 4)]


def test_a_runner_tells_the_share_of_the_task_that_it_is_at():
    runner = Runner(CpuBackend())
    runner.task, runner.share = "job_1", 0.5
    assert (runner.share_of("job_1"), runner.share_of("job_2"), runner.share_of(None)) == (0.5, 0.0, 0.0)


CASES = {
    "powers": [gemm("x2", A, A), gemm("x4", "$x2", "$x2"), gemm("x8", "$x4", "$x4")],
    "views": [
        gemm("f", A, B, order="F", alpha=[0.5, 2]),
        gemm("t", "$f", "$f", trans_a="T", order="F"),
        gemm("c", "$f", "$f", trans_a="C"),
        gemm("r", "$t", "$c", trans_a="R", trans_b="C", c="$t", beta=[1, -1]),
    ],
    "reductions": [
        gemm("p", A, B),
        reduction("y", "$p", "$p", trans_b="C", reduce=["absmax", "argmax", "sumsq", "mean"], return_c=True, axis="n"),
        reduction("s", "$y.c", "$p", trans_a="C", reduce="sum"),
    ],
    "promotion": [gemm("w", A, B, c=B, beta=1, compute="fp64"), gemm("x", "$w", "$w", trans_b="T")],
}


def real_only(dtypes):
    """Fields that real data cannot have: complex factors, and c with its beta."""
    return set() if any("c" in dtype for dtype in dtypes) else {"alpha", "beta", "c"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtypes", [("c8", "c8"), ("f4", "c16"), ("f8", "f8")])
@pytest.mark.parametrize("n", [1, 5, 64, 200])
def test_every_step_has_the_bits_of_the_same_product_as_its_own_job(pool, random, name, dtypes, n):
    # The second operand in Fortran order, so that views of either kind are met.
    second = np.asfortranarray(random(n, n, dtype=dtypes[1]))
    arrays = {A: stored(pool, random(n, n, dtype=dtypes[0])), B: stored(pool, second)}
    steps = [{name: value for name, value in step.items() if name not in real_only(dtypes)} for step in CASES[name]]
    every = [step["id"] for step in steps]
    for keep in (None, every):
        program = compiled(arrays, *steps, keep=keep)
        results, outcome = run(program, arrays)
        alone = one_by_one(program, arrays, pool)
        assert results
        for result, array in results.items():
            assert array.tobytes(order="A") == alone[f"${result}"].tobytes(order="A"), result
        assert [step.id for step in outcome.steps] == every
        assert {step.algorithm for step in outcome.steps} == {"numpy"}


def whole(random, *shape, dtype="c16"):
    """Small whole numbers: exact in every order of summation."""
    return np.round(2 * random(*shape, dtype=dtype))


def test_linear_algebra_between_products(pool, random):
    """Weights of a beamformer: the covariance's inverse times steering vectors, and what else there is."""
    snapshots, steering = random(3, 12, 40, dtype="c16"), random(12, 5, dtype="c16")
    arrays = {A: stored(pool, snapshots), B: stored(pool, steering)}
    program = compiled(
        arrays,
        {"id": "r", "op": "herk", "a": A, "alpha": 0.025},
        {"id": "w", "op": "solve", "a": "$r", "b": B, "assume": "positive"},
        {"id": "other", "op": "solve", "a": {"id": "$r", "conj": True}, "b": B},
        {"id": "i", "op": "inv", "a": "$r"},
        {"id": "l", "op": "cholesky", "a": "$r"},
        {"id": "e", "op": "expm", "a": "$r", "trans_a": "C"},
        {"id": "s", "op": "sum", "a": "$w", "axes": [0, -1], "alpha": 2},
        {"id": "t", "op": "triangle", "a": "$r", "fill": "upper"},
        keep=["r", "w", "other", "i", "l", "e", "s", "t"],
    )
    results, outcome = run(program, arrays, verify=True)
    r = snapshots @ snapshots.conj().swapaxes(-1, -2) / 40
    values, vectors = np.linalg.eigh(r)
    expected = {
        "r": r,
        "w": np.linalg.solve(r, steering),
        "other": np.linalg.solve(r.conj(), steering),
        "i": np.linalg.inv(r),
        "l": np.linalg.cholesky(r),
        "e": (vectors * np.exp(values)[..., None, :]) @ vectors.conj().swapaxes(-1, -2),
        "s": 2 * np.linalg.solve(r, steering).sum(axis=(0, -1)),
        "t": np.triu(r),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(results[name], value, atol=1e-11 * np.abs(value).max())
    assert [step.algorithm for step in outcome.steps] == [step.op for step in program.params.steps]
    checked = {step.id: step.residual for step in outcome.steps}
    assert checked.pop("e") is None  # an exponential is not checked
    assert all(residual < 1e-14 for residual in checked.values())


@pytest.mark.parametrize(
    ("step", "slug"),
    [
        ({"op": "solve", "b": B}, "singular-matrix"),
        ({"op": "inv", "assume": "upper"}, "singular-matrix"),
        ({"op": "inv", "assume": "positive"}, "not-positive-definite"),
        ({"op": "cholesky"}, "not-positive-definite"),
    ],
)
def test_a_matrix_without_a_result_names_its_step_and_its_place(pool, random, step, slug):
    matrices = random(4, 6, 6)
    matrices[:] = np.eye(6)
    matrices[2, 3, 3] = 0
    arrays = {A: stored(pool, matrices), B: stored(pool, random(6, 2))}
    program = compiled(arrays, elementwise("copy", "add", A), {"id": "x", "a": "$copy", **step})
    with pytest.raises(StepInvalid) as error:
        run(program, arrays)
    found = describe(error.value)
    assert (found.slug, found.status) == (slug, 422)
    assert found.extra == {"index": [2], "step": "x"}
    assert found.detail.startswith("step x: the matrix [2] is ")


def test_operations_beside_products(pool, random):
    a, b = whole(random, 30, 20), whole(random, 20)
    steps = [
        elementwise("s", "add", A, B, alpha=[0.5, 2], beta=-1, gamma=3, order="F"),
        gemm("p", "$s", A, trans_a="C"),
        elementwise("m", "multiply", "$p", B, alpha=2),
        elementwise("copy", "add", "$m", order="F"),
        elementwise("whole", "add", "$y"),
        reduction("y", "$m", "$m", reduce="argmax", pre_op="abs"),
    ]
    steps[-2:] = steps[:-3:-1]
    arrays = {A: stored(pool, a), B: stored(pool, b)}
    program = compiled(arrays, *steps, keep=["s", "m", "copy", "whole", "y"])
    results, outcome = run(program, arrays, verify=True)
    s = (0.5 + 2j) * a - b + 3
    m = 2 * (s.conj().T @ a) * b
    for name, expected in (("s", s), ("m", m), ("copy", m), ("whole", results["y.argmax"])):
        np.testing.assert_array_equal(results[name], expected)
    assert [step.algorithm for step in outcome.steps] == ["add", "numpy", "multiply", "add", "numpy", "add"]
    assert [step.residual for step in outcome.steps if step.algorithm != "numpy"] == [0, 0, 0, 0]


def seen(value, offset, shape, strides):
    memory = value.ravel(order="K")
    steps = tuple(stride * value.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(memory[offset:], shape, steps)


def test_operands_by_view(pool, random):
    a, b = np.asfortranarray(whole(random, 6, 6)), whole(random, 6, 8)
    f = np.asfortranarray(a @ b)
    steps = [
        gemm("f", A, B, order="F"),
        gemm("t", {"id": "$f", "offset": 1, "shape": [3, 5], "strides": [11, 2]},
             {"id": B, "offset": 40, "shape": [5, 4], "strides": [0, -3], "conj": True}),
        elementwise("s", "add", {"id": "$t", "offset": 11, "shape": [4, 3], "strides": [-1, -4], "conj": True}),
        elementwise("i", "multiply", {"id": "$s", "part": "imag"},
                    {"id": A, "offset": 2, "shape": [3], "strides": [1], "part": "real"}),
        gemm("c", "$s", "$s", trans_b="C", beta=1,
             c={"id": "$s", "offset": 1, "shape": [4, 1], "strides": [3, 7], "conj": True}),
        reduction("y", {"id": "$c", "offset": 15, "shape": [2, 2, 2], "strides": [0, -4, -1], "conj": True},
                  {"id": "$c", "shape": [2, 3], "strides": [1, 4]}),
        gemm("none", {"id": "$c", "offset": 99, "shape": [2, 0], "strides": [1, 1]}, {"id": A, "shape": [0, 3],
             "strides": [2, 2]}),
    ]  # fmt: skip
    arrays = {A: stored(pool, a), B: stored(pool, b)}
    program = compiled(arrays, *steps, keep=["t", "s", "i", "c", "y", "none"])
    results, outcome = run(program, arrays, verify=True)
    t = seen(f, 1, (3, 5), (11, 2)) @ seen(b, 40, (5, 4), (0, -3)).conj()
    s = seen(t, 11, (4, 3), (-1, -4)).conj()
    c = s @ s.conj().T + s[:, 1:2].conj()
    y = (seen(c, 15, (2, 2, 2), (0, -4, -1)).conj() @ seen(c, 0, (2, 3), (1, 4))).sum(axis=1)
    expected = {"t": t, "s": s, "i": s.imag * a.ravel("K")[2:5].real, "c": c, "y.sum": y, "none": np.zeros((2, 3))}
    for name, value in expected.items():
        np.testing.assert_array_equal(results[name], value)
    assert all(step.residual < 1e-12 for step in outcome.steps[:-1])


def test_a_conjugate_that_is_being_made_can_be_stopped(random, monkeypatch):
    monkeypatch.setattr(host_values, "_PIECE", 64)
    arrays = {A: random(20, 20)}
    program = compiled(arrays, elementwise("s", "add", {"id": A, "conj": True}))
    asked = 0

    def checkpoint():
        nonlocal asked
        asked += 1
        if asked == 5:
            raise JobCancelled("the job was cancelled")

    with pytest.raises(JobCancelled):
        run(program, arrays, HostValues(CpuBackend(), checkpoint))
    assert asked == 5


def test_panels_of_a_large_step_are_those_of_the_job(pool, random):
    """Past 2 Gflop a product is computed in panels, within a program as alone."""
    arrays = {A: stored(pool, random(1100, 640))}
    steps = [gemm("p", A, A, trans_b="C"), gemm("q", "$p", A), reduction("y", "$p", "$q", reduce=["sum", "absmax"])]
    program = compiled(arrays, *steps, keep=["q", "y"])
    results, _ = run(program, arrays)
    alone = one_by_one(program, arrays, pool)
    for name, array in results.items():
        assert array.tobytes() == alone[f"${name}"].tobytes()


class Watched(HostValues):
    """Knows which values are alive when each step begins, and where each is made."""

    def __init__(self, backend, checkpoint=lambda: None):
        super().__init__(backend, checkpoint)
        self.made, self.alive, self.places = [], [], []

    def empty(self, value):
        array = super().empty(value)
        self.made.append(weakref.ref(array))
        return array

    def run(self, params, operands, made):
        self.alive.append([index for index, value in enumerate(self.made) if value() is not None])
        self.places.append({name: array.ctypes.data for name, array in made.items()})
        return super().run(params, operands, made)


def test_a_value_goes_after_its_last_use(random):
    arrays = {A: random(4, 4)}
    steps = [
        gemm("v0", A, A), gemm("v1", "$v0", "$v0"), gemm("v2", "$v1", "$v0"), gemm("v3", "$v2", "$v2"),
        reduction("v4", "$v3", "$v3", reduce=["sum", "mean"], return_c=True), gemm("v5", "$v4.c", A),
        gemm("v6", "$v5", A),
    ]  # fmt: skip
    watched = Watched(CpuBackend())
    run(compiled(arrays, *steps, keep=["v6"]), arrays, watched)
    # Of v4: sum, mean and c, of which only c is used; the others are alive while the step runs.
    assert watched.alive == [[0], [0, 1], [0, 1, 2], [2, 3], [3, 4, 5, 6], [6, 7], [7]]
    assert not any(value() is not None for value in watched.made)


def test_a_result_is_made_in_its_place_and_used_from_there(random):
    arrays = {A: random(4, 4)}
    program = compiled(arrays, gemm("x2", A, A), gemm("x4", "$x2", "$x2"), keep=["x2", "x4"])
    watched = Watched(CpuBackend())
    results, _ = run(program, arrays, watched)
    assert not watched.made
    assert [made["d"] for made in watched.places] == [results["x2"].ctypes.data, results["x4"].ctypes.data]
    np.testing.assert_allclose(results["x4"], np.linalg.matrix_power(arrays[A].astype("c16"), 4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [0, 1])
def test_values_without_elements(n):
    arrays = {A: np.ones((n, 3), "f4"), B: np.ones((3, 0), "f4")}
    steps = [gemm("e", A, B), gemm("z", "$e", "$e", trans_b="T"), reduction("y", "$e", "$e", trans_a="T", reduce="sum")]
    program = compiled(arrays, *steps)
    results, _ = run(program, arrays)
    np.testing.assert_array_equal(results["z"], np.zeros((n, n)))
    assert results["y.sum"].shape == (0,)


def test_a_value_that_memory_has_no_room_for(random, monkeypatch):
    monkeypatch.setattr(host_values.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    column = np.ones((1 << 11, 1), "f8")
    program = compiled({A: column}, gemm("outer", A, A, trans_b="T"), reduction("y", "$outer", A))
    with pytest.raises(MemoryError):
        run(program, {A: column})


# -- checks ---------------------------------------------------------------------------------------------------------


class Wrong(CpuBackend):
    """Whose fast way is wrong in one step, the n-th."""

    def __init__(self, step):
        super().__init__()
        self.step, self.count = step, 0

    def run(self, params, operands, results, *rest):
        timings = super().run(params, operands, results, *rest)
        if params.compute == "auto":
            if self.count == self.step:
                for out in results.values():
                    out[...] *= 3
            self.count += 1
        return timings


@pytest.mark.parametrize("step", [0, 1])
def test_a_wrong_value_is_found_and_set_right_before_it_is_used(random, step, caplog):
    arrays = {A: random(60, 60)}
    program = compiled(arrays, gemm("x2", A, A), gemm("x4", "$x2", "$x2"))
    right, outcome = run(program, arrays, verify=True)
    assert outcome.mismatch is None
    assert 0 < outcome.residual < 1e-5
    assert outcome.residual == max(info.residual for info in outcome.steps)
    backend = Wrong(step)
    results, outcome = run(program, arrays, HostValues(backend, lambda: None), verify=True)
    np.testing.assert_array_equal(results["x4"], right["x4"])
    wrong = outcome.steps[step]
    assert wrong.mismatch > 1
    assert outcome.mismatch == wrong.mismatch
    assert outcome.steps[1 - step].mismatch is None
    assert f"step {wrong.id} was wrong" in caplog.text
    assert outcome.timings.verify_s > 0
    unchecked, _ = run(program, arrays, HostValues(Wrong(step), lambda: None))
    assert not np.array_equal(unchecked["x4"], right["x4"])


def test_what_cannot_be_judged_has_no_residual():
    arrays = {A: np.full((4, 4), np.inf)}
    _, outcome = run(compiled(arrays, gemm("x2", A, A)), arrays, verify=True)
    assert (outcome.residual, outcome.mismatch) == (None, None)


# -- as a task ------------------------------------------------------------------------------------------------------


@pytest.fixture
def message(pool):
    def make(program, arrays, **fields):
        def place(array, order):
            if not array.nbytes:
                return ArrayRef(extent=None, path="", capacity=0, nbytes=0, dtype=array.dtype.name, shape=array.shape,
                                order=order), None  # fmt: skip
            extent = pool.take(array.nbytes)
            extent.view(array.nbytes)[:] = array.tobytes(order="A")
            name, capacity = extent.file
            ref = ArrayRef(extent=name, path=extent.path, capacity=capacity, offset=extent.start, nbytes=array.nbytes,
                           dtype=array.dtype.name, shape=array.shape, order=order)  # fmt: skip
            return ref, extent

        results = {name: place(array, program.results[name].order) for name, array in room_for(program).items()}
        operands = {name: place(array, "C")[0] for name, array in arrays.items()}
        refs = {name: ref for name, (ref, _) in results.items()}
        task = Run(task="t", params=program.params, algorithm="program", operands=operands, results=refs, **fields)
        return task, {name: extent for name, (_, extent) in results.items()}

    return make


def test_a_task(message, random):
    arrays = {A: random(8, 8)}
    program = compiled(arrays, gemm("x2", A, A), reduction("y", "$x2", A, reduce=["absmax", "argmax"]))
    task, places = message(program, arrays, verify=True)
    done = Runner(CpuBackend()).run(unpacked(TO_WORKER.validate_json(encode(packed(task))[4:]))[0])
    assert (done.kind, done.algorithm) == ("done", "numpy")
    assert [(step.id, step.algorithm) for step in done.steps] == [("x2", "numpy"), ("y", "numpy")]
    assert done.timings.kernel_s == pytest.approx(sum(step.kernel_s for step in done.steps))
    truth = np.abs(arrays[A] @ arrays[A] @ arrays[A]).max(0)
    np.testing.assert_allclose(np.frombuffer(places["y.absmax"].view(32), "f4"), truth, rtol=1e-4)


def test_a_cancelled_program_stops_at_its_next_step(message, random):
    arrays = {A: random(8, 8)}
    program = compiled(arrays, gemm("x1", A, A), *(gemm(f"x{n}", f"$x{n - 1}", A) for n in range(2, 100)))
    task, _ = message(program, arrays)

    class Backend(CpuBackend):
        steps = 0

        def run(self, *args):
            self.steps += 1
            if self.steps == 10:
                runner.cancel("t")
            return super().run(*args)

    backend = Backend()
    runner = Runner(backend)
    answer = runner.run(task)
    assert (answer.kind, answer.slug) == ("failed", "cancelled")
    assert backend.steps == 10
    assert runner.run(task).kind == "done", "a cancellation holds for one run"


def test_progress_is_seen_between_steps(message, random):
    arrays = {A: random(8, 8)}
    program = compiled(arrays, gemm("x1", A, A), *(gemm(f"x{n}", f"$x{n - 1}", A) for n in range(2, 20)))
    runner, seen = Runner(CpuBackend()), []
    runner.look = lambda: seen.append(runner.progress)
    assert runner.run(message(program, arrays)[0]).kind == "done"
    assert seen == sorted(seen)
    assert seen[-1] >= 19


def test_an_error_of_a_step_is_an_answer(message, random, monkeypatch):
    arrays = {A: random(8, 8)}
    program = compiled(arrays, gemm("x1", A, A), gemm("x2", "$x1", A))
    task, _ = message(program, arrays)
    monkeypatch.setattr(HostValues, "empty", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    failed = Runner(CpuBackend()).run(task)
    assert (failed.kind, failed.slug) == ("failed", "out-of-memory")
