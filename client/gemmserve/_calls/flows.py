"""Flows: operations of more than one exchange, written once for both clients.

A flow is a generator: it yields a Request (or a Pause) and is sent the answer, or thrown the error. `Client` drives
flows with blocking I/O and `AsyncClient` by awaiting; neither knows anything that is decided here. Interruptions
(KeyboardInterrupt, asyncio.CancelledError) are thrown in too, so that a flow can cancel what it began.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from gemmserve import _errors
from gemmserve._calls import requests
from gemmserve._calls.params import check_shapes, compose, to_json
from gemmserve._calls.requests import LONG_POLL_S, Pause, Request, Together, Work
from gemmserve._model import JobInfo
from gemmserve._remote import ArrayHandle, plain_id
from gemmserve._transfer.arrays import as_array
from gemmserve._transfer.parts import PART, PARTS_FROM, Download, Span, divisible, flat, spans
from gemmserve._transport.content_coding import compressed
from gemmserve._transport.retry import Attempts, RetryPolicy

if TYPE_CHECKING:
    from gemmserve._model import ArrayInfo
    from gemmserve._transfer.arrays import AnyArray
    from gemmserve._transport.digests import Digests
    from gemmserve._transport.sse import Event

T = TypeVar("T")
Flow: TypeAlias = Generator[Request[Any] | Pause | Together | Work[Any], Any, T]

TEMPORARY_TTL_S: Final = 3600.0
"""Life of operands put for one job, should the client die before it deletes them."""

PAGE: Final = 1000
"""Items a page: the most that the service gives."""

INLINE: Final = 1 << 18
"""Bytes that are hashed sooner than a thread is woken."""

UNSUPPORTED: Final = 415
"""Status of an answer to a coding that the server does not read."""

CLEANUP_LIMIT_S: Final = 5.0
"""Seconds of silence after which cancelling or tidying up is given up."""


@dataclass(frozen=True)
class Flows:
    """The flows under one retry policy; `clock` and `uniform` are replaced in tests."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[float, float], float] = random.uniform
    connections: int = 3
    """Number of connections over which a large array goes, in parts; 0: whole, in one request."""
    compression: bool = False
    """Whether arrays that get shorter by it go compressed, whole."""
    digests: Digests = "known"
    """Transfers whose bytes are checked by their digests."""

    def call(self, request: Request[T], *, deadline: float | None = None) -> Flow[T]:
        """One request, repeated as the policy says. Raises the last error."""
        attempts = self._attempts(deadline)
        while True:
            try:
                answer: T = yield request
            except _errors.GemmserveError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            else:
                return answer
            yield Pause(pause)

    def _attempts(self, deadline: float | None = None) -> Attempts:
        return Attempts(self.retry, deadline=deadline, clock=self.clock, uniform=self.uniform)

    def put(
        self, array: AnyArray, *, ttl_s: float | None = None, digest: bool = False, label: str = "put"
    ) -> Flow[ArrayInfo]:
        """Stores an array; a large one in parts, each of which goes on where its connection broke."""
        digest = digest or self.digests == "always"
        if self.compression:
            body = yield Work(partial(compressed, array))
            if body is not None:
                try:
                    request = requests.put_array(array, ttl_s=ttl_s, digest=digest, label=label, compressed=body)
                    return (yield from self.call(request))
                except _errors.APIError as error:
                    if error.status != UNSUPPORTED:  # else a server that does not know it takes the array as it is
                        raise
        if self.connections and array.nbytes >= PARTS_FROM and divisible(array):
            for last in (False, True):
                try:
                    return (yield from self._put_in_parts(array, ttl_s, digest=digest, label=label))
                except (_errors.NotFound, _errors.Gone):
                    # The server lost the upload, or gave it up; or it is one that has none.
                    if last:
                        break
        return (yield from self.call(requests.put_array(array, ttl_s=ttl_s, digest=digest, label=label)))

    def _put_in_parts(self, array: AnyArray, ttl_s: float | None, *, digest: bool, label: str) -> Flow[ArrayInfo]:
        begun = yield from self.call(requests.begin_upload(array, ttl_s=ttl_s))
        data = flat(array)
        parts = [
            self._send_part(begun.id, data, start, end, digest=digest, label=label)
            for start, end in spans(0, len(data), begun.part)
        ]
        try:
            yield Together(parts, self.connections, f"sending {label}", len(data))
            return (yield from self.call(requests.complete_upload(begun.id)))
        except GeneratorExit:
            raise
        except BaseException:
            yield from self.attempt(requests.cancel_upload(begun.id, limit_s=CLEANUP_LIMIT_S))
            raise

    def _send_part(
        self, upload_id: str, data: memoryview, start: int, end: int, *, digest: bool, label: str
    ) -> Flow[None]:
        attempts = self._attempts()
        while start < end:
            try:
                yield requests.send_part(upload_id, start, data[start:end], digest=digest, label=label)
            except _errors.GemmserveError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            else:
                return
            yield Pause(pause)
            if not digest:  # else the part is checked whole, and comes whole
                known = yield from self.call(requests.upload_info(upload_id))
                reached = max([start, *(high for low, high in known.received if low <= start)])
                if reached > start:
                    attempts = self._attempts()
                start = reached

    def download(self, array_id: str, *, nbytes: int = 0) -> Flow[Any]:
        """An array's elements; `nbytes` where they are known: many are fetched over several connections."""
        if not self.connections or self.compression:
            request = requests.array_data(array_id, nbytes=nbytes, compression=self.compression)
            return (yield from self.call(request))
        attempts = self._attempts()
        while True:
            try:
                return (yield from self._download(array_id, nbytes))
            except _errors.CorruptAnswer as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            yield Pause(pause)

    def _download(self, array_id: str, nbytes: int) -> Flow[Any]:
        download = Download()
        first = Span(download, 0, PART if nbytes >= PARTS_FROM else None)
        reached = yield from self._fetch(array_id, first)
        if download.total is not None and reached < download.total:
            rest = [
                self._fetch(array_id, Span(download, low, high)) for low, high in spans(reached, download.total, PART)
            ]
            yield Together(rest, self.connections, "receiving get", download.total - reached)
        if download.sha256 is None and self.digests == "always":
            raise _errors.ProtocolError('the download has no Repr-Digest, and digests="always" wants one')
        if download.sha256 is not None and self.digests != "never":
            download.check()
        return download.result()

    def _fetch(self, array_id: str, span: Span) -> Flow[int]:
        """A span of an array's file, going on where an answer broke off; returns where it ends."""
        attempts = self._attempts()
        start = span.position
        while True:
            began = span.position
            try:
                reached: int = yield requests.array_part(array_id, span)
            except _errors.GemmserveError as error:
                if span.position > began:
                    attempts = self._attempts()
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            else:
                if span.download.sha256 is not None and self.digests != "never":
                    hashing = partial(span.download.came, start, reached)
                    if reached - start < INLINE:
                        hashing()
                    else:
                        yield Work(hashing)
                return reached
            yield Pause(pause)

    def attempt(self, request: Request[Any]) -> Flow[None]:
        """One request once, its failure ignored: tidying up must not hide what happened before."""
        try:
            yield request
        except _errors.GemmserveError:
            return

    def one_shot(
        self, op: str, operands: Mapping[str, AnyArray], params: Mapping[str, Any], *, timeout: float | None
    ) -> Flow[AnyArray | dict[str, AnyArray]]:
        """A product by one exchange. Raises JobTimeout when it is not done within `timeout` seconds."""
        deadline = None if timeout is None else self.clock() + timeout
        request = requests.one_shot(op, params, operands, timeout_s=timeout)
        try:
            received = yield from self.call(request, deadline=deadline)
        except _errors.TransportTimeout as error:
            if deadline is not None and self.clock() >= deadline:
                raise _errors.JobTimeout(f"the product was not done within {timeout} s") from error
            raise
        # A list of one name is answered by a bare .npy; a list is a dict here, whatever its length.
        names = params.get("reduce")
        return {names[0]: received} if isinstance(names, list) and not isinstance(received, dict) else received

    def submit(self, op: str, operands: Mapping[str, Any], params: Mapping[str, Any]) -> Flow[JobInfo]:
        """Submits a job and comes back once the server has it. Local operands are put first; the job keeps them."""
        temporaries: list[str] = []
        try:
            job = yield from self._job(op, operands, params, temporaries)
            info = yield from self.call(requests.submit(job, key=uuid.uuid4().hex))
        except GeneratorExit:
            raise
        except BaseException:
            yield from self._delete_all(temporaries)
            raise
        yield from self._delete_all(temporaries)
        return info

    def run(
        self, op: str, operands: Mapping[str, Any], params: Mapping[str, Any], *, timeout: float | None
    ) -> Flow[JobInfo]:
        """Submits a job and waits until it is final. After `timeout` seconds, or when interrupted, cancels it.

        The returned state is not final if it was cancelled here and the server has not said more.
        """
        deadline = None if timeout is None else self.clock() + timeout
        temporaries: list[str] = []
        try:
            job = yield from self._job(op, operands, params, temporaries)
            if timeout is not None:
                job["timeout_s"] = timeout  # so that the server, too, stops at the deadline if this client is gone
            info = yield from self._run(job, deadline)
        except GeneratorExit:
            raise
        except BaseException:
            yield from self._delete_all(temporaries)
            raise
        yield from self._delete_all(temporaries)
        return info

    def run_job(self, job: dict[str, Any], *, timeout: float | None) -> Flow[JobInfo]:
        """Submits a job whose operands are on the server, and waits as `run` does."""
        deadline = None if timeout is None else self.clock() + timeout
        if timeout is not None:
            job = {**job, "timeout_s": timeout}
        return (yield from self._run(job, deadline))

    def delete_all(self, ids: list[str]) -> Flow[None]:
        """Deletes temporaries; whatever fails is left to their time to live."""
        yield from self._delete_all(ids)

    def _run(self, job: Mapping[str, Any], deadline: float | None) -> Flow[JobInfo]:
        key = uuid.uuid4().hex
        try:
            info = yield from self.call(requests.submit(job, key=key, wait_s=self._poll(deadline)), deadline=deadline)
        except (GeneratorExit, _errors.GemmserveError):
            raise
        except BaseException:
            # Interrupted before the answer, so the id is unknown. The same key returns the same job; if the first
            # request never arrived this one creates it, and cancels it at once.
            yield from self._cancel_submission(job, key)
            raise
        try:
            info = yield from self.wait(info, deadline=deadline)
        except (GeneratorExit, _errors.GemmserveError):
            raise
        except BaseException:
            yield from self.attempt(requests.cancel_job(info.id, limit_s=CLEANUP_LIMIT_S))
            raise
        if not info.final:
            yield from self.attempt(requests.cancel_job(info.id, limit_s=CLEANUP_LIMIT_S))
        return info

    def _cancel_submission(self, job: Mapping[str, Any], key: str) -> Flow[None]:
        try:
            info = yield requests.submit(job, key=key, limit_s=CLEANUP_LIMIT_S)
            yield requests.cancel_job(info.id, limit_s=CLEANUP_LIMIT_S)
        except _errors.GemmserveError:
            return

    def wait(self, info: JobInfo, *, deadline: float | None) -> Flow[JobInfo]:
        """Long polls until the job is final or the deadline has passed; returns the last state seen."""
        quick = 0
        while not info.final:
            wait_s = self._poll(deadline)
            if wait_s <= 0:
                return info
            began = self.clock()
            info = yield from self.call(requests.job_info(info.id, wait_s=wait_s), deadline=deadline)
            if not info.final and self.clock() - began < wait_s / 2:
                # The server answered early (a proxy, or a shorter cap than ours): do not spin.
                quick += 1
                yield Pause(min(1.0, 0.01 * 2.0 ** min(quick, 10)))
        return info

    def _poll(self, deadline: float | None) -> float:
        return LONG_POLL_S if deadline is None else max(0.0, min(LONG_POLL_S, deadline - self.clock()))

    def _job(
        self, op: str, operands: Mapping[str, Any], params: Mapping[str, Any], temporaries: list[str]
    ) -> Flow[dict[str, Any]]:
        """The submission's JSON. Puts local operands and notes them in `temporaries` for the caller to delete."""
        local = {name: as_array(x, name) for name, x in operands.items() if not isinstance(x, ArrayHandle)}
        job: dict[str, Any] = {"op": op, **params}
        for name, operand in operands.items():
            if isinstance(operand, ArrayHandle):
                if name == "c":
                    job[name] = plain_id(operand, name)
                else:
                    job[name] = operand.id
                    trans = operand._compose(params.get(f"trans_{name}", "N"))
                    job[f"trans_{name}"] = trans
        for name, array in local.items():
            info = yield from self.put(array, ttl_s=TEMPORARY_TTL_S, label=name)
            temporaries.append(info.id)
            job[name] = info.id
        return job

    def _delete_all(self, ids: list[str]) -> Flow[None]:
        for array_id in ids:
            yield from self.attempt(requests.delete_array(array_id))

    def ready(self) -> Flow[bool]:
        """Whether the server says that it is; not repeated, for the question is about now."""
        try:
            yield requests.document("/readyz")
        except _errors.NotReady:
            return False
        return True

    def listing(
        self, path: str, parse: Callable[[Any], T], query: Mapping[str, Any] | None = None, *, limit: int | None
    ) -> Flow[list[T]]:
        """All items of a paged listing, newest first, or the first `limit`."""
        items: list[T] = []
        fields = {name: value for name, value in (query or {}).items() if value is not None}
        fields["limit"] = PAGE if limit is None else max(1, min(limit, PAGE))
        while True:
            page = yield from self.call(requests.page(path, fields))
            found = page.get("items")
            if not isinstance(found, list):
                raise _errors.ProtocolError(f"the listing {path} has no list of items")
            items += map(parse, found)
            cursor = page.get("next_cursor")
            if not cursor or (limit is not None and len(items) >= limit):
                return items if limit is None else items[:limit]
            fields["cursor"] = cursor


class Watch:
    """One watching of a job's events, over as many streams as it takes."""

    def __init__(self, flows: Flows, job_id: str) -> None:
        self._flows = flows
        self._job_id = job_id
        self._attempts = flows._attempts()
        self._asked = 0.0
        self._heard = False
        """Whether the stream has reported anything."""
        self._last_id: str | None = None
        self._last: JobInfo | None = None
        self._known: JobInfo | None = None
        """State that the stream may begin with, and that need not be reported again."""

    @property
    def unchecked(self) -> bool:
        """Whether what a stream says, which has no digest, is not good enough to end with."""
        return self._flows.digests == "always"

    def request(self) -> Request[None]:
        """Return the request for the events that have not come."""
        self._known = self._last
        self._asked, self._heard = self._flows.clock(), False
        return requests.job_events(self._job_id, last_id=self._last_id)

    def take(self, event: Event) -> JobInfo | None:
        """The job as an event tells of it; None where that is known: each stream begins with the state now."""
        info = JobInfo.parse(event.data)
        self._heard = True
        self._last_id = event.id
        self._last, known, self._known = info, self._known, None
        if info == known:
            return None
        self._attempts = self._flows._attempts()
        return info

    def broke(self, error: _errors.GemmserveError) -> float | None:
        """Seconds until the next stream is asked for; None: `error` is final."""
        # One that was good for a while has not failed: proxies end what is silent for a minute.
        if self._heard and self._flows.clock() - self._asked >= self._flows.retry.cap_s:
            self._attempts = self._flows._attempts()
        return self._attempts.pause_after(error)

    def ended(self) -> float:
        """The same after a stream that ended before the job did: a server that stops ends them. Raises TransportError
        when that goes on for too long.
        """
        error = _errors.TransportError(f"the events of {self._job_id} ended before the job did")
        pause = self.broke(error)
        if pause is None:
            raise error
        return pause


def prepare(
    op: str, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """(operands without None, parameters as JSON, whether any is remote); local ones checked before anything is sent.

    Raises DtypeUnsupported, ShapeMismatch, ParameterInvalid.
    """
    present = {name: x for name, x in operands.items() if x is not None or name != "c"}
    checked = {name: x if isinstance(x, ArrayHandle) else as_array(x, name) for name, x in present.items()}
    trans = {name: compose(params[name], transposed=False, conjugated=False) for name in ("trans_a", "trans_b")}
    remote = any(isinstance(x, ArrayHandle) for x in checked.values())
    if not remote:
        c = checked.get("c")
        check_shapes(
            checked["a"].shape,
            checked["b"].shape,
            None if c is None else c.shape,
            trans_a=trans["trans_a"],
            trans_b=trans["trans_b"],
            layout=params["layout"],
        )
    encoded = to_json(params)
    if op == "gemm" and "c" not in checked and encoded.get("beta"):
        raise _errors.ParameterInvalid("beta needs c", problem={"parameter": "beta"})
    return checked, encoded, remote


def submission(
    op: str, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(operands, parameters as JSON) of `submit`. Raises as `prepare` does, and ParameterInvalid for `op`."""
    if op not in {"gemm", "gemm_reduce"}:
        raise _errors.ParameterInvalid(f'op must be "gemm" or "gemm_reduce", not {op!r}', problem={"parameter": "op"})
    if op == "gemm_reduce" and operands.get("c") is not None:
        raise _errors.ParameterInvalid("gemm_reduce has no c", problem={"parameter": "c"})
    defaults = {"trans_a": "N", "trans_b": "N", "layout": "interleaved"}
    present, encoded, _ = prepare(op, operands, {**defaults, **params})
    return present, encoded
