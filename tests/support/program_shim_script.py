"""A program through the project's own kernels, on the CPU shim, beside each of its steps as a job of its own.

A process of its own; prints, by result, whether the bits are the same, and the error of the last one, as JSON.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import shim_driver  # noqa: F401  # puts the stand-ins for CuPy and the driver in their places

import cupy  # isort: skip
import numpy as np
from pydantic import TypeAdapter

from gemmserve_kernels import Operand
from gemmserve_service import products
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.executor.worker.cuda import backend as cuda
from gemmserve_service.executor.worker.programs import run_program
from gemmserve_service.jobs.compile_program import compile_program
from gemmserve_service.programs import operands_of
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.schemas import JobRequest

SIMT = {"config": {"algorithm": "simt"}}


def put(self, array):
    """ndarray.set, which the stand-in lacks."""
    self._n[...] = array


def fetch(self, stream=None, order="C", out=None, blocking=True):
    """ndarray.get."""
    if out is None:
        return np.array(self._n, order=order)
    out[...] = self._n
    return out


def step(name, a, b, op="gemm", **fields):
    return {"id": name, "op": op, "a": a, "b": b, **SIMT, **fields}


cupy.ndarray.set, cupy.ndarray.get = put, fetch
backend = cuda.CupyBackend("cuda", 0, 0.5)
A, B = new_id("arr"), new_id("arr")
rng = np.random.default_rng(0)
a = ((rng.standard_normal((40, 40)) + 1j * rng.standard_normal((40, 40))) / 6).astype("c8")
b = np.asfortranarray((rng.standard_normal((40, 24)) + 1j * rng.standard_normal((40, 24))).astype("c8"))
arrays = {A: a, B: b}
steps = [
    step("x2", A, A, order="F"),
    step("x3", "$x2", A, trans_a="C", c="$x2", beta=[0.5, 1]),
    step("p", "$x3", B),
    step("y", "$x3", "$p", "gemm_reduce", reduce=["absmax", "argmax", "sumsq"], return_c=True),
    step("z", "$y.c", "$p", trans_b="C", order="F"),
]
request = TypeAdapter(JobRequest).validate_python(
    {"op": "program", "steps": steps, "keep": ["x2", "y", "z"]}, strict=True
)
program = compile_program(request, {name: Operand.of(array) for name, array in arrays.items()}, None)
results = {name: np.full(value.shape, 7, value.dtype, order=value.order) for name, value in program.results.items()}
operands = {name: HostArray(array, name) for name, array in arrays.items()}
backend.run_program(lambda values: run_program(program.params, operands, results, values, backend.spec))

values = dict(arrays)
for each, product, made in zip(program.params.steps, program.computations, program.values, strict=True):
    outs = {
        name: np.zeros(shape, dtype, order=order) for name, (shape, dtype, order) in products.outputs(product).items()
    }
    backend.run(each, {operand: HostArray(values[name]) for operand, name in operands_of(each).items()}, outs)
    values |= dict(zip(made, outs.values(), strict=True))

x2 = a.astype("c16") @ a
x3 = x2.conj().T @ a + (0.5 + 1j) * x2
p = x3 @ b
z = x3 @ p @ p.conj().T


def seen(value, offset, shape, strides):
    """The same elements by NumPy."""
    steps = tuple(stride * value.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(value.ravel(order="K")[offset:], shape, steps)


def view(name, offset, shape, strides, **fields):
    return {"id": name, "offset": offset, "shape": shape, "strides": strides, **fields}


WINDOWS, BACKWARDS, ONE = (1, (3, 20, 16), (40, 41, 2)), (39, (16, 24), (40, -1)), (7, (20, 24), (0, 0))
by_view = [
    step("p", view(A, *WINDOWS, conj=True), view(B, *BACKWARDS), trans_b="R"),
    step("q", view("$p", 0, (20, 72), (24, 1), part="imag"), view(A, 0, (72, 8), (3, 90), part="real")),
    step("r", view(A, *WINDOWS), view(A, *BACKWARDS), c=view(A, *ONE, conj=True), beta=2),
    step("y", view("$p", 1439, (24, 20), (-1, -24)), view("$p", 0, (20, 9), (24, 1)), "gemm_reduce", reduce="absmax"),
]
asked = TypeAdapter(JobRequest).validate_python(
    {"op": "program", "steps": by_view, "keep": ["p", "q", "r", "y"]}, strict=True
)
views = compile_program(asked, {name: Operand.of(array) for name, array in arrays.items()}, None)
made = {name: np.full(value.shape, 7, value.dtype, order=value.order) for name, value in views.results.items()}
backend.run_program(lambda values: run_program(views.params, operands, made, values, backend.spec))
wide, p_wide = a.astype("c16"), made["p"].astype("c16")
expected = {
    "p": seen(wide, *WINDOWS).conj() @ seen(b.astype("c16"), *BACKWARDS).conj(),
    "q": seen(p_wide, 0, (20, 72), (24, 1)).imag @ seen(wide, 0, (72, 8), (3, 90)).real,
    "r": seen(wide, *WINDOWS) @ seen(wide, *BACKWARDS) + 2 * seen(wide, *ONE).conj(),
    "y.absmax": np.abs(seen(p_wide, 1439, (24, 20), (-1, -24)) @ seen(p_wide, 0, (20, 9), (24, 1))).max(axis=0),
}
by_view_error = max(
    float(np.linalg.norm(made[name] - value) / np.linalg.norm(value)) for name, value in expected.items()
)
same = {name: array.tobytes() == values[f"${name}"].tobytes() for name, array in results.items()}
print(
    json.dumps(
        {"same": same, "error": float(np.linalg.norm(results["z"] - z) / np.linalg.norm(z)), "by view": by_view_error}
    )
)
