// What one output of a matrix instruction is: gemmserve_kernels.numerics.models.step, bit for bit.
//
// Products of 11 significant bits each are exact. They and the accumulator are aligned to the largest of them and cut,
// each towards zero, `alignment_bits` below its binary point; the exact sum is cut to float, towards zero again. Where
// something is not finite, the plain sum says what comes out.
#pragma once

#include "language.hpp"

namespace simt {

// Hopper's: gemmserve_kernels.numerics.models.HOPPER.
constexpr int alignment_bits = 25;

inline int exponent_of(float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x) & 0x7fffffffu;
    if (bits == 0) return -10000;
    return bits < 0x800000u ? -126 : int(bits >> 23) - 127;
}

inline double power_of(int exponent) {
    return __builtin_bit_cast(double, (unsigned long long)(exponent + 1023) << 52);
}

inline float toward_zero(double x) {
    const float nearest = float(x);
    const double magnitude = x < 0 ? -x : x, found = nearest < 0 ? -double(nearest) : double(nearest);
    return found > magnitude ? __builtin_bit_cast(float, __builtin_bit_cast(unsigned, nearest) - 1u) : nearest;
}

inline float aligned_sum(float accumulator, const float* x, const float* y, int count) {
    int largest = exponent_of(accumulator);
    float plain = accumulator;
    for (int k = 0; k < count; ++k) {
        const int here = exponent_of(x[k]) + exponent_of(y[k]);
        largest = here > largest ? here : largest;
        plain += x[k] * y[k];
    }
    if (plain - plain != 0) return plain;
    if (largest < -5000) return 0;
    const double scale = power_of(alignment_bits - largest);
    long long total = (long long)(accumulator * scale);
    for (int k = 0; k < count; ++k) total += (long long)(double(x[k]) * y[k] * scale);
    return toward_zero(double(total) / scale);
}

}  // namespace simt
