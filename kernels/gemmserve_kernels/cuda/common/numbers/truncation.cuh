// What a tensor core's truncation takes, given back on average.
//
// Partial sums are cut towards zero, so the promoted sums of them are too small: by 2^-24 of themselves at least, and by
// more where many instructions add products of high parts to one partial sum. The shares were chosen by the models
// (gemmserve_kernels.numerics.models): what data of one sign lose would be one and a half times as much, what data of both signs
// lose is less. Where the sum's last three bits are 0 nothing was cut, most likely: small integers stay exact.
#pragma once

#include "types.cuh"

// `ACCUMULATIONS`: instructions that add products of high parts to one partial sum.
template <int ACCUMULATIONS>
GEMM_DEVICE float restored(float x) {
    constexpr float SHARE = (ACCUMULATIONS <= 4 ? 1 : ACCUMULATIONS / 2) * 5.9604644775390625e-8f;  // 2^-24
    return (__builtin_bit_cast(unsigned, x) & 7u) != 0 ? fmaf(x, SHARE, x) : x;
}
template <int ACCUMULATIONS>
GEMM_DEVICE Complex<float> restored(Complex<float> x) {
    return {restored<ACCUMULATIONS>(x.re), restored<ACCUMULATIONS>(x.im)};
}
