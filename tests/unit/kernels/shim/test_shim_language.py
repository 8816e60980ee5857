"""The CPU shim's device language: warp operations for both widths, atomics, float16, mathematics, vector types."""

from __future__ import annotations

import re

import numpy as np
import pytest
from simt_shim import ORDERS, CompileError, compile_source

WARP_SOURCE = r"""
#define ALL 0xffffffffffffffffull

template <class T>
__device__ void all_shuffles(const T* in, T* out, int width) {
    const int i = threadIdx.x, n = blockDim.x;
    const T value = in[i];
    out[i] = __shfl_sync(ALL, value, 5, width);
    out[n + i] = __shfl_up_sync(ALL, value, 3, width);
    out[2 * n + i] = __shfl_down_sync(ALL, value, 3, width);
    out[3 * n + i] = __shfl_xor_sync(ALL, value, 6, width);
    out[4 * n + i] = __shfl(value, i + 1, width);
    out[5 * n + i] = __shfl_up(value, 1, width);
    out[6 * n + i] = __shfl_down(value, 1, width);
    out[7 * n + i] = __shfl_xor(value, width / 2, width);
}
extern "C" __global__ void shuffles_float(const float* in, float* out, int width) { all_shuffles(in, out, width); }
extern "C" __global__ void shuffles_double(const double* in, double* out, int width) { all_shuffles(in, out, width); }

extern "C" __global__ void sums(const float* in, float* out) {
    float value = in[threadIdx.x];
    for (int offset = warpSize / 2; offset > 0; offset >>= 1) value += __shfl_xor_sync(ALL, value, offset);
    out[threadIdx.x] = value;
}

extern "C" __global__ void votes(unsigned long long* out) {
    const int i = threadIdx.x, lane = i % warpSize;
    out[i * 5] = __ballot_sync(ALL, lane % 3 == 0);
    out[i * 5 + 1] = __any_sync(ALL, lane == 7) * 10 + __any_sync(ALL, lane > 100);
    out[i * 5 + 2] = __all_sync(ALL, lane < 100) * 10 + __all_sync(ALL, lane != 9);
    out[i * 5 + 3] = __ballot(lane == 1);
    out[i * 5 + 4] = __any(i == 0) * 10 + __all(i >= 0);
}

// Halves of a warp at different operations, and lanes that have left.
extern "C" __global__ void groups(int* out) {
    const int lane = threadIdx.x;
    if (lane >= 24) return;
    int value = lane;
    if (lane < 8) {
        value = __shfl_sync(0xffull, value, 0);
        value += __shfl_xor_sync(0xffull, value, 1);
    } else {
        value = __shfl_sync(0xffff00ull, value, 8);
    }
    __syncwarp();
    out[lane] = __shfl_down_sync(ALL, value, 8);
}

extern "C" __global__ void lane_that_is_not_there(unsigned* out) {
    out[threadIdx.x] = __shfl_sync(ALL, threadIdx.x, 20);
}
"""


@pytest.fixture(scope="module", params=[32, 64])
def warp(request):
    return compile_source(WARP_SOURCE, warp_size=request.param)


def _shuffled(values, width):
    """What the CUDA programming guide says of the eight shuffles, for one array of whole warps."""
    lanes = np.arange(values.size)
    base = lanes // width * width
    own = lanes % width

    def pick(source, inside):
        return values[np.where(inside, source, lanes)]

    everywhere = np.ones(values.size, bool)
    return np.concatenate(
        [
            pick(base + 5 % width, everywhere),
            pick(lanes - 3, own >= 3),
            pick(lanes + 3, own + 3 < width),
            pick(lanes ^ 6, (lanes ^ 6) < base + width),
            pick(base + (lanes + 1) % width, everywhere),
            pick(lanes - 1, own >= 1),
            pick(lanes + 1, own + 1 < width),
            pick(lanes ^ (width // 2), (lanes ^ (width // 2)) < base + width),
        ]
    )


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shuffles(warp, dtype, order):
    values = np.random.default_rng(0).standard_normal(128).astype(dtype)
    for width in (warp.warp_size, 16, 8, 2):
        out = np.zeros(8 * 128, dtype)
        name = {4: "shuffles_float", 8: "shuffles_double"}[values.itemsize]
        warp.launch(name, (1,), (128,), [values, out, width], order=order)
        np.testing.assert_array_equal(out, _shuffled(values, width))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_butterfly_sums_each_warp(warp, order):
    values = np.random.default_rng(1).integers(-50, 50, 192).astype(np.float32)
    out = np.zeros(192, np.float32)
    warp.launch("sums", (1,), (192,), [values, out], order=order)
    size = warp.warp_size
    np.testing.assert_array_equal(out, values.reshape(-1, size).sum(axis=1).repeat(size))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_votes(warp, order):
    size = warp.warp_size
    out = np.zeros((128, 5), np.uint64)
    warp.launch("votes", (1,), (128,), [out], order=order)
    thirds = sum(1 << lane for lane in range(0, size, 3))
    assert {tuple(int(x) for x in row[:4]) for row in out} == {(thirds, 10, 10, 2)}
    assert set(out[:size, 4].tolist()) == {11}
    assert set(out[size:, 4].tolist()) == {1}


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_groups_of_a_warp_meet_apart_and_together(warp, order):
    out = np.full(24, -1, np.int32)
    warp.launch("groups", (1,), (warp.warp_size,), [out], order=order)
    np.testing.assert_array_equal(out[:16], [8] * 16)  # lanes 8 to 23 all hold lane 8's number
    # Lanes 16 to 23 ask lanes 24 to 31, which have returned: all bits set.
    np.testing.assert_array_equal(out[16:], [-1] * 8)


def test_a_lane_beyond_the_block_gives_poison(warp):
    out = np.zeros(8, np.uint32)
    warp.launch("lane_that_is_not_there", (1,), (8,), [out])
    np.testing.assert_array_equal(out, 0xFFFFFFFF)


def test_a_wide_warp_wants_wide_masks():
    source = 'extern "C" __global__ void k(int* o) { o[0] = __shfl_sync(0xffffffffu, 1, 0); }'
    compile_source(source, warp_size=32)
    with pytest.raises(CompileError, match="masks of a 64-wide warp are 64-bit integers"):
        compile_source(source, warp_size=64)


MATRIX_SOURCE = r"""
// v_mfma_f32_32x32x2f32 on CDNA as its 64 lanes see it: D (32 x 32) += A (32 x 2) B (2 x 32), 16 elements of D a lane.
// A collective is how such an instruction is emulated.
struct Fragment { float a, b, d[16]; };

void multiply(simt::Group& group) {
    for (int lane = 0; lane < 64; ++lane)
        for (int i = 0; i < 16; ++i) {
            const int row = 8 * (i / 4) + 4 * (lane / 32) + i % 4, column = lane % 32;
            for (int k = 0; k < 2; ++k)
                static_cast<Fragment*>(group.operand[lane])->d[i] +=
                    static_cast<Fragment*>(group.operand[32 * k + row])->a *
                    static_cast<Fragment*>(group.operand[32 * k + column])->b;
        }
}

extern "C" __global__ void product(const float* a, const float* b, float* d) {
    Fragment mine = {};
    const int lane = threadIdx.x, half = lane / 32, index = lane % 32;
    for (int k = 0; k < 8; k += 2) {
        mine.a = a[index * 8 + k + half];
        mine.b = b[(k + half) * 32 + index];
        simt::collective("mfma", simt::all_lanes, &mine, &multiply, {__FILE__, __LINE__});
    }
    for (int i = 0; i < 16; ++i) d[(8 * (i / 4) + 4 * half + i % 4) * 32 + index] = mine.d[i];
}
"""


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_a_matrix_instruction_can_be_emulated(checked):
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((32, 8)).astype(np.float32), rng.standard_normal((8, 32)).astype(np.float32)
    d = np.zeros((32, 32), np.float32)
    module = compile_source(MATRIX_SOURCE, warp_size=64, checked=checked)
    for order in ORDERS:
        module.launch("product", (1,), (64,), [a, b, d], order=order)
        np.testing.assert_allclose(d, a @ b, atol=1e-5)


ATOMIC_SOURCE = r"""
#define ATOMIC(name, type, call) \
    extern "C" __global__ void name(type* p, const type* v, type* old) { \
        const int i = blockIdx.x * blockDim.x + threadIdx.x; old[i] = call; }
ATOMIC(add_int, int, atomicAdd(p, v[i]))
ATOMIC(add_unsigned, unsigned, atomicAdd(p, v[i]))
ATOMIC(add_ulonglong, unsigned long long, atomicAdd(p, v[i]))
ATOMIC(add_float, float, atomicAdd(p, v[i]))
ATOMIC(add_double, double, atomicAdd(p, v[i]))
ATOMIC(max_int, int, atomicMax(p, v[i]))
ATOMIC(min_int, int, atomicMin(p, v[i]))
ATOMIC(max_ulonglong, unsigned long long, atomicMax(p, v[i]))
ATOMIC(min_unsigned, unsigned, atomicMin(p, v[i]))
ATOMIC(exchange_float, float, atomicExch(p, v[i]))
ATOMIC(cas_int, int, atomicCAS(p, i, i + 1))
ATOMIC(inc_unsigned, unsigned, atomicInc(p, 4u))
ATOMIC(or_unsigned, unsigned, atomicOr(p, v[i]))
"""

UFUNC = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}
TYPES = {"int": np.int32, "unsigned": np.uint32, "ulonglong": np.uint64, "float": np.float32, "double": np.float64}


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "checked"])
def atomics(request):
    names = re.findall(r"^ATOMIC\((\w+)", ATOMIC_SOURCE, re.MULTILINE)  # a macro hides them from kernel_names
    return compile_source(ATOMIC_SOURCE, kernels=names, checked=request.param)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    "kernel",
    ["add_int", "add_unsigned", "add_ulonglong", "add_float", "add_double", "max_int", "min_int", "max_ulonglong",
     "min_unsigned", "or_unsigned"],
)  # fmt: skip
def test_atomics_lose_nothing(atomics, kernel, order):
    operation, _, name = kernel.partition("_")
    values = np.random.default_rng(2).integers(0, 1000, 4 * 64).astype(TYPES[name])
    cell, old = np.full(1, 500, values.dtype), np.zeros_like(values)
    atomics.launch(kernel, (4,), (64,), [cell, values, old], order=order)
    assert cell[0] == UFUNC[operation].reduce(values, initial=values.dtype.type(500))
    assert 500 in old  # what the first thread found


def test_exchange_compare_and_increment(atomics):
    values = np.arange(1, 65, dtype=np.float32)
    cell, old = np.zeros(1, np.float32), np.zeros(64, np.float32)
    atomics.launch("exchange_float", (1,), (64,), [cell, values, old])
    assert sorted([*old, cell[0]]) == list(range(65))
    cell, old, zero = np.zeros(1, np.int32), np.zeros(64, np.int32), np.zeros(64, np.int32)
    atomics.launch("cas_int", (1,), (64,), [cell, zero, old])
    assert cell[0] == 64
    np.testing.assert_array_equal(old, np.arange(64))
    cell, old = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    atomics.launch("inc_unsigned", (1,), (64,), [cell, old.copy(), old])
    np.testing.assert_array_equal(old, np.arange(64) % 5)


def test_atomics_have_only_the_types_of_the_hardware():
    with pytest.raises(CompileError, match="atomicAdd has no form for this type"):
        compile_source('extern "C" __global__ void k(long long* p) { atomicAdd(p, 1); }')


HALF_SOURCE = r"""
extern "C" __global__ void widen(const __half* in, float* out, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = __half2float(in[i]);
}
extern "C" __global__ void narrow(const float* in, __half* out, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = __float2half_rn(in[i]);
}
extern "C" __global__ void arithmetic(const __half* a, const __half* b, __half* out, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        out[i] = a[i] + b[i];
        out[n + i] = a[i] - b[i];
        out[2 * n + i] = a[i] * b[i];
        out[3 * n + i] = a[i] / b[i];
        out[4 * n + i] = -a[i];
    }
}
"""


@pytest.fixture(scope="module", params=["", "SIMT_SOFT_HALF"], ids=["compiler", "software"])
def halves(request):
    return compile_source(HALF_SOURCE, defines=[request.param] if request.param else [])


def test_every_float16_widens_exactly(halves):
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    out = np.zeros(1 << 16, np.float32)
    halves.launch("widen", (1,), (32,), [patterns, out, 1 << 16])
    np.testing.assert_array_equal(out, patterns.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(out), np.signbit(patterns))


def test_float16_rounds_to_nearest_even(halves):
    exact = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    middles = np.unique(exact).astype(np.float64)
    middles = ((middles[1:] + middles[:-1]) / 2).astype(np.float32)  # exact in float32: ties
    bits = np.random.default_rng(3).integers(0, 1 << 32, 50000, dtype=np.uint32).view(np.float32)
    edges = np.array([65519.996, 65520, 65536, -65520, 2**-24, 2**-25, np.nextafter(np.float32(2**-25), 1), 1e-40],
                     np.float32)  # fmt: skip
    values = np.concatenate([exact, middles, np.nextafter(middles, np.inf, dtype=np.float32), bits, edges])
    values = np.concatenate([values, np.float32([np.inf, -np.inf, np.nan])])
    out = np.zeros(values.size, np.float16)
    halves.launch("narrow", (1,), (32,), [values, out, values.size])
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(out, values.astype(np.float16))


def test_float16_arithmetic_rounds_once(halves):
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(1000).astype(np.float16) for _ in range(2))
    out = np.zeros((5, 1000), np.float16)
    halves.launch("arithmetic", (1,), (32,), [a, b, out, 1000])
    np.testing.assert_array_equal(out, [a + b, a - b, a * b, a / b, -a])


MATH_SOURCE = r"""
static_assert(sizeof(float2) == 8 && alignof(float2) == 8, "");
static_assert(sizeof(float3) == 12 && alignof(float3) == 4, "");
static_assert(sizeof(float4) == 16 && alignof(float4) == 16, "");
static_assert(sizeof(double2) == 16 && alignof(double2) == 16, "");
static_assert(sizeof(uint4) == 16 && alignof(int2) == 8 && alignof(ushort4) == 8, "");
static_assert(sizeof(half2) == 4 && alignof(half2) == 4, "");

extern "C" __global__ void mathematics(const float* x, float* out, double* wide) {
    out[0] = fmaf(x[0], x[1], x[2]);
    out[1] = hypotf(x[0], x[1]);
    out[2] = fminf(x[0], __int_as_float(0x7fc00000));
    out[3] = max(x[0], x[1]);
    out[4] = rsqrtf(x[1]);
    out[5] = copysign(x[0], -1.0f) + fabsf(-x[1]) + sqrtf(x[2]);
    out[6] = isnan(x[0] - x[0]) * 4 + isinf(x[0] / 0.0f) * 2 + signbit(-0.0f);
    out[7] = __uint_as_float(__float_as_uint(x[2])) + __popc(0xf0f0u) + __clz(1) + __ffs(8) + __brev(1u << 30);
    wide[0] = fma(double(x[0]), 1e-20, 1.0);
    wide[1] = hypot(3e200, 4e200);
    wide[2] = __longlong_as_double(__double_as_longlong(0.1)) + __umulhi(1u << 31, 6u) + min(2ll, 3ll);
    wide[3] = __hiloint2double(__double2hiint(-0.3), __double2loint(-0.3));
    const float2 pair = make_float2(x[0], x[1]);
    const float4 four = make_float4(pair.y, pair.x, x[2], 0.0f);
    const dim3 one(7);
    wide[4] = four.x + 10 * four.y + one.x + one.y + one.z + make_uint4(1u, 2u, 3u, 4u).w;
    assert(clock64() == 0 && warpSize == 32);
}
"""


def test_mathematics_and_vector_types():
    x = np.array([1.5, 2.25, 3.0], np.float32)
    out, wide = np.zeros(8, np.float32), np.zeros(5)
    compile_source(MATH_SOURCE).launch("mathematics", (1,), (1,), [x, out, wide])
    expected = [1.5 * 2.25 + 3, np.hypot(x[0], x[1]), 1.5, 2.25, 1 / 1.5, -1.5 + 2.25 + 3**0.5, 3, 3 + 8 + 31 + 4 + 2]
    np.testing.assert_allclose(out, expected, rtol=2e-7)
    np.testing.assert_allclose(wide, [1, 5e200, 0.1 + 3 + 2, -0.3, 2.25 + 15 + 9 + 4], rtol=1e-15)
