"""Retries: when another attempt may help, and how long to wait before it. Pure: clocks and chance come from outside.

Everything the client sends may be repeated: reads and deletes are idempotent, products are pure functions of their
operands, an upload that was lost half-way leaves nothing, and submissions carry an Idempotency-Key.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve import _errors

if TYPE_CHECKING:
    from collections.abc import Callable


_SPOILT: Final = 5
"""Attempts where bytes changed on their way: what changes them every time is not in passing."""

_DOUBLINGS: Final = 60  # of a pause; more would be no float


@dataclass(frozen=True)
class RetryPolicy:
    """Policy for repeating what fails in passing: until `total_s` seconds after the first failure.

    That is longer than a server takes to start again. One that has never answered this client is given up after
    `first_s`: it may not be there at all. `attempts` bounds their number besides (None: it does not);
    `RetryPolicy(attempts=1)` never repeats.

    The n-th pause is random in [0, min(`cap_s`, `base_s` * 2**n)]: "full jitter" (M. Brooker, Exponential Backoff And
    Jitter, AWS Architecture Blog, 2015), so that clients that failed together do not come back together. A Retry-After
    is waited for in full, or, if that would exceed the time, not at all.
    """

    attempts: int | None = None
    base_s: float = 0.1
    cap_s: float = 5.0
    total_s: float = 60.0
    first_s: float = 5.0

    def __post_init__(self) -> None:
        few = self.attempts is not None and self.attempts < 1
        if few or min(self.base_s, self.cap_s, self.total_s, self.first_s) < 0:
            raise _errors.ParameterInvalid("a RetryPolicy has attempts >= 1 and no negative seconds")


def may_help(error: _errors.GemmserveError) -> bool:
    """Whether the same request can succeed later: broken or refused connections, overload, a gateway's own errors."""
    match error:
        case _errors.TransportError():
            return error.retriable
        case _errors.Overloaded():
            return error.status != 507  # a quota of stored bytes: arrays must go first
        case _errors.DigestMismatch():
            return error.status is not None
        case _errors.IdempotencyConflict():
            # 409: the first attempt of this very submission is still being taken in. 422 is another body: a mistake.
            return error.status == 409
        case _errors.JobTimeout():
            return False
        case _errors.APIError():
            return error.status in {408, 429, 502, 503, 504}
        case _:
            return False


def may_be_done(error: _errors.GemmserveError) -> bool:
    """Whether what a request asked for may have been done though it failed: its answer was lost, on the way or by a
    gateway.
    """
    match error:
        case _errors.TransportError():
            return error.sent
        case _errors.APIError():
            return error.status in {502, 504}
        case _:
            return False


def _most(policy: RetryPolicy, error: _errors.GemmserveError) -> float:
    """Attempts, by a policy and what went wrong."""
    most = float("inf") if policy.attempts is None else policy.attempts
    if isinstance(error, _errors.DigestMismatch | _errors.CorruptAnswer):
        return min(most, _SPOILT)
    return most


class Attempts:
    """The state of one request's attempts under a policy."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._uniform = uniform
        self._made = 0
        self._deadline = deadline
        self._began: float | None = None
        self.spare_s = 0.0
        """Seconds that are left after the pause that was given last."""

    def pause_after(self, error: _errors.GemmserveError) -> float | None:
        """Seconds to wait before the next attempt, or None: `error` is final."""
        self._made += 1
        now = self._clock()
        if self._began is None:
            # From the first failure: how long the transfer before it took says nothing about the next attempt.
            self._began = now
        policy = self._policy
        if not may_help(error) or self._made >= _most(policy, error):
            return None
        unmet = isinstance(error, _errors.TransportError) and error.unmet
        end = self._began + (min(policy.first_s, policy.total_s) if unmet else policy.total_s)
        left = (end if self._deadline is None else min(end, self._deadline)) - now
        asked = (error.retry_after if isinstance(error, _errors.APIError) else None) or 0.0
        if left <= 0 or asked >= left:
            return None
        ceiling = min(policy.cap_s, policy.base_s * 2.0 ** min(self._made - 1, _DOUBLINGS))
        # The last attempt is at the end, not before it.
        pause = min(max(self._uniform(0.0, ceiling), asked), left)
        self.spare_s = left - pause
        return pause
