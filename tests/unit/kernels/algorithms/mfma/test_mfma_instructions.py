"""What is said of a matrix instruction in three places: to the compiler of the device, to the CPU shim, to the planner.

The shim runs its own spelling of an instruction, so nothing else would notice that the device's has other rows. Layouts
as AMD's matrix instruction calculator prints them.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from simt_shim import compile_source

from gemmserve_kernels.algorithms.mfma.tile import F16, F32, F64, LONG_F16, WMMA_F16, XF32
from gemmserve_kernels.device import compiler

INSTRUCTIONS = {each.name: each for each in (F32, XF32, F64, F16, LONG_F16, WMMA_F16)}
ROWS = {
    "MfmaF64": lambda i, lane: 4 * i + lane // 16,
    "WmmaF16": lambda i, lane: 2 * i + lane // 16,
}
"""The row of an element of D by its register and its lane; the others are of 32 x 32."""


def rows_of_32(i, lane):
    return (8 * (i // 4)) % 32 + 4 * (lane // 32) + i % 4


@pytest.fixture(scope="module")
def header():
    """The branch of the device's compiler."""
    text = compiler._flatten("mfma/instructions.cuh", set())
    return text[text.index("#if defined(GEMM_HIP)\n\ntemplate <class T, int N>\nstruct Lanes") :]


def stated(header, name):
    """(constants, row as a function) of a structure in the text."""
    body = header[header.index(f"struct {name} {{") :].partition("\n};")[0]
    constants = {key: int(value) for key, value in re.findall(r"([A-Z]+) = (\d+)", body)}
    (row,) = re.findall(r"int row\(int i, int lane\) \{ return ([^;]+); \}", body)
    return constants, lambda i, lane: eval(row.replace("/", "//"), {}, {"i": i, "lane": lane})


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_the_device_is_told_what_the_planner_knows(header, name):
    known, (constants, row) = INSTRUCTIONS[name], stated(header, name)
    count = known.tile * known.tile // known.wave
    wanted = {"WAVE": known.wave, "TILE": known.tile, "GROUPS": known.groups, "PER": known.per, "COUNT": count}
    assert constants == wanted
    places = [(row(i, lane), lane % known.tile) for i in range(count) for lane in range(known.wave)]
    assert sorted(places) == [(r, c) for r in range(known.tile) for c in range(known.tile)]
    expected = ROWS.get(name, rows_of_32)
    assert all(row(i, lane) == expected(i, lane) for i in range(count) for lane in range(known.wave))
    depth = int(re.search(r"x\d+x(\d+)", known.mnemonic)[1])
    assert known.groups * known.per == depth


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_the_shim_says_the_same(name):
    known = INSTRUCTIONS[name]
    source = f"""{compiler._flatten("mfma/instructions.cuh", set())}
extern "C" __global__ void write_down(int* to) {{
    using I = {name};
    const int constants[] = {{I::WAVE, I::TILE, I::GROUPS, I::PER, I::COUNT}};
    for (int i = 0; i < 5; ++i) to[i] = constants[i];
    for (int i = 0; i < I::COUNT; ++i)
        for (int lane = 0; lane < I::WAVE; ++lane) to[5 + i * I::WAVE + lane] = I::row(i, lane);
}}
"""
    size = known.tile * known.tile
    found = np.full(5 + size, -1, np.int32)
    compile_source(source, warp_size=known.wave, optimize="-O0").launch("write_down", (1,), (1,), (found,))
    assert found[:5].tolist() == [known.wave, known.tile, known.groups, known.per, size // known.wave]
    i, lane = np.divmod(np.arange(size), known.wave)
    np.testing.assert_array_equal(found[5:], ROWS.get(name, rows_of_32)(i, lane))
