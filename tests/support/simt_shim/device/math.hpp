// Mathematics of the device language on compiler builtins, without <math.h>: the same text for every compiler, no
// conflicts with overloads of a C++ library, and next to no compile time. Contraction (a * b + c into one rounding) is
// off on the CPU and on in NVRTC: results agree within rounding, not bit for bit, unless the source says fma.
#pragma once

#include "language.hpp"

#define SIMT_UNARY(name)                                                 \
    inline double name(double x) { return __builtin_##name(x); }         \
    inline float name(float x) { return __builtin_##name##f(x); }        \
    inline float name##f(float x) { return __builtin_##name##f(x); }
#define SIMT_BINARY(name)                                                               \
    inline double name(double x, double y) { return __builtin_##name(x, y); }           \
    inline float name(float x, float y) { return __builtin_##name##f(x, y); }           \
    inline float name##f(float x, float y) { return __builtin_##name##f(x, y); }

SIMT_UNARY(fabs)
SIMT_UNARY(sqrt)
SIMT_UNARY(exp)
SIMT_UNARY(exp2)
SIMT_UNARY(log)
SIMT_UNARY(log2)
SIMT_UNARY(sin)
SIMT_UNARY(cos)
SIMT_UNARY(floor)
SIMT_UNARY(ceil)
SIMT_UNARY(trunc)
SIMT_UNARY(rint)
SIMT_UNARY(nearbyint)
SIMT_UNARY(round)
SIMT_BINARY(fmin)
SIMT_BINARY(fmax)
SIMT_BINARY(hypot)
SIMT_BINARY(copysign)
SIMT_BINARY(fmod)
SIMT_BINARY(pow)

#undef SIMT_UNARY
#undef SIMT_BINARY

inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline double ldexp(double x, int exponent) { return __builtin_ldexp(x, exponent); }
inline float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
inline float ldexpf(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
inline double scalbn(double x, int exponent) { return __builtin_scalbn(x, exponent); }
inline float scalbnf(float x, int exponent) { return __builtin_scalbnf(x, exponent); }
inline double frexp(double x, int* exponent) { return __builtin_frexp(x, exponent); }
inline float frexpf(float x, int* exponent) { return __builtin_frexpf(x, exponent); }
inline int ilogbf(float x) { return __builtin_ilogbf(x); }
inline int ilogb(double x) { return __builtin_ilogb(x); }
inline double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }

template <class T>
inline bool isnan(T x) {
    return __builtin_isnan(x);
}
template <class T>
inline bool isinf(T x) {
    return __builtin_isinf(x);
}
template <class T>
inline bool isfinite(T x) {
    return __builtin_isfinite(x);
}
template <class T>
inline bool signbit(T x) {
    return __builtin_signbit(x);
}

// The rounding-mode intrinsics that are never contracted; only round to nearest is offered.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __fma_rn(double x, double y, double z) { return __builtin_fma(x, y, z); }
inline double __dsqrt_rn(double x) { return __builtin_sqrt(x); }

#define SIMT_MIN_MAX(type)                                              \
    inline type min(type a, type b) { return b < a ? b : a; }           \
    inline type max(type a, type b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }

inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }

namespace simt {

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

}  // namespace simt

inline int __float_as_int(float x) { return simt::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return simt::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return simt::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return simt::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return simt::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return simt::bits_as<double>(x); }
inline int __double2hiint(double x) { return int(simt::bits_as<unsigned long long>(x) >> 32); }
inline int __double2loint(double x) { return int(simt::bits_as<unsigned long long>(x)); }
inline double __hiloint2double(int high, int low) {
    return simt::bits_as<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}
inline int __float2int_rn(float x) { return int(__builtin_rintf(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }
inline int __double2int_rn(double x) { return (int)__builtin_rint(x); }
inline long long __double2ll_rn(double x) { return (long long)__builtin_rint(x); }

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
// The bytes of y x that the digits of the selector name; the sign-replicating mode of bit 3 is not there.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255u) << 8 * i;
    return result;
}
// The dot product of four bytes with signs, and c.
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += int((signed char)(a >> 8 * i & 255)) * int((signed char)(b >> 8 * i & 255));
    return c;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
    return reversed;
}
