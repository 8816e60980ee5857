"""What an AMD code object says of itself: the kernels' registers, shared memory and spills, and their instructions.

A code object is an ELF file; the kernels' properties are a MessagePack document in the note NT_AMDGPU_METADATA (LLVM,
User Guide for AMDGPU Backend, Code Object V3 and above Metadata). Only what is needed of both formats is read here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

_SHT_SYMTAB: Final = 2
_SHT_NOTE: Final = 7
_SHT_DYNSYM: Final = 11
_STT_OBJECT: Final = 1
_STT_FUNC: Final = 2
_NT_AMDGPU_METADATA: Final = 32


@dataclass(frozen=True)
class Usage:
    """What one kernel takes. `vgpr`: registers of one lane, accumulation registers (`agpr`) among them where an
    architecture has one file for both; `sgpr`: of a wave. `lds`: static shared memory, `scratch`: a lane's memory, both
    in bytes. `vgpr_spills` go to that memory; `sgpr_spills` to lanes of a vector register, which costs little.
    `subnormal`: whether it starts with the device set to keep subnormal numbers of every width, not to flush them.
    """

    vgpr: int
    agpr: int
    sgpr: int
    lds: int
    scratch: int
    vgpr_spills: int
    sgpr_spills: int
    wave: int
    subnormal: bool


@dataclass(frozen=True)
class _Section:
    kind: int
    address: int
    offset: int
    size: int
    link: int
    entry: int


class CodeObject:
    """A parsed code object. Raises ValueError where the bytes are none."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        self._data = data
        try:
            (at,) = struct.unpack_from("<Q", data, 40)
            size, count = struct.unpack_from("<HH", data, 58)
            self._sections = [self._section(at + i * size) for i in range(count)]
        except struct.error as error:
            raise ValueError(f"a truncated ELF file: {error}") from error

    def _section(self, at: int) -> _Section:
        _, kind, _, address, offset, size, link, _, _, entry = struct.unpack_from("<IIQQQQIIQQ", self._data, at)
        return _Section(kind, address, offset, size, link, entry)

    @property
    def metadata(self) -> dict[str, Any]:
        """The document of NT_AMDGPU_METADATA."""
        for section in self._sections:
            if section.kind != _SHT_NOTE:
                continue
            at, end = section.offset, section.offset + section.size
            while at < end:
                name_size, size, kind = struct.unpack_from("<III", self._data, at)
                at += 12 + _aligned(name_size)
                if kind == _NT_AMDGPU_METADATA:
                    document, _ = unpack(self._data, at)
                    if isinstance(document, dict):
                        return document
                at += _aligned(size)
        raise ValueError("no metadata of AMD's")

    @property
    def kernels(self) -> dict[str, Usage]:
        """By name."""
        return {
            kernel[".name"]: Usage(
                vgpr=kernel[".vgpr_count"],
                agpr=kernel.get(".agpr_count", 0),
                sgpr=kernel[".sgpr_count"],
                lds=kernel[".group_segment_fixed_size"],
                scratch=kernel[".private_segment_fixed_size"],
                vgpr_spills=kernel[".vgpr_spill_count"],
                sgpr_spills=kernel[".sgpr_spill_count"],
                wave=kernel[".wavefront_size"],
                subnormal=self._keeps_subnormal(kernel[".symbol"]),
            )
            for kernel in self.metadata["amdhsa.kernels"]
        }

    def _keeps_subnormal(self, descriptor: str) -> bool:
        """FLOAT_DENORM_MODE_32 and FLOAT_DENORM_MODE_16_64 of COMPUTE_PGM_RSRC1 (LLVM, Kernel Descriptor)."""
        (settings,) = struct.unpack_from("<I", self._symbol(descriptor, _STT_OBJECT), 48)
        return bool(settings >> 16 & 15 == 15)

    def code(self, name: str) -> bytes:
        """The machine code of a function. Raises KeyError."""
        return self._symbol(name, _STT_FUNC)

    def _symbol(self, name: str, kind: int) -> bytes:
        for table in self._sections:
            if table.kind not in {_SHT_SYMTAB, _SHT_DYNSYM}:
                continue
            names = self._sections[table.link]
            for at in range(table.offset, table.offset + table.size, table.entry):
                name_at, info, _, section, value, size = struct.unpack_from("<IBBHQQ", self._data, at)
                start = names.offset + name_at
                found = self._data[start : self._data.index(b"\0", start)].decode()
                if found == name and info & 15 == kind:
                    text = self._sections[section]
                    begin = text.offset + value - text.address
                    return self._data[begin : begin + size]
        raise KeyError(name)


def _aligned(size: int) -> int:
    return -(-size // 4) * 4


def unpack(data: bytes, at: int = 0) -> tuple[Any, int]:
    """One MessagePack object at `at`, and where it ends. Maps, arrays, strings, integers, booleans and nil only."""
    kind = data[at]
    if kind < 0x80:
        return kind, at + 1
    if kind < 0x90:
        return _map(data, at + 1, kind & 15)
    if kind < 0xA0:
        return _array(data, at + 1, kind & 15)
    if kind < 0xC0:
        return _string(data, at + 1, kind & 31)
    if kind >= 0xE0:
        return kind - 256, at + 1
    if kind in {0xC0, 0xC2, 0xC3}:
        return {0xC0: None, 0xC2: False, 0xC3: True}[kind], at + 1
    if kind in _NUMBERS:
        code = _NUMBERS[kind]
        return struct.unpack_from(f">{code}", data, at + 1)[0], at + 1 + struct.calcsize(code)
    if kind in _SIZED:
        code, read = _SIZED[kind]
        return read(data, at + 1 + struct.calcsize(code), struct.unpack_from(f">{code}", data, at + 1)[0])
    raise ValueError(f"a MessagePack object of kind {kind:#x}")


def _string(data: bytes, at: int, size: int) -> tuple[str, int]:
    return data[at : at + size].decode(), at + size


def _array(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(count):
        value, at = unpack(data, at)
        found.append(value)
    return found, at


def _map(data: bytes, at: int, count: int) -> tuple[dict[str, Any], int]:
    found = {}
    for _ in range(count):
        key, at = unpack(data, at)
        found[key], at = unpack(data, at)
    return found, at


_NUMBERS: Final = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
_SIZED: Final = {
    0xD9: ("B", _string), 0xDA: ("H", _string), 0xDB: ("I", _string),
    0xDC: ("H", _array), 0xDD: ("I", _array), 0xDE: ("H", _map), 0xDF: ("I", _map),
}  # fmt: skip
