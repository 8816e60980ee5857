"""Flows: operations of more than one exchange, written once for both clients.

A flow is a generator: it yields a Request (or a Pause) and is sent the answer, or thrown the error. `Client` drives
flows with blocking I/O and `AsyncClient` by awaiting; neither knows anything that is decided here. Interruptions
(KeyboardInterrupt, asyncio.CancelledError) are thrown in too, so that a flow can cancel what it began.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np

from gemmserve import _errors, wire
from gemmserve._calls import requests
from gemmserve._calls.outstanding import Outstanding, with_request
from gemmserve._calls.params import check_shapes, compose, results_of, to_json
from gemmserve._calls.places import by_cell
from gemmserve._calls.requests import LONG_POLL_S, Pause, Request, Together, Work
from gemmserve._handles.handle import ArrayHandle, base_of
from gemmserve._model import JobInfo
from gemmserve._transfer.arrays import as_array, filled_again, sample
from gemmserve._transfer.parts import PART, PARTS_FROM, Download, Span, Stretch, divisible, flat, spans
from gemmserve._transport.content_coding import compressed
from gemmserve._transport.retry import Attempts, RetryPolicy, may_be_done

if TYPE_CHECKING:
    from gemmserve._handles.view import Base, View
    from gemmserve._model import ArrayInfo
    from gemmserve._transfer.arrays import AnyArray
    from gemmserve._transfer.sse import Event
    from gemmserve._transport.digests import Digests

T = TypeVar("T")
Flow: TypeAlias = Generator[Request[Any] | Pause | Together | Work[Any], Any, T]

TEMPORARY_TTL_S: Final = 3600.0
"""Life of operands put for one job, should the client die before it deletes them."""

PAGE: Final = 1000
"""Items a page: the most that the service gives."""

INLINE: Final = 1 << 18
"""Bytes that are hashed sooner than a thread is woken."""

WATCHED_POLL_S: Final = 1.0
"""Seconds of a long poll while somebody watches the job's bar."""

UNSUPPORTED: Final = 415
"""Status of an answer to a coding that the server does not read."""

TOGETHER: Final = 500
"""Jobs that are submitted by one exchange: as many as the server takes would be too long for it with every option."""

SPARSE: Final = 2
"""Elements, for each that a view shows, between its first and its last, up to which they are all fetched: more than
twice the bytes cost more than an exchange that has the server gather them."""

SMALL_SPAN: Final = 1 << 18
"""Bytes between a view's first and last that are fetched whatever it shows of them: less time than another exchange
(2 ms at 1 Gbit/s)."""

CLEANUP_LIMIT_S: Final = 5.0
"""Seconds of silence after which cancelling or tidying up is given up."""

_NO_ROUTE: Final = (403, 404, 405)
"""Statuses with which a server answers that has no states of several jobs, and what stands before it."""

LOOK_LIMIT_S: Final = 2.0
"""Seconds of silence after which a picture is given up: somebody waits for the next line of a notebook."""


Known: TypeAlias = "dict[int, tuple[AnyArray, str]]"
"""Local operands and the ids that they were put as; by their identity, which lasts as long as they are held."""

Asked: TypeAlias = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""Operation, operands and encoded parameters of a job, as `submission` gives them."""

Expected: TypeAlias = "Callable[[], Mapping[str, Base | None]]"
"""Function that returns what the results of a product are, by name, where that follows from its operands."""

Sampled: TypeAlias = "tuple[int, str, AnyArray, bytes]"
"""Number of a product, name of a local operand, the array, and some of its elements when it was given."""


@dataclass(frozen=True)
class Submitted:
    """Jobs that were submitted together."""

    jobs: Sequence[Mapping[str, Any]]
    key: str
    infos: Sequence[JobInfo]
    """Their states then."""


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
    outstanding: Outstanding = field(default_factory=Outstanding, compare=False)
    """Jobs of the client whose ends it has not seen."""

    def call(self, request: Request[T], *, deadline: float | None = None) -> Flow[T]:
        """One request, repeated as the policy says. Raises the last error."""
        attempts = self._attempts(deadline)
        while True:
            try:
                answer: T = yield request
            except _errors.GemmserveError as error:
                yield from _pause_after(attempts, error)
            else:
                return answer

    def _attempts(self, deadline: float | None = None) -> Attempts:
        return Attempts(self.retry, deadline=deadline, clock=self.clock, uniform=self.uniform)

    def put(
        self,
        array: AnyArray,
        *,
        ttl_s: float | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        digest: bool = False,
        label: str = "put",
    ) -> Flow[ArrayInfo]:
        """Stores an array; a large one in parts, each of which goes on where its connection broke."""
        query = requests.kept(ttl_s=ttl_s, name=name, labels=labels)
        digest = digest or self.digests == "always"
        if self.compression:
            body = yield Work(partial(compressed, array))
            if body is not None:
                try:
                    request = requests.put_array(array, query=query, digest=digest, label=label, compressed=body)
                    return (yield from self.call(request))
                except _errors.APIError as error:
                    if error.status != UNSUPPORTED:  # else a server that does not know it takes the array as it is
                        raise
        if self.connections and array.nbytes >= PARTS_FROM and divisible(array):
            for last in (False, True):
                try:
                    return (yield from self._put_in_parts(array, query, digest=digest, label=label))
                except (_errors.NotFound, _errors.Gone):
                    # The server lost the upload, or gave it up; or it is one that has none.
                    if last:
                        break
        return (yield from self.call(requests.put_array(array, query=query, digest=digest, label=label)))

    def _put_in_parts(self, array: AnyArray, query: requests.Query, *, digest: bool, label: str) -> Flow[ArrayInfo]:
        begun = yield from self.call(requests.begin_upload(array, query=query))
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
                yield from _pause_after(attempts, error)
            else:
                return
            if not digest:  # else the part is checked whole, and comes whole
                known = yield from self.call(requests.upload_info(upload_id))
                reached = max([start, *(high for low, high in known.received if low <= start)])
                if reached > start:
                    attempts = self._attempts()
                start = reached

    def download(self, array_id: str, *, nbytes: int = 0, out: AnyArray | None = None) -> Flow[Any]:
        """An array's elements; `nbytes` where they are known: many are fetched over several connections. `out`: an
        array of the same shape and dtype that they may be received into.
        """
        if not self.connections or self.compression:
            request = requests.array_data(array_id, nbytes=nbytes, compression=self.compression)
            return (yield from self.call(request))
        attempts = self._attempts()
        while True:
            try:
                return (yield from self._download(array_id, nbytes, out))
            except _errors.CorruptAnswer as error:
                yield from _pause_after(attempts, error)

    def _download(self, array_id: str, nbytes: int, out: AnyArray | None) -> Flow[Any]:
        download = Download(out)
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
                yield from _pause_after(attempts, error)
            else:
                if span.download.sha256 is not None and self.digests != "never":
                    hashing = partial(span.download.came, start, reached)
                    if reached - start < INLINE:
                        hashing()
                    else:
                        yield Work(hashing)
                return reached

    def download_view(self, array_id: str, base: Base, view: View) -> Flow[AnyArray | None]:
        """The elements of a view; None where they lie so sparsely in their array that the server should gather them.

        The stretch of the array from the first to the last of them is fetched. It has no digest of its own, so with
        digests="always" only whole arrays are fetched.
        """
        size = base.dtype.itemsize
        if view.size == 0:
            yield from self.call(requests.array_info(array_id))  # whether it is there
            return np.empty(view.shape, view.dtype(base.dtype))
        low, high = view.span()
        whole = high - low == base.size
        shown = view.size * view.dtype(base.dtype).itemsize
        sparse = (high - low) * size > max(SPARSE * shown, SMALL_SPAN)
        if sparse or (self.digests == "always" and not whole):
            return None
        if whole:
            found = yield from self.download(array_id, nbytes=base.size * size)
            return view.show(requests.single_array(found).reshape(-1, order="F" if base.order == "F" else "C"))
        memory = np.empty(high - low, base.dtype.newbyteorder("<"))
        data = flat(memory)
        part = PART if self.connections and len(data) >= PARTS_FROM else len(data)
        parts = [
            self._fetch_stretch(array_id, Stretch(data[start:stop], low * size + start))
            for start, stop in spans(0, len(data), part)
        ]
        if len(parts) == 1:
            yield from parts[0]
        else:
            yield Together(parts, self.connections, "receiving get", len(data))
        return view.show(memory.astype(base.dtype, copy=False), low)

    def _fetch_stretch(self, array_id: str, stretch: Stretch) -> Flow[int]:
        """A stretch of an array's data, going on where an answer broke off; returns where it ends."""
        attempts = self._attempts()
        while True:
            began = stretch.position
            try:
                reached: int = yield requests.array_stretch(array_id, stretch)
            except _errors.GemmserveError as error:
                if stretch.position > began:
                    attempts = self._attempts()
                yield from _pause_after(attempts, error)
            else:
                return reached

    def attempt(self, request: Request[T]) -> Flow[T | None]:
        """One request once; None where it fails, which is ignored: tidying up must not hide what happened before."""
        try:
            answer: T = yield request
        except _errors.GemmserveError:
            return None
        return answer

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
        """Submits a job and comes back once the server has it; where this is interrupted, it is cancelled. Local
        operands are put first; the job keeps them.
        """

        def submitted(temporaries: list[str]) -> Flow[JobInfo]:
            job = yield from self._job(op, operands, params, temporaries)
            key = secrets.token_hex(16)
            try:
                return (yield from self.call(requests.submit(job, key=key)))
            except (GeneratorExit, _errors.GemmserveError):
                raise
            except BaseException:
                yield from self._cancel_submission(job, key)
                raise

        return (yield from self.with_temporaries(submitted))

    def submit_many(self, asked: Sequence[Asked]) -> Flow[list[Submitted]]:
        """Submits jobs, so many at a time, and comes back once the server has them all; where it refuses some, or this
        is interrupted, those that it has are cancelled.
        """

        def submitted(temporaries: list[str]) -> Flow[list[Submitted]]:
            jobs: list[dict[str, Any]] = []
            made: list[Submitted] = []
            known: Known = {}
            for op, operands, params in asked:
                jobs.append((yield from self._job(op, operands, params, temporaries, known)))
            try:
                for low in range(0, len(jobs), TOGETHER):
                    some = yield from self._submit_some(jobs[low : low + TOGETHER], low)
                    made.append(some)
            except GeneratorExit:
                raise
            except BaseException:
                yield from self.abandon(made)
                raise
            return made

        return (yield from self.with_temporaries(submitted))

    def _submit_some(self, jobs: Sequence[Mapping[str, Any]], before: int) -> Flow[Submitted]:
        """Jobs of one exchange; `before`: the number of those that went before them."""
        key = secrets.token_hex(16)
        try:
            return Submitted(jobs, key, (yield from self.submit_together(jobs, key)))
        except _errors.APIError as error:
            if isinstance(item := error.problem.get("item"), int):
                _errors.numbered(error, before + item)
            raise

    def submit_together(self, jobs: Sequence[Mapping[str, Any]], key: str) -> Flow[list[JobInfo]]:
        """Submits jobs by one exchange; where this is interrupted, they are cancelled."""
        try:
            return (yield from self.call(requests.submit_many(jobs, key=key)))
        except (GeneratorExit, _errors.GemmserveError):
            raise
        except BaseException:
            # As in `_cancel_submission`.
            infos = yield from self.attempt(requests.submit_many(jobs, key=key, limit_s=CLEANUP_LIMIT_S))
            yield from self.abandon([Submitted(jobs, key, infos or [])])
            raise

    def ended(self, last: JobInfo, waiting: Sequence[JobInfo], wait_s: float) -> Flow[Sequence[JobInfo] | None]:
        """State of `last` once it is final, or after `wait_s`, and those of the `waiting` ones that are final by then.
        None: the server does not tell of several, or has forgotten them.
        """
        if not self.outstanding.supported:
            return None
        asked = [last.id, *(info.id for info in waiting if info.id != last.id)][: wire.MAX_STATES]
        states = yield from self._states(asked, wait_s, None)
        return states if states and states[0].id == last.id else None

    def gather(self, submitted: Submitted) -> Flow[Sequence[JobInfo]]:
        """The jobs once all of them are final: what they were submitted with is sent again, which the key makes a
        question.
        """
        infos, quick = submitted.infos, 0
        while not all(info.final for info in infos):
            began = self.clock()
            infos = yield from self.call(requests.submit_many(submitted.jobs, key=submitted.key, wait_s=LONG_POLL_S))
            if self.clock() - began < LONG_POLL_S / 2 and not all(info.final for info in infos):
                quick += 1
                yield Pause(min(1.0, 0.01 * 2.0 ** min(quick, 10)))
        return infos

    def abandon(self, submitted: Iterable[Submitted]) -> Flow[None]:
        """Cancels the jobs that are not final, and deletes the results of those that are, which nobody was given: but
        what has a name or labels stays, by which it is found. Whatever fails is left to itself.
        """
        results: list[str] = []
        for each in submitted:
            for job, info in zip(each.jobs, each.infos, strict=False):
                ended = info if info.final else (yield from self.attempt(_cancel(info.id)))
                if ended is not None and not job.get("name") and not job.get("labels"):
                    results += ended.result.values()
        for own in by_cell(map(requests.segment, results)):
            for low in range(0, len(own), wire.MAX_DELETED):
                some = {"ids": own[low : low + wire.MAX_DELETED]}
                yield from self.attempt(requests.delete_arrays(some, limit_s=CLEANUP_LIMIT_S))

    def run(
        self, op: str, operands: Mapping[str, Any], params: Mapping[str, Any], *, timeout: float | None
    ) -> Flow[JobInfo]:
        """Submits a job and waits until it is final. After `timeout` seconds, or when interrupted, cancels it.

        The returned state is not final if it was cancelled here and the server has not said more.
        """
        deadline = None if timeout is None else self.clock() + timeout

        def finished(temporaries: list[str]) -> Flow[JobInfo]:
            job = yield from self._job(op, operands, params, temporaries)
            return (yield from self.run_job(job, timeout=timeout, deadline=deadline))

        return (yield from self.with_temporaries(finished))

    def run_step(
        self,
        op: str,
        operands: Mapping[str, Any],
        params: Mapping[str, Any],
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> Flow[JobInfo]:
        """A program of one step, "s0", and waits as `run` does. `params`: the step's, as JSON; `fields`: the job's."""

        def finished(temporaries: list[str]) -> Flow[JobInfo]:
            step: dict[str, Any] = {"id": "s0", "op": op, **params}
            for name, x in operands.items():
                if isinstance(x, ArrayHandle):
                    step[name] = x._operand()[0]
                else:
                    info = yield from self.put(as_array(x, name), ttl_s=TEMPORARY_TTL_S, label=name)
                    temporaries.append(info.id)
                    step[name] = info.id
            return (yield from self.run_job({"op": "program", "steps": [step], **fields}, timeout=timeout))

        return (yield from self.with_temporaries(finished))

    def run_job(self, job: dict[str, Any], *, timeout: float | None, deadline: float | None = None) -> Flow[JobInfo]:
        """Submits a job whose operands are on the server, and waits as `run` does; `deadline`: if it is known."""
        if timeout is not None:
            deadline = self.clock() + timeout if deadline is None else deadline
            job = {**job, "timeout_s": timeout}  # so that the server, too, stops then if this client is gone
        return (yield from self._run(job, deadline))

    def with_temporaries(self, make: Callable[[list[str]], Flow[T]]) -> Flow[T]:
        """Return what `make` does; arrays whose ids it notes in its list are deleted in the end, however it ends."""
        temporaries: list[str] = []
        try:
            value = yield from make(temporaries)
        except GeneratorExit:
            raise
        except BaseException:
            yield from self.delete_all(temporaries)
            raise
        yield from self.delete_all(temporaries)
        return value

    def delete_all(self, ids: list[str]) -> Flow[None]:
        """Deletes temporaries; whatever fails is left to their time to live."""
        for array_id in ids:
            yield from self.attempt(requests.delete_array(array_id))

    def delete_one(self, array_id: str) -> Flow[None]:
        """Deletes an array. Raises NotFound where there is none, unless an attempt before may have deleted it."""
        attempts = self._attempts()
        done = False
        while True:
            try:
                yield requests.delete_array(array_id)
            except _errors.NotFound:
                if not done:
                    raise
                return
            except _errors.GemmserveError as error:
                done = done or may_be_done(error)
                yield from _pause_after(attempts, error)
            else:
                return

    def delete(self, ids: Sequence[str]) -> Flow[int]:
        """Deletes arrays, many by each exchange, those of each cell by themselves; those that are gone already are
        passed over. Returns how many went. Where a cell fails the others' arrays go all the same; its error is raised
        in the end.
        """
        count = 0
        failed: _errors.GemmserveError | None = None
        for own in by_cell(map(requests.segment, ids)):
            try:
                for low in range(0, len(own), wire.MAX_DELETED):
                    some = own[low : low + wire.MAX_DELETED]
                    deleted = yield from self.call(requests.delete_arrays({"ids": some}))
                    count += deleted.count
            except _errors.GemmserveError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return count

    def delete_chosen(
        self,
        name: str | None,
        labels: Mapping[str, str] | None,
        older_than_s: float | None,
        *,
        dry_run: bool,
    ) -> Flow[int]:
        """Deletes the arrays that all of what is given chooses, the oldest first; returns how many, or would."""
        choice: dict[str, Any] = {"name": name, "older_than_s": older_than_s, "dry_run": dry_run or None}
        choice = {field: value for field, value in choice.items() if value is not None}
        if labels:
            choice["labels"] = requests.texts(labels)
        count, more = 0, True
        while more:
            deleted = yield from self.call(requests.delete_arrays(choice))
            count, more = count + deleted.count, deleted.more
        return count

    def look(self, array_id: str, info: ArrayInfo | None) -> Flow[tuple[ArrayInfo, AnyArray | None]]:
        """(Metadata of an array, some of its elements if they can be had at once), asked for once and not for long."""
        if info is None:
            info = yield requests.array_info(array_id, limit_s=LOOK_LIMIT_S)
        sample = yield requests.array_sample(array_id, limit_s=LOOK_LIMIT_S)
        return info, sample

    def _run(self, job: Mapping[str, Any], deadline: float | None) -> Flow[JobInfo]:
        key = secrets.token_hex(16)
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
            try:
                info = yield from self.wait(info, deadline=deadline)
            except _errors.Forbidden:  # a key that may submit and not look: what it made it may ask for by its key
                info = yield from self._wait_by_key(job, key, info, deadline)
        except (GeneratorExit, _errors.GemmserveError):
            raise
        except BaseException:
            yield from self.abandon([Submitted([job], key, [info])])
            raise
        if not info.final:
            yield from self.attempt(_cancel(info.id))
        return info

    def _wait_by_key(self, job: Mapping[str, Any], key: str, info: JobInfo, deadline: float | None) -> Flow[JobInfo]:
        """`wait` by the request that made the job, sent again."""
        quick = 0
        while not info.final and (wait_s := self._poll(deadline)) > 0:
            began = self.clock()
            info = yield from self.call(requests.submit(job, key=key, wait_s=wait_s), deadline=deadline)
            if not info.final and self.clock() - began < wait_s / 2:
                quick += 1
                yield Pause(min(1.0, 0.01 * 2.0 ** min(quick, 10)))
        return info

    def _cancel_submission(self, job: Mapping[str, Any], key: str) -> Flow[None]:
        info = yield from self.attempt(requests.submit(job, key=key, limit_s=CLEANUP_LIMIT_S))
        if info is not None:
            yield from self.abandon([Submitted([job], key, [info])])

    def wait(
        self, info: JobInfo, *, deadline: float | None, seen: Callable[[JobInfo], object] | None = None
    ) -> Flow[JobInfo]:
        """Long polls until the job is final or the deadline has passed; returns the last state seen.

        `seen` is called, by whoever drives this, with each state; polls are short then, to see them.
        """
        quick = 0
        while not info.final:
            wait_s = self._poll(deadline)
            if seen is not None:
                seen(info)
                wait_s = min(wait_s, WATCHED_POLL_S)
            if wait_s <= 0:
                return info
            began = self.clock()
            info = yield from self._state(info, wait_s, deadline)
            if not info.final and self.clock() - began < wait_s / 2:
                # The server answered early (a proxy, or a shorter cap than ours): do not spin.
                quick += 1
                yield Pause(min(1.0, 0.01 * 2.0 ** min(quick, 10)))
        return info

    def _state(self, info: JobInfo, wait_s: float, deadline: float | None) -> Flow[JobInfo]:
        """The job once it is final, or after `wait_s`. Others that are outstanding are told of by the same exchange."""
        asked = [info.id, *self.outstanding.ask(info.id)]
        try:
            states = (yield from self._states(asked, wait_s, deadline)) if len(asked) > 1 else None
            for state in states or ():
                self.outstanding.learn(state)
            if states and states[0].id == info.id:
                return with_request(states[0], info)
            return (yield from self.call(requests.job_info(info.id, wait_s=wait_s), deadline=deadline))
        finally:
            self.outstanding.asked(asked)

    def _states(self, ids: Sequence[str], wait_s: float, deadline: float | None) -> Flow[list[JobInfo] | None]:
        """Those jobs that the server knows, as `requests.job_states` has them; None: it does not tell of several."""
        try:
            return (yield from self.call(requests.job_states(ids, wait_s=wait_s), deadline=deadline))
        except _errors.APIError as error:
            if error.status not in _NO_ROUTE:
                raise
            self.outstanding.supported = False
            return None

    def _poll(self, deadline: float | None) -> float:
        return LONG_POLL_S if deadline is None else max(0.0, min(LONG_POLL_S, deadline - self.clock()))

    def _job(
        self,
        op: str,
        operands: Mapping[str, Any],
        params: Mapping[str, Any],
        temporaries: list[str],
        known: Known | None = None,
    ) -> Flow[dict[str, Any]]:
        """The submission's JSON. Puts local operands and notes their ids in `temporaries`, for the caller to delete.

        `known`: those that were put already for jobs that are submitted together; they are noted there, too.
        """
        known = {} if known is None else known
        local = {name: as_array(x, name) for name, x in operands.items() if not isinstance(x, ArrayHandle)}
        job: dict[str, Any] = {"op": op, **params}
        for name, operand in operands.items():
            if isinstance(operand, ArrayHandle):
                if name == "c":
                    job[name], _ = operand._operand()
                else:
                    flag = f"trans_{name}"
                    job[name], job[flag] = operand._operand(trans=params.get(flag, "N"))
        for name, array in local.items():
            if id(array) not in known:
                info = yield from self.put(array, ttl_s=TEMPORARY_TTL_S, label=name)
                temporaries.append(info.id)
                known[id(array)] = array, info.id
            job[name] = known[id(array)][1]
        return job

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


def _cancel(job_id: str) -> Request[JobInfo | None]:
    return requests.cancel_job(job_id, limit_s=CLEANUP_LIMIT_S)


def _pause_after(attempts: Attempts, error: _errors.GemmserveError) -> Flow[None]:
    """Pauses before the next attempt. Raises `error` where it is final."""
    pause = attempts.pause_after(error)
    if pause is None:
        raise error
    yield Pause(pause, error, attempts.spare_s)


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


def submission_of(asked: Mapping[str, Any]) -> Asked:
    """`submission` of a mapping of `Client.submit`'s arguments by name. Raises as that does."""
    params = dict(asked)
    missing = [name for name in ("op", "a", "b") if name not in params]
    if missing:
        raise _errors.ParameterInvalid(f"{missing[0]} is missing", problem={"parameter": missing[0]})
    op = params.pop("op")
    operands = {name: params.pop(name, None) for name in ("a", "b", "c")}
    return (op, *submission(op, operands, params))


def expected_of(op: str, operands: Mapping[str, Any], params: Mapping[str, Any]) -> Expected:
    """The results of a product that the server has accepted. It holds no operand."""
    bases: dict[str, Base | None] = {}
    for name, x in operands.items():
        whole = isinstance(x, ArrayHandle) and x._view is None  # as it is stored: what is known of it will do
        bases[name] = x._known if whole else base_of(x)
    return partial(results_of, op, bases, params)


def sampled(number: int, asked: Asked) -> list[Sampled]:
    """The local operands of a product, for `filled`."""
    return [(number, name, x, sample(x)) for name, x in asked[1].items() if isinstance(x, np.ndarray)]


def filled(samples: Iterable[Sampled]) -> Iterator[tuple[int, _errors.ParameterInvalid]]:
    """The products whose operands an iterator has filled again since they were sampled: all are sent together, and
    earlier products would be computed from later elements.
    """
    for number, name, array, seen in samples:
        if sample(array) != seen:
            yield number, filled_again(name)


def submissions(asked: Iterable[Mapping[str, Any]]) -> list[Asked]:
    """`submission` of each. Raises as that does, and what `filled` finds; `problem["item"]` is the number of the one
    that is wrong.
    """
    found: list[Asked] = []
    samples: list[Sampled] = []
    for number, given in enumerate(asked):
        try:
            found.append(submission_of(given))
        except _errors.APIError as error:
            _errors.numbered(error, number)
            raise
        samples += sampled(number, found[-1])
    for number, changed in filled(samples):
        raise _errors.numbered(changed, number)
    return found
