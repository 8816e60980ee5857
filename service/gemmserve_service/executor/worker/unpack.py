"""Unpacking of the front's messages into what is run: forms, read once, and tasks of one product."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from gemmserve_service.executor import protocol
from gemmserve_service.executor.protocol import ArrayRef
from gemmserve_service.schemas import ProgramParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gemmserve_service.executor.protocol import BlockOf, ExtentRow, Part, Places, Work
    from gemmserve_service.executor.worker.backend import DeviceBackend
    from gemmserve_service.schemas import GemmParams, GemmReduceParams

T = TypeVar("T")

_MAX_FORMS: Final = 512  # as many as the front remembers (`small.SmallProducts`)
TINY: Final = 1 << 20
"""Bytes of operands and results up to which the thread that reads the messages computes a product itself: that takes
little longer than to wake another one for it, and nothing is read meanwhile."""
_MAX_TEXT: Final = 1 << 12  # characters of a form that is kept: programs may have millions


@dataclass(frozen=True, slots=True)
class Run:
    """A task of one product, or of a program."""

    task: str
    params: GemmParams | GemmReduceParams | ProgramParams
    algorithm: str
    operands: dict[str, ArrayRef]
    results: dict[str, ArrayRef]
    verify: bool = False
    defer: bool = False
    express: bool = False
    block: BlockOf | None = None

    @property
    def deferred(self) -> dict[str, str]:
        """Ids by name of the results that have no place yet: they stay on the device, or in memory of this process. A
        block's window is never one.
        """
        if self.block is not None:
            return {}
        return {name: ref.cache_id for name, ref in self.results.items() if ref.placeless and ref.cache_id is not None}


class Form:
    """A form, and the function that computes small products of it."""

    def __init__(self, text: str, backend: DeviceBackend) -> None:
        """Raises ValueError for a text that is no form."""
        fields = protocol.Form.model_validate_json(text)
        self.params = fields.params
        self.operands, self.results = fields.operands, fields.results
        self.nbytes = {
            name: math.prod(kind.shape) * np.dtype(kind.dtype).itemsize
            for name, kind in (*fields.operands.items(), *fields.results.items())
        }
        """Bytes of each array of a product."""
        self._backend = backend
        self._product: Callable[..., None] | None = None
        self._looked = False
        self._found: dict[str, Any] = {}
        """Answers of `find` when it was asked first, by the name of what it looks for."""
        self.compiled: set[bool] = set()
        """Whether the kernels of its products are known to be compiled, without (False) and with those of a check."""

    @property
    def long(self) -> bool:
        """Whether its products are known to have no function, or are programs."""
        return isinstance(self.params, ProgramParams) or (self._looked and self._product is None)

    @property
    def tiny(self) -> bool:
        """Whether its products move little, and no array is empty."""
        return sum(self.nbytes.values()) <= TINY and self.whole

    @property
    def whole(self) -> bool:
        """Whether no array is empty."""
        return all(self.nbytes.values())

    def once(self, name: str, find: Callable[[Form], T]) -> T:
        """Return what `find` returned when it was asked first for what has that name. To be called by one thread."""
        if name not in self._found:
            self._found[name] = find(self)
        found: T = self._found[name]
        return found

    def product(self, row: list[np.ndarray[Any, Any]]) -> Callable[..., None] | None:
        """Return what computes `row`, to be called with its arrays; None: it has to be run as any other product."""
        if not self._looked and not isinstance(self.params, ProgramParams):
            self._looked = True
            count = len(self.operands)
            operands = dict(zip(self.operands, row[:count], strict=True))
            results = dict(zip(self.results, row[count:], strict=True))
            self._product = self._backend.repeated(self.params, operands, results)
        return self._product

    def row(self, part: Part, extents: Sequence[tuple[np.ndarray[Any, Any], int]]) -> list[np.ndarray[Any, Any]] | None:
        """Return operands and results of the part's first product. `extents`: the bytes of each row of the task's table
        and where it begins among them. None: an array has no bytes there.
        """
        row = []
        for kinds, places, writable in ((self.operands, part.operands, False), (self.results, part.results, True)):
            for name, kind in kinds.items():
                number, offset = places[name][0]
                if number < 0:
                    return None
                mapping, start = extents[number]
                array: np.ndarray[Any, Any] = np.ndarray(
                    kind.shape, kind.dtype, mapping, start + offset, None, kind.order
                )
                if not writable:
                    array.flags.writeable = False
                row.append(array)
        return row

    def run(self, work: Work) -> Run:
        """Return a task of one product of this form."""
        (part,) = work.parts
        operands = self._refs(work.extents, self.operands, part.operands)
        results = self._refs(work.extents, self.results, part.results)
        return Run(
            work.task, self.params, part.algorithm, operands, results, work.verify, work.defer, work.express, work.block
        )

    def _refs(
        self, extents: list[ExtentRow], kinds: Mapping[str, protocol.Kind], places: Mapping[str, Places]
    ) -> dict[str, ArrayRef]:
        refs = {}
        for name, kind in kinds.items():
            number, offset = places[name][0]
            extent, path, capacity, start, cache_id = (None, "", 0, 0, None) if number < 0 else extents[number]
            refs[name] = ArrayRef(
                extent=extent if path else None,
                path=path,
                capacity=capacity,
                nbytes=self.nbytes[name],
                dtype=kind.dtype,
                shape=kind.shape,
                order=kind.order,
                cache_id=cache_id,
                offset=start + offset,
            )
        return refs


class Forms:
    """The forms that came last, by their text."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._known: OrderedDict[str, Form] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, text: str) -> Form:
        """Return the form. May be called from any thread. Raises ValueError for a text that is none."""
        with self._lock:
            form = self._known.get(text)
            if form is not None:
                self._known.move_to_end(text)
                return form
            form = Form(text, self._backend)
            if len(text) <= _MAX_TEXT:
                self._known[text] = form
                if len(self._known) > _MAX_FORMS:
                    self._known.popitem(last=False)
            return form


def count_of(part: Part) -> int:
    """Return how many products a part has."""
    return len(next(iter(part.results.values())))
