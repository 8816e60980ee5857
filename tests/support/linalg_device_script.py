"""Linear algebra on the stand-in for CuPy: which calls it makes there, and its results beside NumPy's, as JSON.

The products of our own kernels are NumPy's here. See cupy_on_numpy/README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cupy_on_numpy"))

import cupy
import numpy as np
from linalg_cases import adjoint, op, positive, random

from gemmserve_kernels import Operand
from gemmserve_kernels.dispatch.gemm import gemm
from gemmserve_kernels.operations.linalg import elimination, expm, hermitian, library
from gemmserve_kernels.operations.table import OPERATIONS
from gemmserve_kernels.problem.errors import KernelError


def on_host(*arrays, out=None, **options):
    """`gemm` of the stand-in's arrays: NumPy's."""
    made = gemm(*(None if array is None else cupy.asnumpy(array) for array in arrays), **options)
    if out is None:
        return cupy.array(made)
    out[...] = cupy.array(made)
    return out


elimination.gemm = expm.gemm = hermitian.gemm = on_host
hermitian.DEVICE_LEAF = 8
library._BATCHED_LIMIT = 10  # one after the other beyond
rng = np.random.default_rng(1)
found = {}


def run(name, kind, arrays, expected, **params):
    operation = OPERATIONS[kind](**{each: Operand.of(array) for each, array in arrays.items()}, **params)
    operands = {each: cupy.array(array) for each, array in arrays.items()}
    shape, dtype, _ = operation.results["d"]
    out = cupy.empty(shape, dtype)
    try:
        operation.run(operands, {"d": out})
    except KernelError as error:
        found[name] = [error.slug, getattr(error, "index", None)]
        return
    finding = operation.find(operands, {"d": out}, 3)
    right = np.allclose(out.get(), expected, rtol=1e-8, atol=1e-8 * np.abs(expected).max(initial=0))
    found[name] = [bool(right), bool(not finding.excess > 8)]


for n, batch in ((7, (2, 3)), (20, (2,)), (20, ()), (0, (2,))):
    a = random(rng, (*batch, n, n), "c16")
    b = random(rng, (*batch, n, 2), "c16")
    p = positive(rng, (*batch, n, n), "c16")
    eye = np.eye(n)
    what = f"{n} {list(batch)}"
    wide = a + 9 * eye
    for assume, matrix, exact in (
        ("general", a, a),
        ("positive", p, p),
        ("lower", wide, np.tril(wide)),
        ("upper", wide, np.triu(wide)),
    ):
        run(f"solve {assume} {what}", "solve", {"a": matrix, "b": b}, np.linalg.solve(exact, b), assume=assume)
        run(f"inv {assume} {what}", "inv", {"a": matrix}, np.linalg.inv(exact), assume=assume)
    shared = positive(rng, (n, n), "c16") if n else np.zeros((0, 0))
    run(f"solve shared {what}", "solve", {"a": shared, "b": b}, np.linalg.solve(shared, b))
    run(f"cholesky {what}", "cholesky", {"a": op(p, "C")}, np.linalg.cholesky(p), trans_a="C")
    run(f"herk {what}", "herk", {"a": a, "c": p}, 2 * a @ adjoint(a) - p, alpha=2, beta=-1)
    run(f"herk upper {what}", "herk", {"a": a}, np.triu(a @ adjoint(a)), fill="upper")
    small = a / max(n, 1)
    values, vectors = np.linalg.eig(small)
    exact = (vectors * np.exp(values)[..., None, :]) @ np.linalg.inv(vectors)
    run(f"expm {what}", "expm", {"a": small}, exact)
    run(f"triangle {what}", "triangle", {"a": a}, np.triu(a, 1) + eye, fill="upper", unit=True)
    run(f"hermitian {what}", "triangle", {"a": p + np.triu(a, 1)}, p, structure="hermitian")
    run(f"sum {what}", "sum", {"a": a}, 3 * a.sum(-1), axes=[-1], alpha=3)
singular = random(rng, (4, 5, 5), "f8")
singular[2, 1] = 0
run("singular", "inv", {"a": singular}, singular)
run("singular triangle", "inv", {"a": singular * np.tri(5)}, singular, assume="lower")
broken = positive(rng, (4, 5, 5), "f8")
broken[3, 2, 2] = -1
run("not positive", "cholesky", {"a": broken}, broken)
print(json.dumps(found))
