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
for each, product, made in zip(program.params.steps, program.products, program.values, strict=True):
    outs = {
        name: np.zeros(shape, dtype, order=order) for name, (shape, dtype, order) in products.outputs(product).items()
    }
    backend.run(each, {operand: HostArray(values[name]) for operand, name in operands_of(each).items()}, outs)
    values |= dict(zip(made, outs.values(), strict=True))

x2 = a.astype("c16") @ a
x3 = x2.conj().T @ a + (0.5 + 1j) * x2
p = x3 @ b
z = x3 @ p @ p.conj().T
same = {name: array.tobytes() == values[f"${name}"].tobytes() for name, array in results.items()}
print(json.dumps({"same": same, "error": float(np.linalg.norm(results["z"] - z) / np.linalg.norm(z))}))
