"""Shared memory of the fused kernel: where operands lie as they are, and that lanes meet in no bank.

The header itself says where: a kernel beside it writes it down. 128 bytes are served at once: to 8 lanes of 16 bytes.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from simt_shim import compile_source

from gemmserve_kernels.device import compiler

EXTENT = 64
SERVED_BYTES = 128
"""What is served at once: to 8 lanes of 16 bytes, to 16 of 8."""
STEPS = {
    (2, True): (0, 8, 16, 24, 32, 40, 48, 56),
    (2, False): (0, 1, 8, 9, 32, 33, 40, 41),
    (1, True): (0, 16, 32, 48),
    (1, False): (0, 1, 2, 3, 32, 33, 34, 35),
}
"""Steps of k, from a lane's first one on, that it reads with other lanes: by parts of a number, and along k or not."""
ways = pytest.mark.parametrize("along_k", [False, True], ids=["across k", "along k"])


parts = pytest.mark.parametrize("parts", [2, 1], ids=["complex", "real"])


@functools.cache
def written(along_k, parts):
    """[vector, k] -> byte; [thread] -> first vector, first of its steps."""
    header = compiler._flatten("fused/operand.cuh", set())
    source = f"""#define GEMM_PARTS {parts}
#define GEMM_BLOCK_M 64
#define GEMM_PROMOTE 32
#define GEMM_STAGES 2
{header}
using Side = ChunkOperand<{str(along_k).lower()}, 2, false>;
extern "C" __global__ void write_down(int* places, int* threads) {{
    for (int vector = 0; vector < {EXTENT}; ++vector)
        for (int k = 0; k < {EXTENT}; ++k) *places++ = number_at<{str(along_k).lower()}>(vector, k);
    for (int round = 0; round < Side::ROUNDS; ++round)
        for (int thread = 0; thread < 32 * Config::SIDE_WARPS; ++thread) {{
            const Side side(thread);
            *threads++ = side.first_vector + round * Side::NEXT;
            *threads++ = 16 * side.half + Side::STEPS_OF_LANE * side.t;
        }}
}}
"""
    places, threads = np.full((EXTENT, EXTENT), -1, np.int32), np.full((256, 2), -1, np.int32)
    compile_source(source, optimize="-O0").launch("write_down", (1,), (1,), (places, threads))
    return places, threads


def conflicts(bytes_, width=16):
    """Number of groups of lanes served at once that meet in a bank; `bytes_`: [..., lane] -> first of its `width`."""
    lanes = SERVED_BYTES // width
    together = np.sort(bytes_.reshape(-1, lanes) % SERVED_BYTES // width)
    return int((together != np.arange(lanes)).any(axis=1).sum())


@ways
@parts
def test_every_number_has_a_place_of_its_own(along_k, parts):
    places, _ = written(along_k, parts)
    np.testing.assert_array_equal(np.sort(places.ravel()), np.arange(EXTENT * EXTENT) * 4 * parts)


@ways
@parts
def test_neighbours_lie_together(along_k, parts):
    """As many as 16 bytes hold."""
    places, _ = written(along_k, parts)
    lines, count = places if along_k else places.T, 4 // parts
    for i in range(1, count):
        np.testing.assert_array_equal(lines[:, i::count], lines[:, ::count] + 4 * parts * i)
    assert (lines[:, ::count] % 16 == 0).all()


@ways
@parts
def test_lanes_of_a_producer_meet_in_no_bank(along_k, parts):
    places, threads = written(along_k, parts)
    vector, step = threads.T
    steps, width = STEPS[parts, along_k], 16 if parts == 2 or along_k else 8
    assert conflicts(np.stack([places[vector, step + further] for further in steps]), width) == 0
    along, across = (width // (4 * parts), 1) if along_k else (1, width // (4 * parts))
    read = {(v + i, s + f + j) for v, s in threads.tolist() for f in steps for i in range(across) for j in range(along)}
    assert len(read) == len(threads) * len(steps) * along * across == EXTENT * EXTENT  # all are read, once


@ways
@parts
def test_lanes_that_copy_lines_meet_in_no_bank(along_k, parts):
    places, _ = written(along_k, parts)
    lines = places if along_k else places.T
    at_once = np.ascontiguousarray(lines[:, :: 4 // parts])
    assert conflicts(at_once) == 0
    if not along_k:  # of 16 vectors each
        assert conflicts(np.moveaxis(at_once.reshape(EXTENT, 4, -1), 1, 0).copy()) == 0


@functools.cache
def of_a_task(along_k):
    """Places of a task's numbers: [vector, k] -> byte; [lane of a producer] -> first vector, first of its steps."""
    header = compiler._flatten("fused/cluster/planes.cuh", set())
    source = f"""#define GEMM_CLUSTER 2
#define GEMM_PROMOTE 32
#define GEMM_STAGES 3
{header}
using Side = TaskOperand<{str(along_k).lower()}, 2, false, false>;
extern "C" __global__ void write_down(int* places, int* threads) {{
    for (int vector = 0; vector < Config::TASK; ++vector)
        for (int k = 0; k < Config::CHUNK; ++k) *places++ = TaskPlaces<{str(along_k).lower()}>::at(vector, k);
    for (int lane = 0; lane < 32; ++lane) {{
        const Side side(lane);
        *threads++ = side.first_vector;
        *threads++ = 16 * side.half + 2 * side.t;
    }}
}}
"""
    places, threads = np.full((8, EXTENT), -1, np.int32), np.full((32, 2), -1, np.int32)
    compile_source(source, optimize="-O0").launch("write_down", (1,), (1,), (places, threads))
    return places, threads


@ways
def test_every_number_of_a_task_has_a_place_of_its_own(along_k):
    places, _ = of_a_task(along_k)
    np.testing.assert_array_equal(np.sort(places.ravel()), np.arange(8 * EXTENT) * 8)


@ways
def test_lanes_of_a_cluster_s_producer_meet_in_no_bank(along_k):
    places, threads = of_a_task(along_k)
    vector, step = threads.T
    steps = STEPS[2, along_k]
    assert conflicts(np.stack([places[vector, step + further] for further in steps])) == 0
    assert len({(v, s + f) for v, s in threads.tolist() for f in steps}) == 32 * 8  # all are read, once
    lines = places if along_k else places.T
    assert conflicts(np.ascontiguousarray(lines[:, ::2])) == 0  # as they are copied
