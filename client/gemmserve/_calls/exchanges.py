"""Flows: operations of more than one exchange, written once for both clients; and what all of them begin with.

A flow is a generator: it yields a Request (or a Pause) and is sent the answer, or thrown the error. `Client` drives
flows with blocking I/O and `AsyncClient` by awaiting; neither knows anything that is decided here. Interruptions
(KeyboardInterrupt, asyncio.CancelledError) are thrown in too, so that a flow can cancel what it began.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from gemmserve import _errors
from gemmserve._calls import requests
from gemmserve._calls.outstanding import Outstanding
from gemmserve._calls.requests import Pause, Request, Together, Work
from gemmserve._transport.retry import Attempts, RetryPolicy

if TYPE_CHECKING:
    from gemmserve._transfer.arrays import AnyArray
    from gemmserve._transport.digests import Digests

T = TypeVar("T")
Flow: TypeAlias = Generator[Request[Any] | Pause | Together | Work[Any], Any, T]

TEMPORARY_TTL_S: Final = 3600.0
"""Life of operands put for one job, should the client die before it deletes them."""

PAGE: Final = 1000
"""Items a page: the most that the service gives."""

CLEANUP_LIMIT_S: Final = 5.0
"""Seconds of silence after which cancelling or tidying up is given up."""


@dataclass(frozen=True)
class Exchanges:
    """Exchanges under one retry policy; `clock` and `uniform` are replaced in tests."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[float, float], float] = random.uniform
    connections: int = 3
    """Number of connections over which a large array goes, in parts; 0: whole, in one request."""
    goes_whole: Callable[[AnyArray], bool] = field(default=lambda _: False, compare=False)
    comes_whole: Callable[[int], bool] = field(default=lambda _: False, compare=False)
    """Whether an array that is to be sent, or one of so many bytes that is fetched, does not go in parts."""
    compression: bool = False
    """Whether arrays that get shorter by it go compressed, whole."""
    digests: Digests = "known"
    """Transfers whose bytes are checked by their digests."""
    outstanding: Outstanding = field(default_factory=Outstanding, compare=False)
    """Jobs of the client whose ends it has not seen."""

    def call(self, request: Request[T], *, deadline: float | None = None) -> Flow[T]:
        """One request, repeated as the policy says. Raises the last error."""
        attempts = self.attempts(deadline)
        while True:
            try:
                answer: T = yield request
            except _errors.GemmserveError as error:
                yield from pause_after(attempts, error)
            else:
                return answer

    def attempts(self, deadline: float | None = None) -> Attempts:
        """Return fresh attempts under the policy, up to the deadline by `clock`."""
        return Attempts(self.retry, deadline=deadline, clock=self.clock, uniform=self.uniform)

    def attempt(self, request: Request[T]) -> Flow[T | None]:
        """One request once; None where it fails, which is ignored: tidying up must not hide what happened before."""
        try:
            answer: T = yield request
        except _errors.GemmserveError:
            return None
        return answer

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


def pause_after(attempts: Attempts, error: _errors.GemmserveError) -> Flow[None]:
    """Pauses before the next attempt. Raises `error` where it is final."""
    pause = attempts.pause_after(error)
    if pause is None:
        raise error
    yield Pause(pause, error, attempts.spare_s)
