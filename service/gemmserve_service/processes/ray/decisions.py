"""Decisions of the bridge, from what it sees: how many workers there are to be, and what is done to which; pure.

Growth is at once, since an actor that no node has room for is what Ray's autoscaler adds nodes for; an end comes when
fewer would have been enough for all of `idle_s`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gemmserve_service.processes.ray.demand import Demand

STALE_S: Final = 5.0
"""Age from which a demand says nothing any more: the front is being started again."""
OWNED_S: Final = 5.0
"""Seconds after the last look of a bridge of other settings during which its actors are another server's."""
SILENT_S: Final = 15.0
"""Silence of an actor that had answered, after which it is killed and made anew. A dead node's are by then."""


class Phase(StrEnum):
    """State of an actor, as it says; UNHEARD is one that has said nothing yet: it waits for room, or starts."""

    UNHEARD = "unheard"
    EMPTY = "empty"
    SERVING = "serving"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FOREIGN = "foreign"
    """Made for other settings, by a bridge that is gone."""
    TAKEN = "taken"
    """Made for other settings, by a bridge that looks after it: another server has the namespace."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One of our actors: its number, what it said last, and seconds since then."""

    number: int
    phase: Phase
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps to be done now, by numbers of actors."""

    make: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    """Those that are told to start their worker."""
    stop: tuple[int, ...] = ()
    """Those that are told to end it, after the task that it is at."""
    remove: tuple[int, ...] = ()
    """Those that go at once, for good."""
    restart: tuple[int, ...] = ()
    """Those that Ray is to kill and start anew."""


class Sizing:
    """The number of workers that there are to be: what the demand asks for, and the largest of that over `idle_s`."""

    def __init__(self, least: int, most: int, jobs_per_worker: int, idle_s: float) -> None:
        self._least, self._most, self._jobs, self._idle_s = least, most, jobs_per_worker, idle_s
        self._window: deque[tuple[float, int]] = deque()  # times rise, numbers fall: the first is the largest

    def target(self, now: float, demand: Demand | None, present: int) -> int:
        """Return the number for this moment; `present` is what there is, which stays where the demand is not known,
        and counts as asked for at the first call: a bridge that starts again takes over what it finds.
        """
        if demand is None or now - demand.at > STALE_S:
            wanted = min(max(present, self._least), self._most)
        else:
            wanted = min(max(-(-(demand.queued + demand.running) // self._jobs), self._least), self._most)
            if not self._window:
                self._push(now, min(present, self._most))
        self._push(now, wanted)
        while self._window[0][0] < now - self._idle_s:
            self._window.popleft()
        return self._window[0][1]

    def _push(self, now: float, number: int) -> None:
        while self._window and self._window[-1][1] <= number:
            self._window.pop()
        self._window.append((now, number))


def decide(target: int, seen: Iterable[Seen]) -> Steps:
    """Return the steps from `seen` towards `target` workers. Too many: first those go that do nothing, then the highest
    numbers. A number is free only when its actor is gone.
    """
    actors = sorted(seen, key=lambda actor: actor.number)
    remove = [actor for actor in actors if actor.phase in {Phase.STOPPED, Phase.FOREIGN}]
    restart = [
        actor
        for actor in actors
        if actor.phase in {Phase.EMPTY, Phase.SERVING, Phase.STOPPING} and actor.silent_s > SILENT_S
    ]
    staying = [actor for actor in actors if actor.phase in {Phase.UNHEARD, Phase.EMPTY, Phase.SERVING}]
    idle_first = sorted(staying, key=lambda actor: (actor.phase is Phase.SERVING, -actor.number))
    surplus = idle_first[: max(0, len(staying) - target)]
    taken = {actor.number for actor in actors}
    free = (number for number in range(len(taken) + target) if number not in taken)
    make = [next(free) for _ in range(target - len(staying))]
    return Steps(
        make=tuple(make),
        order=tuple(actor.number for actor in staying if actor.phase is Phase.EMPTY and actor not in surplus + restart),
        stop=tuple(actor.number for actor in surplus if actor.phase is Phase.SERVING),
        remove=tuple(actor.number for actor in remove + [each for each in surplus if each.phase is not Phase.SERVING]),
        restart=tuple(actor.number for actor in restart if actor not in surplus),
    )
