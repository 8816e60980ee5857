"""One of two workers that compute halves of a large product on the stand-in for CuPy, whose memory both can map: run in
a process of its own. NumPy computes in the kernels' place.

Takes a JSON object as its argument and steps on standard input; prints a JSON object a step.
"""

import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "cupy_on_numpy"))

import numpy as np
from cupy._array import ACCOUNT
from cupy.cuda import runtime

from gemmserve_kernels.blocks import memory_plan
from gemmserve_kernels.blocks.grid import GridRule
from gemmserve_service.executor.protocol import BLOCKS_AHEAD, ArrayRef, BlockOf
from gemmserve_service.executor.worker.backend import call
from gemmserve_service.executor.worker.blocks import peer_panels
from gemmserve_service.executor.worker.blocks.gridded import grid_of
from gemmserve_service.executor.worker.blocks.panel_table import PanelsFile
from gemmserve_service.executor.worker.cuda import backend as cuda
from gemmserve_service.executor.worker.cuda import copies, peer_link, pinned_ring
from gemmserve_service.executor.worker.overlap.overlap import Overlap
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import GemmParams

told = json.loads(sys.argv[1])
RULE = GridRule(told["side"])
M = N = K = told["n"]
UPLOADED, COPIED = [0], [0]
KERNEL_S = told.get("kernel_s", 0.0)


def kernel(params, operands, outs, given=None):
    time.sleep(KERNEL_S)
    host = {name: array.get(order="K") for name, array in operands.items()}
    results = {name: np.empty(out.shape, out.dtype) for name, out in outs.items()}
    call(params.model_copy(update={"config": None}), host, results)
    for name, out in outs.items():
        out.set(results[name])


def counted(self, target, source, stream):
    time.sleep(told.get("piece_s", 0.0))
    UPLOADED[0] += source.size
    upload(self, target, source, stream)


def copied(self, target, source, nbytes):
    COPIED[0] += nbytes
    if told.get("stop_in_copy"):
        print(json.dumps({"step": "copies"}), flush=True)
        time.sleep(told["stop_in_copy"])
    copy(self, target, source, nbytes)


upload, pinned_ring.CupyLink.upload = pinned_ring.CupyLink.upload, counted
copy, peer_link.CupyPeerLink.copy = peer_link.CupyPeerLink.copy, copied
memory_plan.workspace_bytes = lambda *_: 0
memory_plan.algorithm_with_strips = lambda *_: None
cuda.call = kernel
copies._DIRECT = 1
pinned_ring.SLOT_BYTES = 1 << 12
peer_panels._LEAST_BYTES = told.get("least_bytes", peer_panels._LEAST_BYTES)


def ref(name):
    return ArrayRef(
        extent=name, path=f"{told['folder']}/{name}", capacity=4 * M * N, nbytes=4 * M * N, dtype="float32",
        shape=(M, N), order="C", cache_id=name,
    )  # fmt: skip


panels = PanelsFile(told["panels"], told["device"], told.get("always", True)) if told.get("panels") else None
grid = grid_of(GemmParams(), {"a": ref("a"), "b": ref("b")}, RULE)
backend = cuda.CupyBackend("cuda", told["device"], 0.75, memory_bytes=told.get("budget"), panels=panels)
runner = Runner(backend, RULE)
answers = []
overlap = Overlap(runner, backend, answers.append)
overlap._compilation = None  # there is no compiler
print(json.dumps({"step": "ready", "needed": memory_plan.plan_memory(grid, cuda.DeviceSpec.of(0), 0).needed_bytes}))
sys.stdout.flush()
for line in sys.stdin:
    step = json.loads(line)
    if step["step"] == "end":
        break
    if step["step"] == "forget":
        runner.forget([], parents=[step["parent"]])
        deadline = time.monotonic() + 30
        while backend.peers is not None and (backend.peers._kept or backend.peers._mapped):
            assert time.monotonic() < deadline, "memory that nobody lets go of"
            time.sleep(0.001)
        print(json.dumps({"step": "forgot", "used": backend.copies.resident.used, "mapped": len(runtime._opened)}))
        sys.stdout.flush()
        continue
    order, parent = step["order"], step["parent"]
    UPLOADED[0] = COPIED[0] = 0
    answers.clear()
    message = Run("t", GemmParams(), "ours", {side: ref(side) for side in ("a", "b")}, {"d": ref(step["result"])})
    for place, index in enumerate(order):
        while place - len(answers) >= 2:  # as the front does
            time.sleep(0.001)
        ahead = tuple(order[place + 1 : place + 1 + BLOCKS_AHEAD])
        block = BlockOf(parent=parent, sides=grid.sides, index=index, ahead=ahead, algorithm="vendor")
        fields = {"task": f"{parent}/{index}", "block": block}
        overlap.start(Run(**{name: fields.get(name, getattr(message, name)) for name in Run.__dataclass_fields__}))
    while len(answers) < len(order):
        time.sleep(0.001)
    print(json.dumps({
        "step": "done", "answers": [answer.kind for answer in answers], "uploaded": UPLOADED[0], "copied": COPIED[0],
        "peak": ACCOUNT.peak, "details": [answer.detail for answer in answers if answer.kind == "failed"],
    }), flush=True)  # fmt: skip
overlap.close()
