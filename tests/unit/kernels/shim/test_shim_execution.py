"""The CPU shim runs kernels: indices, arguments, shared memory, orders, fibers."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from simt_shim import FORWARD, ORDERS, REVERSE, LaunchError, Order, compile_source, kernel_names

SOURCE = r"""
struct Parameters { double scale; float* out; int count; };

extern "C" __global__ void indices(int* out) {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int size = blockDim.x * blockDim.y * blockDim.z;
    out[block * size + thread] = block * 1000 + thread;
}

extern "C" __global__ void __launch_bounds__(64, 2) by_structure(const __grid_constant__ Parameters parameters) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i < parameters.count) parameters.out[i] = float(parameters.scale * i);
}

extern "C" __global__ void plain(float* out, int i, double d, long long l, unsigned char c) {
    out[0] = i; out[1] = d; out[2] = l; out[3] = c;
}

// The order in which threads arrive at a counter.
extern "C" __global__ void arrivals(unsigned* counter, unsigned* order) {
    order[atomicAdd(counter, 1u)] = blockIdx.x * blockDim.x + threadIdx.x;
}

extern "C" __global__ void turned(const float* in, float* out) {
    __shared__ float tile[32][33];
    tile[threadIdx.y][threadIdx.x] = in[threadIdx.y * 32 + threadIdx.x];
    __syncthreads();
    out[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

template <int SIZE>
__device__ float* template_shared() {
    __shared__ float values[SIZE];
    return values;
}

// What a block finds before it writes, then traces for the next block to find.
extern "C" __global__ void poison(unsigned* out) {
    GEMM_DYNAMIC_SHARED(dynamic);
    __shared__ unsigned fixed[4];
    unsigned* const from_template = reinterpret_cast<unsigned*>(template_shared<4>());
    unsigned* const words = reinterpret_cast<unsigned*>(dynamic);
    out[blockIdx.x * 3] = words[7];
    out[blockIdx.x * 3 + 1] = fixed[3];
    out[blockIdx.x * 3 + 2] = from_template[3];
    words[7] = fixed[3] = from_template[3] = 1;
}

extern "C" __global__ void votes(int* out) {
    const int some = __syncthreads_or(threadIdx.x == 3), every = __syncthreads_and(threadIdx.x < 40);
    out[threadIdx.x] = __syncthreads_count(threadIdx.x % 4 == 0) * 100 + some * 10 + every;
}

extern "C" __global__ void __launch_bounds__((4 + 4) * 8) deep(float* out) {
    float local[4096];  // 16 KiB of stack a thread
    for (int i = 0; i < 4096; ++i) local[i] = float(i + threadIdx.x);
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < 4096; i += 512) sum += local[i];
    out[threadIdx.x] = sum;
}
// extern "C" __global__ void commented_out(int* out) {}
"""


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "checked"])
def module(request):
    return compile_source(SOURCE, checked=request.param)


def test_kernels_are_found_in_the_source():
    assert kernel_names(SOURCE) == (
        "indices", "by_structure", "plain", "arrivals", "turned", "poison", "votes", "deep",
    )  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_each_thread_has_its_indices(module, order):
    grid, block = (3, 2, 2), (5, 3, 7)
    out = np.full(12 * 105, -1, np.int32)
    module.launch("indices", grid, block, [out], order=order)
    np.testing.assert_array_equal(out, (np.arange(12)[:, None] * 1000 + np.arange(105)).ravel())


def test_a_structure_goes_by_value_as_ctypes_or_numpy(module):
    class Parameters(ctypes.Structure):
        _fields_ = (("scale", ctypes.c_double), ("out", ctypes.c_void_p), ("count", ctypes.c_int))

    out = np.zeros(100, np.float32)
    module.launch("by_structure", (2,), (64,), [Parameters(0.5, out.ctypes.data, 100)], regions=[_region(out)])
    np.testing.assert_array_equal(out, np.arange(100, dtype=np.float32) / 2)

    dtype = np.dtype([("scale", "f8"), ("out", "u8"), ("count", "i4")], align=True)
    packed = np.array((2.0, out.ctypes.data, 100), dtype)[()]
    module.launch("by_structure", (2,), (64,), [packed], regions=[_region(out)])
    np.testing.assert_array_equal(out, np.arange(100, dtype=np.float32) * 2)


def _region(array):
    from simt_shim import Region

    return Region(array.ctypes.data, array.nbytes, "out")


def test_plain_arguments(module):
    out = np.zeros(4, np.float32)
    module.launch("plain", (1,), (1,), [out, -3, 0.25, np.int64(1 << 20), np.uint8(200)])
    assert out.tolist() == [-3, 0.25, 1 << 20, 200]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([None, 1, 1.0, np.int64(1)], "takes 5 arguments, not 4"),
        ([None, 1, 1.0, 1, np.uint8(1)], "argument 3 of the kernel has 8 bytes, not 4"),
    ],
)
def test_arguments_that_disagree_with_the_kernel(module, args, message):
    with pytest.raises(LaunchError, match=message):
        module.launch("plain", (1,), (1,), args)


def test_a_launch_has_limits(module):
    out = np.zeros(1, np.int32)
    with pytest.raises(LaunchError, match="more than 1024 threads"):
        module.launch("indices", (1,), (1025,), [out])
    with pytest.raises(LaunchError, match="positive sizes"):
        module.launch("indices", (0,), (1,), [out])
    with pytest.raises(LaunchError, match="no kernel 'missing'"):
        module.launch("missing", (1,), (1,), [out])
    with pytest.raises(TypeError, match="an argument of type str"):
        module.launch("indices", (1,), (1,), ["out"])


def _arrivals(module, order):
    counter, arrived = np.zeros(1, np.uint32), np.zeros(4 * 96, np.uint32)
    module.launch("arrivals", (4,), (96,), [counter, arrived], order=order)
    assert sorted(arrived) == list(range(4 * 96))
    return arrived.tolist()


def test_orders_differ_and_repeat(module):
    forward = _arrivals(module, FORWARD)
    assert forward == list(range(4 * 96))
    assert _arrivals(module, REVERSE) == forward[::-1]
    shuffled = [_arrivals(module, Order("shuffled", seed)) for seed in range(8)]
    assert len({tuple(order) for order in shuffled}) == 8
    assert _arrivals(module, Order("shuffled", 5)) == shuffled[5]
    assert len({order[0] for order in shuffled}) > 4  # blocks, warps and lanes all move


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_shared_memory_and_a_barrier(module, order):
    matrix = np.arange(1024, dtype=np.float32).reshape(32, 32)
    out = np.zeros_like(matrix)
    resumed = module.launch("turned", (1,), (32, 32), [matrix, out], order=order)
    np.testing.assert_array_equal(out, matrix.T)
    assert resumed == 2 * 1024  # each thread once before and once after the barrier


def test_shared_memory_is_poisoned_before_each_block():
    module = compile_source(SOURCE)  # a checked build refuses to read it
    out = np.zeros((3, 3), np.uint32)
    for order in (FORWARD, REVERSE):
        module.launch("poison", (3,), (1,), [out], shared=32, order=order)
        np.testing.assert_array_equal(out, 0xFFFFFFFF)


def test_barriers_that_vote(module):
    out = np.zeros(64, np.int32)
    module.launch("votes", (1,), (64,), [out])
    assert set(out.tolist()) == {1610}
    module.launch("votes", (1,), (40,), [out])
    assert set(out[:40].tolist()) == {1011}


def test_threads_keep_their_own_local_arrays(module):
    out = np.zeros(64, np.float32)
    module.launch("deep", (1,), (64,), [out])
    np.testing.assert_array_equal(out, sum(range(0, 4096, 512)) + 8 * np.arange(64))


def test_portable_fibers_give_the_same(module):
    portable = compile_source(SOURCE, checked=module.checked, ucontext=True)
    assert _arrivals(portable, Order("shuffled", 3)) == _arrivals(module, Order("shuffled", 3))
    out = np.zeros(64, np.int32)
    portable.launch("votes", (1,), (64,), [out])
    assert set(out.tolist()) == {1610}
