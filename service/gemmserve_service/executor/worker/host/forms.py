"""Products whose arrays lie side by side in one extent, and that come again and again: looked at once, repeated."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_service.executor.protocol import BundleForm

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.executor.worker.backend import DeviceBackend

_MOST_KEPT: Final = 512  # as many as the front remembers (`small.SmallProducts`)


class Form:
    """One form: its fields, and the function that computes every product of it."""

    def __init__(self, text: str, backend: DeviceBackend) -> None:
        """Raises ValueError for a text that is no form, and what `DeviceBackend.repeated` raises."""
        self.fields = BundleForm.model_validate_json(text)
        self._placed = [
            (placed.shape, np.dtype(placed.dtype), placed.offset, placed.order, writable)
            for arrays, writable in ((self.fields.operands, False), (self.fields.results, True))
            for placed in arrays.values()
        ]
        self._backend = backend
        self._product: Callable[..., None] | None = None
        self._looked = False

    def product(self, row: list[np.ndarray[Any, Any]]) -> Callable[..., None] | None:
        """What computes `row`, to be called with its arrays; None: it has to be run as any other product."""
        if not self._looked:
            self._looked = True
            names, count = [*self.fields.operands, *self.fields.results], len(self.fields.operands)
            arrays = dict(zip(names, row, strict=True))
            operands = {name: arrays[name] for name in names[:count]}
            self._product = self._backend.repeated(
                self.fields.params, operands, {name: arrays[name] for name in names[count:]}
            )
        return self._product

    def row(self, mapping: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Operands and results in an extent, over the mapping itself."""
        row = []
        for shape, dtype, offset, order, writable in self._placed:
            array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, mapping, offset, None, order)
            if not writable:
                array.flags.writeable = False
            row.append(array)
        return row


class Forms:
    """Those that came last, by their text."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._known: OrderedDict[str, Form] = OrderedDict()

    def of(self, text: str) -> Form:
        """The form. Raises what `Form` raises."""
        form = self._known.get(text)
        if form is None:
            form = self._known[text] = Form(text, self._backend)
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(text)
        return form
