// A chunk of an operand: from where it lies to float16 planes in shared memory, through registers.
//
// A vector is a row of op(A) or a column of op(B). Its CHUNK steps of k take 128 bytes of a plane, swizzled as wgmma
// wants them; steps 16 s to 16 s + 15 are those of instruction s, in an order of their own, alike for both operands: unit
// t of the four of 8 bytes has steps 2t, 2t + 1, 2t + 8, 2t + 9, of real numbers 4t to 4t + 3: so 16 bytes of numbers are
// a lane's. Lanes that write one plane together meet in no bank.
#pragma once

#include "../common/judging/verdict.cuh"
#include "../common/numbers/bits.cuh"
#include "../common/raster.cuh"
#include "config.cuh"
#include "params.cuh"

typedef Select<Config::PARTS == 2, Complex<float>, float> Value;

GEMM_DEVICE float re_of(const Complex<float>& x) { return x.re; }
GEMM_DEVICE float im_of(const Complex<float>& x) { return x.im; }
GEMM_DEVICE void conjugate(Complex<float>& x) { x.im = -x.im; }
GEMM_DEVICE float re_of(float x) { return x; }
GEMM_DEVICE float im_of(float) { return 0.0f; }
GEMM_DEVICE void conjugate(float&) {}

enum Plane { RE_HIGH, IM_HIGH, RE_LOW = Config::PARTS, IM_LOW };

// Where unit `unit` of the 16 of a vector lies in a plane.
GEMM_DEVICE int unit_at(int vector, int unit) {
    return vector * Config::ROW + (((unit / 2) ^ (vector & 7)) * 16) + unit % 2 * 8;
}
// Where number `vector` of step `k` lies among those of an operand as they are, which its producers read: lanes that do so
// together meet in no bank.
template <bool ALONG_K>
GEMM_DEVICE int number_at(int vector, int k) {
    constexpr int SIZE = static_cast<int>(sizeof(Value)), PIECE = 16 / SIZE;
    const int line = ALONG_K ? vector : k, on = ALONG_K ? k : vector;
    int change = line << 1 & 4;
    if constexpr (Config::PARTS == 1 && !ALONG_K) change = (line >> 1 & 2) | ((line << 2 ^ line >> 1) & 4);
    return line * Config::NUMBERS_ROW + ((on / PIECE) ^ change) * 16 + on % PIECE * SIZE;
}
// Where number `vector` of step `k` lies in a stage that has numbers as they are.
GEMM_DEVICE int plain_at(int vector, int k) { return k * Config::VECTORS + (vector ^ (k & 15)); }

#if defined(GEMM_CUDA)
// Two floats as float16, rounded to nearest, the first one in the lower half.
GEMM_DEVICE unsigned pack_halves(float first, float second) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
// count += how many of the two have magnitudes of at most 2^8, in each half: from NONE_SMALL on.
GEMM_DEVICE void count_small(unsigned& count, unsigned pair) {
    unsigned magnitude, one;
    asm("abs.f16x2 %0, %1;" : "=r"(magnitude) : "r"(pair));
    asm("set.le.f16x2.f16x2 %0, %1, %2;" : "=r"(one) : "r"(magnitude), "r"(0x5c005c00u));
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(count) : "r"(count), "r"(one));
}
// The larger magnitude of the two, NaN the largest.
GEMM_DEVICE float larger_magnitude(float most, float x) {
    float larger;
    asm("{ .reg .f32 magnitude; abs.f32 magnitude, %2; max.NaN.f32 %0, %1, magnitude; }" : "=f"(larger) : "f"(most), "f"(x));
    return larger;
}
// The larger ones of two lower and of two upper halves.
GEMM_DEVICE unsigned larger_halves(unsigned x, unsigned y) {
    unsigned larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
    return larger;
}
#else
GEMM_DEVICE unsigned pack_halves(float first, float second) {
    return float_to_half(first).bits | static_cast<unsigned>(float_to_half(second).bits) << 16;
}
GEMM_DEVICE void count_small(unsigned& count, unsigned pair) {
    for (int half = 0; half < 2; ++half) {
        const float counted = half_to_float(Half{static_cast<unsigned short>(count >> 16 * half)});
        const unsigned magnitude = pair >> 16 * half & 0x7fffu;
        const unsigned more = float_to_half(counted + (magnitude <= 0x5c00u ? 1.0f : 0.0f)).bits;
        count = (count & ~(0xffffu << 16 * half)) | more << 16 * half;
    }
}
GEMM_DEVICE float larger_magnitude(float most, float x) {
    const unsigned bits = bits_of(x) & 0x7fffffffu;
    return bits_of(most) > bits ? most : float_of(bits);
}
GEMM_DEVICE unsigned larger_halves(unsigned x, unsigned y) {
    const unsigned low = (x & 0xffffu) > (y & 0xffffu) ? x : y, high = x > y ? x : y;
    return (low & 0xffffu) | (high & 0xffff0000u);
}
#endif

GEMM_DEVICE float first_half(unsigned pair) { return half_to_float(Half{static_cast<unsigned short>(pair)}); }
GEMM_DEVICE float second_half(unsigned pair) { return half_to_float(Half{static_cast<unsigned short>(pair >> 16)}); }
// Twice the float16 1024, of which the next ones are its bits and as many more.
constexpr unsigned NONE_SMALL = 0x64006400u;
GEMM_DEVICE int counted(unsigned pair) { return static_cast<int>((pair & 0xffu) + (pair >> 16 & 0xffu)); }

// The larger bits of two numbers that are not negative: those of the larger number, infinities and NaN the largest.
GEMM_DEVICE unsigned larger_bits(unsigned x, unsigned y) { return x > y ? x : y; }
GEMM_DEVICE unsigned magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

// A vector of a chunk as one word: how many real and imaginary parts are not large (7 bits each; all of them set: nothing
// serves), and whether some are not zero.
typedef unsigned short VectorWord;
enum VectorFlag : int { HAS_REAL = 1 << 7, IMAGINARY_AT = 8, HAS_IMAGINARY = 1 << 15, UNSERVED = 0x7f7f };

// What float16 leaves of two scaled numbers.
GEMM_DEVICE unsigned rest_of(float first, float second, float down, unsigned high) {
    return pack_halves(multiply_add(first, down, -first_half(high)), multiply_add(second, down, -second_half(high)));
}

// The power of two by which a chunk of a vector is scaled, from the bits of its largest parts: the largest one comes to
// [2^14, 2^15).
struct VectorScale {
    int exponent;
    bool has_re, has_im, fits;

    GEMM_DEVICE VectorScale(unsigned most_re, unsigned most_im) : has_re(most_re != 0), has_im(most_im != 0) {
        constexpr int LEAST = 67, MOST = 188;  // biased exponents of largest parts whose products fit float32
        const int biased = static_cast<int>(larger_bits(most_re, most_im) >> 23);
        fits = nothing() || (biased >= LEAST && biased <= MOST);
        exponent = nothing() || !fits ? 0 : biased - 127 - 14;
    }
    GEMM_DEVICE bool nothing() const { return !has_re && !has_im; }
    GEMM_DEVICE float down() const { return float_of(static_cast<unsigned>(127 - exponent) << 23); }
    GEMM_DEVICE float up() const { return float_of(static_cast<unsigned>(127 + exponent) << 23); }
};

// How many real and imaginary parts of a chunk of a vector are not large, of `steps` steps.
struct VectorCounts {
    int re, im;

    // Counts of CHUNK steps, those that lie outside included.
    GEMM_DEVICE VectorCounts(int small_re, int small_im, int steps)
        : re(small_re - (Config::CHUNK - steps)), im(small_im - (Config::CHUNK - steps)) {}
    GEMM_DEVICE VectorWord word(const VectorScale& scale) const {
        return static_cast<VectorWord>(
            re | im << IMAGINARY_AT | (scale.has_re ? HAS_REAL : 0) | (scale.has_im ? HAS_IMAGINARY : 0) |
            (scale.fits ? 0 : UNSERVED));
    }
    // Whether the vector alone promises that planes serve.
    GEMM_DEVICE bool promise(const VectorScale& scale, int steps) const {
        const int worse = re > im ? re : im, lossy = Config::PARTS == 2 ? re + im : re;
        return scale.nothing() || (scale.fits && 2 * worse + (lossy + 1) / 2 + 2 <= steps - SPARE);
    }
};

// Where a chunk of an operand lies.
struct ChunkPlace {
    const Value* first;  // of the tile's first vector and step
    int vectors;          // inside the operand
    int steps;
};

// TURNED: planes lie as Config says of columns, those of -im among them.
template <bool ALONG_K_, int VECTOR, bool CONJUGATE, bool TURNED = false>
struct ChunkOperand {
    static constexpr int EXTENT = Config::VECTORS;
    static constexpr bool ALONG_K = ALONG_K_;
    static constexpr int OF_WARP = 8 * Config::SIDE_WARPS;  // vectors that all warps bring at once
    static constexpr int ROUNDS = (EXTENT + OF_WARP - 1) / OF_WARP;
    static constexpr bool EVEN = EXTENT % OF_WARP == 0;
    // From one round's vectors of a warp to the next ones: of real numbers it has neighbours, which one warp has copied.
    static constexpr int NEXT = Config::PARTS == 2 ? OF_WARP : 8;
    // A lane has all k of a quarter of one vector, or an eighth of two that are neighbours.
    static constexpr int VECTORS = ALONG_K ? 1 : 2, UNITS = ALONG_K ? 4 : 2;
    using Share = Value[VECTORS][UNITS][4];
    struct Held {
        Share at[ROUNDS];
    };

    int first_vector, t, half;  // within eight vectors; which steps of k

    GEMM_DEVICE explicit ChunkOperand(int thread) {
        const int lane = thread & 31, warp = thread >> 5 & (Config::SIDE_WARPS - 1);
        first_vector = warp * (Config::PARTS == 2 ? 8 : 8 * ROUNDS) + (ALONG_K ? lane / 4 % 4 * 2 + lane / 16 : 2 * (lane % 4));
        t = ALONG_K ? lane % 4 : lane / 4 % 4;
        half = ALONG_K ? 0 : lane / 16;
    }
    GEMM_DEVICE int step_of(int unit) const { return ALONG_K ? unit : 2 * unit + half; }

    // Reads the lane's share; what lies outside is zero.
    GEMM_DEVICE void load(Held& held, const ChunkPlace& place, const Long& vector_stride, const Long& k_stride) const {
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if (!EVEN && first_vector + round * OF_WARP >= EXTENT) break;
            load(held.at[round], round, place, vector_stride, k_stride);
        }
    }
    // The same of one round.
    GEMM_DEVICE void load(
        Share& held, int round, const ChunkPlace& place, const Long& vector_stride, const Long& k_stride) const {
        const int vector = first_vector + round * OF_WARP;
        const Value* from = place.first + vector * vector_stride + (16 * half + 2 * t) * k_stride;
        if (place.vectors >= EXTENT && place.steps == Config::CHUNK) {
            read<true>(held, from, EXTENT, Config::CHUNK, vector_stride, k_stride);
        } else {
            const int left = place.vectors - vector, steps = place.steps - (16 * half + 2 * t);
            read<false>(held, from, left, steps, vector_stride, k_stride);
        }
    }

    // The first of a lane's neighbouring steps of k is this times t.
    static constexpr int STEPS_OF_LANE = Config::PARTS == 2 ? 2 : 4;

    // The same from where copies.cuh's warps have left the numbers.
    GEMM_DEVICE void take(Held& held, const unsigned char* numbers) const {
        const int k = 16 * half + STEPS_OF_LANE * t;
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int vector = first_vector + round * NEXT;
            if (!EVEN && vector >= EXTENT) break;
            if constexpr (Config::PARTS == 2) take_complex(held.at[round], numbers, vector, k);
            else take_real(held.at[round], numbers, vector, k);
        }
    }

    // Splits what is held into planes, with the scale of each vector and what is known of it. False: a vector
    // of some lane's alone does not promise that planes serve.
    GEMM_DEVICE bool split(const Held& held, int steps, unsigned char* planes, float* scales, VectorWord* counts) const {
        bool promised = true;
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if (!EVEN && first_vector + round * OF_WARP >= EXTENT) break;
            promised &= split(held.at[round], round, steps, planes, scales, counts);
        }
        return promised;
    }
    GEMM_DEVICE bool split(
        const Share& held, int round, int steps, unsigned char* planes, float* scales, VectorWord* counts) const {
        unsigned most[VECTORS], small[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) most[v] = largest_parts(held[v]);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) most[v] = over_lanes(most[v], larger_halves);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int vector = first_vector + round * NEXT + v;
            small[v] = split_vector(held[v], scale_of(most[v]).down(), vector, planes);
        }
        const VectorCounts known = counts_of(small, steps);
        const VectorScale scale = own_scale(most);
        if (t == 0) {
            scales[first_vector + round * NEXT + own_vector()] = scale.up();
            counts[first_vector + round * NEXT + own_vector()] = known.word(scale);
        }
        return known.promise(scale, steps);
    }

    // Copies what planes do not serve, as it is: by the threads of the consumers.
    static GEMM_DEVICE void copy_plain(
        Value* to, const ChunkPlace& place, const Long& vector_stride, const Long& k_stride, int thread) {
#pragma unroll 1
        for (int i = thread; i < EXTENT * Config::CHUNK; i += Config::CONSUMERS) {
            const int vector = ALONG_K ? i / Config::CHUNK : i % EXTENT, k = ALONG_K ? i % Config::CHUNK : i / EXTENT;
            Value x = make<Value>(0.0f, 0.0f);
            if (vector < place.vectors && k < place.steps) x = place.first[vector * vector_stride + k * k_stride];
            if constexpr (CONJUGATE) conjugate(x);
            to[plain_at(vector, k)] = x;
        }
    }

  protected:
    // The share of one round. What lies further on along k or across it lies so from one of two places.
    static GEMM_DEVICE void take_complex(Share& to, const unsigned char* numbers, int vector, int k) {
        const unsigned char* const from[2] = {
            numbers + number_at<ALONG_K>(vector, k), numbers + number_at<ALONG_K>(vector, k + 8)};
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (ALONG_K && e % 2 != 0) continue;
                const int further = ALONG_K ? 16 * u * 8 : (32 * u + e % 2) * Config::NUMBERS_ROW;
                const auto two = *reinterpret_cast<const Vector<Value, 2>*>(from[e / 2] + further);
                to[0][u][e] = two.at[0];
                to[VECTORS - 1][u][ALONG_K ? e + 1 : e] = two.at[1];
            }
        }
    }
    static GEMM_DEVICE void take_real(Share& to, const unsigned char* numbers, int vector, int k) {
        constexpr int SIZE = static_cast<int>(sizeof(Value));
        const unsigned char* const from[2] = {
            numbers + number_at<ALONG_K>(vector, k), numbers + number_at<ALONG_K>(vector, k + (ALONG_K ? 16 : 1))};
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if constexpr (ALONG_K) {
                const auto four = *reinterpret_cast<const Vector<Value, 4>*>(from[u % 2] + u / 2 * 32 * SIZE);
#pragma unroll
                for (int e = 0; e < 4; ++e) to[0][u][e] = four.at[e];
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int further = (32 * u + e / 2 * 2) * Config::NUMBERS_ROW;
                    const auto two = *reinterpret_cast<const Vector<Value, 2>*>(from[e % 2] + further);
                    to[0][u][e] = two.at[0];
                    to[VECTORS - 1][u][e] = two.at[1];
                }
            }
        }
    }

    template <bool WHOLE>
    static GEMM_DEVICE void read(
        Value (&to)[VECTORS][UNITS][4], const Value* from, int vectors, int steps, const Long& vector_stride,
        const Long& k_stride) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int k = 16 * (ALONG_K ? 1 : 2) * u + (e & 1) + 8 * (e >> 1);
                if constexpr (VECTOR == 2 && ALONG_K) {
                    if (e % 2 != 0) continue;
                    Vector<Value, 2> two = {};
                    if (WHOLE || (vectors > 0 && k < steps)) two = *reinterpret_cast<const Vector<Value, 2>*>(from + k);
                    to[0][u][e] = two.at[0];
                    to[0][u][e + 1] = two.at[1];
                } else if constexpr (VECTOR == 2) {
                    Vector<Value, 2> two = {};
                    if (WHOLE || (vectors > 0 && k < steps)) {
                        two = *reinterpret_cast<const Vector<Value, 2>*>(from + k * k_stride);
                    }
                    to[0][u][e] = two.at[0];
                    to[VECTORS - 1][u][e] = two.at[1];
                } else {
#pragma unroll
                    for (int v = 0; v < VECTORS; ++v) {
                        Value x = make<Value>(0.0f, 0.0f);
                        if (WHOLE || (vectors > v && k < steps)) x = from[v * vector_stride + k * k_stride];
                        to[v][u][e] = x;
                    }
                }
            }
        }
    }

    // Combines over the lanes that share a vector.
    template <class Combine>
    static GEMM_DEVICE unsigned over_lanes(unsigned x, Combine combine) {
        if constexpr (ALONG_K) {
            x = combine(x, __shfl_xor_sync(0xffffffffu, x, 1));
            return combine(x, __shfl_xor_sync(0xffffffffu, x, 2));
        } else {
            x = combine(x, __shfl_xor_sync(0xffffffffu, x, 4));
            x = combine(x, __shfl_xor_sync(0xffffffffu, x, 8));
            return combine(x, __shfl_xor_sync(0xffffffffu, x, 16));
        }
    }

    // The upper halves of a lane's largest real and of its largest imaginary part: exponents. None is zero unless the part is.
    static GEMM_DEVICE unsigned largest_parts(const Value (&x)[UNITS][4]) {
        float re = 0.0f, im = 0.0f;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                re = larger_magnitude(re, re_of(x[u][e]));
                if constexpr (Config::PARTS == 2) im = larger_magnitude(im, im_of(x[u][e]));
            }
        }
        const auto upper = [](unsigned bits) { return (bits | (bits < 1u ? bits : 1u) << 16) >> 16; };
        return Config::PARTS == 2 ? upper(bits_of(re)) | upper(bits_of(im)) << 16 : upper(bits_of(re));
    }
    static GEMM_DEVICE VectorScale scale_of(unsigned most) { return VectorScale(most << 16, most & 0xffff0000u); }

    // Where a unit of a vector lies in the first plane.
    static GEMM_DEVICE int at(int vector, int unit) {
        if constexpr (!TURNED) return unit_at(vector, unit);
        return unit_at(vector % Config::TURNED, unit) +
               vector / Config::TURNED * (Config::TURNED_PLANES * Config::TURNED_PLANE);
    }

    // The vector that a lane goes on with, once all know the same: where it has two, lanes of the upper steps take the second.
    GEMM_DEVICE int own_vector() const { return VECTORS == 2 ? half : 0; }
    GEMM_DEVICE VectorScale own_scale(const unsigned (&most)[VECTORS]) const {
        return scale_of(own_vector() == 0 ? most[0] : most[VECTORS - 1]);
    }
    // The counts of the vector that a lane goes on with, from what `split_vector` has returned.
    GEMM_DEVICE VectorCounts counts_of(const unsigned (&small)[VECTORS], int steps) const {
        // Counts: two vectors' in one word, one vector's still in two halves.
        unsigned all = small[0];
        if constexpr (VECTORS == 2) all = __byte_perm(small[0], small[1], 0x5410) + __byte_perm(small[0], small[1], 0x7632);
        all = over_lanes(all, [](unsigned l, unsigned r) { return l + r; });
        all = VECTORS == 2 ? all >> 16 * own_vector() : all + (all >> 16);
        constexpr int OTHER = Config::PARTS == 2 ? 8 : 0;  // real numbers have no worse part
        return VectorCounts(static_cast<int>(all & 0xffu), static_cast<int>(all >> OTHER & 0xffu), steps);
    }

    // A unit of every plane: eight bytes.
    using Parts = Vector<unsigned, 2>[Config::PLANES];

    // Splits a unit, and counts what is not large.
    static GEMM_DEVICE void split_unit(
        Parts& part, const Value (&x)[4], float down, unsigned& small_re, unsigned& small_im) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const Value &first = x[2 * pair], &second = x[2 * pair + 1];
            part[RE_HIGH].at[pair] = pack_halves(re_of(first) * down, re_of(second) * down);
            if constexpr (Config::PARTS == 2) part[IM_HIGH].at[pair] = pack_halves(im_of(first) * down, im_of(second) * down);
            part[RE_LOW].at[pair] = rest_of(re_of(first), re_of(second), down, part[RE_HIGH].at[pair]);
            if constexpr (Config::PARTS == 2) {
                part[IM_LOW].at[pair] = rest_of(im_of(first), im_of(second), down, part[IM_HIGH].at[pair]);
            }
            count_small(small_re, part[RE_HIGH].at[pair]);
            if constexpr (Config::PARTS == 2) count_small(small_im, part[IM_HIGH].at[pair]);
            if constexpr (CONJUGATE) {
                part[IM_HIGH].at[pair] ^= 0x80008000u;
                part[IM_LOW].at[pair] ^= 0x80008000u;
            }
        }
    }

    // Splits the lane's share of a vector. Returns how many real parts are not large, in the next 8 bits how many imaginary
    // ones, and in the upper half the same of others.
    GEMM_DEVICE unsigned split_vector(
        const Value (&x)[UNITS][4], float down, int vector, unsigned char* planes) const {
        unsigned small_re = NONE_SMALL, small_im = NONE_SMALL;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            Parts part;
            split_unit(part, x[u], down, small_re, small_im);
            const auto write = [&](int plane, const Vector<unsigned, 2>& part) {
                constexpr int PLANE = TURNED ? Config::TURNED_PLANE : Config::PLANE;
                *reinterpret_cast<Vector<unsigned, 2>*>(planes + at(vector, 4 * step_of(u) + t) + plane * PLANE) = part;
            };
#pragma unroll
            for (int p = 0; p < Config::PLANES; ++p) write(TURNED ? p + 1 + p / 2 : p, part[p]);
            if constexpr (TURNED) {
                write(0, {part[1].at[0] ^ 0x80008000u, part[1].at[1] ^ 0x80008000u});
                write(3, {part[3].at[0] ^ 0x80008000u, part[3].at[1] ^ 0x80008000u});
            }
        }
        return __byte_perm(small_re, small_im, 0x6240);
    }
};
