// Which elements of a line are outliers: gemmserve_kernels.algorithms.ozaki.bound says what they are for.
#pragma once

#include "least.cuh"

constexpr int CLEAN_CLASSES = 8;  // of 32 at least that hold no outlier
constexpr Long LONG_LINE = 4096;  // from here on the largest elements of classes of normal data are nearly alike
constexpr double NO_LIMIT = __builtin_bit_cast(double, 0x7ff0000000000000ll);  // infinity

GEMM_DEVICE double size_of(const Element& x) {
    double size = fabs(x.part[0]);
    if constexpr (COMPLEX) size = fmax(size, fabs(x.part[PARTS - 1]));
    return size;
}

// Steps of k modulo 32 are classes, a lane of the warp each: the sums of its class, and its largest element. Returns above
// which size elements are likely outliers: twice the CLEAN_CLASSES-th smallest of the largest (three times in short lines),
// an ordinary element as long as outliers lie in no more than the other classes. Its lower half has all bits, so that upper
// halves decide. Infinite where to leave them out cannot be worth it: they have not half of the sum of squares, or what
// clean classes are like does not pass either.
GEMM_DEVICE double outliers_above(
    double largest, double factor, const Magnitudes& size, double square, double target, Long k, const TallyParams& tally) {
    constexpr unsigned FULL = 0xffffffffu;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    double top = largest, all = square;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        top = fmax(top, __shfl_xor_sync(FULL, top, step));
        all += __shfl_xor_sync(FULL, all, step);
    }
    const double scaled = top * factor;
    if (!(all - all == 0.0) || !(scaled > 0.0) || 4.0 * tally.most_outliers * (scaled * scaled) < all) return NO_LIMIT;
    int smaller = 0;
#pragma unroll 1
    for (int step = 1; step < 32; ++step) {
        const double other = __shfl_xor_sync(FULL, largest, step);
        if (other < largest || (other == largest && (lane ^ step) < lane)) ++smaller;
    }
    double ordinary = smaller == CLEAN_CLASSES - 1 ? largest : 0.0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) ordinary = fmax(ordinary, __shfl_xor_sync(FULL, ordinary, step));
    const double above = double_of(bits_of((k < LONG_LINE ? 3.0 : 2.0) * ordinary) | 0xffffffffll);
    if (!(top > above)) return NO_LIMIT;  // also where that is no number
    const bool clean = largest <= above;
    Magnitudes sizes{};
    if (clean) sizes = size;
    double squares = clean ? square : 0.0;
    int classes = clean ? 1 : 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) sizes.part[p] += __shfl_xor_sync(FULL, sizes.part[p], step);
        squares += __shfl_xor_sync(FULL, squares, step);
        classes += __shfl_xor_sync(FULL, classes, step);
    }
    if (squares > 0.75 * all) return NO_LIMIT;
    const double share = 32.0 / classes;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) sizes.part[p] *= share;
    const unsigned lacking = least_deficit(sizes, squares * share, target, k, tally);
    return lacking > tally.limit - tally.limit / 4 ? NO_LIMIT : above;
}

// The sum over a warp.
GEMM_DEVICE int over_warp(int count) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(0xffffffffu, count, step);
    return count;
}

// Whether the scale of a line without outliers is finer by a half of itself at least; both are of lines that are not zero.
GEMM_DEVICE bool is_finer(int code, int than) {
    const int binades = (code >> 3) - (than >> 3);
    return binades > 1 || (binades >= 0 && ((code & 7) << (binades + 1)) >= 3 * (than & 7));
}
