// wgmma (PTX ISA 9.7.15): products of matrices in shared memory by four warps, asynchronous. Between products and reads of
// their sums stand fence, commit and wait.
#pragma once

#include "hopper.cuh"

typedef unsigned long long Descriptor;  // of a matrix in shared memory: PTX ISA 9.7.15.5.1

#if defined(GEMM_CUDA)

#define GEMM_8(constraint, d, i) \
    constraint(d[i]), constraint(d[i + 1]), constraint(d[i + 2]), constraint(d[i + 3]), constraint(d[i + 4]), \
        constraint(d[i + 5]), constraint(d[i + 6]), constraint(d[i + 7])
#define GEMM_32(constraint, d, i) \
    GEMM_8(constraint, d, i), GEMM_8(constraint, d, i + 8), GEMM_8(constraint, d, i + 16), GEMM_8(constraint, d, i + 24)
#define GEMM_64(constraint, d, i) GEMM_32(constraint, d, i), GEMM_32(constraint, d, i + 32)
#define GEMM_128(constraint, d, i) GEMM_64(constraint, d, i), GEMM_64(constraint, d, i + 64)
#define GEMM_REGISTERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GEMM_REGISTERS_64 \
    GEMM_REGISTERS_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GEMM_REGISTERS_128 \
    GEMM_REGISTERS_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// m64 x N x k16 of float16 or bfloat16, COUNT float32 sums a thread: d += SIGN * a b, or d = SIGN * a b where `keep` is 0.
// TRANS: the operand lies along m or n, not along k.
template <int N>
struct Instruction;

// What follows REGISTERS are the numbers of the operands after the sums.
#define GEMM_WGMMA(N, TYPE, REGISTERS, SUMS, A, B, KEEP, SIGN_AT, TRANS_A_AT, TRANS_B_AT) \
    asm volatile("{ .reg .pred keep; setp.ne.b32 keep, %" #KEEP ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32." TYPE "." TYPE " {" REGISTERS "}, %" #A ", %" #B ", keep, %" #SIGN_AT ", 1, %" #TRANS_A_AT \
                 ", %" #TRANS_B_AT "; }" \
                 : SUMS \
                 : "l"(a), "l"(b), "r"(keep), "n"(SIGN), "n"(TRANS_A), "n"(TRANS_B))
#define GEMM_INSTRUCTION(N, COUNT, ...) \
    template <> \
    struct Instruction<N> { \
        template <int SIGN, int TRANS_A, int TRANS_B, bool BFLOAT> \
        static GEMM_DEVICE void multiply(float (&d)[COUNT], Descriptor a, Descriptor b, int keep) { \
            if constexpr (BFLOAT) GEMM_WGMMA(N, "bf16", GEMM_REGISTERS_##COUNT, GEMM_##COUNT("+f", d, 0), __VA_ARGS__); \
            else GEMM_WGMMA(N, "f16", GEMM_REGISTERS_##COUNT, GEMM_##COUNT("+f", d, 0), __VA_ARGS__); \
        } \
    }
GEMM_INSTRUCTION(64, 32, 32, 33, 34, 35, 36, 37);
GEMM_INSTRUCTION(128, 64, 64, 65, 66, 67, 68, 69);
GEMM_INSTRUCTION(256, 128, 128, 129, 130, 131, 132, 133);

// The same of 64 x 64 with the first operand from registers: a lane has two neighbours along k of row lane / 4 of its
// warp's sixteen, of the eighth row below, and of both eight steps of k further on.
template <int SIGN>
GEMM_DEVICE void multiply_held(float (&d)[32], const unsigned (&a)[4], Descriptor b, int keep) {
    asm volatile("{ .reg .pred keep; setp.ne.b32 keep, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 GEMM_REGISTERS_32 "}, {%32, %33, %34, %35}, %36, keep, %38, 1, 0; }"
                 : GEMM_32("+f", d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(SIGN));
}

// d += a b of bytes without a sign: 64 x 32 by 32 x 256.
GEMM_DEVICE void multiply_bytes(unsigned (&d)[128], Descriptor a, Descriptor b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k32.s32.u8.u8 {" GEMM_REGISTERS_128 "}, %128, %129, 1;"
                 : GEMM_128("+r", d, 0)
                 : "l"(a), "l"(b));
}

GEMM_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
GEMM_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most PENDING groups are on their way.
template <int PENDING>
GEMM_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads of accumulators over the wait before it.
template <int COUNT>
GEMM_DEVICE void pin(float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

#elif defined(GEMM_SHIM)
using namespace simt::hopper;
#endif

// An operand along k: rows of BYTES bytes next to each other, swizzled over that span; eight rows are one group, GROUP bytes
// from one to the next.
template <int BYTES, int GROUP = BYTES * 8>
GEMM_DEVICE Descriptor describe(Address address) {
    static_assert(BYTES == 32 || BYTES == 64 || BYTES == 128, "a row is one swizzle span");
    constexpr Descriptor SWIZZLE = BYTES == 128 ? 1 : BYTES == 64 ? 2 : 3;
    constexpr Descriptor GROUP_STRIDE = GROUP / 16;
    return static_cast<Descriptor>((address & 0x3ffff) >> 4) | (1ull << 16) | (GROUP_STRIDE << 32) | (SWIZZLE << 62);
}

// An operand along m or n (PTX ISA 9.7.15.5.1.2: MN-major): for every step of k 64 neighbours in 128 bytes, so that eight
// steps are one swizzled group and DEPTH steps one column; the next 64 neighbours are the next column.
template <int DEPTH>
GEMM_DEVICE Descriptor describe_across(Address address) {
    static_assert(DEPTH % 16 == 0, "an instruction reads 16 steps of k");
    constexpr Descriptor SWIZZLE = 1, COLUMN_STRIDE = DEPTH * 128 / 16, GROUP_STRIDE = 8 * 128 / 16;
    return static_cast<Descriptor>((address & 0x3ffff) >> 4) | (COLUMN_STRIDE << 16) | (GROUP_STRIDE << 32) |
           (SWIZZLE << 62);
}
