"""Shared memory of the kernels in double precision: where octets lie, and that lanes read them from different banks.

The header itself says where they lie: a kernel beside it writes its offsets down. 128 bytes are served at once: to 32
lanes that read 4 bytes each, 16 that read 8, 8 that read 16.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from simt_shim import compile_source

from gemmserve_kernels.device import compiler

SPAN = 128
CASES = [(element, extent, along) for element in (4, 8, 16) for extent in (32, 64, 128) for along in (False, True)]


@functools.cache
def written(element, extent, along):
    """[octet, quarter, lane] -> byte; [octet, g] -> row; [row, step] -> byte."""
    depth = SPAN // element
    header = compiler._flatten("dmma/operand.cuh", set())
    source = f"""{header}
using Tile = OctetTile<{element}, {extent}, {str(along).lower()}>;
extern "C" __global__ void write_down(int* lanes, int* rows, int* places) {{
    for (int octet = 0; octet < {extent // 8}; ++octet) {{
        for (int quarter = 0; quarter < {depth // 4}; ++quarter)
            for (int lane = 0; lane < 32; ++lane)
                *lanes++ = Tile::at_octet(Tile::first(lane), octet, quarter);
        for (int g = 0; g < 8; ++g) *rows++ = Tile::position(octet, g);
    }}
    for (int row = 0; row < {extent}; ++row)
        for (int step = 0; step < {depth}; ++step)
            *places++ = {"Tile::at(row, step * {0})" if along else "Tile::at(step, row * {0})"};
}}
""".replace("{0}", str(element))
    lanes = np.full((extent // 8, depth // 4, 32), -1, np.int32)
    rows = np.full((extent // 8, 8), -1, np.int32)
    places = np.full((extent, depth), -1, np.int32)
    compile_source(source, optimize="-O0").launch("write_down", (1,), (1,), (lanes, rows, places))
    return lanes, rows, places


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_element_has_a_place_of_its_own(case):
    element, extent, _ = case
    _, rows, places = written(*case)
    np.testing.assert_array_equal(np.sort(places.ravel()), np.arange(places.size) * element)
    np.testing.assert_array_equal(np.sort(rows.ravel()), np.arange(extent))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lanes_read_their_rows_and_steps(case):
    lanes, rows, places = written(*case)
    lane = np.arange(32)
    for octet, quarter in np.ndindex(lanes.shape[:2]):
        expected = places[rows[octet, lane // 4], 4 * quarter + lane % 4]
        np.testing.assert_array_equal(lanes[octet, quarter], expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lanes_that_are_served_together_hit_different_banks(case):
    element, *_ = case
    lanes = written(*case)[0]
    together = lanes.reshape(-1, SPAN // element) % SPAN // element
    np.testing.assert_array_equal(np.sort(together), np.broadcast_to(np.arange(SPAN // element), together.shape))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_are_exchanged_as_the_copy_engine_does(case):
    """Sixteen bytes at a time, by the number of their line among eight."""
    element, _, along = case
    places = written(*case)[2]
    at = places if along else places.T
    line = np.arange(len(at))[:, None]
    chunk = np.arange(at.shape[1])[None] * element // 16 % 8
    np.testing.assert_array_equal(at % SPAN // 16, chunk ^ line % 8)
