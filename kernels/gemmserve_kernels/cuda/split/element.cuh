// One pair of neighbouring elements along k: scaled, cut into float16 planes, and what that loses.
#pragma once

#include "params.cuh"
#include "../common/raster.cuh"
#include "../common/types.cuh"

constexpr bool COMPLEX = GEMM_COMPLEX;
constexpr bool PLANAR = GEMM_PLANAR;
constexpr bool LOW = GEMM_LOW;      // whether there is a second plane for what the first one leaves
constexpr bool GAUSS = GEMM_GAUSS;  // three real products a complex one
constexpr int VALUES = GAUSS ? 3 : COMPLEX ? 2 : 1;
constexpr int PLANES = VALUES * (LOW ? 2 : 1);
constexpr int PARTS = COMPLEX ? 2 : 1;
constexpr int WIDTH = COMPLEX ? 2 : 4;  // elements of a 16-byte piece
constexpr int TOP = GAUSS ? 13 : 14;    // the largest magnitude of a vector lies in [2^TOP, 2^(TOP + 1))
constexpr int THREADS = GEMM_THREADS;
constexpr int CLUSTER = GEMM_CLUSTER;
constexpr int WARPS = THREADS / 32;

// A residual counts as lost where it exceeds this part of the element: what rounding takes anyway.
constexpr float KEPT = LOW ? 1.0f / (1 << 21) : 1.0f / (1 << 10);
// The part of a vector's 1-norm that may be lost.
constexpr float LARGEST = 3.4028234663852886e38f;
constexpr float TOLERANCE = LOW ? 1.0f / (1ll << 33) : 1.0f / (1 << 22);

GEMM_DEVICE unsigned bits_of(float x) {
#if defined(GEMM_SHIM)
    return __builtin_bit_cast(unsigned, x);
#else
    return __float_as_uint(x);
#endif
}
GEMM_DEVICE float float_of(unsigned x) {
#if defined(GEMM_SHIM)
    return __builtin_bit_cast(float, x);
#else
    return __uint_as_float(x);
#endif
}
GEMM_DEVICE unsigned larger(unsigned x, unsigned y) { return x > y ? x : y; }

constexpr unsigned INFINITE = 0x7f800000u;

// Magnitude as bits: in this order of unsigned numbers NaN is above infinity, which is above everything finite.
GEMM_DEVICE unsigned magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

// floor(log2(x)) of a finite positive number, subnormals included.
GEMM_DEVICE int exponent_of(unsigned bits) {
    return bits >> 23 ? static_cast<int>(bits >> 23) - 127 : -118 - __clz(static_cast<int>(bits));
}

// The exponent that undoes the scaling of a vector whose largest magnitude is `bits`.
GEMM_DEVICE int undo_exponent(unsigned bits) { return bits == 0 || bits >= INFINITE ? 0 : exponent_of(bits) - TOP; }

// 2^shift as two factors, since it may lie outside of a float's range: both products are exact where the result is
// normal. Both are 0 for a vector with infinities; its planes are of no use, and it is flagged.
struct Scaling {
    float first, second;
};

GEMM_DEVICE float power_of_two(int exponent) { return float_of(static_cast<unsigned>(exponent + 127) << 23); }

GEMM_DEVICE Scaling scaling_of(int shift) {
    const int half = shift >> 1;
    return {power_of_two(half), power_of_two(shift - half)};
}

GEMM_DEVICE Scaling scaling_for(unsigned largest) {
    if (largest >= INFINITE) return {0.0f, 0.0f};
    return scaling_of(-undo_exponent(largest));
}

GEMM_DEVICE float scaled(float x, const Scaling& by) { return x * by.first * by.second; }

GEMM_DEVICE Scaling conjugated(const Scaling& by, int conjugate) {
    return {conjugate ? -by.first : by.first, by.second};
}

// Two floats as neighbouring float16, the first in the lower half.
GEMM_DEVICE unsigned pack(float x, float y) {
#if defined(GEMM_CUDA)
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
#else
    return static_cast<unsigned>(float_to_half(x).bits) | static_cast<unsigned>(float_to_half(y).bits) << 16;
#endif
}
GEMM_DEVICE float unpack(unsigned both, int which) {
    return half_to_float(Half{static_cast<unsigned short>(which ? both >> 16 : both & 0xffffu)});
}

// What a vector loses, its 1-norm, and the bits of all its elements: of the real and of the imaginary parts.
struct Tally {
    float lost[PARTS];
    float norm[PARTS];
    unsigned any[PARTS];

    GEMM_DEVICE void add(const Tally& other) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            lost[p] += other.lost[p];
            norm[p] += other.norm[p];
            any[p] |= other.any[p];
        }
    }

    // Over the lanes of a warp that differ in the bits below `lanes`.
    template <int LANES>
    GEMM_DEVICE void reduce() {
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                lost[p] += __shfl_xor_sync(0xffffffffu, lost[p], step);
                norm[p] += __shfl_xor_sync(0xffffffffu, norm[p], step);
                any[p] |= __shfl_xor_sync(0xffffffffu, any[p], step);
            }
        }
    }

    // Whether the planes will not do: too much is lost, something is not finite (and so is the norm), or all that there
    // is has vanished beside the other part.
    GEMM_DEVICE bool too_much() const {
        bool flag = false;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const bool vanished = norm[p] == 0.0f && any[p] << 1 != 0;
            flag = flag || vanished || !(lost[p] <= TOLERANCE * norm[p]) || !(norm[p] <= LARGEST);
        }
        return flag;
    }
};

// Two neighbours along k, scaled and conjugated, as float16: out[plane] takes both. The tally counts each `weight` times.
template <bool SIDE_B>
GEMM_DEVICE void cut_pair(
    const float (&x)[2], const float (&y)[2], const float (&weight)[2], unsigned (&out)[PLANES], Tally& tally) {
    float value[VALUES][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        value[0][i] = x[i];
        if constexpr (GAUSS) {
            value[1][i] = SIDE_B ? y[i] - x[i] : y[i];
            value[2][i] = x[i] + y[i];
            const float size = weight[i] * (fabsf(x[i]) + fabsf(y[i]));
            tally.norm[0] += size;
            tally.norm[1] += size;
        } else if constexpr (COMPLEX) {
            value[1][i] = y[i];
        }
    }
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
        const int part = v < PARTS ? v : PARTS - 1;
        const unsigned high = pack(value[v][0], value[v][1]);
        float rest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) rest[i] = value[v][i] - unpack(high, i);
        if constexpr (LOW) {
            const unsigned low = pack(rest[0], rest[1]);
#pragma unroll
            for (int i = 0; i < 2; ++i) rest[i] -= unpack(low, i);
            out[GAUSS ? 2 * v : v] = high;
            out[GAUSS ? 2 * v + 1 : VALUES + v] = low;
        } else {
            out[v] = high;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float size = fabsf(value[v][i]);
            tally.lost[part] += weight[i] * fmaxf(multiply_add(-KEPT, size, fabsf(rest[i])), 0.0f);
            if constexpr (!GAUSS) tally.norm[part] += weight[i] * size;
        }
    }
}

// The same for elements as they are stored, `by` for the real and `by_im` for the imaginary parts; `magnitude` becomes
// that of the scaled ones.
template <bool SIDE_B>
GEMM_DEVICE void convert_pair(
    const float (&re)[2], const float (&im)[2], const Scaling& by, const Scaling& by_im, unsigned (&out)[PLANES],
    Tally& tally, float (&magnitude)[2]) {
    float x[2], y[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        x[i] = scaled(re[i], by);
        magnitude[i] = fabsf(x[i]);
        tally.any[0] |= bits_of(re[i]);
        if constexpr (COMPLEX) {
            y[i] = scaled(im[i], by_im);
            magnitude[i] = fmaxf(magnitude[i], fabsf(y[i]));
            tally.any[1] |= bits_of(im[i]);
        }
    }
    cut_pair<SIDE_B>(x, y, {1.0f, 1.0f}, out, tally);
}

// Four floats as they are read at once: two complex or four real elements.
struct alignas(16) Piece {
    float at[4];
};

// The largest magnitude of element `e` of a piece; NaN counts as nothing here (it shows in the norm).
GEMM_DEVICE float piece_magnitude(const Piece& piece, int e) {
    if constexpr (COMPLEX) return fmaxf(fabsf(piece.at[2 * e]), fabsf(piece.at[2 * e + 1]));
    return fabsf(piece.at[e]);
}

// Where an operand's elements are.
struct Source {
    const float* re;
    const float* im;

    GEMM_DEVICE Source(const MatrixParams& matrix, Long offset) {
        constexpr int FLOATS = COMPLEX && !PLANAR ? 2 : 1;
        re = static_cast<const float*>(matrix.re) + offset * FLOATS;
        im = static_cast<const float*>(matrix.im) + offset * FLOATS;
    }

    // WIDTH elements from `offset` on, `stride` apart, of which `count` exist; the others are 0. VECTOR: the host found
    // them next to each other and aligned.
    template <bool VECTOR>
    GEMM_DEVICE Piece load(Long offset, Long stride, Long count) const {
        Piece piece = {};
        if constexpr (VECTOR) {
            if (count >= WIDTH) {
                if constexpr (COMPLEX && PLANAR) {
                    const auto x = *reinterpret_cast<const Vector<float, 2>*>(re + offset);
                    const auto y = *reinterpret_cast<const Vector<float, 2>*>(im + offset);
                    return {{x.at[0], y.at[0], x.at[1], y.at[1]}};
                } else {
                    const auto x = *reinterpret_cast<const Vector<float, 4>*>(re + (COMPLEX ? 2 : 1) * offset);
                    return {{x.at[0], x.at[1], x.at[2], x.at[3]}};
                }
            }
        }
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            if (e >= count) break;
            const Long at = offset + e * stride;
            if constexpr (!COMPLEX) {
                piece.at[e] = re[at];
            } else if constexpr (PLANAR) {
                piece.at[2 * e] = re[at];
                piece.at[2 * e + 1] = im[at];
            } else {
                const auto x = *reinterpret_cast<const Complex<float>*>(re + 2 * at);
                piece.at[2 * e] = x.re;
                piece.at[2 * e + 1] = x.im;
            }
        }
        return piece;
    }
};

// Whether pieces can go to shared memory without passing through registers.
#if defined(GEMM_CUDA)
template <bool VECTOR>
constexpr bool ASYNC = VECTOR && !(COMPLEX && PLANAR);
// `bytes` of 16; the rest becomes 0.
GEMM_DEVICE void copy_async(Piece* to, const float* from, int bytes) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}
GEMM_DEVICE void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
GEMM_DEVICE void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#else
template <bool VECTOR>
constexpr bool ASYNC = false;
GEMM_DEVICE void copy_async(Piece*, const float*, int) {}
GEMM_DEVICE void commit_async() {}
template <int PENDING>
GEMM_DEVICE void wait_async() {}
#endif

// WIDTH elements into shared memory, some time before the wait that covers it.
template <bool VECTOR>
GEMM_DEVICE void fetch(Piece* to, const Source& source, Long offset, Long stride, Long count) {
    if constexpr (ASYNC<VECTOR>) {
        const int exist = count >= WIDTH ? WIDTH : count > 0 ? static_cast<int>(count) : 0;
        copy_async(to, exist ? source.re + (COMPLEX ? 2 : 1) * offset : source.re, exist * (16 / WIDTH));
    } else {
        *to = source.load<VECTOR>(offset, stride, count);
    }
}

// Raises a maximum in memory that only ever rises: the atomic is needed only where the value seen is too small.
GEMM_DEVICE void raise(unsigned* place, unsigned bits) {
#if defined(GEMM_SHIM)
    atomicMax(place, bits);  // its race checker would report the read
#else
    if (bits > *static_cast<volatile unsigned*>(place)) atomicMax(place, bits);
#endif
}
