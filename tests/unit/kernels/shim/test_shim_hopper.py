"""The CPU shim's matrix instruction of Hopper: operands in shared memory laid out as in PTX ISA 9.7.15.5.1.2.

Shared memory is filled here element by element from the canonical layouts, swizzled, for descriptors written by hand.
"""

from __future__ import annotations

import numpy as np
import pytest
from simt_shim import compile_source

SOURCE = r"""
template <int ACROSS_A, int ACROSS_B>
__device__ void multiply(const uint4* image, unsigned long long left, unsigned long long right, float* out) {
    GEMM_DYNAMIC_SHARED(memory);
    const unsigned address = (simt::hopper::shared_address(memory) + 1023) & ~1023u;
    uint4* const at = static_cast<uint4*>(simt::hopper::shared_pointer(address, 16));
    for (int i = threadIdx.x; i < 2048; i += 128) at[i] = image[i];
    __syncthreads();
    float d[32];
    for (int e = 0; e < 32; ++e) d[e] = 0;
    using Instruction = simt::hopper::Instruction<64>;
    Instruction::multiply<1, ACROSS_A, ACROSS_B, false>(d, left + address / 16, right + address / 16, 0);
    simt::hopper::wgmma_commit();
    simt::hopper::wgmma_wait<0>();
    for (int e = 0; e < 32; ++e) out[threadIdx.x * 32 + e] = d[e];
}
extern "C" __global__ void along(const uint4* i, unsigned long long a, unsigned long long b, float* d) {
    multiply<0, 0>(i, a, b, d);
}
extern "C" __global__ void across_a(const uint4* i, unsigned long long a, unsigned long long b, float* d) {
    multiply<1, 0>(i, a, b, d);
}
extern "C" __global__ void across_b(const uint4* i, unsigned long long a, unsigned long long b, float* d) {
    multiply<0, 1>(i, a, b, d);
}
extern "C" __global__ void held(const uint4* image, const unsigned* left, unsigned long long right, float* out) {
    GEMM_DYNAMIC_SHARED(memory);
    const unsigned address = (simt::hopper::shared_address(memory) + 1023) & ~1023u;
    uint4* const at = static_cast<uint4*>(simt::hopper::shared_pointer(address, 16));
    for (int i = threadIdx.x; i < 2048; i += 128) at[i] = image[i];
    __syncthreads();
    float d[32];
    unsigned a[4];
    for (int e = 0; e < 32; ++e) d[e] = 1;
    for (int i = 0; i < 4; ++i) a[i] = left[threadIdx.x * 4 + i];
    simt::hopper::multiply_held<-1>(d, a, right + address / 16, 1);
    simt::hopper::wgmma_commit();
    simt::hopper::wgmma_wait<0>();
    for (int e = 0; e < 32; ++e) out[threadIdx.x * 32 + e] = d[e];
}
"""
MODES = {128: 1, 64: 2, 32: 3}
RIGHT = 16384
"""Bytes from the left operand to the right one."""


@pytest.fixture(scope="module")
def module():
    return compile_source(SOURCE, optimize="-O0")


def swizzle(byte, span):
    """Swizzle<B, 4, 3> on bytes, 16 2^B of them the span."""
    bits = {128: 3, 64: 2, 32: 1}[span]
    return byte ^ ((byte >> 3) & (((1 << bits) - 1) << 4))


def fill(memory, first, matrix, span, leading, stride, *, across):
    """`matrix`, (m or n, k), at byte `first`, strides in bytes; its descriptor."""
    pieces = span // 16
    for i, k in np.ndindex(*matrix.shape):
        if across:  # ((T, w, m), (8, k)) : ((1, T, LBO), (w T, SBO)), T = 8
            offset = 2 * (i % 8 + 8 * (i // 8 % pieces)) + i // (8 * pieces) * leading
            offset += 2 * 8 * pieces * (k % 8) + k // 8 * stride
        else:  # ((8, m), (T, 2)) : ((w T, SBO), (1, T))
            offset = 2 * 8 * pieces * (i % 8) + i // 8 * stride + 2 * k
        memory[swizzle(first + offset, span) // 2] = matrix[i, k]
    return first >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | MODES[span] << 62


def product(module, name, memory, left, right):
    """The 64 x 64 result, put together from the accumulators of 128 threads."""
    out = np.zeros((128, 32), np.float32)
    left = left if isinstance(left, np.ndarray) else np.uint64(left)
    module.launch(name, (1,), (128,), [memory, left, np.uint64(right), out], shared=40 * 1024)
    result = np.zeros((64, 64), np.float32)
    for thread, e in np.ndindex(128, 32):
        row = thread // 32 * 16 + thread % 32 // 4 + e // 2 % 2 * 8
        result[row, e // 4 * 8 + thread % 4 * 2 + e % 2] = out[thread, e]
    return result


@pytest.mark.parametrize("name", ["along", "across_a", "across_b"])
@pytest.mark.parametrize(
    ("span", "leading", "stride"),
    [(128, 4096, 1024), (128, 8192, 2048), (64, 512, 4096), (64, 4096, 512), (32, 512, 2048), (32, 2048, 256)],
)
def test_operands_lie_as_the_tables_say(module, name, span, leading, stride):
    rng = np.random.default_rng(span + leading)
    left, right = (rng.integers(-8, 9, (64, 16)).astype(np.float16) for _ in range(2))
    memory = np.full(RIGHT, np.nan, np.float16)
    descriptors = []
    for first, matrix, across in ((0, left, name == "across_a"), (RIGHT, right, name == "across_b")):
        # Along k groups of eight rows follow each other; the leading offset is not used.
        offsets = (leading, stride) if across else (16, 8 * span)
        descriptors.append(fill(memory, first, matrix, span, *offsets, across=across))
    found = product(module, name, memory, *descriptors)
    np.testing.assert_array_equal(found, left.astype(np.float32) @ right.T.astype(np.float32))


def test_the_left_operand_may_lie_in_registers(module):
    """PTX ISA 9.7.15.5.1.1, matrix A of m64k16: a0, a1 | a2, a3 | a4, a5 | a6, a7 in four registers of a thread."""
    rng = np.random.default_rng(1)
    left, right = (rng.integers(-8, 9, (64, 16)).astype(np.float16) for _ in range(2))
    memory = np.full(RIGHT, np.nan, np.float16)
    descriptor = fill(memory, RIGHT, right, 128, 16, 1024, across=False)
    registers = np.zeros((128, 4, 2), np.float16)
    for thread, i in np.ndindex(128, 8):
        row = 16 * (thread // 32) + thread % 32 // 4 + (8 if i in {2, 3, 6, 7} else 0)
        registers[thread, i // 2, i % 2] = left[row, thread % 4 * 2 + i % 2 + (8 if i >= 4 else 0)]
    found = product(module, "held", memory, registers.view(np.uint32), descriptor)
    np.testing.assert_array_equal(found, 1 - left.astype(np.float32) @ right.T.astype(np.float32))
