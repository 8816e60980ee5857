// Matrix multiply-add of one warp: mma.sync of sm_80, and of sm_90 in double.
#pragma once

#include "../platform.cuh"

#if defined(GEMM_CUDA)

// To nearest, ties away from zero.
GEMM_DEVICE unsigned to_tf32(float x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// d = a b + c for one warp: a is 16 x K, b is K x 8, d and c are 16 x 8. With g = lane / 4 and t = lane % 4, d holds
// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1); a TF32 holds (g, t), (g + 8, t), and for K = 8 (g, t + 4),
// (g + 8, t + 4); b TF32 (t, g), (t + 4, g) (PTX ISA, matrix fragments for mma.m16n8k4, k8, k16).
// A register of float16 or bfloat16 holds two elements that are neighbours in k: a has (g, 2t), (g + 8, 2t), (g, 2t + 8),
// (g + 8, 2t + 8).
#define GEMM_MULTIPLY(TYPE) \
    static constexpr int A = 4, B = 2; \
    static GEMM_DEVICE void run(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4]) { \
        asm("mma.sync.aligned." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), \
              "f"(c[3])); \
    }

template <int K>
struct MultiplyTf32;

template <>
struct MultiplyTf32<8> {
    GEMM_MULTIPLY("m16n8k8.row.col.f32.tf32.tf32")
};

template <>
struct MultiplyTf32<4> {
    static constexpr int A = 2, B = 1;
    static GEMM_DEVICE void run(float (&d)[4], const unsigned (&a)[2], const unsigned (&b)[1], const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%7, %8, %9, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(b[0]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
};

struct MultiplyFp16 {
    GEMM_MULTIPLY("m16n8k16.row.col.f32.f16.f16")
};

struct MultiplyBf16 {
    GEMM_MULTIPLY("m16n8k16.row.col.f32.bf16.bf16")
};

// Two stacked d = a b + c in double for one warp, a being 8 x K, b K x 8, d and c 8 x 8, g and t as above: lower[0] holds
// (g, 2t), lower[1] (g, 2t + 1) of the first d; a[s] holds (g, t + 4s), b[s] (t + 4s, g). Sums are rounded to nearest.
template <int K>
struct MultiplyDouble {
    static constexpr int STEPS = K / 4;
    static_assert(K == 4 || K == 8 || K == 16, "the shapes that instructions have");

    static GEMM_DEVICE void run(
        double (&lower)[2], double (&upper)[2], const double (&a)[STEPS], const double (&below)[STEPS],
        const double (&b)[STEPS]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if constexpr (K == 4) {
            asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
                "{%0, %1, %2, %3};"
                : "+d"(lower[0]), "+d"(lower[1]), "+d"(upper[0]), "+d"(upper[1])
                : "d"(a[0]), "d"(below[0]), "d"(b[0]));
        } else if constexpr (K == 16) {
            asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
                "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
                : "+d"(lower[0]), "+d"(lower[1]), "+d"(upper[0]), "+d"(upper[1])
                : "d"(a[0]), "d"(below[0]), "d"(a[1]), "d"(below[1]), "d"(a[2]), "d"(below[2]), "d"(a[3]), "d"(below[3]),
                  "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
        } else {
            asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                "{%0, %1, %2, %3};"
                : "+d"(lower[0]), "+d"(lower[1]), "+d"(upper[0]), "+d"(upper[1])
                : "d"(a[0]), "d"(below[0]), "d"(a[1]), "d"(below[1]), "d"(b[0]), "d"(b[1]));
        }
#else
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            single(lower, a[s], b[s]);
            single(upper, below[s], b[s]);
        }
#endif
    }
    static GEMM_DEVICE void single(double (&d)[2], double a, double b) {
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(d[0]), "+d"(d[1])
            : "d"(a), "d"(b));
    }
};

#elif defined(GEMM_SHIM)
using namespace simt::ampere;
#endif
