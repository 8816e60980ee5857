"""Many products on a device: operands come together, results go together, and the host waits once for all kernels.

Each product is launched for itself, through the same call and on memory as well aligned as if it were alone, so it has
the bits that it would have alone.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

from gemmserve_kernels.device.compiler import waited_s
from gemmserve_service.executor.worker.checks import verification
from gemmserve_service.executor.worker.cuda.copies import order_of
from gemmserve_service.executor.worker.cuda.pinned_ring import flat
from gemmserve_service.schemas import Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from gemmserve_service.executor.worker.backend import HostArray
    from gemmserve_service.executor.worker.batches import Products
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.executor.worker.cuda.copies import DeviceCopies
    from gemmserve_service.schemas import StepParams

    Array = np.ndarray[Any, Any]

_TURN_BYTES: Final = 256 << 20
"""Bytes of the operands and results on the device at a time."""
_ALIGNMENT: Final = 256
"""Bytes: of what a device allocates (CUDA C++ Programming Guide, device memory accesses)."""


class Backend(Protocol):
    """Device, as far as batches use it."""

    cupy: Any
    copies: DeviceCopies

    def call(self, params: StepParams, operands: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        """Enqueues a product."""


def run_together(backend: Backend, products: Products, checkpoint: Callable[[], None]) -> Timings:
    """Computes every product of a part of a batch, and checks each if that is wanted. Raises what a product raises."""
    verdicts: list[Verdict] | None = [] if products.verify else None
    stacks = products.each_stack()
    rows = iter(products)
    operands, results = products.first()
    each = sum(array.nbytes for array in (*operands.values(), *results.values()))
    turn = max(_TURN_BYTES // max(each, 1), 1)
    total = Timings()
    for low in range(0, len(products), turn):
        checkpoint()
        some = list(islice(rows, turn))
        part = [{name: None if x is None else x[low : low + turn] for name, x in side.items()} for side in stacks]
        _turn(backend, products, some, part, total, verdicts)
    checkpoint()
    products.verdicts = verdicts
    return total


def _turn(
    backend: Backend,
    products: Products,
    rows: list[tuple[dict[str, HostArray], dict[str, Array]]],
    stacks: Sequence[Mapping[str, Array | None]],
    total: Timings,
    verdicts: list[Verdict] | None,
) -> None:
    cupy, copies, params = backend.cupy, backend.copies, products.params
    stream = cupy.cuda.get_current_stream()
    began = time.perf_counter()
    there: dict[str, Sequence[Any]] = {}
    for name in rows[0][0]:
        memory = _together(stacks[0][name])
        if memory is not None:
            there[name] = _cut(cupy, copies.fresh(memory), rows[0][0][name].data, len(rows))
            continue
        column = [operands[name] for operands, _ in rows]
        known: dict[int, Any] = {}  # one array may serve several products
        for operand in column:
            if id(operand.data) not in known:
                known[id(operand.data)] = copies.load(operand)
        there[name] = [known[id(operand.data)] for operand in column]
    stream.synchronize()
    loaded = time.perf_counter()
    blocks: dict[str, tuple[Any, Array]] = {}
    made: dict[str, Sequence[Any]] = {}
    for name, out in rows[0][1].items():
        memory = _together(stacks[1][name])
        if memory is not None:
            blocks[name] = cupy.empty(memory.shape, memory.dtype), memory
            made[name] = _cut(cupy, blocks[name][0], out, len(rows))
        else:
            made[name] = [cupy.empty(out.shape, out.dtype, order=order_of(out)) for _ in rows]
    start, stop, waited = cupy.cuda.Event(), cupy.cuda.Event(), waited_s()
    start.record()
    for index in range(len(rows)):
        backend.call(
            params,
            {name: arrays[index] for name, arrays in there.items()},
            {name: arrays[index] for name, arrays in made.items()},
        )
    stop.record()
    compile_s = waited_s() - waited
    stop.synchronize()
    computed = time.perf_counter()
    if verdicts is not None:
        for index in range(len(rows)):
            given, outs = ({name: arrays[index] for name, arrays in side.items()} for side in (there, made))
            verdicts.append(_checked(backend, products, given, outs))
        total.verify_s += time.perf_counter() - computed
        computed = time.perf_counter()
    for name, arrays in made.items():
        if name in blocks:
            copies.store(*blocks[name])
        else:
            for array, (_, results) in zip(arrays, rows, strict=True):
                copies.store(array, results[name])
    total.h2d_s += loaded - began
    total.compile_s += compile_s
    total.kernel_s += max(cupy.cuda.get_elapsed_time(start, stop) / 1e3 - compile_s, 0.0)
    total.d2h_s += time.perf_counter() - computed


def _checked(backend: Backend, products: Products, given: dict[str, Any], outs: dict[str, Any]) -> Verdict:
    return verification.on_device(
        products.params,
        given,
        outs,
        lambda plain: backend.call(plain, given, outs),
        f"a product of a batch by {products.algorithm}",
    )


def _together(stack: Array | None) -> Array | None:
    """The memory of arrays that lie one behind the other, each as well aligned as the first; None where they do not."""
    if stack is None or not stack.size or stack[0].nbytes % _ALIGNMENT:
        return None
    memory = flat(stack)
    return flat(stack.swapaxes(-1, -2)) if memory is None and stack.ndim > 2 else memory


def _cut(cupy: Any, block: Any, one: Array, count: int) -> list[Any]:
    """`count` arrays like `one` in a block of the device's memory."""
    order = order_of(one)
    return [
        cupy.ndarray(one.shape, one.dtype, memptr=block.data + number * one.nbytes, order=order)
        for number in range(count)
    ]
