// AMD's matrix instructions for a wave of 64 lanes (CDNA) or 32 (RDNA 3), which tell each other what they hold. Kernels'
// headers take these names where they would have compiler builtins: `using namespace simt::amd`.
//
// Layouts: AMD Instinct MI200, MI300 and CDNA 4 instruction set architecture reference guides; AMD's lab notes on matrix
// cores (the rows of a lane of v_mfma_f64_16x16x4: 4 i + lane / 16); RDNA 3 instruction set architecture reference guide,
// section 7.9. Arithmetic: P. Xie et al., MMA-Sim, arXiv 2511.10909, bit for bit CDNA 3's: float32 and double are chains
// of fused multiply-adds; float16 and XF32 see `fused` below. CDNA 4's twice as long instruction is taken for two of
// CDNA 3's. RDNA 3 rounds to nearest (7.9); in which order it adds is not documented: one step of k after another here.
#pragma once

#include "half.hpp"
#include "matrix_unit.hpp"
#include "warp.hpp"

namespace simt::amd {

inline double floor_of(double x) {
    const double whole = double((long long)(x));  // |x| < 2^40 here
    return whole > x ? whole - 1 : whole;
}

// The products, cut to 24 bits below the largest one's binary point, towards zero; their sum cut to 31 and the
// accumulator to 24 bits below the larger of both, towards minus infinity; the sum of these rounded to nearest.
// tests/support/kernel_models/mfma.py, bit for bit.
// `least`: the exponent of a subnormal number.
inline float fused(float accumulator, const float* x, const float* y, int count, int least) {
    constexpr int NOTHING = -126;
    const auto exponent = [least](float v) { return exponent_of(v) < least ? least : exponent_of(v); };
    int largest = -10000;
    float plain = accumulator;
    for (int k = 0; k < count; ++k) {
        const int here = x[k] == 0 || y[k] == 0 ? NOTHING : exponent(x[k]) + exponent(y[k]);
        largest = here > largest ? here : largest;
        plain += x[k] * y[k];
    }
    if (plain - plain != 0) return plain;
    double sum = 0;
    for (int k = 0; k < count; ++k) {
        sum += double((long long)(double(x[k]) * y[k] * power_of(24) * power_of(-largest)));
    }
    sum *= power_of(-24);  // in units of 2^largest
    const int of_accumulator = accumulator == 0 ? NOTHING : exponent_of(accumulator);
    const int top = of_accumulator > largest ? of_accumulator : largest;
    const int down = largest - top < -100 ? -100 : largest - top;
    const int down_accumulator = of_accumulator - top < -100 ? -100 : of_accumulator - top;
    const double significand = double(accumulator) * power_of(-of_accumulator);
    sum = floor_of(sum * power_of(31 + down)) * power_of(-31);
    sum += floor_of(significand * power_of(24 + down_accumulator)) * power_of(-24);
    return float(sum * power_of(top));
}

template <class T, int COUNT>
struct Words {
    T at[COUNT];
    T& operator[](int i) { return at[i]; }
    T operator[](int i) const { return at[i]; }
};

// What every instruction has in common: a lane's elements of A and B are seen by all lanes of the wave.
template <class Element_, int TILE_, int PER_, class Sum, class Shape>
struct Matrix {
    using Element = Element_;
    static constexpr int WAVE = 64, TILE = TILE_, GROUPS = 64 / TILE_, PER = PER_, COUNT = TILE_ * TILE_ / 64;
    using Sums = Words<Sum, COUNT>;

    template <class Vector>
    static void run(Sums& d, const Vector& a, const Vector& b) {
        static_assert(sizeof(Vector) > 0 && warpSize == 64, "a wave has 64 lanes");
        __shared__ Element_ held[16][64][2][PER_];
        const int lane = int(threadIdx.x) % 64;
        auto& wave = held[threadIdx.x / 64];
        for (int e = 0; e < PER; ++e) {
            wave[lane][0][e] = a.at[e];
            wave[lane][1][e] = b.at[e];
        }
        __syncwarp();
        Sums sums;
        for (int i = 0; i < COUNT; ++i) {
            Element_ x[GROUPS * PER_], y[GROUPS * PER_];
            for (int g = 0; g < GROUPS; ++g)
                for (int e = 0; e < PER; ++e) {
                    x[g * PER + e] = wave[g * TILE + Shape::row(i, lane)][0][e];
                    y[g * PER + e] = wave[g * TILE + lane % TILE][1][e];
                }
            sums[i] = Shape::sum(d[i], x, y, GROUPS * PER);
        }
        __syncwarp();
        d = sums;
    }
};

struct Rows32 {
    static int row(int i, int lane) { return 8 * (i / 4) + 4 * (lane / 32) + i % 4; }
};
struct Rows16 {
    static int row(int i, int lane) { return 4 * i + lane / 16; }
};

struct ChainF32 : Rows32 {
    static float sum(float d, const float* x, const float* y, int count) {
        for (int k = 0; k < count; ++k) d = fmaf(x[k], y[k], d);
        return d;
    }
};
struct ChainF64 : Rows16 {
    static double sum(double d, const double* x, const double* y, int count) {
        for (int k = 0; k < count; ++k) d = fma(x[k], y[k], d);
        return d;
    }
};
template <class Half>
struct FusedF16 : Rows32 {
    static float sum(float d, const Half* x, const Half* y, int count) {
        constexpr int AT_ONCE = 8;
        for (int first = 0; first < count; first += AT_ONCE) {
            float left[AT_ONCE], right[AT_ONCE];
            for (int k = 0; k < AT_ONCE; ++k) {
                left[k] = simt::half_to_float(x[first + k].bits);
                right[k] = simt::half_to_float(y[first + k].bits);
            }
            d = fused(d, left, right, AT_ONCE, -14);
        }
        return d;
    }
};
struct FusedXf32 : Rows32 {
    static float sum(float d, const float* x, const float* y, int count) {
        float left[4], right[4];
        for (int k = 0; k < count; ++k) {
            left[k] = __builtin_bit_cast(float, __builtin_bit_cast(unsigned, x[k]) & 0xffffe000u);
            right[k] = __builtin_bit_cast(float, __builtin_bit_cast(unsigned, y[k]) & 0xffffe000u);
        }
        return fused(d, left, right, count, -126);
    }
};

struct MfmaF32 : Matrix<float, 32, 1, float, ChainF32>, Rows32 {};
struct MfmaXf32 : Matrix<float, 32, 2, float, FusedXf32>, Rows32 {};
struct MfmaF64 : Matrix<double, 16, 1, double, ChainF64>, Rows16 {};
// Half is the kernels' own.
template <class Half>
struct MfmaF16Of : Matrix<Half, 32, 4, float, FusedF16<Half>>, Rows32 {};
template <class Half>
struct MfmaLongF16Of : Matrix<Half, 32, 8, float, FusedF16<Half>>, Rows32 {};

// Lanes 16 to 31 must hold what lanes 0 to 15 do: where one does not, its row or column becomes NaN.
template <class Half>
struct WmmaF16Of {
    using Element = Half;
    static constexpr int WAVE = 32, TILE = 16, GROUPS = 1, PER = 16, COUNT = 8;
    using Sums = Words<float, COUNT>;

    static int row(int i, int lane) { return 2 * i + lane / 16; }

    template <class Vector>
    static void run(Sums& d, const Vector& a, const Vector& b) {
        static_assert(sizeof(Vector) > 0 && warpSize == 32, "a wave has 32 lanes");
        Held<Vector> mine{a, b, d};
        collective("v_wmma_f32_16x16x16_f16", all_lanes, &mine, &combine<Vector>, {__FILE__, __LINE__});
        d = mine.d;
    }

  private:
    template <class Vector>
    struct Held {
        Vector a, b;
        Sums d;
    };

    template <class Vector>
    static void combine(Group& group) {
        const auto of = [&group](int lane) -> Held<Vector>& { return *static_cast<Held<Vector>*>(group.operand[lane]); };
        for (int lane = 0; lane < WAVE; ++lane) {
            const int column = lane % TILE;
            for (int i = 0; i < COUNT; ++i) {
                const int here = row(i, lane);
                float& sum = of(lane).d[i];
                for (int k = 0; k < PER; ++k) {
                    const auto x = of(here).a.at[k].bits, y = of(column).b.at[k].bits;
                    sum = fmaf(simt::half_to_float(x), simt::half_to_float(y), sum);  // exact product, one rounding
                    if (x != of(here + TILE).a.at[k].bits || y != of(column + TILE).b.at[k].bits) sum = __builtin_nanf("");
                }
            }
        }
    }
};

}  // namespace simt::amd
