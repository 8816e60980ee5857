"""Outstanding jobs: those that a client has not seen ended. Whoever waits for one is told of others by the same
exchange, so that the results of many take few.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from gemmserve._calls.places import cell_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gemmserve._model import JobInfo

MOST: Final = 63
"""Jobs that are asked for beside one: the server looks each of them up, whether it has changed or not."""


class Handle(Protocol):
    """Handle of a job."""

    info: JobInfo


class Outstanding:
    """The outstanding jobs of one client by their handles, oldest first.

    Threads may share it: each change is one operation of the interpreter. Two that begin to wait in the same moment may
    ask for the same jobs, which does no harm.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()
        self._asked: set[str] = set()
        """Ids of jobs that an exchange under way asks for."""
        self.supported = True
        """Whether the server has the route, as far as is known."""

    def add(self, handle: Handle) -> None:
        """Note the job of a handle, unless it is over."""
        if not handle.info.final:
            self._handles[handle.info.id] = handle

    def ask(self, job_id: str) -> list[str]:
        """The ids of others to ask for beside that job: of its cell, and such as no other exchange asks for. `asked`
        follows, with all of them.
        """
        self._asked.add(job_id)
        found: list[str] = []
        for reference in self._handles.valuerefs() if self.supported else ():
            handle = reference()
            if handle is None:
                continue
            other = handle.info.id
            if handle.info.final:
                self._handles.pop(other, None)
            elif other not in self._asked and cell_of(other) == cell_of(job_id):
                found.append(other)
                if len(found) == MOST:
                    break
        self._asked.update(found)
        return found

    def asked(self, ids: Iterable[str]) -> None:
        """Note that the exchange about them is over."""
        self._asked.difference_update(ids)

    def learn(self, info: JobInfo) -> None:
        """Note the state of a job as the server told it."""
        handle = self._handles.get(info.id)
        if handle is not None and not handle.info.final:
            handle.info = with_request(info, handle.info)


def with_request(info: JobInfo, known: JobInfo) -> JobInfo:
    """The job, whose request the server has left out, with that as it is known."""
    return replace(info, fields={**info.fields, "request": known.fields.get("request")})
