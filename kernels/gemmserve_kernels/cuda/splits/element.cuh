// A run of neighbouring elements along k: scaled, cut into planes, and what is counted of it (planes/verdict.py).
#pragma once

#include "params.cuh"
#include "../common/dependent.cuh"
#include "../common/numbers/bits.cuh"
#include "../common/judging/flag_bits.cuh"
#include "../common/raster.cuh"
#include "../common/numbers/types.cuh"
#include "../common/judging/verdict.cuh"

constexpr bool COMPLEX = GEMM_COMPLEX;
constexpr bool PLANAR = GEMM_PLANAR;
constexpr bool BFLOAT = GEMM_BFLOAT;  // bfloat16 in the place of float16
constexpr int DEPTH = GEMM_DEPTH;     // planes of a value, each for what those before it leave
constexpr bool GAUSS = GEMM_GAUSS;    // three real products a complex one
constexpr int VALUES = GAUSS ? 3 : COMPLEX ? 2 : 1;
constexpr int PLANES = VALUES * DEPTH;
constexpr int PARTS = COMPLEX ? 2 : 1;
constexpr int TOP = BFLOAT ? 30 : GAUSS ? 13 : 14;  // the largest magnitude of a vector lies in [2^TOP, 2^(TOP + 1))
constexpr int THREADS = GEMM_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int RUN = 8;  // steps of k that a thread converts at once: 16 bytes of a plane
constexpr unsigned ALL_LANES = 0xffffffffu;

// Scaled magnitudes from LARGE on count as large. From SAFE on they lose nothing: planes keep x to within 2^-22 |x| (one
// plane: 2^-11) but for float16's subnormal numbers, where they keep it to within 2^-25.
constexpr float LARGE = GAUSS ? 128.0f : 256.0f;
constexpr float SAFE = DEPTH > 1 ? 1.0f / (1 << 4) : 1.0f / (1 << 15);
constexpr float LOSES = DEPTH > 1 ? SAFE - 1.0f / (1 << 16) : SAFE - 1.0f / (1 << 25);  // others round to SAFE at least
constexpr int DEEPEST = 92;  // binades below a vector's largest magnitude down to which bfloat16 products are exact
constexpr int REACH = 64;    // binades below it, and the half of k's, within which elements are not far from it
constexpr float LEAST_NORMAL = 1.17549435e-38f;  // 2^-126
constexpr bool INFINITE_LAST = GEMM_INFINITE_LAST;  // infinities have a place in the planes

GEMM_DEVICE unsigned larger(unsigned x, unsigned y) { return x > y ? x : y; }

constexpr unsigned INFINITE = 0x7f800000u;

// Magnitude as bits: in this order of unsigned numbers NaN is above infinity, which is above everything finite.
GEMM_DEVICE unsigned magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

// The larger of two magnitudes, NaN where one is.
GEMM_DEVICE float larger_magnitude(float x, float y) {
#if defined(GEMM_LARGER)
    return larger(x, y);
#else
    return float_of(larger(bits_of(x), bits_of(y)));
#endif
}

// floor(log2(x)) of a finite positive number, subnormals included.
GEMM_DEVICE int exponent_of(unsigned bits) {
    return bits >> 23 ? static_cast<int>(bits >> 23) - 127 : -118 - __clz(static_cast<int>(bits));
}

// The exponent that undoes the scaling of a vector whose largest magnitude is `bits`.
GEMM_DEVICE int undo_exponent(unsigned bits) { return bits == 0 || bits >= INFINITE ? 0 : exponent_of(bits) - TOP; }

// 2^shift as two factors, since it may lie above a float's range; the second one is nearly always 1. The first is 0 for
// a vector with infinities or NaN. `tiny`: bits of the magnitude below which elements are too small for bfloat16's planes.
struct Scaling {
    float first, second;
    unsigned tiny;
};

GEMM_DEVICE Scaling scaling_of(int shift) {
    const int first = shift < 126 ? shift : 126;
    return {power_of_two(first), power_of_two(shift - first), 0};
}

GEMM_DEVICE Scaling scaling_for(unsigned largest) {
    constexpr unsigned LEAST = TOP > 32 ? TOP : 32;
    const unsigned biased = largest >> 23;
    Scaling by;
    if (biased - LEAST < 255 - LEAST) by = {float_of((2 * 127 + TOP - biased) << 23), 1.0f, 0};  // nearly always
    else if (largest >= INFINITE) return {0.0f, 1.0f, 0};
    else by = scaling_of(-undo_exponent(largest));
    if constexpr (BFLOAT) {
        const int deepest = exponent_of(largest | (largest == 0)) - DEEPEST;
        by.tiny = deepest >= -126 ? static_cast<unsigned>(deepest + 127) << 23 : deepest >= -149 ? 1u << (deepest + 149) : 0;
    }
    return by;
}

// Two floats as neighbouring float16, or bfloat16, the first in the lower half.
GEMM_DEVICE unsigned pack(float x, float y) {
#if defined(GEMM_CUDA)
    unsigned both;
    if constexpr (BFLOAT) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
#else
    if constexpr (BFLOAT) {
        const unsigned low = bits_of(x), high = bits_of(y);
        return (low + 0x7fffu + (low >> 16 & 1u)) >> 16 | ((high + 0x7fffu + (high >> 16 & 1u)) & 0xffff0000u);
    }
    return static_cast<unsigned>(float_to_half(x).bits) | static_cast<unsigned>(float_to_half(y).bits) << 16;
#endif
}
GEMM_DEVICE float unpack(unsigned both, int which) {
    if constexpr (BFLOAT) return float_of(which ? both & 0xffff0000u : both << 16);
    return half_to_float(Half{static_cast<unsigned short>(which ? both >> 16 : both & 0xffffu)});
}

// What is counted of a vector, as far as a thread has seen it: elements whose real (imaginary) part is not large, and parts
// that lose something. Of bfloat16 planes: those whose part is far from the largest, and parts that are too small for them.
constexpr int COUNTS = PARTS + 1, LOSSY = PARTS;

struct Tally {
    int count[COUNTS];
    unsigned packed[PARTS];  // two counts each, not yet added

    GEMM_DEVICE void unpack() {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
#if defined(GEMM_CUDA)
            const float first = half_to_float(Half{static_cast<unsigned short>(packed[p] & 0xffffu)});
            const float second = half_to_float(Half{static_cast<unsigned short>(packed[p] >> 16)});
            count[p] += static_cast<int>(first + second);
#else
            count[p] += static_cast<int>((packed[p] & 0xffffu) + (packed[p] >> 16));
#endif
            packed[p] = 0;
        }
    }
};

// The least scaled magnitude of an element of bfloat16 planes that is not far from the largest.
GEMM_DEVICE float nearest_far(Long k) {
    const int binades = 32 - __clz(static_cast<int>(k));  // log2(k), rounded up
    return power_of_two(TOP - REACH + (binades + 1) / 2);
}

// Counts those of two scaled magnitudes that are not large; `high` is both as float16.
GEMM_DEVICE void count_small(unsigned& packed, float x, float y, unsigned high) {
#if defined(GEMM_CUDA)
    constexpr unsigned LIMIT = GAUSS ? 0x58005800u : 0x5c005c00u;  // LARGE
    unsigned less;
    if constexpr (GAUSS) high = pack(x, y);
    asm("{ .reg .b32 size; abs.f16x2 size, %1; set.lt.f16x2.f16x2 %0, size, %2; }" : "=r"(less) : "r"(high), "r"(LIMIT));
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(packed) : "r"(less));
#else
    if constexpr (!GAUSS) x = unpack(high, 0), y = unpack(high, 1);
    packed += (fabsf(x) < LARGE ? 1u : 0u) + (fabsf(y) < LARGE ? 0x10000u : 0u);
#endif
}

// The smallest magnitudes of both halves so far.
struct Smallest {
#if defined(GEMM_CUDA)
    unsigned both = 0x7bff7bffu;
    GEMM_DEVICE void add(unsigned high) {
        asm("{ .reg .b32 size; abs.f16x2 size, %1; min.f16x2 %0, %0, size; }" : "+r"(both) : "r"(high));
    }
    GEMM_DEVICE bool may_lose() const {
        constexpr unsigned LIMIT = DEPTH > 1 ? 0x2c002c00u : 0x02000200u;  // SAFE
        unsigned less;
        asm("set.lt.f16x2.f16x2 %0, %1, %2;" : "=r"(less) : "r"(both), "r"(LIMIT));
        return less != 0;
    }
#else
    float least = 65504.0f;
    GEMM_DEVICE void add(unsigned high) { least = fminf(least, fminf(fabsf(unpack(high, 0)), fabsf(unpack(high, 1)))); }
    GEMM_DEVICE bool may_lose() const { return least < SAFE; }
#endif
};

// Sums over LANES neighbouring lanes: the first ones get those of the parts, in turns, and the one behind them that of what
// loses.
template <int LANES>
GEMM_DEVICE int sum_of_lanes(const Tally& tally, int lane) {
    int mine = tally.count[0];
    if constexpr (PARTS == 2) {
        const bool odd = lane & 1;
        mine = odd ? tally.count[1] : tally.count[0];
        mine += __shfl_xor_sync(ALL_LANES, odd ? tally.count[0] : tally.count[1], 1);
    } else {
        mine += __shfl_xor_sync(ALL_LANES, mine, 1);
    }
#pragma unroll
    for (int step = 2; step < LANES; step *= 2) mine += __shfl_xor_sync(ALL_LANES, mine, step);
    int lossy = tally.count[LOSSY];
    if (__any_sync(ALL_LANES, lossy != 0)) {
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) lossy += __shfl_xor_sync(ALL_LANES, lossy, step);
    }
    return lane % LANES == LOSSY ? lossy : mine;
}

GEMM_DEVICE void raise_word(int* word, int value) {
    if (value > 0) atomicMax(word, value);
}

// What float16 planes lack of a vector, or of several of a group the most of it; nothing of one that is all zero.
struct Deficit {
    int best, worst, lossy, present;

    GEMM_DEVICE bool is_doubtful(Long k) const {
        return present != 0 && 2ll * worst + (lossy + 1ll) / 2 + 2 > k - SPARE;
    }
    // `doubts`: how many of the vectors are doubtful.
    GEMM_DEVICE void raise_group(const SplitOperandParams& operand, int matrix, int row, int doubts) const {
        if (present == 0) return;
        int* const words = operand.deficits + 1 + (matrix * groups_of(operand.rows) + row / GROUP) * GROUP_WORDS;
        raise_word(words, best);
        raise_word(words + 1, worst);
        raise_word(words + 2, lossy);
        atomicOr(words + 3, present);
        if (doubts > 0) atomicAdd(operand.deficits, doubts);
    }
};

// `counts` as in Tally, `largest` magnitudes (bits) of a vector's parts; `padding`: how many of those that are not large were
// none of its elements.
GEMM_DEVICE Deficit deficit_of(const int (&counts)[COUNTS], const unsigned (&largest)[PARTS], int padding) {
    const unsigned most = larger(largest[0], largest[PARTS - 1]);
    if (most == 0) return {};
    Deficit found = {NEVER, 0, counts[LOSSY], 0};
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        int deficit = most >= INFINITE ? NEVER : counts[p] - padding;
        deficit = deficit < NEVER ? deficit : NEVER;
        found.best = deficit < found.best ? deficit : found.best;
        found.worst = deficit > found.worst ? deficit : found.worst;
        found.present |= largest[p] != 0 || most >= INFINITE ? 1 << p : 0;
    }
    return found;
}

// Writes down what has been counted of a vector, as in `deficit_of`.
GEMM_DEVICE void record(
    const SplitOperandParams& operand, int matrix, int row, const int (&counts)[COUNTS], const unsigned (&largest)[PARTS],
    int padding, int* status) {
    if constexpr (BFLOAT) {
        const unsigned most = larger(largest[0], largest[PARTS - 1]);
        const bool unfit = !INFINITE_LAST && most == INFINITE;  // products with NaN are NaN as they are
        const bool deep = unfit || counts[LOSSY] != 0;
        bool sparse = unfit;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            sparse |= most < INFINITE && largest[p] != 0 && 2ll * (counts[p] - padding) >= operand.k;
        }
        operand.flags[matrix * operand.rows + row] = (deep ? FLAG_DEEP : 0) | (sparse ? FLAG_SPARSE : 0);
        if (deep) atomicAdd(status, 1);
    } else {
        const Deficit found = deficit_of(counts, largest, padding);
        found.raise_group(operand, matrix, row, found.is_doubtful(operand.k) ? 1 : 0);
    }
}

// Two neighbours along k, scaled and conjugated, as planes: out[plane] takes both.
template <bool SIDE_B>
GEMM_DEVICE void cut_pair(
    const float (&x)[2], const float (&y)[2], unsigned (&out)[PLANES], Tally& tally, Smallest& smallest) {
    float value[VALUES][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        value[0][i] = x[i];
        if constexpr (GAUSS) {
            value[1][i] = SIDE_B ? y[i] - x[i] : y[i];
            value[2][i] = x[i] + y[i];
            if (SIDE_B && i == 1) smallest.add(pack(y[0], y[1]));  // counted, and no plane
        } else if constexpr (COMPLEX) {
            value[1][i] = y[i];
        }
    }
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
#pragma unroll
        for (int depth = 0; depth < DEPTH; ++depth) {
            const unsigned both = pack(value[v][0], value[v][1]);
            out[GAUSS ? v * DEPTH + depth : depth * VALUES + v] = both;
            if constexpr (!BFLOAT) {
                if (depth == 0) smallest.add(both);
                if (depth == 0 && v < PARTS) {
                    count_small(tally.packed[v], v == 0 ? x[0] : y[0], v == 0 ? x[1] : y[1], both);
                }
            }
            if (depth + 1 == DEPTH) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) value[v][i] -= unpack(both, i);
        }
    }
}

// A part of an element of a vector that holds infinities, as bfloat16: all of its products are infinite or NaN. Finite numbers
// are 1 with their sign, or 0. An infinity is that and, in its last plane, infinite: the only one that it is multiplied by
// is the other's first, which is 0 where the other number is and has its sign elsewhere; so products are what they
// should be, infinite or NaN. Not where the last planes are multiplied by others (nine products).
GEMM_DEVICE unsigned infinite_part(float x, bool minus, int depth) {
    const unsigned magnitude = magnitude_bits(x), sign = (bits_of(x) >> 31 ^ (minus ? 1u : 0u)) << 15;
    if (magnitude > INFINITE) return 0x7fc0u;
    if (depth + 1 == DEPTH && magnitude == INFINITE) return 0x7f80u | sign;
    return depth == 0 && magnitude != 0 ? 0x3f80u | sign : 0u;
}

GEMM_DEVICE void convert_infinite(
    const float (&re)[RUN], const float (&im)[RUN], bool conjugate, Vector<unsigned, RUN / 2> (&words)[PLANES]) {
#pragma unroll
    for (int p = 0; p < PLANES; ++p) {
        const bool of_im = COMPLEX && p % VALUES != 0;
        const float(&x)[RUN] = of_im ? im : re;
#pragma unroll
        for (int pair = 0; pair < RUN / 2; ++pair) {
            words[p].at[pair] = infinite_part(x[2 * pair], of_im && conjugate, p / VALUES) |
                                infinite_part(x[2 * pair + 1], of_im && conjugate, p / VALUES) << 16;
        }
    }
}

// What of a magnitude's bits, those of 0 excepted, is below `tiny`.
GEMM_DEVICE bool is_deep(float x, unsigned tiny) { return magnitude_bits(x) - 1u < tiny - 1u && tiny != 0; }

// A scaled number that is not 0: its first plane must not be, or its products with infinities would be NaN.
GEMM_DEVICE float kept_from_zero(float x, float stored) {
    return fabsf(x) < LEAST_NORMAL ? copysignf(LEAST_NORMAL, stored) : x;
}

// RUN steps of a vector as they are stored; words[plane] takes them scaled and cut. All lanes of a warp come here.
template <bool SIDE_B>
GEMM_DEVICE void convert_run(
    float (&re)[RUN], float (&im)[RUN], const Scaling& by, const SplitOperandParams& operand,
    Vector<unsigned, RUN / 2> (&words)[PLANES], Tally& tally) {
    const bool conjugate = operand.conjugate;
    if constexpr (BFLOAT && INFINITE_LAST) {
        if (by.first == 0.0f) {
            convert_infinite(re, im, conjugate, words);
            return;
        }
    }
    unsigned deep = 0, negative = 0;  // a bit each; those of im are RUN further
    if constexpr (BFLOAT) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            deep |= (is_deep(re[i], by.tiny) ? 1u : 0u) << i;
            if constexpr (COMPLEX) deep |= (is_deep(im[i], by.tiny) ? 1u : 0u) << (RUN + i);
        }
        if (deep != 0) {
            tally.count[LOSSY] += __popc(deep);
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                negative |= (bits_of(re[i]) >> 31) << i;
                if constexpr (COMPLEX) negative |= (bits_of(im[i]) >> 31 ^ (conjugate ? 1u : 0u)) << (RUN + i);
            }
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
    if constexpr (BFLOAT) {
        const float near = nearest_far(operand.k);
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            if (deep != 0) {
                if (deep >> i & 1) re[i] = kept_from_zero(re[i], negative >> i & 1 ? -1.0f : 1.0f);
                if (COMPLEX && (deep >> (RUN + i) & 1)) {
                    im[i] = kept_from_zero(im[i], negative >> (RUN + i) & 1 ? -1.0f : 1.0f);
                }
            }
            tally.count[0] += !(fabsf(re[i]) >= near);
            if constexpr (COMPLEX) tally.count[PARTS - 1] += !(fabsf(im[i]) >= near);
        }
    }
    Smallest smallest;
#pragma unroll
    for (int pair = 0; pair < RUN / 2; ++pair) {
        const int i = 2 * pair;
        unsigned out[PLANES];
        cut_pair<SIDE_B>({re[i], re[i + 1]}, {im[i], im[i + 1]}, out, tally, smallest);
#pragma unroll
        for (int p = 0; p < PLANES; ++p) words[p].at[pair] = out[p];
    }
    if constexpr (!BFLOAT) {
        if (__any_sync(ALL_LANES, smallest.may_lose())) {
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                tally.count[LOSSY] += re[i] != 0.0f && fabsf(re[i]) < LOSES;
                if constexpr (COMPLEX) tally.count[LOSSY] += im[i] != 0.0f && fabsf(im[i]) < LOSES;
            }
        }
    }
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
