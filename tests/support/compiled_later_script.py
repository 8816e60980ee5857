"""Products by the project's own kernels, on the CPU shim, whose kernels are compiled while they wait, and again with
the kernels there: as a worker runs them. A process of its own; prints what was found as JSON.
"""

import json
import queue
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import shim_driver  # puts the stand-ins for CuPy and the driver in their places

import cupy  # isort: skip
import numpy as np
from works import packed

from gemmserve_kernels import Operand, plan
from gemmserve_kernels.device import compiler
from gemmserve_service import products
from gemmserve_service.executor.protocol import ArrayRef
from gemmserve_service.executor.worker.cuda import backend as cuda
from gemmserve_service.executor.worker.overlap.overlap import Overlap
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import GemmParams, GemmReduceParams
from gemmserve_service.store.extents.extents import ExtentPool

WAIT_S = 60
CASES = {
    "plain": GemmParams(config={"algorithm": "simt"}, alpha=2),
    "tensor cores": GemmParams(compute="3xtf32", config={"algorithm": "mma"}),
    "several kernels": GemmParams(compute="3xfp16", config={"algorithm": "mma"}, alpha=0.5),
    "reduced": GemmReduceParams(reduce=["sumsq", "argmax"], return_c=True),
}
BESIDE = GemmParams(config={"algorithm": "simt"})
"""A product of real numbers, whose kernel is there."""


def put(self, array):
    """ndarray.set, which the stand-in lacks."""
    self._n[...] = array


def fetch(self, stream=None, order="C", out=None, blocking=True):
    """ndarray.get."""
    if out is None:
        return np.array(self._n, order=order)
    out[...] = self._n
    return out


cupy.ndarray.set, cupy.ndarray.get = put, fetch

there = set()
"""Kernels that are compiled."""
loaded_too_early = []
compiling = threading.Event()
"""Whether the compiler gets on."""


def compiled_file(source, arch):
    return Path(f"{source.name}.cubin") if source in there else None


def cubin_file(source, arch):
    assert compiling.wait(WAIT_S)
    there.add(source)
    return compiled_file(source, arch)


def load(source, *others, load=compiler.load):
    if source not in there and source.name != "read_counters":  # which is no product's
        loaded_too_early.append(source.name)
    return load(source, *others)


compiler.compiled_file, compiler.cubin_file, compiler.load = compiled_file, cubin_file, load

pool = ExtentPool(Path(tempfile.mkdtemp()), keep_bytes=0)


def place(array):
    """Puts an array where a worker finds it; returns the reference and its bytes."""
    extent = pool.take(array.nbytes)
    view = extent.view(array.nbytes)
    view[:] = array.tobytes()
    return ArrayRef(
        extent=extent.file[0], path=extent.path, capacity=extent.file[1], offset=extent.start,
        dtype=array.dtype.name, shape=array.shape, order="C", nbytes=array.nbytes,
    ), view  # fmt: skip


class Worker:
    """A worker's tasks, without a front; in the thread that makes it."""

    def __init__(self, backend):
        self.said = queue.Queue()
        """Answers, and (task, whether it waits for the compiler)."""
        self.backend = backend
        self.overlap = Overlap(Runner(backend), backend, self.said.put, lambda *told: self.said.put(told))

    def start(self, name, params, a, b):
        """Starts a product; returns what reads its results."""
        product = products.build(params, {"a": Operand.of(a), "b": Operand.of(b)})
        results = {key: place(np.zeros(shape, dtype)) for key, (shape, dtype, _) in products.outputs(product).items()}
        chosen = plan(product, self.backend.spec).algorithm
        run = Run(
            task=name,
            params=params,
            algorithm=chosen,
            operands={"a": place(a)[0], "b": place(b)[0]},
            results={key: ref for key, (ref, _) in results.items()},
        )
        (work,) = packed(run).tasks
        self.overlap.start(work)
        return chosen, lambda: {key: bytes(view).hex() for key, (_, view) in results.items()}

    def hears(self):
        return self.said.get(timeout=WAIT_S)


backend = cuda.CupyBackend("cuda", 0, 0.5)
rng = np.random.default_rng(5)
a = (rng.standard_normal((40, 70)) + 1j * rng.standard_normal((40, 70))).astype("c8")
b = (rng.standard_normal((70, 30)) + 1j * rng.standard_normal((70, 30))).astype("c8")
real = rng.standard_normal((24, 24)).astype("f4")
found = {}
for name, params in CASES.items():
    there.clear()
    compiling.set()
    cold = Worker(backend)
    cold.start("before", BESIDE, real, real)  # its kernels are there from here on
    while not hasattr(answer := cold.hears(), "algorithm"):
        pass
    compiling.clear()
    del shim_driver.launched[:]
    chosen, read = cold.start(name, params, a, b)
    told = cold.hears()
    cold.start("beside", BESIDE, real, real)
    passed = cold.hears()
    launched_beside = len(shim_driver.launched)
    compiling.set()
    over, done = cold.hears(), cold.hears()
    cold_launches, cold_bits = shim_driver.launched[launched_beside:], read()
    del shim_driver.launched[:]
    warm = Worker(backend)
    _, read_warm = warm.start("warm", params, a, b)
    again = warm.hears()
    found[name] = {
        "waited": [told == (name, True), over == (name, False), done.timings.compile_s > 0],
        "passed": passed.task,
        "algorithms": [chosen, done.algorithm, again.algorithm],
        "same kernels": cold_launches == shim_driver.launched != [],
        "same bits": cold_bits == read_warm(),
        "warm waited": again.timings.compile_s,
    }
    if isinstance(params, GemmParams):
        bits = np.frombuffer(bytes.fromhex(cold_bits["d"]), "c8").reshape(40, 30)
        exact = params.alpha * (a.astype("c16") @ b)
        found[name]["error"] = float(np.linalg.norm(bits - exact) / np.linalg.norm(exact))
print(json.dumps({"cases": found, "loaded too early": loaded_too_early}))
