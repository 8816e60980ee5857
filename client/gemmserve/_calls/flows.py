"""Flows of jobs: submitted one by one and together, waited for, watched, cancelled."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from gemmserve import _errors, wire
from gemmserve._calls import requests
from gemmserve._calls.arrays import ArrayFlows
from gemmserve._calls.exchanges import CLEANUP_LIMIT_S, TEMPORARY_TTL_S
from gemmserve._calls.outstanding import with_request
from gemmserve._calls.places import by_cell
from gemmserve._calls.requests import LONG_POLL_S, Pause, Request
from gemmserve._handles.handle import ArrayHandle
from gemmserve._transfer.arrays import as_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gemmserve._calls.exchanges import Flow
    from gemmserve._calls.submissions import Asked
    from gemmserve._model import JobInfo
    from gemmserve._transfer.arrays import AnyArray

T = TypeVar("T")

WATCHED_POLL_S: Final = 1.0
"""Seconds of a long poll while somebody watches the job's bar."""

TOGETHER: Final = 500
"""Jobs that are submitted by one exchange: as many as the server takes would be too long for it with every option."""

_NO_ROUTE: Final = (403, 404, 405)
"""Statuses with which a server answers that has no states of several jobs, and what stands before it."""

Known: TypeAlias = "dict[int, tuple[AnyArray, str]]"
"""Local operands and the ids that they were put as; by their identity, which lasts as long as they are held."""


@dataclass(frozen=True)
class Submitted:
    """Jobs that were submitted together."""

    jobs: Sequence[Mapping[str, Any]]
    key: str
    infos: Sequence[JobInfo]
    """Their states then."""


class Flows(ArrayFlows):
    """All flows of a client."""

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
            job = yield from self.job_document(op, operands, params, temporaries)
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
                jobs.append((yield from self.job_document(op, operands, params, temporaries, known)))
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
        infos, polls = submitted.infos, _Polls(self.clock)
        while not all(info.final for info in infos):
            polls.begin(LONG_POLL_S)
            infos = yield from self.call(requests.submit_many(submitted.jobs, key=submitted.key, wait_s=LONG_POLL_S))
            if not all(info.final for info in infos):
                yield from polls.pause()
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
            job = yield from self.job_document(op, operands, params, temporaries)
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
        polls = _Polls(self.clock)
        while not info.final and (wait_s := self._poll(deadline)) > 0:
            polls.begin(wait_s)
            info = yield from self.call(requests.submit(job, key=key, wait_s=wait_s), deadline=deadline)
            if not info.final:
                yield from polls.pause()
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
        polls = _Polls(self.clock)
        while not info.final:
            wait_s = self._poll(deadline)
            if seen is not None:
                seen(info)
                wait_s = min(wait_s, WATCHED_POLL_S)
            if wait_s <= 0:
                return info
            polls.begin(wait_s)
            info = yield from self._state(info, wait_s, deadline)
            if not info.final:
                yield from polls.pause()
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

    def job_document(
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


class _Polls:
    """Long polls, one after the other. Some are answered early (a proxy, or a shorter cap than ours): nobody spins."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._wait_s = 0.0
        self._early = 0

    def begin(self, wait_s: float) -> None:
        """Note that a poll of `wait_s` is sent."""
        self._began, self._wait_s = self._clock(), wait_s

    def pause(self) -> Flow[None]:
        """Pauses before the next one where this one was answered early, longer each time."""
        if self._clock() - self._began < self._wait_s / 2:
            self._early += 1
            yield Pause(min(1.0, 0.01 * 2.0 ** min(self._early, 10)))


def _cancel(job_id: str) -> Request[JobInfo | None]:
    return requests.cancel_job(job_id, limit_s=CLEANUP_LIMIT_S)
