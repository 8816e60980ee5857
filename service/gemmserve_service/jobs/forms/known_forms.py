"""Forms of jobs that were asked for before: found again by the JSON text of a job, which need not be parsed then.

Whoever submits many jobs sends the same text again and again but for the ids of arrays in it. Which of them are
operands is found out once, by parsing the text with other ids in their places; whatever has the same text around its
ids is the same job on other operands.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.errors import ServiceError
from gemmserve_service.jobs.forms.form import PLACES, Asked, Form
from gemmserve_service.schemas import ARRAY_ID, GemmJob, GemmReduceJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gemmserve_service.jobs.forms.form import Ids
    from gemmserve_service.schemas import ProgramJob

    Order = Callable[[Any], Ids]
    Parse = Callable[[str], GemmJob | GemmReduceJob | ProgramJob]

_QUOTED_ID: Final = re.compile(f'"({ARRAY_ID})"', re.ASCII)
# No brace is in it but the outer two, and no string with a bracket, a quote or an escape: so it is clear where it ends.
_PLAIN: Final = re.compile(r"\{[^{}\[\]\\]*(?:\[[^{}\[\]\\\"]*\][^{}\[\]\\]*)*\}")
_SEVERAL: Final = re.compile(r'[ \t\n\r]*\{[ \t\n\r]*"jobs"[ \t\n\r]*:[ \t\n\r]*\[[ \t\n\r]*')
_NEXT: Final = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_END: Final = re.compile(r"[ \t\n\r]*\][ \t\n\r]*\}[ \t\n\r]*")
MAX_CHARACTERS: Final = 2048
"""Characters of the text of a job whose form is kept."""

_MAX_KEPT: Final = 256
_MAX_SEEN: Final = 1024


class KnownForms:
    """Forms seen last, by the text around the ids."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, ...], tuple[Form, Order | None]] = OrderedDict()
        self._seen: OrderedDict[int, bool] = OrderedDict()
        """Hashes of what was asked for and is not known: whether that is because it has no form, or it came once."""

    def find(self, text: str) -> Asked | None:
        """The job that is asked for by a JSON text; None: such a one is not known."""
        parts = _QUOTED_ID.split(text)
        key = tuple(parts[::2])
        found = self._known.get(key)
        if found is None:
            return None
        self._known.move_to_end(key)
        form, order = found
        ids = tuple(parts[1::2])
        return Asked(form, ids if order is None else order(ids))

    def learn(self, text: str, parse: Parse) -> None:
        """Note that a job was asked for by a JSON text, which is whole and right: its form is known from the second
        time on. `parse` makes the job of a text, or raises ServiceError.
        """
        parts = _QUOTED_ID.split(text)
        if not 5 <= len(parts) <= 2 * len(PLACES) + 1 or len(text) > MAX_CHARACTERS or not text.isascii():
            return
        key = tuple(parts[::2])
        seen = self._seen.get(hash(key))
        if seen is None:
            self._seen[hash(key)] = False
            _bound(self._seen, _MAX_SEEN)
        elif not seen:
            found = _form(key, parse)
            if found is None:
                self._seen[hash(key)] = True
            else:
                del self._seen[hash(key)]
                self._known[key] = found
                _bound(self._known, _MAX_KEPT)


def _bound(kept: OrderedDict[Any, Any], most: int) -> None:
    if len(kept) > most:
        kept.popitem(last=False)


def _form(pieces: tuple[str, ...], parse: Parse) -> tuple[Form, Order | None] | None:
    """The form of jobs with that text around their ids, and which id is which operand's. None: there is none."""
    places = PLACES[: len(pieces) - 1]
    text = pieces[0] + "".join([f'"{place}"{piece}' for place, piece in zip(places, pieces[1:], strict=True)])
    try:
        request = parse(text)
        if not isinstance(request, GemmJob | GemmReduceJob):
            return None
        form = Form(request)
    except (ServiceError, ValueError):
        return None
    given = [getattr(request, name) for name in form.operands]
    if sorted(given) != list(places):  # an id is no operand's
        return None
    order = [places.index(place) for place in given]
    return form, None if order == sorted(order) else itemgetter(*order)


def elements(text: str, most: int) -> Iterator[str]:
    """Yield the texts of the jobs in `{"jobs": [...]}`, at most so many. Raises ValueError at the end, or before, where
    it is another JSON text, or has more than plain ones in it.
    """
    begin = _SEVERAL.match(text)
    at = -1 if begin is None else begin.end()
    for _ in range(most):
        element = None if at < 0 else _PLAIN.match(text, at, at + MAX_CHARACTERS)
        if element is None:
            break
        yield element[0]
        following = _NEXT.match(text, element.end())
        if following is None:
            if _END.fullmatch(text, element.end()) is None:
                break
            return
        at = following.end()
    raise ValueError("these are not plain jobs")
