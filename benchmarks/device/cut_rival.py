"""Cuts a newer cuBLAS down to one GPU architecture, so that it can be carried to a machine without a network.

    pip download --no-deps nvidia-cublas
    python benchmarks/device/cut_rival.py nvidia_cublas-13.10.0.20-....whl --arch 90 --output .rival --parts 3

Of the wheel's 444 MB most is machine code of other architectures. Its payloads become zeros where they lie: nothing
moves, and the driver picks what it does anyway. Both libraries get names of their own (`libcublas` becomes
`librivals`), so that they are loaded beside those that CuPy has. What is left goes through tar and xz, into files of
one size that rival.sh puts together again. Code lies in three kinds of section: fat binaries (`.nv_fatbin`,
`.cask_resource`), whose entries say what they are for, and cubins by themselves, each a frame of zstd (`.ldata`).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import struct
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIBRARIES = ("libcublas.so.13", "libcublasLt.so.13")
OLD, NEW = b"libcublas", b"librivals"
FATBIN, ENTRY_CUBIN = 0xBA55ED50, 2
FRAME = b"\x28\xb5\x2f\xfd"
FAT_SECTIONS, FRAME_SECTIONS = (".nv_fatbin", ".cask_resource"), (".ldata",)
NEW_ABI = 8
"""From this version of the ABI on cubins have the architecture in their flags' second byte, before in the first."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 27}]


@dataclass(frozen=True)
class Section:
    """Where a section's bytes lie in the file."""

    offset: int
    size: int


def sections(elf):
    """The sections of a 64-bit little-endian ELF file by name; without those that have no bytes in it."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    each, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * each) for i in range(count)]
    found, nobits = {}, 8
    for name, kind, _, _, offset, size, *_ in headers:
        start = headers[names][4] + name
        if kind != nobits:
            found[bytes(elf[start : elf.index(b"\0", start)]).decode()] = Section(offset, size)
    return found


def entries(elf, section):
    """Code in a section of fat binaries: (kind, architecture, offset and size of the payload) of every entry."""
    at, end = section.offset, section.offset + section.size
    magic = struct.pack("<I", FATBIN)
    while (at := elf.find(magic, at, end)) >= 0:
        header, size = struct.unpack_from("<HQ", elf, at + 6)
        entry, at = at + header, at + header + size
        while entry < at:
            kind, _, length, payload = struct.unpack_from("<HHIQ", elf, entry)
            (arch,) = struct.unpack_from("<I", elf, entry + 28)
            yield kind, arch, entry + length, payload
            entry += length + payload


def frame_end(data, at):
    """Where a frame of zstd that begins at `at` ends (RFC 8878)."""
    descriptor = data[at + 4]
    single, checksum = descriptor & 0x20, descriptor & 4
    content = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    at += 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3] + content
    last = False
    while not last:
        header = int.from_bytes(data[at : at + 3], "little")
        last, run_length = header & 1, (header >> 1) & 3 == 1
        at += 3 + (1 if run_length else header >> 3)
    return at + (4 if checksum else 0)


def cubins(elf, section):
    """Cubins by themselves: (architecture, offset, size) of every frame."""
    at, end = section.offset, section.offset + section.size
    while (at := elf.find(FRAME, at, end)) >= 0:
        after = frame_end(elf, at)
        head = zstd.ZstdDecompressor().decompress(bytes(elf[at:after]), max_length=64)
        yield architecture(head), at, after - at
        at = after


def architecture(head):
    """The compute capability times ten that a cubin, of which these are the first 64 bytes, is for."""
    if head[:4] != b"\x7fELF":
        raise ValueError("not a cubin")
    (flags,) = struct.unpack_from("<I", head, 48)
    return (flags >> 8 if head[8] >= NEW_ABI else flags) & 0xFF


def cut(elf, arch):
    """Zeros instead of the code for other architectures, in place; returns how many bytes of code were kept and not."""
    kept = gone = 0
    found = sections(elf)
    payloads = [
        (kind == ENTRY_CUBIN and its == arch, offset, size)
        for name in FAT_SECTIONS
        if name in found
        for kind, its, offset, size in entries(elf, found[name])
    ]
    payloads += [
        (its == arch, offset, size)
        for name in FRAME_SECTIONS
        if name in found
        for its, offset, size in cubins(elf, found[name])
    ]
    for keep, offset, size in payloads:
        if keep:
            kept += size
        else:
            gone += size
            elf[offset : offset + size] = bytes(size)
    return kept, gone


def rename(elf):
    """Gives the libraries their own names wherever these stand among the dynamic strings: SONAME, needed, versions."""
    where = sections(elf)[".dynstr"]
    end = where.offset + where.size
    strings = bytes(elf[where.offset : end])
    for name in LIBRARIES:
        old = b"\0" + name.encode() + b"\0"
        strings = strings.replace(old, old.replace(OLD, NEW))
    elf[where.offset : end] = strings


def packed(libraries):
    """A tar through xz of these files by name: the same bytes for the same files."""
    stream = io.BytesIO()
    with lzma.open(stream, "wb", filters=FILTERS) as xz, tarfile.open(fileobj=xz, mode="w|") as tar:
        for name, data in libraries.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def split(data, count):
    """The data in `count` parts of one size, but for the last."""
    size = -(-len(data) // count)
    return [data[i * size : (i + 1) * size] for i in range(count)]


def parsed(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="of pip download --no-deps nvidia-cublas")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times ten")
    parser.add_argument("--output", type=Path, default=Path(".rival"), help="a folder: part1of3, part2of3, part3of3")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a folder for the libraries themselves, too")
    return parser.parse_args(argv)


def main(argv=None):
    options = parsed(argv)
    libraries = {}
    with zipfile.ZipFile(options.wheel) as wheel:
        for path in wheel.namelist():
            name = Path(path).name
            if name in LIBRARIES:
                elf = bytearray(wheel.read(path))
                kept, gone = cut(elf, options.arch)
                rename(elf)
                libraries[name.encode().replace(OLD, NEW).decode()] = elf
                print(f"{name}: {kept / 1e6:.1f} MB of code kept, {gone / 1e6:.1f} MB gone", flush=True)
    if len(libraries) < len(LIBRARIES):
        print(f"no {' and '.join(LIBRARIES)} in {options.wheel}", file=sys.stderr)
        return 2
    for folder in filter(None, (options.output, options.keep)):
        folder.mkdir(parents=True, exist_ok=True)
    if options.keep:
        for name, data in libraries.items():
            (options.keep / name).write_bytes(data)
    whole = packed(libraries)
    for number, part in enumerate(split(whole, options.parts), 1):
        path = options.output / f"part{number}of{options.parts}"
        path.write_bytes(part)
        print(f"{path}: {len(part) / 2**20:.1f} MiB, sha256 {hashlib.sha256(part).hexdigest()[:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
