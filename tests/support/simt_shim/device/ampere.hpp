// The machinery of sm_80 that CUDA C++ has no word for: asynchronous copies, which are done at once here, and matrix
// instructions of one warp, whose lanes tell each other what they hold. Kernels' headers take these names where they
// would have PTX: `using namespace simt::ampere`.
#pragma once

#include "half.hpp"
#include "matrix_unit.hpp"
#include "warp.hpp"

namespace simt::ampere {

template <int BYTES>
inline void copy_async(void* shared, const void* global, int bytes) {
    const auto* from = static_cast<const unsigned char*>(global);
    for (int i = 0; i < BYTES; ++i) static_cast<unsigned char*>(shared)[i] = i < bytes ? from[i] : 0;
}
template <int BYTES>
inline void copy_async(void* shared, const void* global) {
    copy_async<BYTES>(shared, global, BYTES);
}
inline void copy_commit() {}
template <int PENDING>
inline void copy_wait() {}
inline int thread_again() { return int(threadIdx.x); }
inline unsigned block_again() { return blockIdx.x; }
inline int once_more(int x) { return x; }
template <class T>
inline T* once_more(T* x) {
    return x;
}

inline float tf32_value(unsigned bits) { return __builtin_bit_cast(float, bits & 0xffffe000u); }

// d = a b + c for 16 x K by K x 8, VALUES numbers in a register, the registers of k after those of the rows (PTX ISA,
// fragments of mma.m16n8k4, k8 and k16).
template <int A_, int B_, int VALUES, bool BFLOAT = false>
struct MatrixInstruction {
    static constexpr int A = A_, B = B_;

    static float value(unsigned bits, int v) {
        if (BFLOAT) return __builtin_bit_cast(float, v == 0 ? bits << 16 : bits & 0xffff0000u);
        return VALUES == 2 ? simt::half_to_float((unsigned short)(bits >> 16 * v)) : tf32_value(bits);
    }
    static void run(float (&d)[4], const unsigned (&a)[A], const unsigned (&b)[B], const float (&c)[4]) {
        Lane own{};
        for (int i = 0; i < A; ++i) own.held[i] = a[i];
        for (int i = 0; i < B; ++i) own.held[A + i] = b[i];
        for (int e = 0; e < 4; ++e) own.sums[e] = c[e];
        collective("mma.sync", all_lanes, &own, &combine, {__FILE__, __LINE__});
        for (int e = 0; e < 4; ++e) d[e] = own.sums[e];
    }

  private:
    struct Lane {
        unsigned held[A_ + B_];
        float sums[4];
    };

    static void combine(Group& group) {
        const auto held = [&](int lane, int i) { return static_cast<const Lane*>(group.operand[lane])->held[i]; };
        for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4, t = lane % 4;
            for (int e = 0; e < 4; ++e) {
                constexpr int COUNT = B_ * 4 * VALUES;
                float x[COUNT], y[COUNT];
                int k = 0;
                for (int h = 0; h < B; ++h)
                    for (int lane_k = 0; lane_k < 4; ++lane_k)
                        for (int v = 0; v < VALUES; ++v, ++k) {
                            x[k] = value(held(g * 4 + lane_k, 2 * h + e / 2), v);
                            y[k] = value(held((2 * t + e % 2) * 4 + lane_k, A + h), v);
                        }
                float& sum = static_cast<Lane*>(group.operand[lane])->sums[e];
                sum = aligned_sum(sum, x, y, COUNT);
            }
        }
    }
};
template <int K>
struct MultiplyTf32 : MatrixInstruction<K / 2, K / 4, 1> {};
struct MultiplyFp16 : MatrixInstruction<4, 2, 2> {};
struct MultiplyBf16 : MatrixInstruction<4, 2, 2, true> {};

// Two stacked 8 x K by K x 8 in double (fragments of mma.m16n8k4 and k8), one rounding for each step of k.
template <int K>
struct MultiplyDouble {
    static constexpr int STEPS = K / 4;

    static void run(
        double (&lower)[2], double (&upper)[2], const double (&a)[STEPS], const double (&below)[STEPS],
        const double (&b)[STEPS]) {
        Lane own{};
        for (int s = 0; s < STEPS; ++s) {
            own.left[0][s] = a[s];
            own.left[1][s] = below[s];
            own.right[s] = b[s];
        }
        for (int e = 0; e < 2; ++e) own.sums[0][e] = lower[e], own.sums[1][e] = upper[e];
        collective("mma.sync", all_lanes, &own, &combine, {__FILE__, __LINE__});
        for (int e = 0; e < 2; ++e) lower[e] = own.sums[0][e], upper[e] = own.sums[1][e];
    }

  private:
    struct Lane {
        double left[2][STEPS], right[STEPS], sums[2][2];
    };

    static void combine(Group& group) {
        const auto lane_at = [&](int lane) -> Lane& { return *static_cast<Lane*>(group.operand[lane]); };
        for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4, t = lane % 4;
            for (int half = 0; half < 2; ++half)
                for (int e = 0; e < 2; ++e)
                    for (int s = 0; s < STEPS; ++s)
                        for (int k = 0; k < 4; ++k) {
                            double& sum = lane_at(lane).sums[half][e];
                            sum = fma(lane_at(g * 4 + k).left[half][s], lane_at((2 * t + e) * 4 + k).right[s], sum);
                        }
        }
    }
};

// cvt.rna.tf32.f32: to nearest, ties away from zero; the bits below are 0.
inline unsigned to_tf32(float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace simt::ampere
