"""Products of a single request whose body is small: one extent for operands and result, and nothing worked out twice.

What depends on a request's parameters and .npy headers alone is worked out once and remembered, for a client that
multiplies small matrices sends the same ones again and again. Scheduler, limits and checks are those of `single`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gemmserve.wire import RESULT_DTYPES, format_npy_header, parse_npy_header
from gemmserve_kernels import Operand
from gemmserve_service import products
from gemmserve_service.errors import ServiceError
from gemmserve_service.executor.packing import form_of
from gemmserve_service.executor.protocol import Part
from gemmserve_service.jobs.small.bundles import BundleTask, Layout, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemmserve_kernels import KernelError, Plan
    from gemmserve_service.executor.port import Worker
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.products import Product
    from gemmserve_service.runtime.tracing.spans import ProductTrace
    from gemmserve_service.scheduling.tasks import Listener
    from gemmserve_service.schemas import GemmParams, GemmReduceParams

_NUMBERS: Final = itertools.count(1)
_MAX_PRODUCTS: Final = 512  # products that are remembered
_MAX_KEY: Final = 2048  # bytes of the parameters and headers of one that is
_MAX_RESULT: Final = 1 << 20  # bytes; a column by a row has as many as the square of what was sent


@dataclass(eq=False)
class SmallProduct:
    """A product as its parameters and headers describe it: what is to be computed, and what lies where."""

    params: GemmParams | GemmReduceParams
    problem: Product
    heads: dict[str, int]
    """Bytes of each operand's .npy header."""
    operands: tuple[Slot, ...]
    results: tuple[Slot, ...]
    layout: Layout
    answer_head: bytes
    """The .npy header of the result."""
    size: tuple[int, int]
    """Bytes and operations of the problem."""
    models: dict[int, Any] = field(default_factory=dict, init=False)
    """`Task.models` of every task that computes it."""
    _parts: dict[str, list[Part]] = field(default_factory=dict, init=False)
    _plans: tuple[Sequence[Worker], dict[int, Plan | KernelError]] | None = field(default=None, init=False)

    def parts(self, algorithm: str) -> list[Part]:
        """Return the parts of its message: all but the extent, and the same every time."""
        parts = self._parts.get(algorithm)
        if parts is None:
            operands = {slot.name: (slot.dtype, slot.shape, slot.order) for slot in self.operands}
            results = {slot.name: (slot.dtype, slot.shape, slot.order) for slot in self.results}
            part = Part(
                form=form_of(self.params, operands, results),
                algorithm=algorithm,
                operands={slot.name: [(0, slot.offset)] for slot in self.operands},
                results={slot.name: [(0, slot.offset)] for slot in self.results},
            )
            parts = [part]
            self._parts[algorithm] = parts
        return parts

    def plans(self, workers: Sequence[Worker], check: Callable[[Product], dict[int, Plan | KernelError]]) -> Any:
        """`Scheduler.check`, asked once for the workers that stand for the devices that there are."""
        if self._plans is None or self._plans[0] is not workers:
            self._plans = workers, check(self.problem)
        return dict(self._plans[1])

    def nbytes(self) -> int:
        """Bytes of operands and result."""
        return self.size[0]


class SmallProducts:
    """Small products seen last, by their parameters and headers."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Any, ...], SmallProduct] = OrderedDict()

    def get(
        self,
        kind: type[GemmParams | GemmReduceParams],
        parse: Callable[[bytes | None], GemmParams | GemmReduceParams],
        body: bytes,
        parts: dict[str, tuple[int, int]],
    ) -> SmallProduct | None:
        """The product that a form asks for, whose parts begin and end there; None where it is not plain, or wrong.

        `parse` makes the params part a model.
        """
        heads: dict[str, bytes] = {}
        text: bytes | None = None
        for name, (start, end) in parts.items():
            if name == "params":
                text = body[start:end]
                continue
            # Version 1.0, the only one that NumPy writes for such arrays: two bytes of length.
            length = 10 + int.from_bytes(body[start + 8 : start + 10], "little")
            if body[start + 6 : start + 8] != b"\x01\x00" or start + length > end:
                return None
            heads[name] = body[start : start + length]
        if not {"a", "b"} <= heads.keys():
            return None
        key = (kind, text, *heads.items())
        product = self._known.get(key)
        if product is None:
            try:
                product = _describe(parse(text), heads)
            except (ServiceError, ValueError):  # NpyError and KernelError are ValueErrors
                product = None
            if product is None:
                return None
            if len(text or b"") + sum(map(len, heads.values())) <= _MAX_KEY:
                self._known[key] = product
                if len(self._known) > _MAX_PRODUCTS:
                    self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        for slot in product.operands:
            start, end = parts[slot.name]
            if end - start != product.heads[slot.name] + slot.nbytes:
                return None
        return product


def _describe(params: GemmParams | GemmReduceParams, heads: dict[str, bytes]) -> SmallProduct | None:
    layout = Layout()
    slots = []
    for name, head in heads.items():
        header = parse_npy_header(head)
        if header is None or header.data_offset != len(head) or header.dtype.newbyteorder("<") != header.dtype:
            return None
        slots.append(layout.place(name, header.dtype, header.shape, header.order))
    operands = {slot.name: Operand.contiguous(slot.shape, RESULT_DTYPES[slot.dtype], slot.order) for slot in slots}
    problem = products.build(params, operands)
    results = tuple(
        layout.place(name, dtype, shape, order) for name, (shape, dtype, order) in products.outputs(problem).items()
    )
    if len(results) != 1 or results[0].nbytes > _MAX_RESULT or not all(slot.nbytes for slot in (*slots, *results)):
        return None
    (result,) = results
    answer = format_npy_header(RESULT_DTYPES[result.dtype], result.shape, fortran_order=result.order == "F")
    lengths = {name: len(head) for name, head in heads.items()}
    size = (problem.nbytes(), problem.flops())
    return SmallProduct(params, problem, lengths, tuple(slots), results, layout, answer, size)


def begin(
    core: Core,
    product: SmallProduct,
    body: bytes,
    parts: dict[str, tuple[int, int]],
    listener: Listener,
    *,
    arrived: float,
    timeout_s: float | None,
    owner: str,
    trace: ProductTrace | None = None,
) -> BundleTask:
    """Queues the product of a form, whose bytes are copied; `listener` is told what becomes of it, perhaps at once.

    Whoever takes the result over closes the task. `arrived`: by time.monotonic. Raises Draining, NotReady, QueueFull,
    QuotaExceeded, TooLarge, StoreFull, KernelError.
    """
    scheduler = core.scheduler
    scheduler.check_admission(product, owner)
    plans = product.plans(scheduler.fleet.representatives, scheduler.check)
    room = core.store.room(product.layout.nbytes, largest=product.layout.largest, owner=owner)
    try:
        view, sent = room.extent.view(room.nbytes), memoryview(body)
        for slot in product.operands:
            start = parts[slot.name][0] + product.heads[slot.name]
            view[slot.offset : slot.offset + slot.nbytes] = sent[start : start + slot.nbytes]
        task = BundleTask(
            f"small_{next(_NUMBERS)}",
            product.params,
            product.problem,
            listener,
            room=room,
            parts=product.parts,
            owner=owner,
            timeout_s=scheduler.settings.oneshot_timeout_s if timeout_s is None else timeout_s,
            durable=False,
            submitted=arrived,
            plans=plans,
            models=product.models,
            trace=trace,
        )
    except BaseException:
        room.give_back()
        raise
    task.size = product.size
    scheduler.submit(task, soon=True)
    return task
