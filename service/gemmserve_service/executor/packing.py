"""Packing of products on arrays of the store into the messages that a worker is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmserve_kernels.device.caching import cached
from gemmserve_service.executor.protocol import Form, Kind, row_without_place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_service.executor.protocol import ExtentRow
    from gemmserve_service.schemas import GemmParams, GemmReduceParams, ProgramParams
    from gemmserve_service.store.extents.extents import Extent

ArrayKind = tuple[str, tuple[int, ...], str]
"""dtype, shape and order of an array."""


class ExtentTable:
    """The extents of a task, in the order in which they were first asked for."""

    def __init__(self) -> None:
        self.rows: list[ExtentRow] = []
        self._numbers: dict[str, int] = {}

    def number(self, extent: Extent | None, cache_id: str | None = None) -> int:
        """Return the extent's row, -1 for None. `cache_id`: id of the immutable array that it holds."""
        if extent is None:
            return -1
        number = self._numbers.get(extent.name)
        if number is None:
            number = self._numbers[extent.name] = len(self.rows)
            self.rows.append(row_of(extent, cache_id))
        return number

    def number_without_place(self, array: str) -> int:
        """Return the row of an array that is on a device alone."""
        number = self._numbers.get(array)
        if number is None:
            number = self._numbers[array] = len(self.rows)
            self.rows.append(row_without_place(array))
        return number


def row_of(extent: Extent, cache_id: str | None) -> ExtentRow:
    """Return an extent's row. `cache_id`: id of the immutable array that it holds."""
    shared = extent.shared  # `Extent.file`, asked for three arrays of every product
    if shared is None:
        return extent.name, extent.path, extent.capacity, extent.start, cache_id
    return shared.name, extent.path, shared.nbytes, extent.start, cache_id


def form_of(
    params: GemmParams | GemmReduceParams | ProgramParams,
    operands: Mapping[str, ArrayKind],
    results: Mapping[str, ArrayKind],
) -> str:
    """Return the `Form` as JSON; worked out once for products that come again."""
    return cached(_form_of, params, tuple(operands.items()), tuple(results.items()))


def _form_of(
    params: GemmParams | GemmReduceParams | ProgramParams,
    operands: tuple[tuple[str, ArrayKind], ...],
    results: tuple[tuple[str, ArrayKind], ...],
) -> str:
    return Form(params=params, operands=_kinds(operands), results=_kinds(results)).model_dump_json()


def _kinds(side: tuple[tuple[str, ArrayKind], ...]) -> dict[str, Kind]:
    return {
        name: Kind(dtype=dtype, shape=shape, order="F" if order == "F" else "C") for name, (dtype, shape, order) in side
    }
