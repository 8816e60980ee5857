"""Products of an iterable that are on the server a few at a time: what `Client.map` gives, in order."""

from __future__ import annotations

import os
import secrets
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from gemmserve import _errors
from gemmserve._calls.flows import TOGETHER, Submitted, expected_of, filled, sampled, submission_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import TypeAlias

    from gemmserve._calls.flows import Asked, Expected, Flow, Flows, Known, Sampled
    from gemmserve._model import JobInfo

    Outcome: TypeAlias = tuple[JobInfo, Expected] | _errors.APIError

_OF_SERVER: Final = (_errors.Overloaded, _errors.StoreFull, _errors.Unauthorized, _errors.Forbidden)
"""Errors that the next product would meet too, whichever one the server names."""

_DONE: Final[Any] = object()


@dataclass(frozen=True)
class _Chunk:
    """Products that were submitted together, and those among them that were refused."""

    expected: dict[int, Expected]
    """Functions that return what their results are, by their numbers."""
    submitted: Submitted
    refused: dict[int, _errors.APIError]


class Mapped:
    """Products by their numbers in the caller's iterable, from 0 on.

    What is wrong with one of them, here or for the server, is its outcome where `errors` is "return". Where that is
    "raise", and for what is wrong with the server, the key or the iterable, it ends the products: what went before is
    finished, then `next` raises it.
    """

    def __init__(self, flows: Flows, asked: Iterable[Mapping[str, Any]], in_flight: int, errors: str) -> None:
        if errors not in {"raise", "return"}:
            raise _errors.ParameterInvalid(f'errors is "raise" or "return", not {errors!r}')
        self._flows = flows
        self._process = os.getpid()
        self._source = iter(asked)
        self._taken = 0
        self._size = min(max(in_flight // 2, 1), TOGETHER)
        self._chunks = max(2, in_flight // self._size)
        self._return = errors == "return"
        self._pending: deque[_Chunk] = deque()
        self._outcomes: dict[int, Outcome] = {}
        """Outcomes of the products that are done, which are not taken yet."""
        self._untaken: dict[int, tuple[Mapping[str, Any], JobInfo]] = {}
        """Those among them that are jobs, with what they were submitted with."""
        self._over = False
        self._error: Exception | None = None
        """Error that has ended the products."""
        self._stop = 0
        """Number of the product in whose place it is raised."""

    def next(self) -> Flow[list[int] | None]:
        """The numbers of the next products that are done, whose outcomes are to be taken; None: there are no more. The
        products after them are submitted before it returns. Raises what ended them.
        """
        yield from self._fill()
        if not self._pending:
            if self._error is not None:
                raise self._error
            return None
        chunk = self._pending[0]
        infos = yield from self._flows.gather(chunk.submitted)
        self._pending.popleft()
        ended = zip(chunk.submitted.jobs, infos, strict=True)
        self._untaken = dict(zip(chunk.expected, ended, strict=True))
        done = zip(infos, chunk.expected.values(), strict=True)
        self._outcomes = {**chunk.refused, **dict(zip(chunk.expected, done, strict=True))}
        yield from self._fill()
        return [n for n in sorted(self._outcomes) if self._error is None or n < self._stop]

    def take(self, number: int) -> Outcome:
        """The outcome of a product that `next` named: a final job with what its results are, which are the caller's
        from now on, or an error.
        """
        self._untaken.pop(number, None)
        return self._outcomes.pop(number)

    def close(self) -> Flow[None]:
        """Cancels the jobs that are not final, and deletes results that were not taken, but those with a name or
        labels; nothing in a forked child, which closes its copy of the iterator.
        """
        if os.getpid() != self._process:
            return
        jobs, infos = zip(*self._untaken.values(), strict=True) if self._untaken else ((), ())
        yield from self._flows.abandon([Submitted(jobs, "", infos), *(chunk.submitted for chunk in self._pending)])

    def _fill(self) -> Flow[None]:
        while len(self._pending) < self._chunks and not self._over:
            asked, refused = self._take()
            chunk = yield from self._flows.with_temporaries(partial(self._submit, asked, refused))
            if chunk.expected or chunk.refused:
                self._pending.append(chunk)

    def _take(self) -> tuple[dict[int, Asked], dict[int, _errors.APIError]]:
        """(The next products, those that are wrong at first sight), by their numbers."""
        asked: dict[int, Asked] = {}
        refused: dict[int, _errors.APIError] = {}
        samples: list[Sampled] = []
        for number in range(self._taken, self._taken + self._size):
            try:
                given = next(self._source, _DONE)
            except Exception as error:  # of the iterable's own, whatever it asked of a server
                self._end(number, error)
                break
            if given is _DONE:
                self._over = True
                break
            self._taken += 1
            try:
                asked[number] = submission_of(given)
                samples += sampled(number, asked[number])
            except _errors.APIError as error:
                if not self._refuse(number, error, refused):
                    break
            except Exception as error:  # no mapping is given
                self._end(number, error)
                break
        for number, changed in filled(samples):
            if number in asked:
                del asked[number]
                if not self._refuse(number, changed, refused):
                    asked = {each: product for each, product in asked.items() if each < number}
                    break
        return asked, refused

    def _refuse(self, number: int, error: _errors.APIError, refused: dict[int, _errors.APIError]) -> bool:
        """Note what is wrong with a product. Returns whether those after it go on."""
        error = _errors.numbered(error, number)
        if self._return:
            refused[number] = error
        else:
            self._end(number, error)
        return self._return

    def _end(self, number: int, error: Exception) -> None:
        """Let the products end before that of this number."""
        self._over, self._error, self._stop = True, error, number

    def _submit(
        self, asked: dict[int, Asked], refused: dict[int, _errors.APIError], temporaries: list[str]
    ) -> Flow[_Chunk]:
        """Submits products, without those that the server refuses."""
        jobs: dict[int, Mapping[str, Any]] = {}
        known: Known = {}
        for number, (op, operands, params) in asked.items():
            try:
                jobs[number] = yield from self._flows._job(op, operands, params, temporaries, known)
            except (_errors.InvalidRequest, _errors.TooLarge) as error:
                if not self._refuse(number, error, refused):
                    break
            except _errors.GemmserveError as error:
                self._end(number, error)
                break
        while jobs:
            key = secrets.token_hex(16)
            try:
                infos = yield from self._flows.submit_together(list(jobs.values()), key)
            except _errors.GemmserveError as error:
                number, of_product = _meant(error, list(jobs))
                if of_product and self._refuse(number, cast("_errors.APIError", error), refused):
                    del jobs[number]
                    continue
                if not of_product:
                    self._end(number, error)
                jobs = {each: job for each, job in jobs.items() if each < number}
            else:
                expected = {number: expected_of(*asked[number]) for number in jobs}
                return _Chunk(expected, Submitted(list(jobs.values()), key, infos), refused)
        return _Chunk({}, Submitted([], "", []), refused)


def _meant(error: _errors.GemmserveError, numbers: list[int]) -> tuple[int, bool]:
    """(Number of the first product that a refusal of these is about, whether it is about that one alone)."""
    item = error.problem.get("item") if isinstance(error, _errors.APIError) else None
    if not isinstance(item, int) or not 0 <= item < len(numbers):
        return numbers[0], False
    return numbers[item], not isinstance(error, _OF_SERVER)
