"""Watching a job: its events as a stream tells of them, and what follows when the stream ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmserve import _errors
from gemmserve._calls import requests
from gemmserve._model import JobInfo

if TYPE_CHECKING:
    from gemmserve._calls.exchanges import Exchanges
    from gemmserve._calls.requests import Request
    from gemmserve._transfer.sse import Event


class Watch:
    """One watching of a job's events, over as many streams as it takes."""

    def __init__(self, exchanges: Exchanges, job_id: str) -> None:
        self._exchanges = exchanges
        self._job_id = job_id
        self._attempts = exchanges.attempts()
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
        return self._exchanges.digests == "always"

    def request(self) -> Request[None]:
        """Return the request for the events that have not come."""
        self._known = self._last
        self._asked, self._heard = self._exchanges.clock(), False
        return requests.job_events(self._job_id, last_id=self._last_id)

    def take(self, event: Event) -> JobInfo | None:
        """The job as an event tells of it; None where that is known: each stream begins with the state now."""
        info = JobInfo.parse(event.data)
        self._heard = True
        self._last_id = event.id
        self._last, known, self._known = info, self._known, None
        if info == known:
            return None
        self._attempts = self._exchanges.attempts()
        return info

    def broke(self, error: _errors.GemmserveError) -> float | None:
        """Seconds until the next stream is asked for; None: `error` is final."""
        # One that was good for a while has not failed: proxies end what is silent for a minute.
        if self._heard and self._exchanges.clock() - self._asked >= self._exchanges.retry.cap_s:
            self._attempts = self._exchanges.attempts()
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
