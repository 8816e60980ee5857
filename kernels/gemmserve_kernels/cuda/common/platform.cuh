// One spelling of the device language for three compilers: NVRTC (CUDA), HIPRTC (ROCm) and the C++ compiler behind the
// CPU shim of the tests. None of them brings headers along, so nothing here includes any.
#pragma once

#if defined(GEMM_SHIM)
// The shim's header stands before this text and defines the device keywords, threadIdx, __syncthreads, the math
// functions and GEMM_DYNAMIC_SHARED.
#elif defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define GEMM_CUDA 1
#define GEMM_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#elif defined(__HIPCC_RTC__) || defined(__HIPCC__)
#define GEMM_HIP 1
// The second argument of __launch_bounds__ counts waves per SIMD unit here, not blocks: leave it to the compiler.
#undef GEMM_MIN_BLOCKS
#define GEMM_MIN_BLOCKS 1
#define GEMM_DYNAMIC_SHARED(name) extern __shared__ __attribute__((aligned(16))) unsigned char name[]
#else
#error "compile with NVRTC, HIPRTC or the CPU shim"
#endif

#define GEMM_DEVICE __device__ __forceinline__

typedef long long Long;

// Kernels see warps of 32 lanes. Where a device's have 64, each half is one: what its lanes ask of each other stays in it.
#if defined(GEMM_HIP)
#define __shfl_xor_sync(mask, value, step) __shfl_xor(value, step, 32)
#define __any_sync(mask, predicate) (half_ballot(predicate) != 0)
#define __all_sync(mask, predicate) (half_ballot(!(predicate)) == 0)
#define __ballot_sync(mask, predicate) half_ballot(predicate)
GEMM_DEVICE unsigned half_ballot(int predicate) {
    return static_cast<unsigned>(__ballot(predicate) >> (__lane_id() & 32u));
}
#elif defined(GEMM_SHIM)
#if SIMT_WARP_SIZE == 64
#define __shfl_xor_sync(mask, value, step) __shfl_xor_sync(half_wave(), value, step)
#define __any_sync(mask, predicate) __any_sync(half_wave(), predicate)
#define __all_sync(mask, predicate) __all_sync(half_wave(), predicate)
#define __ballot_sync(mask, predicate) static_cast<unsigned>(__ballot_sync(half_wave(), predicate) >> (threadIdx.x & 32u))
#define __syncwarp() __syncwarp(half_wave())
GEMM_DEVICE unsigned long long half_wave() { return 0xffffffffull << (threadIdx.x & 32u); }
#endif
#endif

// float16 as its bits: the run-time compilers have no __half without headers.
struct Half {
    unsigned short bits;
};

#if defined(GEMM_CUDA)

GEMM_DEVICE float half_to_float(Half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

GEMM_DEVICE Half float_to_half(float x) {
    Half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

#if __CUDA_ARCH__ >= 800
#define GEMM_LARGER 1
// The larger and the smaller of two, NaN where one is, in one instruction (PTX ISA, max and min).
GEMM_DEVICE float larger(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

GEMM_DEVICE float smaller(float x, float y) {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
#endif

#elif defined(GEMM_HIP)

GEMM_DEVICE float half_to_float(Half x) { return static_cast<float>(__builtin_bit_cast(_Float16, x.bits)); }

GEMM_DEVICE Half float_to_half(float x) {
    return Half{__builtin_bit_cast(unsigned short, static_cast<_Float16>(x))};
}

#else

// In software, as the C++ compilers that run the shim do not all have _Float16. Round to nearest, ties to even
// (IEEE 754-2019, 4.3.1); subnormals are kept.
GEMM_DEVICE float half_to_float(Half x) {
    const unsigned sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, fraction = x.bits & 1023u;
    if (exponent == 0) {
        const float value = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -value : value;
    }
    const unsigned word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    return __builtin_bit_cast(float, word);
}

GEMM_DEVICE Half float_to_half(float x) {
    const unsigned word = __builtin_bit_cast(unsigned, x), sign = word >> 16 & 0x8000u, magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return Half{static_cast<unsigned short>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return Half{static_cast<unsigned short>(sign | 0x7c00u)};  // 65520 and above
    if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 puts the ulp of a float at 2^-24
        const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
        return Half{static_cast<unsigned short>(sign | (__builtin_bit_cast(unsigned, shifted) - 0x3f000000u))};
    }
    const unsigned rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23);
    return Half{static_cast<unsigned short>(sign | rounded >> 13)};
}

#endif

// Overloads by width, so that templates need not choose between f and no f.
GEMM_DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
GEMM_DEVICE double multiply_add(double a, double b, double c) { return fma(a, b, c); }
GEMM_DEVICE float magnitude_of(float re, float im) { return hypotf(re, im); }
GEMM_DEVICE double magnitude_of(double re, double im) { return hypot(re, im); }
// x x + y y, not contracted: the same for y and x.
GEMM_DEVICE float sum_of_squares(float x, float y) {
#if defined(GEMM_CUDA)
    return __fadd_rn(__fmul_rn(x, x), __fmul_rn(y, y));
#else
#if defined(GEMM_HIP)
#pragma clang fp contract(off)
#endif
    return x * x + y * y;
#endif
}
GEMM_DEVICE double sum_of_squares(double x, double y) {
#if defined(GEMM_CUDA)
    return __dadd_rn(__dmul_rn(x, x), __dmul_rn(y, y));
#else
#if defined(GEMM_HIP)
#pragma clang fp contract(off)
#endif
    return x * x + y * y;
#endif
}
GEMM_DEVICE float magnitude_of(float x) { return fabsf(x); }
GEMM_DEVICE double magnitude_of(double x) { return fabs(x); }
