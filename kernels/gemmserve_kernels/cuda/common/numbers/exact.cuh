// Sums and products in double together with what their rounding lost.
//
// Sources: D. E. Knuth, The Art of Computer Programming, volume 2, 4.2.2, theorem B (the sum); T. Ogita, S. M. Rump,
// S. Oishi, Accurate sum and dot product, SIAM J. Sci. Comput. 26 (2005) (the product by a fused multiply-add, and Dot2:
// a dot product as if it had been computed with twice the bits, and rounded once).
#pragma once

#include "../platform.cuh"

// high + low.
struct Exact {
    double high, low;
};

// No compiler may contract these: the difference of a rounded product is what they are about.
GEMM_DEVICE double rounded_sum(double x, double y) {
#if defined(GEMM_CUDA)
    return __dadd_rn(x, y);
#else
#if defined(GEMM_HIP)
#pragma clang fp contract(off)
#endif
    return x + y;
#endif
}
GEMM_DEVICE double rounded_product(double x, double y) {
#if defined(GEMM_CUDA)
    return __dmul_rn(x, y);
#else
#if defined(GEMM_HIP)
#pragma clang fp contract(off)
#endif
    return x * y;
#endif
}

// x + y exactly, unless it overflows.
GEMM_DEVICE Exact two_sum(double x, double y) {
    const double sum = rounded_sum(x, y), of_y = rounded_sum(sum, -x), of_x = rounded_sum(sum, -of_y);
    return {sum, rounded_sum(rounded_sum(x, -of_x), rounded_sum(y, -of_y))};
}

// x y exactly, unless it overflows or what is lost underflows.
GEMM_DEVICE Exact two_product(double x, double y) {
    const double product = rounded_product(x, y);
    return {product, multiply_add(x, y, -product)};
}

// Two sums in one.
GEMM_DEVICE Exact joined(Exact x, Exact y) {
    const Exact sum = two_sum(x.high, y.high);
    return {sum.high, sum.low + (x.low + y.low)};
}

GEMM_DEVICE bool finite(double x) { return x - x == 0; }
