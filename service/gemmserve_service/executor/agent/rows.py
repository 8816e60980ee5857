"""Rows of tasks: which bytes of the front's extents a task reads and writes, and the same task on a node's extents."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_service.executor.protocol import Form, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_service.executor.protocol import ExtentRow, Part, Places, Work
    from gemmserve_service.store.extents.extents import Extent

Range = tuple[int, int]
"""First byte and the one after the last, counted from where a row's extent begins."""

_KEPT_TEXT: Final = 1 << 12  # characters of a form that is remembered: programs may have millions
SHIFT: Final = 1 << 16
"""Bytes before the first one used, from which on a node's extent begins later than the row."""


@dataclass(slots=True)
class Use:
    """Use that a task makes of one row: the ranges that it reads, and those that it writes, ascending and apart."""

    row: ExtentRow
    reads: list[Range]
    writes: list[Range]
    array: str | None = field(init=False)
    """Id of the immutable array that the row is of; None: it is of none."""
    placeless: bool = field(init=False)
    """Whether its array is on the device alone."""
    shared: bool = field(init=False)
    """Whether it is an immutable array that is only read, of which a copy may be kept."""
    first: int = field(init=False)
    """Byte of the row that the node's extent begins with."""
    end: int = field(init=False)
    """Byte of the row after the last that is used."""
    nbytes: int = field(init=False)
    """Bytes of the node's extent."""

    def __post_init__(self) -> None:
        reads, writes = self.reads or self.writes, self.writes or self.reads
        array = self.array = self.row[4]
        self.placeless = not self.row[1]
        self.shared = array is not None and not self.writes
        self.first = 0 if array is not None else min(reads[0][0], writes[0][0]) // SHIFT * SHIFT
        self.end = max(reads[-1][1], writes[-1][1])
        self.nbytes = self.end - self.first


Layout = dict[int, tuple[list[Range], list[Range]]]
"""Ranges that a task reads and writes of each row that it uses, by the row's number; ascending, and apart."""


def layout_of(work: Work) -> Layout:
    """Return what a task does with its rows, which its parts say alone. Raises ProtocolError for a task whose parts do
    not fit together.
    """
    reads: dict[int, list[Range]] = {}
    writes: dict[int, list[Range]] = {}
    try:
        for part in work.parts:
            operands, results = _sizes(part.form)
            for sizes, places, found in ((operands, part.operands, reads), (results, part.results, writes)):
                for name, nbytes in sizes.items():
                    for number, offset in places[name]:
                        if number >= 0 and nbytes:
                            if number in found:
                                found[number].append((offset, offset + nbytes))
                            else:
                                found[number] = [(offset, offset + nbytes)]
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"task {work.task} makes no sense: {error}") from error
    return {number: (merged(reads.get(number, [])), merged(writes.get(number, []))) for number in {**reads, **writes}}


def uses_in(layout: Layout, work: Work) -> list[Use | None]:
    """Return the use of each row of a task of that layout; None of one that is not used. Raises ProtocolError for a
    task that lacks some of them.
    """
    rows = work.extents
    if max(layout, default=-1) >= len(rows):
        raise ProtocolError(f"task {work.task} has a place in a row that it lacks")
    return [Use(row, *layout[number]) if number in layout else None for number, row in enumerate(rows)]


def uses_of(work: Work) -> list[Use | None]:
    """Return the use of each row of a task; None of one that is not used. Raises ProtocolError for a task whose parts
    do not fit together.
    """
    return uses_in(layout_of(work), work)


def on_node(work: Work, uses: list[Use | None], extents: Mapping[int, Extent]) -> Work:
    """Return the task on a node's extents, by the number of the row; rows without a place are as they were."""
    shifts = {number: use.first for number, use in enumerate(uses) if use is not None and use.first}
    parts = work.parts if not shifts else [_shifted(part, shifts) for part in work.parts]
    return replace(work, extents=node_rows(work, extents), parts=parts)


def node_rows(work: Work, extents: Mapping[int, Extent]) -> list[ExtentRow]:
    """Return the rows of a task on a node's extents; those without one as they were."""
    return [node_row(extents[number], row[4]) if number in extents else row for number, row in enumerate(work.extents)]


def node_row(extent: Extent, array: str | None) -> ExtentRow:
    """Return the row of a node's extent, which holds that array."""
    name, nbytes = extent.file
    return name, extent.path, nbytes, extent.start, array


def merged(ranges: list[Range]) -> list[Range]:
    """Return the ranges ascending, those that touch as one."""
    if len(ranges) < 2:  # most
        return ranges
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def result_bytes(work: Work) -> dict[str, int]:
    """Return the bytes of a task's results that have no place yet, by array. Raises ProtocolError."""
    uses = uses_of(work)
    return {use.array: use.end for use in uses if use is not None and use.placeless and use.writes and use.array}


def _sizes(form: str) -> tuple[dict[str, int], dict[str, int]]:
    return _read(form) if len(form) > _KEPT_TEXT else _known(form)


def _read(form: str) -> tuple[dict[str, int], dict[str, int]]:
    fields = Form.model_validate_json(form)
    operands, results = (
        {name: math.prod(kind.shape) * np.dtype(kind.dtype).itemsize for name, kind in side.items()}
        for side in (fields.operands, fields.results)
    )
    return operands, results


_known = lru_cache(512)(_read)


def _shifted(part: Part, shifts: Mapping[int, int]) -> Part:
    operands, results = (
        {name: _moved(places, shifts) for name, places in side.items()} for side in (part.operands, part.results)
    )
    return replace(part, operands=operands, results=results)


def _moved(places: Places, shifts: Mapping[int, int]) -> Places:
    return [(number, offset - shifts.get(number, 0)) for number, offset in places]
