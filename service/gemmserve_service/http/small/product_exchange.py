"""Small one-shot products straight from the connection."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from gemmserve.wire import ALGORITHM_HEADER, NPY, NpyError
from gemmserve_kernels.problem.errors import DeviceError, KernelError
from gemmserve_service.errors import JobCancelled, ServiceError
from gemmserve_service.executor.protocol import Done
from gemmserve_service.http.problems import problem_response
from gemmserve_service.http.protocol.response_writer import field_lines
from gemmserve_service.http.requests.multipart import MAX_PARAMS
from gemmserve_service.http.requests.multipart_decoder import split
from gemmserve_service.http.routes.common import elements_header, server_timing
from gemmserve_service.http.small.base_exchange import Exchange
from gemmserve_service.http.small.heads import SmallRoute
from gemmserve_service.jobs.one_shot import summary
from gemmserve_service.jobs.small import small_products
from gemmserve_service.jobs.small.bundles import BundleTask

if TYPE_CHECKING:
    from gemmserve_service.http.protocol.connection import Body
    from gemmserve_service.http.small.form_memo import Parts
    from gemmserve_service.scheduling.tasks import Task

_ALGORITHM: Final = ALGORITHM_HEADER.lower()

log = structlog.get_logger(__name__)


class ProductExchange(Exchange):
    """A one-shot product; the scheduler's listener for it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._product: small_products.SmallProduct | None = None
        self._task: BundleTask | None = None
        self._outcome: Done | Exception | None = None

    def take(self, body: bytes) -> None:
        """Queue the product."""
        arrived = time.monotonic()
        path = self._path
        product, parts = self.head.form.find(body) or self._described(body)
        if product is None or parts is None:
            self.hand_over(body)
            return
        self._product = product
        try:
            self._task = small_products.begin(
                path.core,
                product,
                body,
                parts,
                self,
                arrived=arrived,
                timeout_s=self.head.timeout_s,
                owner=self._scope["state"]["caller"].owner,
                trace=None if self._trace is None else self._trace.product(),
            )
        except Exception as error:
            self._outcome = error
            path.ended(self, now=False)

    def _described(self, body: bytes) -> tuple[small_products.SmallProduct | None, Parts | None]:
        """Return the product that the form asks for, and its parts; None, None where it is not plain, or wrong."""
        head = self.head
        route = head.route
        assert isinstance(route, SmallRoute)
        parts = split(body, head.boundary, self._start)
        begin, end = (0, 0) if parts is None else parts.get("params", (0, 0))
        if parts is None or not parts.keys() <= route.names or end - begin > MAX_PARAMS:
            return None, None
        product = self._path.products.get(route.kind, route.parse, body, parts)
        if product is not None:
            head.form.learn(body, self._start, product, parts)
        return product, parts

    # -- the scheduler's listener -----------------------------------------------------------------------------------

    def started(self, task: Task) -> None:
        """Do nothing: nobody asks."""

    def compiling(self, task: Task, compiles: bool) -> None:
        """See `scheduling.tasks.Listener`."""

    def progressed(self, task: Task, share: float) -> None:
        """Do nothing: nobody asks."""

    def requeued(self, task: Task) -> None:
        """Do nothing: nobody asks."""

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """See `tasks.Listener`."""
        assert isinstance(task, BundleTask)
        # Not while it is being queued, nor where the answer to a cycle begins with the next request at once.
        now = self._task is not None and self.cycle is None
        self._task, self._outcome = task, outcome
        self._path.ended(self, now=now)

    # -- the answer -------------------------------------------------------------------------------------------------

    def given_up(self) -> None:
        """Cancel the product, which nobody wants any more."""
        if self._task is not None:
            self._path.core.scheduler.cancel(self._task)

    def made(self) -> tuple[int, bytes, Body]:
        """Return the product, or the problem; a result that cannot be described is answered with 500."""
        if isinstance(self._outcome, Done):
            try:
                return self._result(self._outcome)
            except Exception as error:
                return self._problem(error)
        return self._problem(self._outcome)

    def sent(self) -> None:
        """Free the room: the result has been copied."""
        if isinstance(self._outcome, Done):
            assert self._task is not None
            self._task.close()

    def _result(self, done: Done) -> tuple[int, bytes, Body]:
        product, task = self._product, self._task
        assert product is not None
        assert task is not None
        (slot,) = product.results
        made = task.room.extent.view(task.room.nbytes)[slot.offset : slot.offset + slot.nbytes]
        timing = server_timing(done.timings, self._received_s, time.perf_counter() - self._began)
        counted = "".join(f"{name.lower()}: {value}\r\n" for name, value in elements_header(done.elements).items())
        head = (
            f"server-timing: {timing}\r\n{_ALGORITHM}: {done.algorithm}\r\n{counted}cache-control: no-store\r\n"
            f'content-disposition: attachment; filename="{slot.name}.npy"\r\n'
            f"content-length: {len(product.answer_head) + slot.nbytes}\r\n"
            f"content-type: {NPY}\r\n"
        )
        return 200, head.encode("ascii"), (product.answer_head, made)

    def _problem(self, error: Exception | None) -> tuple[int, bytes, Body]:
        assert error is not None
        if not isinstance(error, ServiceError | KernelError | DeviceError | NpyError):
            log.error("unexpected error", exc_info=error, **self._context)
        response = problem_response(error)
        self._slug = response.slug
        return response.status_code, field_lines(response.raw_headers), (bytes(response.body),)

    def observed(self) -> None:
        """Tell the observers of the product."""
        task, outcome = self._task, self._outcome
        if task is not None and isinstance(outcome, Done | ServiceError):
            observed = JobCancelled("the client hung up") if self._gone else outcome
            self._path.core.observe(summary(task, observed), task.size)
        self._task = None  # which has this as its listener: nothing is left to the garbage collector
