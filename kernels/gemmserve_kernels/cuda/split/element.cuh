// A run of neighbouring elements along k: scaled, cut into float16 planes, and what that loses.
#pragma once

#include "params.cuh"
#include "../common/dependent.cuh"
#include "../common/bits.cuh"
#include "../common/raster.cuh"
#include "../common/types.cuh"

constexpr bool COMPLEX = GEMM_COMPLEX;
constexpr bool PLANAR = GEMM_PLANAR;
constexpr bool LOW = GEMM_LOW;      // whether there is a second plane for what the first one leaves
constexpr bool GAUSS = GEMM_GAUSS;  // three real products a complex one
constexpr int VALUES = GAUSS ? 3 : COMPLEX ? 2 : 1;
constexpr int PLANES = VALUES * (LOW ? 2 : 1);
constexpr int PARTS = COMPLEX ? 2 : 1;
constexpr int TOP = GAUSS ? 13 : 14;  // the largest magnitude of a vector lies in [2^TOP, 2^(TOP + 1))
constexpr int THREADS = GEMM_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int RUN = 8;  // steps of k that a thread converts at once: 16 bytes of a plane
constexpr unsigned ALL_LANES = 0xffffffffu;

// A residual counts as lost where it exceeds this part of the element: what rounding takes anyway.
constexpr float KEPT = LOW ? 1.0f / (1 << 21) : 1.0f / (1 << 10);
// Scaled magnitudes from here on lose nothing. Planes keep x to within 2^-22 |x| (one plane: 2^-11) but for float16's
// subnormal numbers, where they keep it to within 2^-25: less than KEPT |x|, from here on.
constexpr float SAFE = LOW ? 1.0f / (1 << 4) : 1.0f / (1 << 15);
constexpr float LARGEST = 3.4028234663852886e38f;
// The part of a vector's 1-norm that may be lost.
constexpr float TOLERANCE = LOW ? 1.0f / (1ll << 33) : 1.0f / (1 << 22);

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

// 2^shift as two factors, since it may lie above a float's range; the second one is nearly always 1. The first is 0 for
// a vector with infinities: its planes are of no use, and it is flagged.
struct Scaling {
    float first, second;
};

GEMM_DEVICE Scaling scaling_of(int shift) {
    const int first = shift < 126 ? shift : 126;
    return {power_of_two(first), power_of_two(shift - first)};
}

GEMM_DEVICE Scaling scaling_for(unsigned largest) {
    const unsigned biased = largest >> 23;
    if (biased - 32 < 255 - 32) return {float_of((2 * 127 + TOP - biased) << 23), 1.0f};  // nearly always
    if (largest >= INFINITE) return {0.0f, 1.0f};
    return scaling_of(-undo_exponent(largest));
}

GEMM_DEVICE float scaled(float x, const Scaling& by) { return x * by.first * by.second; }

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

// Of the real or of the imaginary parts of a vector: what is lost, and the 1-norm.
struct Part {
    float lost, norm;

    GEMM_DEVICE void add(const Part& other) {
        lost += other.lost;
        norm += other.norm;
    }

    // Whether the planes will not do: too much is lost, something is not finite (and so is the norm), or all that is
    // `present` has vanished beside the other part.
    GEMM_DEVICE bool too_much(bool present) const {
        return (norm == 0.0f && present) || !(lost <= TOLERANCE * norm) || !(norm <= LARGEST);
    }
};

struct Tally {
    Part part[PARTS];
};

// Sums over LANES neighbouring lanes: even ones get that of the real, odd ones that of the imaginary parts.
template <int LANES>
GEMM_DEVICE float sum_of_lanes(float first, float second, int lane) {
    float mine = first;
    if constexpr (PARTS == 2) {
        const bool odd = lane & 1;
        mine = odd ? second : first;
        mine += __shfl_xor_sync(ALL_LANES, odd ? first : second, 1);
    } else {
        mine += __shfl_xor_sync(ALL_LANES, mine, 1);
    }
#pragma unroll
    for (int step = 2; step < LANES; step *= 2) mine += __shfl_xor_sync(ALL_LANES, mine, step);
    return mine;
}

template <int LANES>
GEMM_DEVICE Part sum_of_lanes(const Tally& tally, int lane) {
    const Part &first = tally.part[0], &second = tally.part[PARTS - 1];
    Part sum;
    sum.lost = 0.0f;
    if (__any_sync(ALL_LANES, first.lost + second.lost != 0.0f)) {
        sum.lost = sum_of_lanes<LANES>(first.lost, second.lost, lane);
    }
    sum.norm = sum_of_lanes<LANES>(first.norm, second.norm, lane);
    return sum;
}

// Two neighbours along k, scaled and conjugated, as float16: out[plane] takes both. The tally counts each `weight`
// times. What is lost is looked at where `look` says so.
template <bool SIDE_B>
GEMM_DEVICE void cut_pair(
    const float (&x)[2], const float (&y)[2], const float (&weight)[2], bool look, unsigned (&out)[PLANES],
    Tally& tally) {
    float value[VALUES][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        value[0][i] = x[i];
        if constexpr (GAUSS) {
            value[1][i] = SIDE_B ? y[i] - x[i] : y[i];
            value[2][i] = x[i] + y[i];
            const float size = weight[i] * (fabsf(x[i]) + fabsf(y[i]));
            tally.part[0].norm += size;
            tally.part[1].norm += size;
        } else if constexpr (COMPLEX) {
            value[1][i] = y[i];
        }
    }
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
        Part& part = tally.part[v < PARTS ? v : PARTS - 1];
        const unsigned high = pack(value[v][0], value[v][1]);
        unsigned low = 0;
        out[GAUSS && LOW ? 2 * v : v] = high;
        if constexpr (LOW) {
            low = pack(value[v][0] - unpack(high, 0), value[v][1] - unpack(high, 1));
            out[GAUSS ? 2 * v + 1 : VALUES + v] = low;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float size = fabsf(value[v][i]);
            if (look) {
                const float rest = value[v][i] - unpack(high, i) - unpack(low, i);
                part.lost += weight[i] * fmaxf(multiply_add(-KEPT, size, fabsf(rest)), 0.0f);
            }
            if constexpr (!GAUSS) part.norm += weight[i] * size;
        }
    }
}

// The largest magnitudes at RUN steps of k, of scaled elements and of the elements themselves.
struct Peaks {
    float relative[RUN], absolute[RUN];
};

// RUN steps of a vector as they are stored; words[plane] takes them scaled and cut. All lanes of a warp come here. Whether
// any of them may have lost something or vanished: else only the norm is of interest, for what is not finite.
template <bool SIDE_B>
GEMM_DEVICE bool convert_run(
    float (&re)[RUN], float (&im)[RUN], const Scaling& by, bool conjugate, Peaks& peaks,
    Vector<unsigned, RUN / 2> (&words)[PLANES], Tally& tally) {
    if (by.first != 0.0f) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            peaks.absolute[i] = fmaxf(peaks.absolute[i], fabsf(re[i]));
            if constexpr (COMPLEX) peaks.absolute[i] = fmaxf(peaks.absolute[i], fabsf(im[i]));
        }
    }
    const float first_im = conjugate ? -by.first : by.first;
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
        re[i] *= by.first;
        if constexpr (COMPLEX) im[i] *= first_im;
    }
    if (by.second != 1.0f) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            re[i] *= by.second;
            if constexpr (COMPLEX) im[i] *= by.second;
        }
    }
    float smallest = LARGEST;
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
        peaks.relative[i] = fmaxf(peaks.relative[i], fabsf(re[i]));
        smallest = fminf(smallest, fabsf(re[i]));
        if constexpr (COMPLEX) {
            peaks.relative[i] = fmaxf(peaks.relative[i], fabsf(im[i]));
            smallest = fminf(smallest, fabsf(im[i]));
        }
        if constexpr (GAUSS) {
            smallest = fminf(smallest, fabsf(re[i] + im[i]));
            if constexpr (SIDE_B) smallest = fminf(smallest, fabsf(im[i] - re[i]));
        }
    }
    const bool look = __any_sync(ALL_LANES, smallest < SAFE);
#pragma unroll
    for (int pair = 0; pair < RUN / 2; ++pair) {
        const int i = 2 * pair;
        unsigned out[PLANES];
        cut_pair<SIDE_B>({re[i], re[i + 1]}, {im[i], im[i + 1]}, {1.0f, 1.0f}, look, out, tally);
#pragma unroll
        for (int p = 0; p < PLANES; ++p) words[p].at[pair] = out[p];
    }
    return look;
}

// Raises maxima in memory, which only ever rise, of COUNT neighbouring words of which `length` exist. All lanes of a warp
// come here. LOOK first where many have done so before: atomics are then seldom needed.
template <int COUNT>
GEMM_DEVICE void raise(unsigned* place, const float* values, int length, bool look, int lane) {
    unsigned seen[COUNT / 32] = {};
#if !defined(GEMM_SHIM)  // its race checker would report the read
    if (look) {
#pragma unroll
        for (int i = 0; i < COUNT / 32; ++i) {
            if (i * 32 + lane < length) seen[i] = static_cast<volatile unsigned*>(place)[i * 32 + lane];
        }
    }
#endif
#pragma unroll
    for (int i = 0; i < COUNT / 32; ++i) {
        if (i * 32 + lane >= length) continue;
        const unsigned bits = bits_of(values[i * 32 + lane]);
        if (bits > seen[i]) atomicMax(place + i * 32 + lane, bits);
    }
}

// The maxima that the first LANES lanes have of successive runs, at steps of k from `k` on, to memory; all lanes begin
// again. `scratch` in shared memory is the warp's own.
template <int LANES>
GEMM_DEVICE void raise(
    const SplitOperand& operand, int matrix, int k, Peaks& peaks, float* scratch, bool look, int lane) {
    const int length = static_cast<int>(operand.k) - k;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        float(&mine)[RUN] = which == 0 ? peaks.relative : peaks.absolute;
        if (lane < LANES) {
#pragma unroll
            for (int i = 0; i < RUN; ++i) scratch[lane * RUN + i] = mine[i];
        }
        __syncwarp();
        raise<LANES * RUN>((which == 0 ? operand.relative : operand.absolute) + matrix * operand.k + k, scratch, length, look, lane);
        __syncwarp();
    }
    peaks = {};
}

// 16 bytes by one instruction: the compiler makes four of some copies of structures.
GEMM_DEVICE void store_words(Half* to, const Vector<unsigned, 4>& words) {
#if defined(GEMM_CUDA)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.at[0]), "r"(words.at[1]),
                 "r"(words.at[2]), "r"(words.at[3])
                 : "memory");
#else
    *reinterpret_cast<Vector<unsigned, 4>*>(to) = words;
#endif
}

// RUN steps of k, cut: the planes lie `plane` elements apart.
GEMM_DEVICE void store_run(Half* to, Long plane, const Vector<unsigned, RUN / 2> (&words)[PLANES]) {
#pragma unroll
    for (int p = 0; p < PLANES; ++p) {
        store_words(to, words[p]);
        to += plane;
    }
}
