"""Products of an iterable that are on the server a few at a time: what `Client.map` gives, in order."""

from __future__ import annotations

import os
import secrets
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, cast

from gemmserve import _errors
from gemmserve._calls.flows import TOGETHER, Submitted
from gemmserve._calls.requests import LONG_POLL_S, Pause
from gemmserve._calls.submissions import expected_of, filled, sampled, submission_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import TypeAlias

    from gemmserve._calls.exchanges import Flow
    from gemmserve._calls.flows import Flows, Known
    from gemmserve._calls.submissions import Asked, Expected, Sampled
    from gemmserve._model import JobInfo

    Outcome: TypeAlias = tuple[JobInfo, Expected] | _errors.APIError

_OF_SERVER: Final = (_errors.Overloaded, _errors.StoreFull, _errors.Unauthorized, _errors.Forbidden)
"""Errors that the next product would meet too, whichever one the server names."""

_DONE: Final[Any] = object()

_BRIEF_S: Final = 0.01
_LONG_S: Final = 0.02
"""Seconds that an exchange for results takes as a rule: where it took less, the next one is for twice as many, where it
took more, for half as many."""
_PATIENCE_S: Final = 0.05
"""Seconds after which one for several comes back whatever is done: those that come may take much longer."""


class _Chunk:
    """Products that were submitted together, and those among them that were refused, in order."""

    def __init__(
        self, expected: Mapping[int, Expected], submitted: Submitted, refused: Mapping[int, _errors.APIError]
    ) -> None:
        """`expected`: functions that return what the results are, by the products' numbers."""
        self.submitted = submitted
        self._expected = expected
        self._jobs = dict(zip(expected, submitted.jobs, strict=True))
        self._infos = dict(zip(expected, submitted.infos, strict=True))
        self._refused = refused
        self._left = deque(sorted([*expected, *refused]))

    @property
    def left(self) -> int:
        """Outcomes that were not taken."""
        return len(self._left)

    def ready(self) -> list[int]:
        """The numbers of the products whose turn it is, and whose outcomes are there."""
        return [*takewhile(lambda n: n in self._refused or self._infos[n].final, self._left)]

    def waiting(self) -> list[JobInfo]:
        """The jobs that are not final, as they were seen last."""
        return [self._infos[n] for n in self._left if n not in self._refused and not self._infos[n].final]

    def learn(self, infos: Iterable[JobInfo]) -> None:
        """Note states of jobs."""
        told = {info.id: info for info in infos}
        for n, known in self._infos.items():
            if not known.final and (info := told.get(known.id)) is not None:
                self._infos[n] = replace(info, fields={**info.fields, "request": self._jobs[n]})

    def replace(self, infos: Iterable[JobInfo]) -> None:
        """Take these for the jobs: those that have not ended may have been made anew."""
        for n, info in zip(self._infos, infos, strict=True):
            if not self._infos[n].final:
                self._infos[n] = info

    def take(self) -> Outcome:
        """The outcome of the product whose turn it is."""
        n = self._left.popleft()
        return self._refused[n] if n in self._refused else (self._infos[n], self._expected[n])

    def untaken(self) -> Submitted:
        """The jobs whose outcomes were not taken."""
        left = [n for n in self._left if n not in self._refused]
        return Submitted([self._jobs[n] for n in left], self.submitted.key, [self._infos[n] for n in left])


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
        self._stride = 1
        """Jobs in a row for whose ends an exchange waits."""
        self._early = 0
        """Exchanges in a row that came back before their time with nothing."""
        self._over = False
        self._error: Exception | None = None
        """Error that has ended the products."""
        self._stop = 0
        """Number of the product in whose place it is raised."""

    def next(self) -> Flow[list[int] | None]:
        """The numbers of the next products that are done, whose outcomes are to be taken, all of them, in order; None:
        there are no more. What comes after them is submitted before it returns. Raises what ended them.
        """
        while True:
            while self._pending and not self._pending[0].left:
                self._pending.popleft()
            yield from self._fill()
            if not self._pending:
                if self._error is not None:
                    raise self._error
                return None
            chunk = self._pending[0]
            while not (ready := chunk.ready()):
                yield from self._wait(chunk)
            if len(ready) == chunk.left:
                yield from self._fill(done=1)
            if numbers := [n for n in ready if self._error is None or n < self._stop]:
                return numbers
            self._pending.popleft()  # what it has left is behind what ended them

    def take(self) -> Outcome:
        """The outcome of the first product that `next` named and that was not taken: a final job with what its results
        are, which are the caller's from now on, or an error.
        """
        return self._pending[0].take()

    def close(self) -> Flow[None]:
        """Cancels the jobs that are not final, and deletes results that were not taken, but those with a name or
        labels; nothing in a forked child, which closes its copy of the iterator.
        """
        if os.getpid() == self._process:
            yield from self._flows.abandon([chunk.untaken() for chunk in self._pending])

    def _wait(self, chunk: _Chunk) -> Flow[None]:
        """Wait for the end of jobs whose turn it is: of so many in a row as end within some hundredths of a second, for
        an exchange for each would take longer than short ones do.
        """
        waiting = chunk.waiting()
        last = waiting[min(self._stride, len(waiting)) - 1]
        wait_s = LONG_POLL_S if self._stride == 1 else _PATIENCE_S
        began = self._flows.clock()
        infos = yield from self._flows.ended(last, waiting, wait_s)
        spent_s = self._flows.clock() - began
        if infos is None:
            infos = yield from self._flows.gather(chunk.submitted)
            chunk.replace(infos)
            return
        chunk.learn(infos)
        if not chunk.ready():  # those behind the first were done sooner, or none is
            self._stride = 1
        elif spent_s < _BRIEF_S:
            self._stride = min(2 * self._stride, self._size)
        elif spent_s > _LONG_S:
            self._stride = max(self._stride // 2, 1)
        self._early = 0 if any(info.final for info in infos) or spent_s > wait_s / 2 else self._early + 1
        if self._early:  # the server does not wait so long: do not spin
            yield Pause(min(1.0, 0.01 * 2.0 ** min(self._early, 10)))

    def _fill(self, done: int = 0) -> Flow[None]:
        """Submit what may be on the server beside chunks of which so many are done."""
        while len(self._pending) - done < self._chunks and not self._over:
            asked, refused = self._take()
            chunk = yield from self._flows.with_temporaries(partial(self._submit, asked, refused))
            if chunk.left:
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
                jobs[number] = yield from self._flows.job_document(op, operands, params, temporaries, known)
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
