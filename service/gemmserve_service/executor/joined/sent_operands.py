"""Small operands that a node was sent with tasks, which it keeps: it is not sent them again.

It may give its copy up without a word. Then it asks for the bytes, as for those of any operand, and has them again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_service.executor.joined.assignments import Operand

MAX_SENT: Final = 4096
"""Operands that are remembered of a link, the last ones that were sent or used."""

_Place = tuple[str, int]


class SentOperands:
    """Small operands that one link was sent, by their place, of which each array that ever lies there has an id."""

    def __init__(self) -> None:
        self._sent: OrderedDict[_Place, tuple[str, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def has(self, operand: Operand) -> bool:
        """Whether the node was sent these bytes, or more, of this array."""
        place = operand.file.name, operand.start
        array, nbytes = self._sent.get(place, (None, 0))
        if array is None or array != operand.array or nbytes < operand.nbytes:
            return False
        self._sent.move_to_end(place)
        return True

    def add(self, operand: Operand) -> None:
        """Note that they are sent. What is no immutable array the node does not keep."""
        if operand.array is None:
            return
        place = operand.file.name, operand.start
        self._sent[place] = operand.array, operand.nbytes
        self._sent.move_to_end(place)
        if len(self._sent) > MAX_SENT:
            self._sent.popitem(last=False)
