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
SERVED = 8
"""Lanes that are served at once."""
ways = pytest.mark.parametrize("along_k", [False, True], ids=["across k", "along k"])


@functools.cache
def written(along_k):
    """[vector, k] -> byte; [thread] -> first vector, first of its steps."""
    header = compiler._flatten("fused/operand.cuh", set())
    source = f"""#define GEMM_BLOCK_M 64
#define GEMM_PROMOTE 32
#define GEMM_STAGES 2
{header}
using Side = ChunkOperand<{str(along_k).lower()}, 2, false>;
extern "C" __global__ void write_down(int* places, int* threads) {{
    for (int vector = 0; vector < {EXTENT}; ++vector)
        for (int k = 0; k < {EXTENT}; ++k) *places++ = number_at<{str(along_k).lower()}>(vector, k);
    for (int thread = 0; thread < 32 * Config::SIDE_WARPS; ++thread) {{
        const Side side(thread);
        *threads++ = side.first_vector;
        *threads++ = 16 * side.half + 2 * side.t;
    }}
}}
"""
    places, threads = np.full((EXTENT, EXTENT), -1, np.int32), np.full((256, 2), -1, np.int32)
    compile_source(source, optimize="-O0").launch("write_down", (1,), (1,), (places, threads))
    return places, threads


def conflicts(bytes_):
    """Number of groups of lanes served at once that meet in a bank; `bytes_`: [..., lane] -> first of its 16 bytes."""
    together = np.sort(bytes_.reshape(-1, SERVED) % 128 // 16)
    return int((together != np.arange(SERVED)).any(axis=1).sum())


@ways
def test_every_number_has_a_place_of_its_own(along_k):
    places, _ = written(along_k)
    np.testing.assert_array_equal(np.sort(places.ravel()), np.arange(EXTENT * EXTENT) * 8)


@ways
def test_two_neighbours_lie_together(along_k):
    places, _ = written(along_k)
    first, second = (places[:, 0::2], places[:, 1::2]) if along_k else (places[0::2], places[1::2])
    np.testing.assert_array_equal(second, first + 8)
    assert (first % 16 == 0).all()


@ways
def test_lanes_of_a_producer_meet_in_no_bank(along_k):
    places, threads = written(along_k)
    vector, step = threads.T
    steps = (0, 8, 16, 24, 32, 40, 48, 56) if along_k else (0, 1, 8, 9, 32, 33, 40, 41)
    assert conflicts(np.stack([places[vector, step + further] for further in steps])) == 0
    assert len({(v, s + f) for v, s in threads.tolist() for f in steps}) == 256 * 8  # all are read, once


@ways
def test_lanes_that_copy_lines_meet_in_no_bank(along_k):
    places, _ = written(along_k)
    lines = places if along_k else places.T
    assert conflicts(np.ascontiguousarray(lines[:, ::2])) == 0


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
    steps = (0, 8, 16, 24, 32, 40, 48, 56) if along_k else (0, 1, 8, 9, 32, 33, 40, 41)
    assert conflicts(np.stack([places[vector, step + further] for further in steps])) == 0
    assert len({(v, s + f) for v, s in threads.tolist() for f in steps}) == 32 * 8  # all are read, once
    lines = places if along_k else places.T
    assert conflicts(np.ascontiguousarray(lines[:, ::2])) == 0  # as they are copied
