"""Structures that kernels take as arguments, laid out as the device code declares them.

A structure is declared once, in a .cu or .cuh file; the host reads its fields there. Each line declares members of one
type: of `_SCALARS`, pointers, other structures, or arrays of these.
"""

from __future__ import annotations

import ctypes
import keyword
import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gemmserve_kernels.device.compiler import flattened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Structure = TypeVar("Structure", bound=ctypes.Structure)

_SCALARS: Final = {
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "int": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "Long": ctypes.c_int64,
    "unsigned long long": ctypes.c_uint64,
}
_ADDRESS: Final = ctypes.c_int64
"""An address; relative to a base, and possibly negative, until it is placed."""
_MAP_ALIGNMENT: Final = 64
"""Bytes that a structure with tensor maps, which come first in it, is a multiple of."""
_MEMBER: Final = re.compile(r"\s+(?:const )?((?:unsigned )?(?:long long|char|\w+))(\*?) ([^;()]+);.*")
_DECLARATOR: Final = re.compile(r"\s*(\*?)(\w+)((?:\[[^]]+\])*)")

_known: Final[dict[str, type[Any]]] = {}


def opaque(cls: type[Structure]) -> type[Structure]:
    """Decorator of a class that has fields of its own, for a structure that the device code does not look into."""
    _known[cls.__name__] = cls
    return cls


def device_struct(path: str) -> Callable[[type[Structure]], type[Structure]]:
    """Decorator of a class of the name of a structure in cuda/`path`, or in a file that it includes: sets its fields.

    Structures among the fields are of the classes that were declared so before. Pointers are numbers of 64 bits. A
    field whose name is a keyword of Python has an underscore behind it (`in_`).
    """

    def declared(cls: type[Structure]) -> type[Structure]:
        cls._fields_ = list(_fields(flattened(path), cls.__name__))
        _known[cls.__name__] = cls
        return cls

    return declared


def _fields(text: str, name: str) -> Iterator[tuple[str, type[Any]]]:
    """Yield the names and types of the members of a structure in `text`. Raises ValueError for what it cannot read."""
    found = re.search(rf"^struct {name} {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"the device code has no structure {name}")
    size, aligned = 0, False
    for line in found[1].splitlines():
        member = _MEMBER.fullmatch(line)
        if member is None:
            if re.match(r"\s+[^/\s].*;", line) and "(" not in line:
                raise ValueError(f"{name}: no member of a structure: {line.strip()}")
            continue
        for declarator in member[3].split(","):
            star, field, extents = _DECLARATOR.fullmatch(declarator).groups()  # type: ignore[union-attr]
            kind = _ADDRESS if member[2] or star else _kind(text, member[1])
            aligned |= kind is _known.get("TensorMap")
            for extent in reversed(re.findall(r"[^][]+", extents)):
                kind *= sum(_constant(text, term.strip()) for term in extent.split("+"))
            size = -(-size // ctypes.alignment(kind)) * ctypes.alignment(kind) + ctypes.sizeof(kind)
            yield f"{field}_" if keyword.iskeyword(field) else field, kind
    if aligned and size % _MAP_ALIGNMENT:
        yield "padding", ctypes.c_char * (-size % _MAP_ALIGNMENT)


def _kind(text: str, name: str) -> Any:
    """The type of that name: a number, or a structure of `text`."""
    if name not in _SCALARS and name not in _known:
        _known[name] = type(name, (ctypes.Structure,), {"_fields_": list(_fields(text, name))})
    return _SCALARS.get(name) or _known[name]


def _constant(text: str, term: str) -> int:
    """The value of a number, or of a constant of `text`."""
    return int(term) if term.isdigit() else int(re.search(rf"\b{term} = (\d+)[,;]", text)[1])  # type: ignore[index]
