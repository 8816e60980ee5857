"""The CPU shim notices what is wrong with a kernel, says where, and is ready for the next launch."""

from __future__ import annotations

import faulthandler
import shutil
import signal

import numpy as np
import pytest
from simt_shim import (
    ORDERS,
    BarrierError,
    DataRace,
    GuardedBlock,
    MemoryFault,
    Region,
    ShimError,
    Trap,
    WarpError,
    compile_source,
)

# File and line come from addr2line; where binutils are not installed a message names the offset in the module.
LINES = shutil.which("addr2line") is not None
PLACE = r"(faults\.cu:\d+|module offset 0x[0-9a-f]+)"


def at(line):
    return f"faults.cu:{line}" if LINES else "module offset 0x"


SOURCE = r"""#line 1 "faults.cu"
#define ALL 0xffffffffffffffffull
extern "C" __global__ void fine(float* out) { out[threadIdx.x] = 1.0f; }

// ---- barriers
extern "C" __global__ void some_return(float* out, int n) {
    if (threadIdx.x >= n) return;
    __syncthreads();
    out[threadIdx.x] = 1.0f;
}
extern "C" __global__ void two_places(float* out, int n) {
    if (threadIdx.x < n) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
extern "C" __global__ void one_too_many(float* out, int n) {
    for (int i = 0; i < (threadIdx.x == n ? 3 : 2); ++i) __syncthreads();
}

// ---- warps
extern "C" __global__ void lane_elsewhere(int* out) {
    if (threadIdx.x == 3) __syncthreads();
    out[0] = __shfl_sync(ALL, 1, 0);
}
extern "C" __global__ void mask_without_self(int* out) { out[0] = __shfl_sync(1ull, 1, 0); }
extern "C" __global__ void two_masks(int* out) {
    __syncwarp(threadIdx.x < 16 ? 0xffffull : ALL);
    __syncthreads();
}

// ---- shared memory: neighbours' values, with or without the barrier between
template <bool BARRIER>
__device__ void exchange(float* out) {
    __shared__ float values[64];
    values[threadIdx.x] = float(threadIdx.x);
    if (BARRIER) __syncthreads();
    out[threadIdx.x] = values[63 - threadIdx.x];
}
extern "C" __global__ void with_barrier(float* out) { exchange<true>(out); }
extern "C" __global__ void without_barrier(float* out) { exchange<false>(out); }

// The second barrier of a loop: a fast thread overwrites what a slow one still reads.
extern "C" __global__ void overwritten(float* out, int both) {
    GEMM_DYNAMIC_SHARED(shared);
    float* const values = reinterpret_cast<float*>(shared);
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) {
        values[threadIdx.x] = float(i * 100 + threadIdx.x);
        __syncthreads();
        sum += values[(threadIdx.x + 33) % 64];
        if (both) __syncthreads();
    }
    out[threadIdx.x] = sum;
}

// Inside a warp __syncwarp orders memory, a shuffle does not.
extern "C" __global__ void warp_exchange(float* out, int ordered) {
    __shared__ float values[64];
    values[threadIdx.x] = 1.0f;
    if (ordered) __syncwarp();
    out[threadIdx.x] = __shfl_sync(ALL, 1.0f, 0) + values[threadIdx.x ^ 1];
}
extern "C" __global__ void unwritten(float* out) {
    __shared__ float values[64];
    if (threadIdx.x != 5) values[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}
extern "C" __global__ void shared_overrun(int index) {
    GEMM_DYNAMIC_SHARED(shared);
    shared[index] = 0;
}

// ---- global memory
extern "C" __global__ void store(float* out, long long index) { out[index] = 1.0f; }
extern "C" __global__ void load(float* out, long long index) { out[0] = out[index]; }
extern "C" __global__ void same_element(float* out) { out[threadIdx.x / 2] = 1.0f; }
extern "C" __global__ void blocks_collide(float* out) { out[0] = float(blockIdx.x); }
extern "C" __global__ void last_block(float* partial, unsigned* done, float* out, int careful) {
    partial[blockIdx.x] = float(blockIdx.x);
    __threadfence();
    if (!careful) {
        out[blockIdx.x] = partial[0];
    } else if (atomicAdd(done, 1u) == gridDim.x - 1) {
        float sum = 0.0f;
        for (unsigned i = 0; i < gridDim.x; ++i) sum += partial[i];
        out[0] = sum;
        *done = 0;
    }
}

// ---- traps
extern "C" __global__ void traps(int n) { if (threadIdx.x == n) __trap(); }
extern "C" __global__ void asserts(int n) { assert(int(threadIdx.x) < n); }
extern "C" __global__ void divides(int* out, int by) { out[0] = 100 / by; }
__device__ __noinline__ int dig(int depth) {
    volatile int pad[1024];
    pad[depth % 1024] = depth;
    return depth == 0 ? 0 : dig(depth - 1) + pad[depth % 1024];
}
extern "C" __global__ void spins(volatile int* flag) { while (*flag == 0) {} }
extern "C" __global__ void meets_for_ever(volatile int* flag) { while (*flag == 0) __syncthreads(); }
extern "C" __global__ void digs(int* out, int depth) { out[0] = dig(depth); }
"""


def line_of(fragment: str) -> int:
    """The first line that has the fragment, as #line counts."""
    return next(number for number, line in enumerate(SOURCE.splitlines()) if fragment in line)


@pytest.fixture(scope="module")
def fast():
    return compile_source(SOURCE)


@pytest.fixture(scope="module")
def checked():
    return compile_source(SOURCE, checked=True)


@pytest.fixture(params=["fast", "checked"])
def either(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def out():
    return np.zeros(64, np.float32)


def _still_works(module):
    out = np.zeros(64, np.float32)
    module.launch("fine", (1,), (64,), [out])
    assert out.sum() == 64


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_threads_that_return_before_a_barrier(either, out, order):
    with pytest.raises(BarrierError) as caught:
        either.launch("some_return", (1,), (64,), [out, 40], order=order)
    line = line_of("if (threadIdx.x >= n) return;") + 1
    waiting = f"40 of 64 threads wait at __syncthreads, faults.cu:{line}"
    assert waiting in str(caught.value)
    assert ", and 24 have returned, the first of them (40, 0, 0)" in str(caught.value)
    assert caught.value.thread == (0, 0, 0)
    either.launch("some_return", (1,), (64,), [out, 64], order=order)
    _still_works(either)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_threads_at_different_barriers(either, out, order):
    with pytest.raises(BarrierError) as caught:
        either.launch("two_places", (1,), (64,), [out, 10], order=order)
    line = line_of("if (threadIdx.x < n) {") + 1
    assert f"thread (10, 0, 0) waits at __syncthreads, faults.cu:{line + 2}" in str(caught.value)
    assert f"thread (0, 0, 0) waits at faults.cu:{line}" in str(caught.value)
    with pytest.raises(BarrierError, match=r"1 of 64 threads wait .* 63 have returned"):
        either.launch("one_too_many", (1,), (64,), [out, 10], order=order)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("lane_elsewhere", r"divergent __shfl_sync: .* for lane 3, which waits at __syncthreads"),
        ("mask_without_self", r"lane 1 calls it with mask 0x1, which does not name it"),
        ("two_masks", r"divergent __syncwarp: .* mask 0xffffffff for lane 0, which waits at __syncthreads"),
    ],
)
def test_lanes_that_do_not_come(either, kernel, message):
    with pytest.raises(WarpError, match=message):
        either.launch(kernel, (1,), (32,), [np.zeros(1, np.int32)])
    _still_works(either)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_missing_barrier_shows_as_poison(fast, out, order):
    reversed_ = np.arange(63, -1, -1, dtype=np.float32)
    fast.launch("with_barrier", (1,), (64,), [out], order=order)
    np.testing.assert_array_equal(out, reversed_)
    fast.launch("without_barrier", (1,), (64,), [out], order=order)
    assert np.isnan(out).any()


def test_a_missing_second_barrier_shows_as_wrong_values(fast, out):
    expected = np.zeros(64, np.float32)
    fast.launch("overwritten", (1,), (64,), [expected, 1], shared=256)
    for order in ORDERS:
        fast.launch("overwritten", (1,), (64,), [out, 1], shared=256, order=order)
        np.testing.assert_array_equal(out, expected)
        fast.launch("overwritten", (1,), (64,), [out, 0], shared=256, order=order)
        assert (out != expected).any()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_checked_build_reports_the_race_itself(checked, out, order):
    for kernel, args, shared in (
        ("with_barrier", [out], 0),
        ("overwritten", [out, 1], 256),
        ("warp_exchange", [out, 1], 0),
    ):
        checked.launch(kernel, (1,), (64,), args, shared=shared, order=order)
    with pytest.raises(ShimError, match=r"not written|data race in shared memory"):
        checked.launch("without_barrier", (1,), (64,), [out], order=order)
    with pytest.raises(DataRace, match=rf"the earlier access at {PLACE}") as caught:
        checked.launch("overwritten", (1,), (64,), [out, 0], shared=256, order=order)
    read = line_of("sum += values[(threadIdx.x + 33) % 64];")
    write = line_of("values[threadIdx.x] = float(i * 100 + threadIdx.x);")
    assert at(read) in str(caught.value)
    assert at(write) in str(caught.value)
    with pytest.raises(ShimError, match=r"not written|data race in shared memory"):
        checked.launch("warp_exchange", (1,), (64,), [out, 0], order=order)


def test_a_checked_build_refuses_to_read_what_was_never_written(checked, out):
    with pytest.raises(MemoryFault, match="the block has not written") as caught:
        checked.launch("unwritten", (1,), (64,), [out])
    assert caught.value.thread == (5, 0, 0)
    assert "of static shared memory" in str(caught.value)


@pytest.mark.parametrize("index", [256, -1])
def test_past_dynamic_shared_memory(either, index):
    either.launch("shared_overrun", (1,), (1,), [255], shared=256)
    with pytest.raises(MemoryFault, match="dynamic shared memory"):
        either.launch("shared_overrun", (1,), (1,), [index], shared=256)
    either.launch("shared_overrun", (1,), (1,), [255], shared=256)


@pytest.mark.parametrize(("kernel", "verb"), [("load", "read"), ("store", "write")])
def test_far_out_of_bounds(either, kernel, verb):
    block = GuardedBlock(4096)
    region = Region(block.address, block.nbytes, "buffer x")
    values = block.bytes().view(np.float32)
    either.launch(kernel, (1,), (1,), [values, np.int64(1023)])
    for index, where in ((1024, "0 bytes past the end of"), (1034, "40 bytes past the end of"), (-1, "4 bytes before")):
        with pytest.raises(MemoryFault) as caught:
            either.launch(kernel, (1,), (1,), [np.uint64(block.address), np.int64(index)], regions=[region])
        assert f"invalid {verb}" in str(caught.value)
        assert f"{where} buffer x (4096 bytes)" in str(caught.value)
        assert at(line_of(f"void {kernel}(")) in str(caught.value)
        assert caught.value.address == block.address + 4 * index
    _still_works(either)


def test_just_out_of_bounds(fast, checked):
    """An element past a buffer that does not fill its last page: poison and damage, or the check of every access."""
    block = GuardedBlock(40)
    region = Region(block.address, 40, "buffer x")
    address = np.uint64(block.address)
    fast.launch("load", (1,), (1,), [address, np.int64(10)])
    assert np.isnan(block.bytes().view(np.float32)[0])
    assert block.damage() is None
    fast.launch("store", (1,), (1,), [address, np.int64(10)])
    assert block.damage() == 40
    with pytest.raises(MemoryFault, match="0 bytes past the end of buffer x"):
        checked.launch("load", (1,), (1,), [address, np.int64(10)], regions=[region])


def test_races_in_global_memory(checked, out):
    with pytest.raises(DataRace, match=r"data race in global memory: this write and the write by thread \(0, 0, 0\) h"):
        checked.launch("same_element", (1,), (64,), [out])
    with pytest.raises(DataRace, match=r"this write and the write by thread \(0, 0, 0\) of another block"):
        checked.launch("blocks_collide", (2,), (1,), [out])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_last_block_may_read_what_others_published(checked, out, order):
    partial, done = np.zeros(5, np.float32), np.zeros(1, np.uint32)
    checked.launch("last_block", (5,), (1,), [partial, done, out, 1], order=order)
    assert out[0] == 10
    with pytest.raises(DataRace, match="another block"):
        checked.launch("last_block", (5,), (1,), [partial, done, out, 0], order=order)


def test_traps_and_assertions(either):
    either.launch("traps", (1,), (32,), [40])
    with pytest.raises(Trap, match=rf"__trap at {PLACE}; block \(0, 0, 0\), thread \(7, 0, 0\)"):
        either.launch("traps", (1,), (32,), [7])
    with pytest.raises(Trap, match=r"assertion failed: int\(threadIdx.x\) < n, at faults.cu:\d+.*thread \(20, 0, 0\)"):
        either.launch("asserts", (1,), (32,), [20])
    out = np.zeros(1, np.int32)
    with pytest.raises(Trap, match=rf"integer division by zero.*{at(line_of('void divides'))}"):
        either.launch("divides", (1,), (1,), [out, 0])
    _still_works(either)


@pytest.mark.parametrize("kernel", ["spins", "meets_for_ever"])
def test_a_loop_without_end(either, kernel):
    either.launch(kernel, (1,), (8,), [np.ones(1, np.int32)])
    with pytest.raises(Trap, match=r"not done after 0\.05 seconds"):
        either.launch(kernel, (1,), (8,), [np.zeros(1, np.int32)], seconds=0.05)
    _still_works(either)


def test_a_stack_overflow(either):
    out = np.zeros(1, np.int32)
    either.launch("digs", (1,), (1,), [out, 20])
    assert out[0] == 210
    with pytest.raises(MemoryFault, match="stack overflow: a thread has 252 KiB"):
        either.launch("digs", (1,), (1,), [out, 1000])
    _still_works(either)


def test_signal_handlers_are_put_back(fast):
    before = [signal.getsignal(number) for number in (signal.SIGSEGV, signal.SIGFPE)]
    was_enabled = faulthandler.is_enabled()
    with pytest.raises(MemoryFault):
        fast.launch("store", (1,), (1,), [None, np.int64(0)])
    assert [signal.getsignal(number) for number in (signal.SIGSEGV, signal.SIGFPE)] == before
    assert faulthandler.is_enabled() == was_enabled
