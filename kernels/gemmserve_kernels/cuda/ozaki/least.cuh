// What lines lack at least, from their norms alone: gemmserve_kernels.algorithms.ozaki.bound has the theorem.
#pragma once

#include "lines.cuh"

struct Magnitudes {
    double part[PARTS];  // sums over a line

    GEMM_DEVICE void add(const Magnitudes& other) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) part[p] += other.part[p];
    }
};

// What the better part of a line lacks at least. `square`: the sum of squares of the line, or less.
GEMM_DEVICE unsigned least_deficit(const Magnitudes& size, double square, double target, Long k, const TallyParams& tally) {
    if (!(square > 0.0)) return 0;
    constexpr double MARGIN = 1.0 + 3.814697265625e-06;  // 1 + 2^-18: single precision counts
    const double factor = target * tally.step / sqrt(square) * MARGIN, all = static_cast<double>(k) * TALLY_WHOLE;
    double most = 0.0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) most = fmax(most, size.part[p] * factor);
    most += 0.25 * static_cast<double>(k) + 2.0;  // every four neighbours count one at least
    return most < all ? static_cast<unsigned>(all - most) : 0u;
}
