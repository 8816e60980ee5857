"""tools/amd: code objects are read right, budgets hold what they should, every kernel is asked for once."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(scope="module", autouse=True)
def _path():
    sys.path.insert(0, str(TOOLS))
    yield
    sys.path.remove(str(TOOLS))


def packed(value):
    """MessagePack, by its specification."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        if 0 <= value < 128:
            return bytes([value])
        if -32 <= value < 0:
            return bytes([256 + value])
        return b"\xcd" + struct.pack(">H", value) if 0 <= value < 1 << 16 else b"\xd2" + struct.pack(">i", value)
    if isinstance(value, str):
        text = value.encode()
        return (bytes([0xA0 + len(text)]) if len(text) < 32 else b"\xd9" + bytes([len(text)])) + text
    if isinstance(value, list):
        head = bytes([0x90 + len(value)]) if len(value) < 16 else b"\xdc" + struct.pack(">H", len(value))
        return head + b"".join(map(packed, value))
    head = bytes([0x80 + len(value)]) if len(value) < 16 else b"\xde" + struct.pack(">H", len(value))
    return head + b"".join(packed(key) + packed(item) for key, item in value.items())


def elf(document, code, settings=0xF0000):
    """A code object with the metadata and one function, `kernel`, with its descriptor before it."""
    description = packed(document)
    note = struct.pack("<III", 4, 3, 5) + b"ABC\0" + b"xyz\0"  # somebody else's
    note += struct.pack("<III", 7, len(description), 32) + b"AMDGPU\0\0" + description
    names = b"\0kernel\0kernel.kd\0"
    symbols = struct.pack("<IBBHQQ", 8, 1, 0, 2, 0x2000, 64) + struct.pack("<IBBHQQ", 1, 2, 0, 2, 0x2040, len(code))
    descriptor = b"\0" * 48 + struct.pack("<I", settings) + b"\0" * 12
    bodies = [b"", note, descriptor + code, symbols, names]
    at, offsets = 64, []
    for body in bodies:
        offsets.append(at)
        at += len(body)
    kinds, links, entries, addresses = [0, 7, 1, 11, 3], [0, 0, 0, 4, 0], [0, 0, 0, 24, 0], [0, 0, 0x2000, 0, 0]
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 40, at)
    struct.pack_into("<HH", header, 58, 64, len(bodies))
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kinds[i], 0, addresses[i], offsets[i], len(bodies[i]), links[i], 0, 0, entries[i])
        for i in range(len(bodies))
    )
    return bytes(header) + b"".join(bodies) + table


KERNEL = {
    ".name": "kernel",
    ".symbol": "kernel.kd",
    ".args": [{".size": 300, ".offset": -5}] * 20,
    ".vgpr_count": 136,
    ".agpr_count": 64,
    ".sgpr_count": 53,
    ".group_segment_fixed_size": 70000,
    ".private_segment_fixed_size": 0,
    ".vgpr_spill_count": 0,
    ".sgpr_spill_count": 2,
    ".wavefront_size": 64,
    ".uses_dynamic_stack": False,
    ".a name that is longer than thirty-one characters": None,
}


def test_metadata_and_code_of_a_code_object():
    from amd.codeobject import CodeObject, Usage

    found = CodeObject(elf({"amdhsa.version": [1, 2], "amdhsa.kernels": [KERNEL]}, b"machine code"))
    assert found.metadata["amdhsa.version"] == [1, 2]
    assert found.metadata["amdhsa.kernels"][0] == KERNEL
    assert found.kernels == {"kernel": Usage(136, 64, 53, 70000, 0, 0, 2, 64, True)}
    assert found.code("kernel") == b"machine code"
    with pytest.raises(KeyError):
        found.code("another")


@pytest.mark.parametrize(("settings", "kept"), [(0xF0000, True), (0xFFF2FFFF, False), (0xC0000, False), (0, False)])
def test_whether_subnormal_numbers_are_kept(settings, kept):
    """All four bits: those of float32, and those of float16 and double, which RDNA 3's matrix units go by."""
    from amd.codeobject import CodeObject

    assert CodeObject(elf({"amdhsa.kernels": [KERNEL]}, b"code", settings)).kernels["kernel"].subnormal is kept


@pytest.mark.parametrize("data", [b"", b"not an ELF file", b"\x7fELF\x02\x01" + b"\0" * 20])
def test_what_is_no_code_object(data):
    from amd.codeobject import CodeObject

    with pytest.raises(ValueError, match="ELF"):
        CodeObject(data)


def compiled(instructions=("v_mfma_f32_32x32x2_f32",), **usage):
    from amd.codeobject import Usage
    from amd.compiling import Compiled

    values = dict.fromkeys(("agpr", "lds", "scratch", "vgpr_spills", "sgpr_spills"), 0)
    values |= {"vgpr": 130, "sgpr": 50, "wave": 64, "subnormal": True}
    return Compiled(Usage(**values | usage), dict.fromkeys(instructions, 1))


def finding(result, mnemonic="v_mfma_f32_32x32x2"):
    from amd.check import Finding
    from amd.kernels import Case

    from gemmserve_kernels.device.compiler import KernelSource

    return Finding("gfx942", Case("mfma_gemm x", KernelSource("mfma_gemm", ()), "mfma_gemm", mnemonic), result)


BUDGETS = {"gfx942": {"mfma_gemm x": [136, 56, 0, 0, 0]}}


@pytest.mark.parametrize(
    ("usage", "word"),
    [
        ({}, None),
        ({"vgpr": 137}, "vgpr: 137, the budget is 136"),
        ({"sgpr": 60}, "sgpr"),
        ({"lds": 16}, "lds"),
        ({"sgpr_spills": 1}, "sgpr_spills: 1, the budget is 0"),
        ({"subnormal": False}, "takes subnormal numbers for zero"),
        ({"vgpr_spills": 3, "scratch": 12}, "spills 3 registers, 12 bytes"),
        ({"instructions": ("v_fma_f32",)}, "has no v_mfma_f32_32x32x2"),
        ({"instructions": ("v_mfma_f32_32x32x2f32",)}, None),
        ({"instructions": ("v_mfma_f32_16x16x4_f32", "v_wmma_f32_16x16x16_f16")}, "has no v_mfma_f32_32x32x2"),
    ],
)
def test_faults(usage, word):
    import re

    from amd.check import faults

    found = faults(finding(compiled(**usage)), BUDGETS)
    assert (not found) if word is None else re.search(word, "; ".join(found)), found


def test_a_kernel_without_a_budget_or_that_does_not_compile():
    import dataclasses

    from amd.check import faults

    assert "no budget" in faults(finding(compiled()), {})[0]
    broken = dataclasses.replace(finding(None), error="x.cu:1: error")
    assert faults(broken, BUDGETS) == ["x.cu:1: error"]


def test_plain_kernels_may_spill_what_their_budget_says():
    from amd.check import faults, updated

    spilling = finding(compiled((), sgpr_spills=7, scratch=32, vgpr=131), "")
    assert len(faults(spilling, BUDGETS)) == 2
    budgets = updated([spilling])
    assert budgets == {"gfx942": {"mfma_gemm x": [136, 56, 0, 64, 64]}}
    assert faults(spilling, budgets) == []


def test_every_kernel_has_a_budget_and_every_budget_a_kernel():
    from amd import kernels

    budgets = json.loads((TOOLS / "amd" / "budgets.json").read_text())
    assert set(budgets) == set(kernels.SPECS) == {"gfx90a", "gfx942", "gfx950", "gfx1100"}
    for arch in kernels.SPECS:
        assert set(budgets[arch]) == {case.label for case in kernels.cases(arch)}


def test_every_instruction_is_looked_for_where_it_exists():
    from amd import kernels

    from gemmserve_kernels.algorithms.mfma.tile import ARCHITECTURES

    for arch, known in ARCHITECTURES.items():
        wanted = {arithmetic.instruction.mnemonic for arithmetic in known.values()}
        found = {case.mnemonic for case in kernels.cases(arch)} - {""}
        assert found == wanted
        entries = {case.entry for case in kernels.cases(arch) if case.mnemonic}
        assert entries == {"mfma_gemm", "mfma_reduce"}


def test_without_apt_the_message_says_so(monkeypatch, tmp_path):
    from amd import toolchain

    monkeypatch.setenv(toolchain.DIRECTORY_VARIABLE, str(tmp_path / "none"))
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(toolchain.ToolchainError, match=r"apt-get is missing|x86-64"):
        toolchain.ensure()


def test_what_is_there_is_taken_as_it_is(monkeypatch, tmp_path):
    from amd import toolchain

    monkeypatch.setenv(toolchain.DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "packages.txt").write_text("libhiprtc7_7.2_amd64\n")
    assert toolchain.ensure() == tmp_path
    assert "libhiprtc7" in toolchain.packages(tmp_path)
    with pytest.raises(toolchain.ToolchainError, match="remove it"):
        toolchain.command(tmp_path)


def test_the_stand_in_for_the_tracer_has_what_cupy_wants_of_it(tmp_path):
    import ctypes

    from amd import wheel

    wheel._stand_in(tmp_path / "tracer")
    library = ctypes.CDLL(str(tmp_path / "tracer" / "libroctracer64.so.4"))
    assert (library.roctracer_start(), library.roctracer_stop()) == (-1, -1)


def test_without_cupys_libraries_the_message_says_so(monkeypatch, tmp_path, capsys):
    from amd import toolchain, wheel

    monkeypatch.setenv(toolchain.DIRECTORY_VARIABLE, str(tmp_path / "none"))
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    assert wheel.main() == 2
    assert "CuPy's libraries cannot be had" in capsys.readouterr().err
