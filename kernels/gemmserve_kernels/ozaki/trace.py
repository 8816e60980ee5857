"""Launches worked out once and repeated with other addresses: what keeps the host's share of a product small.

A `Tracer` stands in for the device while the launches of a product are worked out; every array has a made-up address. A
`Program` is what it saw: allocations and launches in their order. Running it fills in where arrays lie this time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.compiler import KernelSource
    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher

_SHIFT: Final = 48
"""Made-up addresses are (number + 1) * 2**48 plus an offset of either sign."""
_ADDRESSES: Final = frozenset({"re", "im", "codes", "residues", "a", "b", "products", "a_codes", "b_codes", "patches"})
"""Names of 64-bit fields that hold addresses."""


@dataclass(frozen=True)
class Symbol:
    """An array that is not there: the number of its made-up address, and what an array would say of itself."""

    number: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def address(self) -> int:
        """Where it seems to lie."""
        return (self.number + 1) << _SHIFT


@dataclass(frozen=True)
class _Allocation:
    symbol: Symbol
    cleared: bool


@dataclass(frozen=True)
class _Launch:
    """`places`: (offset in the structure, number of a symbol, bytes from its start). `last`: symbols not used again."""

    source: KernelSource
    entry: str
    grid: int
    block: int
    shared: int
    params: ctypes.Structure
    places: tuple[tuple[int, int, int], ...]
    last: tuple[int, ...] = ()


@cache
def _address_fields(kind: type[ctypes.Structure]) -> tuple[int, ...]:
    """Offsets of the fields that hold addresses."""
    found: list[int] = []
    for name, typ, *_ in kind._fields_:
        offset = getattr(kind, name).offset
        if isinstance(typ, type) and issubclass(typ, ctypes.Structure):
            found += [offset + inner for inner in _address_fields(typ)]
        elif name in _ADDRESSES and ctypes.sizeof(typ) == ctypes.sizeof(ctypes.c_int64):
            found.append(offset)
    return tuple(found)


@dataclass(frozen=True)
class Program:
    """Allocations and launches; the arguments are the first symbols."""

    steps: tuple[_Allocation | _Launch, ...]

    def run(self, launcher: Launcher, addresses: Sequence[int]) -> None:
        """Repeats the launches on `launcher`, with the arguments at `addresses`."""
        at = dict(enumerate(addresses))
        kept: dict[int, Any] = {}
        for step in self.steps:
            if isinstance(step, _Allocation):
                make = launcher.zeros if step.cleared else launcher.empty
                array = make(step.symbol.shape, step.symbol.dtype)
                kept[step.symbol.number] = array
                at[step.symbol.number] = launcher.pointer(array)
                continue
            params = type(step.params).from_buffer_copy(step.params)
            for offset, number, distance in step.places:
                ctypes.c_int64.from_buffer(params, offset).value = at[number] + distance
            launcher.launch(
                step.source, step.entry, grid=step.grid, block=step.block, shared=step.shared, params=params
            )
            for number in step.last:
                kept.pop(number, None)  # work on one stream: the memory may serve what comes after


@dataclass
class Tracer:
    """A Launcher that runs nothing. The arguments of the program are its first symbols: `argument` makes them."""

    spec: DeviceSpec
    max_grid: int
    arguments: int = 0
    symbols: int = 0
    steps: list[_Allocation | _Launch] = field(default_factory=list)

    def argument(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Symbol:
        """The next argument, before anything is allocated."""
        self.arguments += 1
        return self._symbol(shape, dtype)

    def _symbol(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Symbol:
        self.symbols += 1
        return Symbol(self.symbols - 1, shape, np.dtype(dtype))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """See Launcher."""
        return self._allocate(shape, dtype, cleared=False)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """See Launcher."""
        return self._allocate(shape, dtype, cleared=True)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, cleared: bool) -> Symbol:
        symbol = self._symbol(shape, dtype)
        self.steps.append(_Allocation(symbol, cleared))
        return symbol

    def pointer(self, array: Any) -> int:
        """See Launcher."""
        return int(array.address)

    def launch(
        self, source: KernelSource, entry: str, *, grid: int, block: int, shared: int, params: ctypes.Structure
    ) -> None:
        """See Launcher."""
        places = []
        for offset in _address_fields(type(params)):
            value = ctypes.c_int64.from_buffer(params, offset).value
            number = (value + (1 << _SHIFT - 1) >> _SHIFT) - 1
            places.append((offset, number, value - (number + 1 << _SHIFT)))
        copy = type(params).from_buffer_copy(params)
        self.steps.append(_Launch(source, entry, grid, block, shared, copy, tuple(places)))

    def program(self) -> Program:
        """What was seen."""
        seen: set[int] = set()
        steps: list[_Allocation | _Launch] = []
        for step in reversed(self.steps):
            if isinstance(step, _Launch):
                used = {number for _, number, _ in step.places}
                last = tuple(sorted(n for n in used - seen if n >= self.arguments))
                seen |= used
                step = _Launch(  # noqa: PLW2901
                    step.source, step.entry, step.grid, step.block, step.shared, step.params, step.places, last
                )
            steps.append(step)
        return Program(tuple(reversed(steps)))
