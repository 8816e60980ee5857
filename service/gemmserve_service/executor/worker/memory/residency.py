"""Residency of immutable arrays on a device: copies of them, and forms that products want of them (planes, residues).

Which go when room is needed: those whose loss costs least for the room that they take (GreedyDual-Size-Frequency;
Cherkasova, Improving WWW Proxies Performance with GreedyDual-Size-Frequency Caching Policy, HP Labs 1998). Each has the
priority age + uses * cost / size; the lowest goes, and the age becomes its priority, so that what nobody uses any more
goes in the end, however dear it was.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LINK_RATE: Final = 20e9  # bytes a second to a device, about: what a copy costs to be made again


@dataclass(slots=True)
class _Kept:
    value: Any
    nbytes: int
    cost_s: float
    priority: float
    order: int
    uses: int = 1
    pinned: bool = False
    """Whether it is nowhere else yet: it stays until it is let go."""


@dataclass(frozen=True, slots=True)
class Account:
    """Counters of a `Residency`."""

    used: int
    budget: int
    hits: int
    misses: int
    evictions: int


class Residency:
    """Values by array and form, `budget` bytes in all.

    An array's id never comes back for other bytes, so nothing here goes stale. What is in use when it is dropped lives
    until its user lets go. Every method may be called from any thread.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self.hits = 0
        self.misses = 0
        """Misses of `get` with an array's id."""
        self.evictions = 0
        """Copies and forms that had to go for others."""
        self._came: set[str] = set()
        self._went: set[str] = set()
        self._lock = threading.Lock()
        self._age = 0.0
        self._kept: dict[str, dict[Any, _Kept]] = {}
        self._order: list[tuple[float, int, str, Any]] = []
        """A heap of what is kept and what is no longer, by priorities that may have grown since."""
        self._sequence = itertools.count()

    def get(
        self,
        array: str | None,
        nbytes: int,
        load: Callable[[], Any],
        *,
        form: Any = None,
        cost_s: float | None = None,
        measure: Callable[[Any], int] | None = None,
    ) -> Any:
        """The value of that form of `array`, made by `load` where there is none.

        `nbytes`: that it takes; where that is only a guess, `measure` tells it of the value. `form`: anything that can
        be a key; None is the copy itself, without which no other form is kept. `cost_s`: seconds to make it again, by
        default those of a copy. Nothing is kept without an id or past the budget.
        """
        if array is None:
            return load()
        with self._lock:
            found = self._kept.get(array, {}).get(form)
            if found is not None:
                self._used(found)
                return found.value
            self.misses += 1
            fits = nbytes <= self.budget
            if fits:  # room is made before the value is, so that the device has it; and it counts while it is made
                self._make_room(nbytes)
                fits = self.used + nbytes <= self.budget  # not beside what is pinned, perhaps
            if fits:
                self.used += nbytes
        if not fits:
            return load()
        try:
            value = load()
        except BaseException:
            with self._lock:
                self.used -= nbytes
            raise
        with self._lock:
            forms = self._kept.get(array, {})
            if form in forms:  # two wanted it at once
                self.used -= nbytes
                return forms[form].value
            if form is not None and None not in forms:  # made of a copy that had to go meanwhile
                self.used -= nbytes
                return value
            self._kept[array] = forms
            cost_s = nbytes / _LINK_RATE if cost_s is None else cost_s
            if measure is not None:
                guess, nbytes = nbytes, measure(value)
                self.used += nbytes - guess
            priority = self._age + cost_s / max(nbytes, 1)
            kept = forms[form] = _Kept(value, nbytes, cost_s, priority, next(self._sequence))
            heapq.heappush(self._order, (priority, kept.order, array, form))
            if form is None:
                self._note(array, came=True)
        return value

    def use(self, arrays: Sequence[str], forms: Sequence[Any] = (), *, again: int = 0) -> list[Any] | None:
        """The copies of all these arrays, each used once more; None: one is not here, and nothing has happened.

        `forms`: of each array; what is here of that is returned in the copy's place. None, too, if a copy that has been
        used `again` times lacks it: whoever makes it is to be asked.
        """
        with self._lock:
            copies = []
            for array in arrays:
                here = self._kept.get(array)
                copy = None if here is None else here.get(None)
                if copy is None:
                    return None
                copies.append(copy)
            values = [kept.value for kept in copies]
            prepared = []
            for number, form in enumerate(forms):
                if form is None:
                    continue
                found = self._kept[arrays[number]].get(form)
                if found is not None:
                    values[number] = found.value
                    prepared.append(found)
                elif copies[number].uses + 1 >= again:
                    return None
            for kept in (*copies, *prepared):
                self._used(kept)
        return values

    def put(self, array: str, value: Any, nbytes: int, *, pinned: bool = False) -> bool:
        """Keeps a copy that was made elsewhere; False: there is no room for it.

        That is no use of it. `pinned`: it is nowhere else, is kept whether there is room or not, in the place of what
        is there, and stays until `unpin`.
        """
        with self._lock:
            if pinned:
                self._drop(array)
            if None in self._kept.get(array, {}):  # of an array: the same bytes
                return True
            self._make_room(nbytes)
            if self.used + nbytes > self.budget and not pinned:
                return False
            self.used += nbytes
            cost_s = nbytes / _LINK_RATE
            kept = _Kept(value, nbytes, cost_s, self._age + cost_s / max(nbytes, 1), next(self._sequence), 0, pinned)
            self._kept.setdefault(array, {})[None] = kept
            heapq.heappush(self._order, (kept.priority, kept.order, array, None))
            self._note(array, came=True)
        return True

    def unpin(self, array: str) -> None:
        """Unpin a copy: it may be evicted like any other."""
        with self._lock:
            kept = self._kept.get(array, {}).get(None)
            if kept is not None:
                kept.pinned = False

    def account(self) -> Account:
        """Return bytes held, hits, misses and evictions."""
        with self._lock:
            return Account(self.used, self.budget, self.hits, self.misses, self.evictions)

    def news(self) -> tuple[list[str], list[str]]:
        """Arrays whose copies came, and went, since this was asked last."""
        with self._lock:
            came, went = list(self._came), list(self._went)
            self._came.clear()
            self._went.clear()
        return came, went

    def arrays(self) -> list[str]:
        """Every array of which there is a copy; `news` goes on from here."""
        with self._lock:
            self._came.clear()
            self._went.clear()
            return list(self._kept)

    def uses(self, array: str | None, form: Any = None) -> int:
        """Return how often that was used since it came; 0 where it is not here."""
        with self._lock:
            kept = None if array is None else self._kept.get(array, {}).get(form)
            return 0 if kept is None else kept.uses

    def holds(self, array: str, form: Any = None) -> bool:
        """Whether that is here."""
        with self._lock:
            return form in self._kept.get(array, {})

    def peek(self, array: str) -> Any:
        """Return the copy of an array, None where there is none. That is no use of it."""
        with self._lock:
            kept = self._kept.get(array, {}).get(None)
            return None if kept is None else kept.value

    def reserve(self, nbytes: int) -> None:
        """Count bytes that are not kept here, and make room for them as far as that can be; fewer where negative."""
        with self._lock:
            self._make_room(nbytes)
            self.used += nbytes

    def forget(self, array: str) -> None:
        """Drops every form of an array that is gone."""
        with self._lock:
            self._drop(array)

    def clear(self) -> None:
        """Drops everything but what is pinned."""
        with self._lock:
            for array, forms in list(self._kept.items()):
                pinned = forms.get(None)
                if pinned is None or not pinned.pinned:
                    self._drop(array)
                    continue
                self.used -= sum(kept.nbytes for form, kept in forms.items() if form is not None)
                self._kept[array] = {None: pinned}
            self._order = [entry for entry in self._order if entry[2] in self._kept and entry[3] is None]
            heapq.heapify(self._order)

    def _used(self, kept: _Kept) -> None:
        self.hits += 1
        kept.uses += 1
        kept.priority = self._age + kept.uses * kept.cost_s / max(kept.nbytes, 1)

    def _make_room(self, nbytes: int) -> None:
        stay: list[tuple[float, int, str, Any]] = []
        while self.used + nbytes > self.budget and self._order:
            noted, order, array, form = heapq.heappop(self._order)
            kept = self._kept.get(array, {}).get(form)
            if kept is None or kept.order != order:
                continue  # forgotten meanwhile
            if kept.pinned:
                stay.append((noted, order, array, form))
                continue
            if kept.priority > noted:  # used meanwhile: priorities only grow
                heapq.heappush(self._order, (kept.priority, order, array, form))
                continue
            self._age = kept.priority
            self.evictions += 1
            if form is None:
                self._drop(array)
            else:
                self.used -= self._kept[array].pop(form).nbytes
        for entry in stay:
            heapq.heappush(self._order, entry)

    def _drop(self, array: str) -> None:
        forms = self._kept.pop(array, {})
        self.used -= sum(kept.nbytes for kept in forms.values())
        if forms:
            self._note(array, came=False)

    def _note(self, array: str, *, came: bool) -> None:
        (self._came if came else self._went).add(array)
        (self._went if came else self._came).discard(array)
