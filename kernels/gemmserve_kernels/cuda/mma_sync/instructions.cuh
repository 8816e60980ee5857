// The instructions of sm_80 that CUDA C++ has no word for without headers: asynchronous copies, matrix multiply-add.
// On the CPU shim (GEMM_SHIM) the same names come from the header that its users put before this text.
#pragma once

#include "../common/platform.cuh"

#if defined(GEMM_CUDA)

// Copies `bytes` (0 .. BYTES) from global to shared memory and writes zeros up to BYTES.
template <int BYTES>
GEMM_DEVICE void copy_async(void* shared, const void* global, int bytes) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    if constexpr (BYTES == 16) {  // .cg leaves the L1 cache alone
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES), "r"(bytes)
                     : "memory");
    }
}

GEMM_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups of this thread's copies are under way.
template <int PENDING>
GEMM_DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// threadIdx.x and blockIdx.x, read when asked: the compiler keeps no registers for them, nor for what follows from them.
GEMM_DEVICE int thread_again() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
GEMM_DEVICE unsigned block_again() {
    unsigned x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

// d = a b + c for one warp: a is 16 x K, b is K x 8, d and c are 16 x 8. With g = lane / 4 and t = lane % 4, d holds
// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1); a TF32 holds (g, t), (g + 8, t), and for K = 8 (g, t + 4),
// (g + 8, t + 4); b TF32 (t, g), (t + 4, g) (PTX ISA, matrix fragments for mma.m16n8k4, k8, k16).
template <int K>
struct MultiplyTf32;

template <>
struct MultiplyTf32<8> {
    static constexpr int A = 4, B = 2;
    static GEMM_DEVICE void run(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
              "f"(c[3]));
    }
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

// Each register holds two float16 that are neighbours in k: a has (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8).
struct MultiplyFp16 {
    static constexpr int A = 4, B = 2;
    static GEMM_DEVICE void run(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
              "f"(c[3]));
    }
};

#else

// The CPU shim: a copy is done at once, and a product by the lanes telling each other what they hold.

template <int BYTES>
GEMM_DEVICE void copy_async(void* shared, const void* global, int bytes) {
    const auto* from = static_cast<const unsigned char*>(global);
    for (int i = 0; i < BYTES; ++i) static_cast<unsigned char*>(shared)[i] = i < bytes ? from[i] : 0;
}
GEMM_DEVICE void copy_commit() {}
template <int PENDING>
GEMM_DEVICE void copy_wait() {}
GEMM_DEVICE int thread_again() { return static_cast<int>(threadIdx.x); }
GEMM_DEVICE unsigned block_again() { return blockIdx.x; }

// Towards zero, as the tensor core cuts its sums.
GEMM_DEVICE float cut(double x) {
    const float nearest = static_cast<float>(x);
    const double magnitude = x < 0 ? -x : x, found = nearest < 0 ? -static_cast<double>(nearest) : nearest;
    if (!(found > magnitude) || nearest - nearest != 0.0f) return nearest;
    return __builtin_bit_cast(float, __builtin_bit_cast(unsigned, nearest) - 1u);
}
GEMM_DEVICE double tf32_value(unsigned bits) { return __builtin_bit_cast(float, bits & 0xffffe000u); }
GEMM_DEVICE double fp16_value(unsigned bits, int half) {
    return half_to_float(Half{static_cast<unsigned short>(bits >> (16 * half))});
}

// VALUES numbers in a register, the registers of k after those of the rows.
template <int A_, int B_, int VALUES>
struct ShimMultiply {
    static constexpr int A = A_, B = B_;
    static GEMM_DEVICE double value(unsigned bits, int v) { return VALUES == 2 ? fp16_value(bits, v) : tf32_value(bits); }
    static GEMM_DEVICE void run(float (&d)[4], const unsigned (&a)[A], const unsigned (&b)[B], const float (&c)[4]) {
        __shared__ unsigned held[32][32][A_ + B_];
        const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
        auto& warp = held[threadIdx.x / 32];
        for (int i = 0; i < A; ++i) warp[lane][i] = a[i];
        for (int i = 0; i < B; ++i) warp[lane][A + i] = b[i];
        __syncwarp();
        float sums[4];
        for (int e = 0; e < 4; ++e) {
            double sum = static_cast<double>(c[e]);
            for (int h = 0; h < B; ++h)
                for (int lane_k = 0; lane_k < 4; ++lane_k)
                    for (int v = 0; v < VALUES; ++v)
                        sum += value(warp[g * 4 + lane_k][2 * h + e / 2], v) *
                               value(warp[(2 * t + e % 2) * 4 + lane_k][A + h], v);
            sums[e] = cut(sum);
        }
        __syncwarp();
        for (int e = 0; e < 4; ++e) d[e] = sums[e];
    }
};
template <int K>
struct MultiplyTf32 : ShimMultiply<K / 2, K / 4, 1> {};
struct MultiplyFp16 : ShimMultiply<4, 2, 2> {};

#endif
