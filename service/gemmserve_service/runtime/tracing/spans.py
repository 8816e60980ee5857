"""Spans of requests, and of the products that they asked for, made afterwards from times that were recorded.

A request that is traced has a `RequestTrace` from its head on. A product has a `ProductTrace`, which the scheduler
tells when a worker is sent it, is lost with it, or has answered. Nothing here is made for a request that is not traced.

A one-shot's phases are children of its request's span. A durable job has a span of its own, which is a child of the
span of the request that submitted it, however long after that it ends; what is on record of it (`traceparent`) is that
parent, so that a job which another process finishes is still found there. Requests that look at a job have a link to
its span, as the one that submitted it has.
"""

from __future__ import annotations

import random
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, Tracer

    from gemmserve_service.schemas import Timings

    Attributes = Mapping[str, str | int | float | bool]

# W3C Trace Context, section 3.2: version, trace id, parent id, flags; neither id may be all zeros, and version 00 ends
# with the flags.
TRACEPARENT: Final = re.compile(
    r"(?!ff)(?!00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?"
)
_FLAGS: Final = slice(53, 55)
_PHASES: Final = ("compile", "h2d", "kernel", "d2h", "verify")
_MAX_LINKS: Final = 32
"""Links of a request's span to jobs: one that asks for a thousand has them as children anyway."""

REQUEST: Final[ContextVar[RequestTrace | None]] = ContextVar("gemmserve.request_trace", default=None)
"""Trace of the request that this code runs for, where it is traced."""


class Tracing:
    """Decides which requests are traced, and begins their spans; belongs to the event loop's thread."""

    def __init__(self, tracer: Tracer, ratio: float, close: Callable[[], None] = lambda: None) -> None:
        """`ratio`: share of the requests that say nothing of a trace which begin one, 0 to 1. `close`: see there."""
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.tracer = tracer
        self.close = close
        """Exports what is left, within a bounded time; blocks meanwhile."""
        self._ratio = ratio
        self._propagator = TraceContextTextMapPropagator()
        self.nothing = Context()
        self._chance = random.Random()  # noqa: S311 (a sample, no secret)

    def wanted(self, traceparent: str, *, valid: bool) -> bool:
        """Return whether a request that has just begun is traced: its parent is sampled; or it has none that is valid
        (by `TRACEPARENT`), and is among those that begin a trace.
        """
        if valid:
            return bool(int(traceparent[_FLAGS], 16) & 1)
        return self._ratio > 0.0 and self._chance.random() < self._ratio

    def begin(self, traceparent: str, tracestate: str, attributes: Attributes) -> RequestTrace | None:
        """Return the trace of such a request; None: the SDK's sampler, which has the last word, wants none.

        `traceparent`: its parent's, "" for none. `attributes`: those of its span that are known now.
        """
        from opentelemetry.trace import SpanKind

        times = Times()
        span = self.tracer.start_span(
            str(attributes["http.request.method"]),
            context=self.context_of(traceparent, tracestate),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=times.ns(times.began),
        )
        return RequestTrace(self, span, times) if span.is_recording() else None

    def context_of(self, traceparent: str, tracestate: str = "") -> Context:
        if not traceparent:
            return self.nothing
        carrier = {"traceparent": traceparent} | ({"tracestate": tracestate} if tracestate else {})
        return self._propagator.extract(carrier, self.nothing)

    def resumed(self, traceparent: str, created: float) -> ProductTrace | None:
        """Return the trace of a job of an earlier process, which a request of that trace submitted at `created`
        (seconds since the epoch).
        """
        times = Times()
        parent = self.context_of(traceparent)
        job = self.job(parent, times, int(created * 1e9))
        return job if job.span is not None and job.span.is_recording() else None

    def job(self, parent: Context, times: Times, start_ns: int) -> ProductTrace:
        """Return the trace of a job whose span begins then, below a request's."""
        from opentelemetry.trace import set_span_in_context

        span = self.tracer.start_span("job", context=parent, start_time=start_ns)
        return ProductTrace(self.tracer, set_span_in_context(span, self.nothing), times, span)


class Times:
    """Conversion of time.monotonic, in seconds, to nanoseconds since the epoch, as both are when this is made."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._epoch_ns = time.time_ns() - int(self.began * 1e9)

    def ns(self, monotonic: float) -> int:
        """Return that moment."""
        return self._epoch_ns + int(monotonic * 1e9)


def text_of(context: SpanContext) -> str:
    """Return the traceparent that names a span."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def product_trace() -> ProductTrace | None:
    """Return a trace for a product of the request that this code runs for, where it is traced."""
    request = REQUEST.get()
    return None if request is None else request.product()


def link_job(traceparent: str) -> None:
    """Add a link to a job's span to the request that this code runs for, where it is traced."""
    request = REQUEST.get()
    if request is not None:
        request.link(traceparent)


class RequestTrace:
    """A traced request: its span, which is open until `end`, and the times of its phases."""

    def __init__(self, tracing: Tracing, span: Span, times: Times) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracing = tracing
        self._times = times
        self._span = span
        self._context = set_span_in_context(span, tracing.nothing)
        self._received: float | None = None
        self._answering: float | None = None
        self._products: list[ProductTrace] = []
        self._linked: set[str] = set()
        self.traceparent = text_of(span.get_span_context())
        """Name of its span."""

    def received(self) -> None:
        """Called whenever bytes of the body have come."""
        self._received = time.monotonic()

    def answering(self) -> None:
        """Called when the answer begins."""
        self._answering = time.monotonic()

    def product(self) -> ProductTrace:
        """Return the trace of a product that is computed while the request waits."""
        product = ProductTrace(self._tracing.tracer, self._context, self._times)
        self._products.append(product)
        return product

    def job(self, arrived: float) -> ProductTrace:
        """Return the trace of a durable job that the request submits; `arrived`: when, by time.monotonic."""
        job = self._tracing.job(self._context, self._times, self._times.ns(arrived))
        self.link(job.traceparent)
        return job

    def link(self, traceparent: str) -> None:
        """Add a link to a job's span, once."""
        if traceparent in self._linked or len(self._linked) >= _MAX_LINKS:
            return
        from opentelemetry.trace import get_current_span

        self._linked.add(traceparent)
        context = self._tracing.context_of(traceparent)
        self._span.add_link(get_current_span(context).get_span_context())

    def end(self, name: str, attributes: Attributes, error: str | None, seconds: float) -> None:
        """Make its phases' spans, and end its own, `seconds` after it began. `error`: what went wrong in the server, in
        a word.
        """
        now = self._times.began + seconds
        if self._received is not None:
            self._phase("receive", self._times.began, self._received)
        for product in self._products:
            product.end()
        if self._answering is not None:
            self._phase("send", self._answering, max(self._answering, now))
        self._span.update_name(name)
        self._span.set_attributes(attributes)
        for product in self._products:
            self._span.set_attributes(product.attributes)
        if error is not None:
            _failed(self._span, error)
        self._span.end(self._times.ns(now))

    def _phase(self, name: str, began: float, ended: float) -> None:
        span = self._tracing.tracer.start_span(name, context=self._context, start_time=self._times.ns(began))
        span.end(self._times.ns(ended))


@dataclass(slots=True)
class _Attempt:
    """One worker's try at a product. Times by time.monotonic."""

    queued: float
    began: float
    device: str
    ended: float | None = None
    lost: bool = False


class ProductTrace:
    """A traced product, or job: told by the scheduler what becomes of it; `end` makes its spans."""

    def __init__(self, tracer: Tracer, context: Context, times: Times, span: Span | None = None) -> None:
        """`context`: of the parent of its phases. `span`: its own, where it has one."""
        from opentelemetry.trace import get_current_span

        self._tracer = tracer
        self._context = context
        self._times = times
        self.span = span
        """Span of its own, of a durable job."""
        self.attributes: dict[str, Any] = {}
        """Attributes `gemmserve.*` of its span, or of the request's: what it is, and what became of it."""
        self.traceparent = text_of(get_current_span(context).get_span_context())
        """Name of the span that has its phases."""
        self._submitted = times.began
        self._queued: float | None = None
        self._attempts: list[_Attempt] = []
        self._timings: Timings | None = None
        self._over = 0.0
        self._error: str | None = None

    # -- for the scheduler ------------------------------------------------------------------------------------------

    def submitted(self, at: float, attributes: Attributes) -> None:
        """Called when it begins to wait for a worker."""
        self._submitted = self._queued = at
        self.attributes.update(attributes)

    def started(self, device: str, at: float) -> None:
        """Called when a worker is sent it."""
        self._attempts.append(_Attempt(at if self._queued is None else self._queued, at, device))
        self._queued = None

    def lost(self) -> None:
        """Called when its worker is lost."""
        attempt = self._attempts[-1]
        attempt.ended, attempt.lost = time.monotonic(), True

    def requeued(self) -> None:
        """Called when it waits again after that."""
        self._queued = time.monotonic()

    def ended(self, *, timings: Timings | None = None, algorithm: str | None = None, error: str | None = None) -> None:
        """Called at its end. `error`: the slug of its problem."""
        self._over = time.monotonic()
        self._timings, self._error = timings, error
        if algorithm is not None:
            self.attributes["gemmserve.algorithm"] = algorithm
        if self._attempts:
            self.attributes["gemmserve.device"] = self._attempts[-1].device
            self.attributes["gemmserve.attempts"] = len(self._attempts)

    # -- its spans --------------------------------------------------------------------------------------------------

    def end(self, state: str = "") -> None:
        """Make its spans, and end its own, if it has one. `state`: a job's, which is final."""
        over = self._over or time.monotonic()
        for attempt in self._attempts:
            self._made("queue", attempt.queued, attempt.began)
            self._ran(attempt, over)
        if self._queued is not None:
            self._made("queue", self._queued, over)
        if self.span is None:
            return
        self.span.set_attributes({**self.attributes, "gemmserve.job.state": state})
        if self._error is not None or state == "failed":
            _failed(self.span, self._error or state)
        self.span.end(self._times.ns(time.monotonic()))

    def written(self, name: str) -> None:
        """Make the span of its results' way from the device, which ends now; after `ended`."""
        self._made(name, self._over, time.monotonic())

    def _ran(self, attempt: _Attempt, over: float) -> None:
        from opentelemetry.trace import set_span_in_context

        ended = over if attempt.ended is None else attempt.ended
        run = self._tracer.start_span(
            "run",
            context=self._context,
            start_time=self._times.ns(attempt.began),
            attributes={"gemmserve.device": attempt.device},
        )
        if attempt.lost:
            _failed(run, "worker-lost")
        elif self._timings is not None:
            timings = self._timings
            seconds = [(name, getattr(timings, f"{name}_s")) for name in _PHASES]
            # What a worker measures are durations. They are laid end to end behind the time that it let the product
            # wait in its group, and before its answer.
            waited_until = self._submitted + timings.queue_s
            begins = max(attempt.began, min(waited_until, ended - sum(each for _, each in seconds)))
            context = set_span_in_context(run, self._context)
            for name, each in seconds:
                if each:
                    span = self._tracer.start_span(name, context=context, start_time=self._times.ns(begins))
                    begins += each
                    span.end(self._times.ns(begins))
        run.end(self._times.ns(ended))

    def _made(self, name: str, began: float, ended: float) -> None:
        span = self._tracer.start_span(name, context=self._context, start_time=self._times.ns(began))
        span.end(self._times.ns(ended))


def _failed(span: Span, error: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, error)
    span.set_attribute("error.type", error)
