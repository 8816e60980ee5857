"""When another attempt may help, and how long to wait before it. Pure: clocks and chance come from outside.

Everything the client sends may be repeated: reads and deletes are idempotent, products are pure functions of their
operands, an upload that was lost half-way leaves nothing, and submissions carry an Idempotency-Key.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmserve import _errors

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class RetryPolicy:
    """`attempts` in all, none begun later than `total_s` seconds after the first failure.

    The n-th pause is random in [0, min(`cap_s`, `base_s` * 2**n)]: "full jitter" (M. Brooker, Exponential Backoff And
    Jitter, AWS Architecture Blog, 2015), so that clients that failed together do not come back together. A Retry-After
    is waited for in full, or, if that would exceed `total_s`, not at all. `RetryPolicy(attempts=1)` never repeats.
    """

    attempts: int = 5
    base_s: float = 0.1
    cap_s: float = 5.0
    total_s: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or min(self.base_s, self.cap_s, self.total_s) < 0:
            raise _errors.ParameterInvalid("a RetryPolicy has attempts >= 1 and no negative seconds")


def may_help(error: _errors.GemmserveError) -> bool:
    """Whether the same request can succeed later: broken or refused connections, overload, a gateway's own errors."""
    match error:
        case _errors.TransportError():
            return error.retriable
        case _errors.Overloaded():
            return error.status != 507  # a quota of stored bytes: arrays must go first
        case _errors.DigestMismatch():
            return True
        case _errors.IdempotencyConflict():
            # 409: the first attempt of this very submission is still being taken in. 422 is another body: a mistake.
            return error.status == 409
        case _errors.JobTimeout():
            return False
        case _errors.APIError():
            return error.status in {408, 429, 502, 503, 504}
        case _:
            return False


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
        self._end: float | None = None

    def pause_after(self, error: _errors.GemmserveError) -> float | None:
        """Seconds to wait before the next attempt, or None: `error` is final."""
        self._made += 1
        if self._end is None:
            # From the first failure: how long the transfer before it took says nothing about the next attempt.
            end = self._clock() + self._policy.total_s
            self._end = end if self._deadline is None else min(end, self._deadline)
        if self._made >= self._policy.attempts or not may_help(error):
            return None
        ceiling = min(self._policy.cap_s, self._policy.base_s * 2.0 ** (self._made - 1))
        asked = error.retry_after if isinstance(error, _errors.APIError) else None
        pause = max(self._uniform(0.0, ceiling), asked or 0.0)
        return pause if self._clock() + pause < self._end else None
