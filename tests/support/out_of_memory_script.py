"""The CUDA backend with too little device memory, on the stand-in for CuPy: run in a process of its own.

What a kernel would compute is computed by NumPy, and refused where operands and results together exceed the room.
Prints one JSON object a product.
"""

import json
import pathlib
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "cupy_on_numpy"))

import numpy as np
from cupy.cuda import memory

from gemmserve_kernels.problem.errors import OutOfDeviceMemory
from gemmserve_service.executor.worker.backend import HostArray, call, go_on
from gemmserve_service.executor.worker.cuda import backend as cuda
from gemmserve_service.executor.worker.memory.host_arena import ArenaFile
from gemmserve_service.schemas import GemmParams, GemmReduceParams
from gemmserve_service.store.extents.memfd import create_arena

ROOM = 0
SEEN = []


def kernel(params, operands, outs, given=None):
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
ARENA = 4 << 20
fd = create_arena(ARENA)
backend = cuda.CupyBackend("cuda", 0, 0.5, ArenaFile(f"/proc/self/fd/{fd}", ARENA, ARENA))
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

# Memory that a step of what is prepared ahead has, which ends as soon as somebody waits for it.
taken, ends = threading.Event(), threading.Event()


def step():
    global ROOM
    taken.set()
    ends.wait(60)
    ROOM = WHOLE


def yield_memory(wait=backend.warm_up.yield_memory):
    if taken.is_set():
        ends.set()
    return wait()


backend.warm_up.yield_memory = yield_memory
backend.warm_up.steps = lambda: iter([step])
backend.warm_up.begin()
assert taken.wait(60)
attempt(GemmParams(), 1000, {"d": np.zeros((M, M))}, a=a, b=b)

# An operand that is a result which the device alone has, with room for the whole, and without.
import cupy  # noqa: E402

from gemmserve_service.executor.worker.memory.write_queue import Result  # noqa: E402

told = [], []
over = threading.Event()
while backend.arena.registered_bytes < ARENA:
    time.sleep(0.001)
registered, plain = (memory.reshape(-1, a.nbytes) for memory in (backend.arena.memory, np.zeros(4 * a.nbytes, "u1")))
places = {"late-0": registered[0], "late-1": plain[0], "late-2": registered[3], "late-3": plain[1]}


def tell(settled, lost):
    told[0].extend(settled)
    told[1].extend(lost)
    if len(told[0]) == len(places):
        over.set()


backend.write_queue.begin(tell, lambda row: places[row[0]])
for number, room in enumerate((WHOLE, WHOLE // 3)):
    value, name = cupy.empty(a.shape, a.dtype), f"late-{number}"
    value.set(a)
    backend.write_queue.reserve(f"task-{number}", [Result(name, value)], go_on)
    ROOM = room
    SEEN.clear()
    d = np.zeros((M, M))
    operand = HostArray(
        np.empty(a.shape), name, lambda name=name: backend.write_queue.read(name).view("f8").reshape(a.shape)
    )
    backend.run(GemmParams(), {"a": operand, "b": HostArray(b, "id-b")}, {"d": d})
    resident = backend.copies.resident.holds(name)
    backend.copies.resident.clear()
    print(json.dumps({"right": bool(np.array_equal(d, a @ b)), "tries": len(SEEN), "resident": resident}))
for number in (2, 3):  # from the device itself
    backend.write_queue.reserve(f"task-{number}", [Result(f"late-{number}", value)], go_on)
for number in range(4):
    backend.write_queue.write(f"task-{number}", {f"late-{number}": (f"late-{number}", "", 0, 0, None)}, urgent=False)
assert over.wait(60)
print(
    json.dumps(
        {"told": told, "right": all(np.array_equal(place, a.reshape(-1).view("u1")) for place in places.values())}
    )
)
