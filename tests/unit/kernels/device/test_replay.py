"""Products worked out once and run again at other addresses: the same launches, the same bits."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from simt_cases import SMALL, Gemm, ShimMachine, random, run_gemm
from simt_shim.launcher import ShimLauncher

from gemmserve_kernels import GemmConfig, GemmProblem, Operand
from gemmserve_kernels.device import replay
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.device.tensor_map import MAP_BYTES, Box, TensorMap
from gemmserve_kernels.dispatch.planned_call import program_of
from gemmserve_kernels.dispatch.prepare import prepare_on
from gemmserve_kernels.dispatch.routes import Plan, plan_gemm
from gemmserve_kernels.problem.arrays import ArrayKey

A100 = KNOWN["A100"]
SOURCE = KernelSource("none", ())


class Params(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int32), ("other", ctypes.c_int64), ("a", ctypes.c_uint64), ("b", ctypes.c_int64))


class Mapped(ctypes.Structure):
    _fields_ = (("map", TensorMap), ("a", ctypes.c_uint64))


def note(launcher, kind=Params, **fields):
    launcher.launch(SOURCE, "kernel", grid=1, block=32, shared=0, params=kind(**fields))


def key(array):
    return ArrayKey.of(array), array.ctypes.data % 16


def program(run):
    """Record a function that takes a recorder and one argument."""

    def traced(recorder):
        run(recorder, recorder.argument((4, 6), np.float32, (24, 4), 8))
        return 1

    return replay.record(A100, 100, traced)


def words(of, step, addresses, workspace=0, counters=0):
    filled = of.filled(addresses, workspace, counters, lambda box, address: None)
    return step.kind.from_buffer_copy(filled.tobytes(), step.word * 8)


def test_addresses_are_found_and_nothing_else():
    def run(launcher, x):
        note(launcher, count=7, other=1 << 48, a=launcher.pointer(x) + 5, b=launcher.pointer(x[1:, 2:]) - 1000)

    traced = program(run)
    (step,) = traced.steps
    found = words(traced, step, [1 << 40])
    assert (found.count, found.other, found.a, found.b) == (7, 1 << 48, (1 << 40) + 5, (1 << 40) + 32 - 1000)
    assert traced.workspace == 0


def test_memory_is_shared_by_what_does_not_live_together():
    def run(launcher, x):
        first, second = launcher.empty((100,), np.dtype("f4")), launcher.zeros((3, 5), np.dtype("f8"))
        note(launcher, a=launcher.pointer(first), b=launcher.pointer(second))
        third = launcher.empty((90,), np.dtype("f4"))
        note(launcher, a=launcher.pointer(third), b=launcher.pointer(second))

    traced = program(run)
    clear, one, two = traced.steps
    assert (clear.offset, clear.nbytes) == (512, 120)
    a, b = words(traced, one, [0], 4096), words(traced, two, [0], 4096)
    assert (a.a, a.b) == (4096, 4096 + 512)
    assert (b.a, b.b) == (4096, 4096 + 512)
    assert traced.workspace == 512 + 120


def test_the_counters_of_a_device_are_an_address_of_their_own():
    def run(launcher, x):
        memory = launcher.empty((100,), np.dtype("f4"))
        counters = launcher.counters(21)
        note(launcher, count=3, a=counters + 8, b=launcher.pointer(memory))
        note(launcher, a=launcher.pointer(x), b=launcher.counters(2))

    traced = program(run)
    one, two = (words(traced, step, [1 << 40], 4096, 1 << 33) for step in traced.steps)
    assert (one.count, one.a, one.b) == (3, (1 << 33) + 8, 4096)
    assert (two.a, two.b) == ((1 << 40), 1 << 33)
    assert traced.elements == 23
    assert program(lambda launcher, x: note(launcher, a=launcher.pointer(x))).elements == 0


def test_tensor_maps_are_made_anew():
    box = Box((64, 4, 1, 1), (64, 4, 1, 1))

    def run(launcher, x):
        made = launcher.tensor_map(box, launcher.pointer(x) + 64)
        note(launcher, Mapped, map=made, a=launcher.pointer(x))

    traced = program(run)
    seen = []

    def encode(of, address):
        seen.append((of, address))
        return TensorMap((ctypes.c_uint64 * (MAP_BYTES // 8))(*range(16)))

    filled = traced.filled([1 << 32], 0, 0, encode)
    assert seen == [(box, (1 << 32) + 64)]
    assert filled.tolist() == [*range(16), 1 << 32]


def test_what_depends_on_addresses_is_refused():
    with pytest.raises(ValueError, match="depend on addresses"):
        program(lambda launcher, x: note(launcher, other=launcher.pointer(x) // 3))
    with pytest.raises(ValueError, match="depend on addresses"):
        program(lambda launcher, x: [note(launcher)] * (launcher.pointer(x) >> 28 & 1) or note(launcher))


def test_a_kernel_starts_early_only_behind_another():
    def run(launcher, x):
        for _ in range(2):
            words = launcher.zeros((4,), np.dtype("i4"))
            for _ in range(2):
                params = Params(a=launcher.pointer(words))
                launcher.launch(SOURCE, "k", grid=1, block=32, shared=0, params=params, dependent=True)

    steps = program(run).steps
    assert [getattr(step, "dependent", None) for step in steps] == [None, False, True, None, False, True]


@dataclass(frozen=True)
class Noted:
    """A routine of a library that only keeps what it is given."""

    name: str
    seen: list = field(default_factory=list, compare=False)

    def enqueue(self, addresses):
        self.seen.append(addresses)


def test_routines_are_called_between_launches():
    """Their memory is alive until then, as that of launches is; the kernel behind one waits for it."""
    routine = Noted("multiply")

    def run(launcher, x):
        first, second = launcher.empty((100,), np.dtype("f4")), launcher.empty((100,), np.dtype("f4"))
        launcher.call(routine, (launcher.pointer(x) + 8, launcher.pointer(first)))
        params = Params(a=launcher.pointer(first), b=launcher.pointer(second))
        launcher.launch(SOURCE, "k", grid=1, block=32, shared=0, params=params, dependent=True)
        third = launcher.empty((90,), np.dtype("f4"))
        launcher.call(routine, (launcher.pointer(second), launcher.pointer(third)))

    traced = program(run)
    one, kernel, two = traced.steps
    assert isinstance(one, replay.Call)
    assert isinstance(two, replay.Call)
    assert (one.count, two.count, kernel.dependent) == (2, 2, False)
    memory = SimpleNamespace(address=4096)
    launcher = SimpleNamespace(
        empty=lambda shape, dtype: memory, pointer=lambda array: array.address, tensor_map=None,
        launch=lambda *_, **__: None, call=lambda routine, addresses: routine.enqueue(addresses),
    )  # fmt: skip
    traced.run(launcher, [1 << 40])
    assert routine.seen == [((1 << 40) + 8, 4096), (4096 + 512, 4096)]
    assert traced.workspace == 512 + 400


def test_routines_that_depend_on_addresses_are_refused():
    with pytest.raises(ValueError, match="depend on addresses"):
        program(lambda launcher, x: launcher.call(Noted(str(launcher.pointer(x))), ()))


def run_program(machine, problem, plan, arrays, out, prepared=(None, None)):
    """Runs the product by its program, in memory that the tracing never saw."""
    held = [None if x is None else machine.put(x) for x in arrays]
    into = machine.put(out)
    outlines = tuple(None if p is None else p.outline for p in prepared)
    keys = (key(held[0]), key(held[1]), None if held[2] is None else key(held[2]), key(into))
    traced = program_of(machine.launcher, problem, plan, keys, outlines)
    given = [held[0], held[1], into, *([] if held[2] is None else [held[2]])]
    given += [x for p in prepared if p is not None for x in p.arrays]
    traced.run(machine.launcher, [machine.launcher.pointer(x) for x in given])
    return machine.get(into)


@pytest.mark.parametrize(
    "case",
    [
        Gemm((33, 21), (21, 19)),
        Gemm(
            (2, 1, 9, 12), (3, 12, 10), (9, 10), options={"alpha": 2 - 1j, "beta": 0.5}, strides=("offset", "reversed")
        ),
        Gemm((2, 8, 9), (2, 9, 7), options={"layout": "planar"}, dtypes=("float32",)),
        Gemm((5, 0), (0, 4)),
    ],
    ids=["plain", "batched", "planar", "empty k"],
)
def test_a_program_has_the_bits_of_the_host_code(case):
    machine = ShimMachine(ShimLauncher(A100))
    problem, a, b, c, expected = run_gemm(machine, case)
    poison = np.full(problem.result_shape, np.nan, problem.result_dtype)
    result = run_program(machine, problem, Plan("simt", SMALL), (a, b, c if problem.beta else None), poison)
    np.testing.assert_array_equal(result, expected)


def test_an_empty_result_takes_no_launch():
    machine = ShimMachine(ShimLauncher(A100))
    a, b = np.zeros((0, 3), "c8"), np.zeros((3, 4), "c8")
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    assert run_program(machine, problem, Plan("simt"), (a, b, None), np.zeros((0, 4), "c8")).shape == (0, 4)
    assert machine.launcher.launches == []


@pytest.mark.parametrize("side", ["a", "b", None])
def test_planes_and_prepared_operands(side):
    machine = ShimMachine(ShimLauncher(A100))
    a, b = random(1, "c8", 40, 70), random(2, "c8", 70, 30)
    config = GemmConfig(algorithm="mma")
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="3xfp16", config=config)
    plan = plan_gemm(problem, A100)
    out = np.full((40, 30), np.nan, "c8")
    direct = machine.put(out)
    plan.run_gemm(machine.launcher, problem, machine.put(a), machine.put(b), None, direct)
    made = [None, None]
    if side is not None:
        at = "ab".index(side)
        made[at] = prepare_on(machine.launcher, machine.put((a, b)[at]), side, "3xfp16")
        assert made[at].payload is not None
        assert made[at].outline is prepare_on(machine.launcher, machine.put((a, b)[at]), side, "3xfp16").outline
    result = run_program(machine, problem, plan, (a, b, None), out, tuple(made))
    np.testing.assert_array_equal(result, machine.get(direct))
    np.testing.assert_allclose(result, a.astype("c16") @ b, rtol=0, atol=1e-5 * 70)
