"""The CUDA backend with too little device memory, on the stand-in for CuPy: run in a process of its own.

What a kernel would compute is computed by NumPy, and refused where operands and results together exceed the room.
Prints one JSON object a product.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "cupy_on_numpy"))

import numpy as np
from cupy.cuda import memory

from gemmserve_kernels.problem.errors import OutOfDeviceMemory
from gemmserve_service.executor.worker.backend import HostArray, call
from gemmserve_service.executor.worker.cuda import backend as cuda
from gemmserve_service.schemas import GemmParams, GemmReduceParams

ROOM = 0
SEEN = []


def kernel(params, operands, outs):
    needed = sum(array.nbytes for array in (*operands.values(), *outs.values()))
    SEEN.append(needed)
    if needed > ROOM:
        raise memory.OutOfMemoryError(needed, needed, ROOM) if len(SEEN) % 2 else OutOfDeviceMemory("no room")
    host = {name: array.get() for name, array in operands.items()}
    results = {name: np.empty(out.shape, out.dtype) for name, out in outs.items()}
    call(params, host, results)
    for name, out in outs.items():
        out.set(np.asarray(results[name], order="C" if out.flags.c_contiguous else "F"))


def attempt(params, room, results, **arrays):
    global ROOM
    ROOM = room
    SEEN.clear()
    expected = {name: np.empty(out.shape, out.dtype) for name, out in results.items()}
    call(params, arrays, expected)
    operands = {name: HostArray(array, f"id-{name}") for name, array in arrays.items()}
    try:
        backend.run(params, operands, results)
    except OutOfDeviceMemory as error:
        print(json.dumps({"error": str(error), "tries": len(SEEN)}))
        return
    right = all(np.array_equal(results[name], expected[name]) for name in results)
    print(json.dumps({"right": right, "tries": len(SEEN), "fitted": sum(needed <= ROOM for needed in SEEN)}))


cuda.call = kernel
backend = cuda.CupyBackend("cuda", 0, 0.5)
rng = np.random.default_rng(1)
M = 512
a = rng.integers(-3, 4, (M, 64)).astype("f8")
b = rng.integers(-3, 4, (64, M)).astype("f8")
WHOLE = 8 * (2 * M * 64 + M * M)
for order in "CF":
    d = np.zeros((M, M), order=order)
    attempt(GemmParams(order=order), WHOLE, {"d": d}, a=a, b=b)
    attempt(GemmParams(order=order), WHOLE // 3, {"d": d * 0}, a=a, b=b)
attempt(GemmReduceParams(reduce=["sumsq", "argmax"], return_c=True), WHOLE // 2,
        {"sumsq": np.zeros(M), "argmax": np.zeros(M, "i8"), "c": np.zeros((M, M))}, a=a, b=b)  # fmt: skip
attempt(GemmParams(), 1000, {"d": np.zeros((M, M))}, a=a, b=b)

# An operand that is a result which the device alone has, with room for the whole, and without.
import cupy  # noqa: E402

from gemmserve_service.executor.worker.memory.write_queue import Result  # noqa: E402

told = []
backend.write_queue.begin(told.append)
for number, room in enumerate((WHOLE, WHOLE // 3)):
    value, place = cupy.empty(a.shape, a.dtype), np.zeros(a.shape)
    value.set(a)
    assert backend.write_queue.reserve(f"task-{number}", [Result(f"late-{number}", value, place)])
    backend.write_queue._delay_s = 3600.0
    backend.write_queue.start(f"task-{number}")
    ROOM = room
    SEEN.clear()
    d = np.zeros((M, M))
    backend.run(GemmParams(), {"a": HostArray(place, f"late-{number}"), "b": HostArray(b, "id-b")}, {"d": d})
    print(json.dumps({
        "right": bool(np.array_equal(d, a @ b)),
        "tries": len(SEEN),
        "written": bool(np.array_equal(place, a)),
        "told": [outcome.task for outcome in told],
    }))  # fmt: skip
    backend.write_queue.flush()
