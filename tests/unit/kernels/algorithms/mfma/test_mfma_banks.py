"""Shared memory of the matrix units' kernels: no two of the 8 pieces that are accessed together in the same banks.

Pieces have 16 bytes. The header itself says where they lie: a kernel beside it writes its offsets down. Which lanes are
served together: 8 neighbours where they write, and either 8 neighbours or 4 with the 4 that are 16 lanes and 4 away
where they read (as AMD's Composable Kernel assumes of ds_read_b128).
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from simt_shim import compile_source

from gemmserve_kernels.device import compiler

BANKS = 8  # of 16 bytes: 32 of 4
LANES = np.arange(64)
TOGETHER = [np.arange(first, first + 8) for first in range(0, 64, 8)]
SPREAD = [
    half + np.concatenate([np.arange(4) + first, np.arange(4) + second])
    for half in (0, 32)
    for first, second in ((0, 20), (4, 16), (8, 28), (12, 24))
]
TILES = {
    "float": [(64, 8, 32), (128, 8, 32), (128, 16, 32), (64, 32, 32)],
    "double": [(64, 8, 16), (128, 8, 16), (32, 8, 16), (64, 16, 16)],
    "Half": [(64, 32, 32), (128, 32, 32), (32, 32, 32), (64, 64, 32)],
}
"""By element: rows and steps of k of a tile, rows of an instruction on waves of 64 lanes."""
VECTOR = {"float": 4, "double": 2, "Half": 8}  # elements that are read at once
CASES = [(element, *tile) for element, tiles in TILES.items() for tile in tiles]


@functools.cache
def offsets(element, extent, depth):
    """[line, row] -> byte."""
    header = compiler._flatten("mfma/tile.cuh", set())
    source = f"""{header}
extern "C" __global__ void write_down(int* to) {{
    using Tile = PackedTile<{element}, {extent}, {depth}, 1>;
    to[0] = Tile::LINES;
    for (int line = 0; line < Tile::LINES; ++line)
        for (int row = 0; row < {extent}; ++row) to[1 + line * {extent} + row] = Tile::at(line, row);
}}
"""
    found = np.full(1 + extent * depth, -1, np.int32)
    compile_source(source, warp_size=64, optimize="-O0").launch("write_down", (1,), (1,), (found,))
    lines = int(found[0])
    return found[1 : 1 + lines * extent].reshape(lines, extent)


def conflicts(places, groups):
    """Accesses more than one of a bank, in the worst group."""
    worst = 0
    for group in groups:
        banks = places[group] // 16 % BANKS
        distinct = len(np.unique(places[group]))
        worst = max(worst, distinct - len(np.unique(banks)))
    return worst


@pytest.mark.parametrize(("element", "extent", "depth", "tile"), CASES)
def test_every_piece_has_a_place_of_its_own(element, extent, depth, tile):
    found = np.sort(offsets(element, extent, depth).ravel())
    np.testing.assert_array_equal(found, np.arange(found.size) * 16)


@pytest.mark.parametrize(("element", "extent", "depth", "tile"), CASES)
def test_fragments_are_read_without_conflicts(element, extent, depth, tile):
    found, groups = offsets(element, extent, depth), 64 // tile
    for step in range(len(found) // groups):
        for row in range(0, extent, tile):
            places = found[step * groups + LANES // tile, row + LANES % tile]
            assert conflicts(places, TOGETHER) == 0
            assert conflicts(places, SPREAD) == 0


@pytest.mark.parametrize(("extent", "depth"), [(64, 32), (128, 32), (32, 16)])
def test_waves_of_32_read_their_two_pieces_without_conflicts(extent, depth):
    """Both halves of the wave read the same 16 rows, of one line after the other."""
    found, lanes = offsets("Half", extent, depth), LANES[:32]
    for line in range(len(found)):
        for row in range(0, extent, 16):
            assert conflicts(found[line, row + lanes % 16], TOGETHER[:4]) == 0


@pytest.mark.parametrize(
    ("element", "extent", "depth", "apart"),
    [(*case[:3], apart) for case in CASES for apart in (1, 2, 4, 8) if apart <= min(VECTOR[case[0]], case[1] // 8)],
)
def test_what_lies_across_k_is_written_without_conflicts(element, extent, depth, apart):
    """Neighbouring threads write rows that far apart, in one line as long as it has rows."""
    found = offsets(element, extent, depth)
    line, row = np.divmod(LANES, extent // apart)
    line %= len(found)  # where there are fewer chunks than lanes: another group of lanes
    for first in range(apart):
        assert conflicts(found[line, row * apart + first], TOGETHER) == 0


@pytest.mark.parametrize(("element", "extent", "depth", "tile"), CASES)
def test_what_lies_along_k_is_written_without_conflicts(element, extent, depth, tile):
    """Neighbouring threads write the lines of a row."""
    found = offsets(element, extent, depth)
    row, line = np.divmod(LANES, len(found))
    for first in range(0, extent - int(row.max()), int(row.max()) + 1):
        assert conflicts(found[line, first + row], TOGETHER) == 0
