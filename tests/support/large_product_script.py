"""Large products on the CUDA backend by blocks, on the stand-in for CuPy, whose memory is counted and bounded: run in a
process of its own. NumPy computes in the kernels' place.

Prints one JSON object a case.
"""

import gc
import hashlib
import json
import logging
import pathlib
import sys
import tempfile
import threading
import time
from dataclasses import replace

sys.path.insert(0, str(pathlib.Path(__file__).parent / "cupy_on_numpy"))

import cupy
import numpy as np
from cupy._array import ACCOUNT
from cupy.cuda import memory

from gemmserve_kernels.blocks import memory_plan
from gemmserve_kernels.blocks.grid import GridRule
from gemmserve_kernels.blocks.reduction import BlockReduction
from gemmserve_service.executor.protocol import BLOCKS_AHEAD, ArrayRef, BlockOf
from gemmserve_service.executor.worker.backend import call
from gemmserve_service.executor.worker.blocks.gridded import grid_of
from gemmserve_service.executor.worker.cuda import backend as cuda
from gemmserve_service.executor.worker.cuda import copies, pinned_ring
from gemmserve_service.executor.worker.overlap.overlap import Overlap
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import GemmParams, GemmReduceParams
from gemmserve_service.store.extents.extents import ExtentPool

RULE = GridRule(128)
M, N, K = 640, 768, 512
KERNEL = threading.local()
PAGEABLE = []
UPLOADED = [0]
CALLS = [0]
FAILING = 0
"""The first of so many products finds too little memory; 0: none does."""
SHORT = []
"""Numbers of products, in their order, that find too little memory."""


def kernel(params, operands, outs, given=None):
    CALLS[0] += 1
    if (FAILING and CALLS[0] % FAILING == 0) or CALLS[0] in SHORT:
        raise memory.OutOfMemoryError(1, 1, 1)
    STRIPS.append(getattr(params, "strips", 1))
    if PLANES:
        (m, k), (_, n) = operands["a"].shape, operands["b"].shape
        assert STRIPS[-1] == 1 or params.config.algorithm == "wgmma"
        for _ in range(STRIPS[-1]):
            cupy.cuda.alloc(PLANES * k * sum(strip_of(m, n, STRIPS[-1])))
    KERNEL.at_work = True
    host = {name: array.get(order="K") for name, array in operands.items()}
    results = {name: np.empty(out.shape, out.dtype) for name, out in outs.items()}
    call(params.model_copy(update={"config": None}), host, results)
    for name, out in outs.items():
        out.set(np.asarray(results[name], order="C" if out.flags.c_contiguous else "F"))
    KERNEL.at_work = False


def strip_of(m, n, strips):
    across = {1: 1, 2: 1, 4: 2, 8: 2, 16: 4}[strips]
    return -(-m // across), -(-n // (strips // across))


def planes(problem, spec, strips=1):
    return PLANES * problem.k * sum(strip_of(problem.m, problem.n, strips))


memory_plan.workspace_bytes = planes
memory_plan.algorithm_with_strips = lambda *_: "wgmma" if PLANES else None


def watched(name):
    plain = getattr(cupy.ndarray, name)

    def method(self, *args, **kwargs):
        if not getattr(KERNEL, "at_work", False):
            PAGEABLE.append(self.nbytes)
        return plain(self, *args, **kwargs)

    setattr(cupy.ndarray, name, method)


def counted(self, target, source, stream):
    UPLOADED[0] += source.size
    upload(self, target, source, stream)


upload = pinned_ring.CupyLink.upload
pinned_ring.CupyLink.upload = counted
PLANES = 0
"""Bytes that are made of every element of a block's panels; 0: what NumPy takes is not the device's."""
STRIPS = []
"""Strips in which products were computed."""
cuda.call = kernel
copies._DIRECT = 1
pinned_ring.SLOT_BYTES = 1 << 12
watched("get")
watched("set")

pool = ExtentPool(pathlib.Path(tempfile.mkdtemp()), keep_bytes=0)
rng = np.random.default_rng(1)
A, B, C = (rng.standard_normal(shape).astype("f4") for shape in ((M, K), (K, N), (M, N)))
CASES = {
    "plain": (GemmParams(), {"a": A, "b": B}, "C"),
    "turned": (GemmParams(trans_a="T", trans_b="T", order="F"), {"a": A.T.copy(), "b": np.asfortranarray(B.T)}, "F"),
    "added": (GemmParams(beta=2), {"a": np.asfortranarray(A), "b": B, "c": C}, "C"),
}
WHOLE = A.nbytes + B.nbytes + 4 * M * N


def place(array):
    extent = pool.take(array.nbytes)
    view = extent.view(array.nbytes)
    view[:] = array.tobytes(order="A")
    return ArrayRef(
        extent=extent.file[0], path=extent.path, capacity=extent.file[1], offset=extent.start, nbytes=array.nbytes,
        dtype=array.dtype.name, shape=array.shape, order="C" if array.flags.c_contiguous else "F",
    ), view  # fmt: skip


def message_of(name, **fields):
    params, arrays, order = CASES[name]
    out, view = place(np.full((M, N), np.nan, "f4", order))
    operands = {side: place(array)[0] for side, array in arrays.items()}
    operands = {side: replace(ref, cache_id=f"{name}-{side}") for side, ref in operands.items()}
    return Run("t", params, "ours", operands, {"d": replace(out, cache_id=f"{name}-d")}, **fields), view


def opened(budget):
    gc.collect()
    assert ACCOUNT.used == 0, "memory of the case before"
    ACCOUNT.release()
    assert ACCOUNT.taken == 0, "memory of the case before"
    ACCOUNT.limit = 0
    backend = cuda.CupyBackend("cuda", 0, 0.75, memory_bytes=budget)
    ACCOUNT.peak = ACCOUNT.used
    PAGEABLE.clear()
    UPLOADED[0] = 0
    return backend


def run(backend, messages, *, overlapped):
    """Answers of tasks, one after the other or in a worker's pipeline."""
    runner = Runner(backend, RULE)
    if not overlapped:
        backend.enter()
        return [runner.run(message) for message in messages]
    answers = []
    overlap = Overlap(runner, backend, answers.append)
    overlap._compilation = None  # there is no compiler
    for number, message in enumerate(messages):
        while number - len(answers) >= 2:  # as the front does
            time.sleep(0.001)
        overlap.start(message)
    overlap.close()
    runner.forget([], parents=["t"])
    return answers


def expecting(order, **fields):
    """Blocks in an order, each with those that come after it."""
    return [
        BlockOf(parent="t", index=index, ahead=tuple(order[place + 1 : place + 1 + BLOCKS_AHEAD]), **fields)
        for place, index in enumerate(order)
    ]


def reduction(share, *, overlapped, blocks=False, shuffle=None, failing=0):
    """`case` of a reduction; `blocks`: by blocks as messages of their own, and then one that puts them together."""
    global FAILING
    params = GemmReduceParams(reduce=["sum", "absmax", "argmax"], axis="n")
    operands = {side: place(array)[0] for side, array in (("a", A), ("b", B))}
    operands = {side: replace(ref, cache_id=f"reduced-{side}") for side, ref in operands.items()}
    placed = {name: place(np.full(M, 9, dtype)) for name, dtype in (("sum", "f4"), ("absmax", "f4"), ("argmax", "i8"))}
    grid = grid_of(params, operands, RULE)
    if blocks:
        placed["partials"] = place(np.full(BlockReduction(grid).nbytes // 8, np.nan))
    message = Run("t", params, "ours", operands, {name: ref for name, (ref, _) in placed.items()})
    least = memory_plan.plan_memory(grid, cuda.DeviceSpec.of(0), 0).needed_bytes
    budget = max(least, int(share * (A.nbytes + B.nbytes)))
    backend = opened(budget)
    plan = backend.plan_blocks(grid)
    messages = [message]
    if blocks:
        order = list(plan.order)
        if shuffle is not None:
            np.random.default_rng(shuffle).shuffle(order)
        named = expecting(order, sides=grid.sides, algorithm="simt")
        messages = [replace(message, task=f"t/{block.index}", block=block) for block in named]
    FAILING = failing
    answers = run(backend, messages, overlapped=overlapped)
    FAILING = 0
    if blocks:
        named = BlockOf(parent="t", sides=grid.sides, index=0, combine=True)
        answers += run(backend, [replace(message, task="t/all", block=named)], overlapped=overlapped)
    found = {name: np.frombuffer(bytes(placed[name][1]), ref.dtype) for name, (ref, _) in placed.items()}
    product = A.astype("f8") @ B
    error = max(
        np.abs(found["sum"] - product.sum(1)).max() / 30, np.abs(found["absmax"] - np.abs(product).max(1)).max()
    )
    there = np.take_along_axis(product, found["argmax"][:, None], 1)[:, 0]
    error = max(error, np.abs(there - product.max(1)).max())
    print(json.dumps({
        "case": "reduced", "overlapped": overlapped, "blocks": blocks, "failing": failing,
        "answers": sorted({answer.kind for answer in answers}), "tasks": len(answers), "expected": grid.count + 1,
        "detail": next((answer.detail for answer in answers if answer.kind == "failed"), ""), "error": float(error),
        "bits": hashlib.sha256(b"".join(found[name].tobytes() for name in params.reduce)).hexdigest(),
        "fits": plan.fits, "uploaded": UPLOADED[0], "planned": plan.uploaded_bytes, "shuffled": shuffle is not None,
        "budget": budget, "peak": ACCOUNT.peak, "streams": plan.uploaded_bytes > A.nbytes + B.nbytes,
        "pageable": max(PAGEABLE, default=0), "used": backend.copies.resident.used,
    }), flush=True)  # fmt: skip


def case(name, share, *, overlapped, blocks=False, shuffle=None, failing=0):
    """`share`: of what operands and result take; None: what a pair of panels needs. `blocks`: as messages of their own,
    in an order of their own where `shuffle` is a seed.
    """
    global FAILING
    message, view = message_of(name)
    grid = grid_of(message.params, message.operands, RULE)
    budget = memory_plan.plan_memory(grid, cuda.DeviceSpec.of(0), 0).needed_bytes
    if share is not None:
        budget = max(budget, int(WHOLE * share)) if share > 0.2 else int(WHOLE * share)
    backend = opened(budget)
    plan = backend.plan_blocks(grid)
    messages = [message]
    if blocks:
        order = list(plan.order)
        if shuffle is not None:
            np.random.default_rng(shuffle).shuffle(order)
        named = expecting(order, sides=grid.sides, algorithm="vendor")
        messages = [replace(message, task=f"t/{block.index}", block=block) for block in named]
    FAILING = failing
    answers = run(backend, messages, overlapped=overlapped)
    FAILING = 0
    order = CASES[name][2]
    d = np.frombuffer(bytes(view), "f4").reshape((M, N), order=order)
    exact = A.astype("f8") @ B + (2.0 * C if name == "added" else 0)
    read = C.nbytes if name == "added" else 0
    print(json.dumps({
        "case": name, "overlapped": overlapped, "blocks": blocks, "failing": failing, "shuffled": shuffle is not None,
        "answers": sorted({answer.kind for answer in answers}), "tasks": [answer.task for answer in answers],
        "expected": [each.task for each in messages],
        "detail": next((answer.detail for answer in answers if answer.kind == "failed"), ""),
        "error": float(np.abs(d - exact).max()), "bits": hashlib.sha256(bytes(view)).hexdigest(),
        "fits": plan.fits, "uploaded": UPLOADED[0] - read, "planned": plan.uploaded_bytes,
        "budget": budget, "peak": ACCOUNT.peak, "pageable": max(PAGEABLE, default=0),
        "resident": backend.copies.resident.holds(f"{name}-d"), "used": backend.copies.resident.used,
    }), flush=True)  # fmt: skip


for name in CASES:
    for share, overlapped, blocks in (
        (4.0, False, False), (0.25, True, False), (0.25, False, False), (0.25, True, True),
        (None, True, False), (0.45, True, False),
    ):  # fmt: skip
        case(name, share, overlapped=overlapped, blocks=blocks)
    case(name, 0.3, overlapped=True, blocks=True, shuffle=7)
    case(name, 0.3, overlapped=True, failing=4)
case("plain", 0.1, overlapped=True)
for share, overlapped, blocks in (
    (4.0, False, False), (0.25, True, False), (0.25, True, True), (0.0, False, False),
):  # fmt: skip
    reduction(share, overlapped=overlapped, blocks=blocks)
reduction(0.3, overlapped=True, blocks=True, shuffle=7)
reduction(0.3, overlapped=True, failing=4)


def stripped(budget):
    """A product whose algorithm makes planes, within so many bytes."""
    message, view = message_of("plain")
    grid = grid_of(message.params, message.operands, RULE)
    backend = opened(budget)
    plan = backend.plan_blocks(grid)
    STRIPS.clear()
    answers = run(backend, [message], overlapped=True)
    print(json.dumps({
        "case": "stripped", "answers": [answer.kind for answer in answers], "fits": plan.fits, "strips": plan.strips,
        "computed": sorted(set(STRIPS)), "prepared": sum(STRIPS), "blocks": grid.count, "budget": budget,
        "bits": hashlib.sha256(bytes(view)).hexdigest(), "peak": ACCOUNT.peak, "uploaded": UPLOADED[0],
        "planned": plan.uploaded_bytes, "slots": plan.slots, "windows": plan.windows,
    }), flush=True)  # fmt: skip


PLANES = 6
PANEL, WINDOW = 128 * K * 4, 128 * 128 * 4
PAIR = 2 * PANEL + WINDOW + PLANES * K * 256
for budget in (2 * PAIR, PAIR + PANEL + WINDOW // 2, PAIR - PANEL // 2):
    stripped(budget)


def short(count):
    """A product whose sixth block finds too little memory so often."""
    message, view = message_of("plain")
    grid = grid_of(message.params, message.operands, RULE)
    backend = opened(int(WHOLE * 0.6))
    plan = backend.plan_blocks(grid)
    CALLS[0] = 0
    SHORT[:] = range(6, 6 + count)
    said = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("gemmserve_service.executor.worker")
    logger.addHandler(heard)
    logger.setLevel(logging.DEBUG)
    answers = run(backend, [message], overlapped=True)
    logger.removeHandler(heard)
    logger.setLevel(logging.NOTSET)
    print(json.dumps({
        "case": "short", "count": count, "answers": [answer.kind for answer in answers], "calls": CALLS[0],
        "blocks": grid.count, "bits": hashlib.sha256(bytes(view)).hexdigest(), "uploaded": UPLOADED[0],
        "planned": plan.uploaded_bytes, "pair": sum(plan.slot_bytes), "slots": plan.slots,
        "used": backend.copies.resident.used, "peak": ACCOUNT.peak, "budget": int(WHOLE * 0.6),
        "order": plan.order, "log": "\n".join(said) if not count else "", "h2d_s": answers[0].timings.h2d_s,
    }), flush=True)  # fmt: skip
    SHORT.clear()


PLANES = 0
for count in range(6):
    short(count)
