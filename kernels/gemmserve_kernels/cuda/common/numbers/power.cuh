// Sums of scaled planes times the power of two that undoes the scaling.
#pragma once

#include "bits.cuh"
#include "types.cuh"

// x 2^exponent, rounded at most once. One float may not hold the power; the product of three does, each a third of it:
// where a product with two of them is subnormal, that with the third is 0. Sums lie between 2^-126 and 2^127, so that
// beyond -378 and 254 the result is 0 or infinite in any case.
struct Power {
    float first, second, third;

    GEMM_DEVICE explicit Power(int exponent) {
        const bool one_factor = exponent >= -126 && exponent <= 127;
        exponent = exponent < -378 ? -378 : exponent > 378 ? 378 : exponent;
        const int part = one_factor ? 0 : exponent / 3;
        second = third = power_of_two(part);
        first = power_of_two(exponent - 2 * part);
    }
    GEMM_DEVICE float times(float x) const { return x * first * second * third; }
    GEMM_DEVICE Complex<float> times(Complex<float> x) const { return {times(x.re), times(x.im)}; }
};
