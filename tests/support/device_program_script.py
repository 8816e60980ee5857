"""A program on the CUDA backend, on the stand-in for CuPy: run in a process of its own. Prints one JSON object.

What a kernel would compute is computed by NumPy; what goes over the link is noted.
"""

import json
import math
import pathlib
import sys
import weakref

sys.path.insert(0, str(pathlib.Path(__file__).parent / "cupy_on_numpy"))

import cupy
import numpy as np
from cupy.cuda import memory
from pydantic import TypeAdapter

from gemmserve_kernels import Operand
from gemmserve_kernels.algorithms.common.prepared_operand import PreparedOperand, source_of
from gemmserve_kernels.problem.errors import OutOfDeviceMemory
from gemmserve_service import products
from gemmserve_service.errors import JobCancelled
from gemmserve_service.executor.worker.backend import HostArray, call
from gemmserve_service.executor.worker.checks import verification
from gemmserve_service.executor.worker.cuda import backend as cuda
from gemmserve_service.executor.worker.cuda import copies
from gemmserve_service.executor.worker.cuda import values as device_values
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.host.values import HostValues
from gemmserve_service.executor.worker.programs import run_program
from gemmserve_service.jobs.compile_program import compile_program
from gemmserve_service.programs import operands_of
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.schemas import JobRequest

UPLOADS, DOWNLOADS, LIVE, LAYOUTS = [], [], [], []
ROOM = 1 << 40
RESULTS = {}
A, B, C = new_id("arr"), new_id("arr"), new_id("arr")
rng = np.random.default_rng(3)
ARRAYS = {
    A: (rng.standard_normal((128, 128)) + 1j * rng.standard_normal((128, 128))).astype("c8") / 16,
    B: (rng.standard_normal((128, 24)) + 1j * rng.standard_normal((128, 24))).astype("c8") / 16,
}


def put(self, array):
    """ndarray.set, which the stand-in lacks."""
    self._n[...] = array
    UPLOADS.append(next((name for name, known in {"a": ARRAYS[A], "b": ARRAYS[B]}.items() if known is array), "other"))


def fetch(self, stream=None, order="C", out=None, blocking=True):
    """ndarray.get."""
    if out is None:
        DOWNLOADS.append("fresh memory")
        return np.array(self._n, order=order)
    DOWNLOADS.append(next((name for name, known in RESULTS.items() if known is out), "other"))
    out[...] = self._n
    return out


cupy.ndarray.set, cupy.ndarray.get = put, fetch


def prepare(array, side, compute="auto", *, trans="N", layout="interleaved"):
    """What the kernels' `prepare` does where there is nothing to prepare."""
    return PreparedOperand(array, side, trans, layout, compute, None)


def kernel(params, operands, outs, given=None):
    operands = {name: source_of(array) for name, array in operands.items()}
    LIVE.append(sorted(index for index, value in enumerate(MADE) if value() is not None))
    LAYOUTS.append(
        [
            (name, array.shape, array.strides, array.dtype.name)
            for name, array in [*sorted(operands.items()), *sorted(outs.items())]
        ]
    )
    needed = sum(array.nbytes for array in (*operands.values(), *outs.values()))
    if needed > ROOM:
        raise memory.OutOfMemoryError(needed, needed, ROOM)
    host = {name: array._n for name, array in operands.items()}
    results = {name: np.empty(out.shape, out.dtype, order="C") for name, out in outs.items()}
    call(params, host, results)
    for name, out in outs.items():
        out._n[...] = results[name]


MADE = []
EVENTS = {"recorded": 0, "waited": 0, "most": 0}
empty = device_values.DeviceValues.empty
record, synchronize = cupy.cuda.Event.record, cupy.cuda.Event.synchronize


def watched_empty(self, value):
    array = empty(self, value)
    MADE.append(weakref.ref(array))
    return array


def noted_record(self, stream=None):
    record(self, stream)
    EVENTS["recorded"] += 1
    EVENTS["most"] = max(EVENTS["most"], EVENTS["recorded"] // 2 - EVENTS["waited"])


def noted_wait(self):
    synchronize(self)
    EVENTS["waited"] += 1


device_values.DeviceValues.empty = watched_empty
cupy.cuda.Event.record, cupy.cuda.Event.synchronize = noted_record, noted_wait
cuda.call, copies.prepare = kernel, prepare
verification.find_on_device = lambda params, operands, results, seed: verification.find(
    params, *({name: array._n for name, array in side.items()} for side in (operands, results)), seed
)
backend = cuda.CupyBackend("cuda", 0, 0.5)


def gemm(step, a, b, **fields):
    return {"id": step, "op": "gemm", "a": a, "b": b, **fields}


def compiled(*steps, **fields):
    request = TypeAdapter(JobRequest).validate_python({"op": "program", "steps": list(steps), **fields}, strict=True)
    return compile_program(request, {name: Operand.of(array) for name, array in ARRAYS.items()}, None)


def run(program, *, verify=False, checkpoint=lambda: None):
    """The program on the device, beside the same on the CPU."""
    for notes in (UPLOADS, DOWNLOADS, LIVE, MADE):
        notes.clear()
    EVENTS.update(recorded=0, waited=0, most=0)
    rooms = [
        {name: np.zeros(value.shape, value.dtype, order=value.order) for name, value in program.results.items()}
        for _ in range(2)
    ]
    RESULTS.clear()
    RESULTS.update(rooms[0])
    operands = {name: HostArray(array, name) for name, array in ARRAYS.items() if name in program.arrays}
    outcome = backend.run_program(
        lambda values: run_program(program.params, operands, rooms[0], values, backend.spec, verify=verify), checkpoint
    )
    cpu = CpuBackend()
    free = [each.model_copy(update={"config": None}) for each in program.params.steps]
    params = program.params.model_copy(update={"steps": tuple(free)})
    run_program(params, operands, rooms[1], HostValues(cpu, lambda: None), cpu.spec)
    right = all(np.allclose(rooms[0][name], rooms[1][name], rtol=1e-4, atol=1e-4) for name in rooms[0])
    return outcome, {"right": right, "uploads": list(UPLOADS), "downloads": list(DOWNLOADS)}


def alone(program):
    """Every step as a job of its own on the same device, its operands stored."""
    LAYOUTS.clear()
    values = dict(ARRAYS)
    for step, product, made in zip(program.params.steps, program.computations, program.values, strict=True):
        names = operands_of(step)
        operands = {operand: HostArray(values[name], name) for operand, name in names.items()}
        outs = {
            result: np.zeros(math.prod(shape), dtype).reshape(shape, order=order)
            for result, (shape, dtype, order) in products.outputs(product).items()
        }
        RESULTS.update(outs)
        backend.run(step, operands, outs)
        values |= dict(zip(made, outs.values(), strict=True))
    return list(LAYOUTS), values


found = {}
chain = compiled(
    gemm("x2", A, A, order="F"),
    gemm("kept", "$x2", "$x2", order="F"),
    gemm("x6", "$kept", "$x2"),
    {"id": "y", "op": "gemm_reduce", "a": "$x6", "b": B, "reduce": ["absmax", "sum", "mean"], "axis": "n"},
    keep=["kept", "y.absmax", "y.sum"],
)
_, found["chain"] = run(chain)
# Of no result: x2, x6 and y.mean, in the order of their making.
found["chain"] |= {"alive": list(LIVE), "expected_alive": [[0], [0], [0, 1], [1, 2]]}
_, found["again"] = run(chain)

ARRAYS[C] = np.asfortranarray(ARRAYS[B][:, :1])
layouts = compiled(
    gemm("column", A, C, order="F"),
    gemm("row", "$column", A, trans_a="C", order="F"),
    gemm("outer", "$column", "$row", order="F"),
    {"id": "r", "op": "gemm_reduce", "a": "$outer", "b": A, "reduce": ["absmax", "sum"], "return_c": True},
    gemm("end", "$r.c", "$outer", trans_a="T", trans_b="R", c="$outer", beta=[0.5, 1]),
    keep=["row", "r.sum", "end"],
)
LAYOUTS.clear()
run(layouts)
together, results = list(LAYOUTS), {name: array.copy() for name, array in RESULTS.items()}
apart, values = alone(layouts)
found["layouts"] = {
    "same": together == apart,
    "steps": len(together),
    "bits": all(array.tobytes() == values[f"${name}"].tobytes() for name, array in results.items()),
}
OPERATIONS = [
    {"id": "s", "op": "add", "a": A, "b": C, "alpha": [0, 1], "gamma": 2, "order": "F"},
    gemm("p", "$s", "$s", trans_a="C"),
    {"id": "m", "op": "multiply", "a": "$p", "b": "$s", "alpha": 0.5},
    {"id": "copy", "op": "add", "a": "$p", "order": "F"},
]
outcome, found["operations"] = run(compiled(*OPERATIONS, keep=["m", "copy"]), verify=True)
found["operations"]["residuals"] = sum(step.residual < 1e-5 for step in outcome.steps)
found["operations"]["algorithms"] = [step.algorithm for step in outcome.steps]
ROOM = 8 * 128 * 128 * 3 - 1  # the product does not fit, each operation does
_, found["operations"]["little memory"] = run(compiled(*OPERATIONS[:2], OPERATIONS[3]))
ROOM = 1 << 40


def view(name, offset, shape, strides, **fields):
    return {"id": name, "offset": offset, "shape": shape, "strides": strides, **fields}


VIEWS = [
    gemm("p", view(A, 127, [64, 128], [256, -1], conj=True), B, trans_a="R"),
    gemm("q", view("$p", 2, [20, 64], [1, 24], conj=True), view(A, 0, [64, 30], [1, 0])),
    {"id": "s", "op": "add", "a": {"id": "$q", "conj": True}, "b": view(B, 0, [20, 1], [24, 1], part="imag")},
    {"id": "m", "op": "multiply", "a": {"id": "$s", "part": "real"}, "b": view("$q", 29, [20, 30], [30, -1])},
]
outcome, found["views"] = run(compiled(*VIEWS, keep=["p", "m"]), verify=True)
found["views"]["residuals"] = sum(step.residual < 1e-5 for step in outcome.steps)
outcome, found["checked"] = run(compiled(gemm("x2", A, A), gemm("x4", "$x2", "$x2"), gemm("z", "$x4", B)), verify=True)
found["checked"]["residuals"] = sum(step.residual < 1e-5 for step in outcome.steps)

long = compiled(gemm("x1", A, A), *(gemm(f"x{n}", f"$x{n - 1}", A) for n in range(2, 40)))
_, found["ahead"] = run(long)
found["ahead"]["most_ahead"] = EVENTS["most"]
steps = 0


def checkpoint():
    global steps
    if steps == 7:
        raise JobCancelled("the job was cancelled")
    steps += 1


try:
    run(long, checkpoint=checkpoint)
except JobCancelled:
    found["ahead"]["cancelled_after"] = len(LIVE)

ROOM = 8 * 128 * 128 * 3 - 1  # one gemm of three squares does not fit; half of one does
_, found["little memory"] = run(compiled(gemm("x2", A, A), gemm("x4", "$x2", "$x2")))
found["little memory"]["fitted"] = len(LIVE) > 4
ROOM = 100
try:
    run(compiled(gemm("x2", A, A), gemm("x4", "$x2", "$x2")))
except OutOfDeviceMemory as error:
    found["no memory"] = {"error": type(error).__name__}

# Through the kernels' own `gemm` on arrays of the device: the vendor's BLAS, which the stand-in has.
cuda.call = call
vendor = {"config": {"algorithm": "vendor"}}
outcome, found["vendor"] = run(
    compiled(
        gemm("x2", A, A, order="F", **vendor),
        gemm("x3", "$x2", A, trans_a="C", c="$x2", beta=2, **vendor),
        gemm("x4", "$x3", "$x2", trans_b="T", **vendor),
        keep=["x3", "x4"],
    )
)
found["vendor"]["algorithms"] = [step.algorithm for step in outcome.steps]
print(json.dumps(found))
