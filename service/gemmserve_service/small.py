"""Products of a single request whose body is small: gathered whole, cut by searching, in one extent with their result.

What depends on a request's parameters and .npy headers alone is worked out once and remembered, for a client that
multiplies small matrices sends the same ones again and again. Scheduler, limits and checks are those of `single`.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import is_not
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import ClientDisconnect

from gemmserve.wire import RESULT_DTYPES, format_npy_header, parse_npy_header
from gemmserve_kernels import Operand
from gemmserve_service import operations
from gemmserve_service.bundles import BundleTask, Layout, Refs, Slot, refs_of, reserve
from gemmserve_service.errors import JobCancelled, ServiceError
from gemmserve_service.executor.protocol import Done
from gemmserve_service.ids import new_id
from gemmserve_service.sending import until_disconnect
from gemmserve_service.single import Waiter, summary

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive

    from gemmserve_kernels import KernelError, Plan
    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_service.core import Core
    from gemmserve_service.executor.base import Worker
    from gemmserve_service.extents import Extent
    from gemmserve_service.operations import Product
    from gemmserve_service.schemas import GemmParams, GemmReduceParams

_MOST_KEPT: Final = 512  # products that are remembered
_MOST_KEY: Final = 2048  # bytes of the parameters and headers of one that is
_MOST_REFS: Final = 64  # extents whose references are remembered with a product
_LOOK_S: Final = 0.005  # a product that is done sooner is not worth a look whether its client is still there


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
    models: dict[str, Any] = field(default_factory=dict, init=False)
    """`Task.models` of every task that computes it."""
    refs: dict[str, Refs] = field(default_factory=dict, init=False)
    """By extent, the arrays in it; extents are used again and again."""
    _plans: tuple[list[DeviceSpec | None], dict[str, Plan | KernelError]] | None = field(default=None, init=False)

    def plans(self, workers: list[Worker], check: Callable[[Product], dict[str, Plan | KernelError]]) -> Any:
        """`Scheduler.check`, asked once for the devices that there are."""
        specs = [worker.spec for worker in workers]
        known = [] if self._plans is None else self._plans[0]
        if self._plans is None or len(known) != len(specs) or any(map(is_not, known, specs)):
            self._plans = specs, check(self.problem)
        return dict(self._plans[1])

    def nbytes(self) -> int:
        """Of operands and result."""
        return self.size[0]


class SmallProducts:
    """Those seen last, by what was sent."""

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
            if len(text or b"") + sum(map(len, heads.values())) <= _MOST_KEY:
                self._known[key] = product
                if len(self._known) > _MOST_KEPT:
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
    problem = operations.build(params, operands)
    results = tuple(
        layout.place(name, dtype, shape, order) for name, (shape, dtype, order) in operations.outputs(problem).items()
    )
    if len(results) != 1 or not all(slot.nbytes for slot in (*slots, *results)):
        return None
    (result,) = results
    answer = format_npy_header(RESULT_DTYPES[result.dtype], result.shape, fortran_order=result.order == "F")
    lengths = {name: len(head) for name, head in heads.items()}
    size = (problem.nbytes(), problem.flops())
    return SmallProduct(params, problem, lengths, tuple(slots), results, layout, answer, size)


async def run_small(
    core: Core,
    product: SmallProduct,
    body: bytes,
    parts: dict[str, tuple[int, int]],
    receive: Receive,
    *,
    timeout_s: float | None,
    owner: str,
) -> tuple[bytes, Done]:
    """The result as a .npy file, and the worker's account. A client that hangs up cancels the product.

    Raises what `single.run_once` raises, and ClientDisconnect.
    """
    arrived = time.monotonic()
    scheduler = core.scheduler
    with scheduler.admission(owner) as claim:
        plans = product.plans(list(core.executor.workers()), scheduler.check)
        claim(product)
        bundle = reserve(core.store, product.layout.nbytes, largest=product.layout.largest, owner=owner)
    view = bundle.view
    for slot in product.operands:
        start = parts[slot.name][0] + product.heads[slot.name]
        view[slot.offset : slot.offset + slot.nbytes] = memoryview(body)[start : start + slot.nbytes]
    loop = asyncio.get_running_loop()
    waiter = Waiter(loop.create_future())
    task = BundleTask(
        new_id("job"),
        product.params,
        product.problem,
        waiter,
        bundle=bundle,
        refs=_refs(product, bundle.extent),
        owner=owner,
        timeout_s=scheduler.settings.oneshot_timeout_s if timeout_s is None else timeout_s,
        durable=False,
        submitted=arrived,
        plans=plans,
        models=product.models,
    )
    task.size = product.size
    scheduler.submit(task, soon=True)
    hangup = Hangup(loop, receive, lambda: scheduler.cancel(task))
    try:
        outcome = await waiter.outcome
    except asyncio.CancelledError:
        if not task.over:
            scheduler.cancel(task)
        elif not waiter.outcome.cancelled() and isinstance(waiter.outcome.result(), Done):
            task.close()
        core.observe(summary(task, JobCancelled("the client hung up")), task.size)
        raise
    finally:
        hangup.stop()
    core.observe(summary(task, outcome), task.size)
    if isinstance(outcome, ServiceError):
        raise ClientDisconnect if hangup.seen else outcome
    (slot,) = product.results
    answer = b"".join((product.answer_head, view[slot.offset : slot.offset + slot.nbytes]))
    del view
    task.close()
    return answer, outcome


def _refs(product: SmallProduct, extent: Extent | None) -> Refs:
    assert extent is not None  # nothing in a small product is empty
    found = product.refs.get(extent.name)
    if found is None:
        if len(product.refs) >= _MOST_REFS:
            product.refs.clear()
        found = product.refs[extent.name] = refs_of(extent, product.operands, product.results)
    return found


class Hangup:
    """Looks after a while whether the client is still there; `gone` is called when it is not."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Receive, gone: Callable[[], None]) -> None:
        self.seen = False
        self._receive = receive
        self._gone = gone
        self._watch: asyncio.Task[None] | None = None
        self._timer = loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._watch = asyncio.ensure_future(until_disconnect(self._receive))
        self._watch.add_done_callback(self._ended)

    def _ended(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and watch.exception() is None:
            self.seen = True
            self._gone()

    def stop(self) -> None:
        """Looks no more."""
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
