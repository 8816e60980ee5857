"""A library cut down to one architecture: synthetic files of the kinds of section that there are."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile

import pytest
from benchmark_scripts import load_package

(cut_rival,) = load_package("benchmarks.device", "cut_rival")
zstd = cut_rival.zstd


def elf_file(sections):
    """A file with these sections, (name, bytes), and nothing else of an ELF file."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in sections) + b".names\0"
    parts, headers, at, name_at = [], [bytes(64)], 64, 1
    for name, content in [*sections, (".names", names)]:
        headers.append(struct.pack("<IIQQQQIIQQ", name_at, 1, 0, 0, at, len(content), 0, 0, 1, 0))
        parts.append(content)
        at += len(content)
        name_at += len(name) + 1
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 0x28, at)
    struct.pack_into("<HHH", header, 0x3A, 64, len(headers), len(headers) - 1)
    return bytearray(bytes(header) + b"".join(parts) + b"".join(headers))


def fat_binary(*entries):
    """Entries of (kind, architecture, payload)."""
    body = b""
    for kind, arch, payload in entries:
        header = bytearray(64)
        struct.pack_into("<HHIQ", header, 0, kind, 0x101, 64, len(payload))
        struct.pack_into("<I", header, 28, arch)
        body += bytes(header) + payload
    return struct.pack("<IHHQ", cut_rival.FATBIN, 1, 16, len(body)) + body


def cubin(arch, abi):
    """The beginning of one, as it tells what it is for, and something that compresses to several blocks."""
    head = bytearray(64)
    head[:6], head[8] = b"\x7fELF\x02\x01", abi
    struct.pack_into("<I", head, 48, arch << 8 | 0x6000002 if abi >= 8 else arch << 16 | 0x500 | arch)
    return bytes(head) + bytes(i * i % 251 for i in range(1000)) * 300


@pytest.fixture
def library():
    frames = [zstd.compress(cubin(arch, abi)) for arch, abi in ((80, 7), (90, 7), (90, 8), (100, 8), (75, 7))]
    strings = b"\0libcublasLt.so.13\0cublasCreate_v2\0libcublas.so.13\0notlibcublas.so.13\0"
    return elf_file([
        (".dynstr", strings),
        (".nv_fatbin", fat_binary((2, 80, b"a" * 24), (2, 90, b"b" * 40)) + bytes(8) + fat_binary((1, 90, b"c" * 16))),
        (".cask_resource", fat_binary((2, 100, b"d" * 32))),
        (".ldata", b"weights" + frames[0] + b"\0" * 5 + b"".join(frames[1:]) + b"more weights"),
    ]), frames  # fmt: skip


def test_code_of_other_architectures_becomes_zeros_where_it_lies(library):
    elf, frames = library
    before = bytes(elf)
    kept, gone = cut_rival.cut(elf, 90)
    assert (kept, gone) == (40 + sum(map(len, frames[1:3])), 24 + 16 + 32 + sum(map(len, (frames[0], *frames[3:]))))
    expected = before
    for payload in (b"a" * 24, b"c" * 16, b"d" * 32, frames[0], *frames[3:]):
        assert expected.count(payload) == 1
        expected = expected.replace(payload, bytes(len(payload)))
    assert elf == expected
    assert cut_rival.cut(elf, 90)[0] == kept  # of what is left, all is kept


def test_libraries_are_renamed_among_dynamic_strings_alone(library):
    elf, _ = library
    elf += b"\0libcublas.so.13\0"
    cut_rival.rename(elf)
    assert b"\0librivalsLt.so.13\0cublasCreate_v2\0librivals.so.13\0notlibcublas.so.13\0" in elf
    assert elf.endswith(b"\0libcublas.so.13\0")


@pytest.mark.parametrize("content", [b"", b"x", bytes(300_000), bytes(i % 251 for i in range(400_000))])
def test_frames_end_where_they_end(content):
    frame = zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: len(content) % 2})
    assert cut_rival.frame_end(b"before" + frame + b"after", 6) == 6 + len(frame)


def test_a_file_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="ELF"):
        cut_rival.sections(b"MZ" + bytes(100))
    with pytest.raises(ValueError, match="cubin"):
        cut_rival.architecture(bytes(64))


def test_a_wheel_comes_back_from_its_parts(library, tmp_path):
    elf, _ = library
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in cut_rival.LIBRARIES:
            archive.writestr(f"nvidia/cu13/lib/{name}", bytes(elf))
        archive.writestr("nvidia/cu13/lib/libnvblas.so.13", b"other")
    assert cut_rival.main([str(wheel), "--output", str(tmp_path / "parts"), "--parts", "3"]) == 0
    parts = sorted((tmp_path / "parts").iterdir())
    assert [part.name for part in parts] == ["part1of3", "part2of3", "part3of3"]
    sizes = [part.stat().st_size for part in parts]
    assert sizes[0] == sizes[1] >= sizes[2] > 0
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts)), mode="r:xz") as tar:
        assert tar.getnames() == ["librivals.so.13", "librivalsLt.so.13"]
        cut_rival.cut(elf, 90)
        cut_rival.rename(elf)
        assert tar.extractfile("librivals.so.13").read() == elf


def test_a_wheel_without_the_libraries(tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("x", b"")
    assert cut_rival.main([str(tmp_path / "w.whl"), "--output", str(tmp_path / "parts")]) == 2
    assert "libcublas" in capsys.readouterr().err
