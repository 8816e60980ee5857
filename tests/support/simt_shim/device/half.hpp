// float16: __half and __half2 as cuda_fp16.h and hip_fp16.h name them, stored in 16 bits, every operation through
// float with one rounding to nearest even (what the hardware does for a single addition or product).
#pragma once

#include "math.hpp"

namespace simt {

#if defined(__FLT16_MANT_DIG__) && !defined(SIMT_SOFT_HALF)
inline float half_to_float(unsigned short bits) { return float(bits_as<_Float16>(bits)); }
inline unsigned short float_to_half(float x) { return bits_as<unsigned short>(_Float16(x)); }
#else
// IEEE 754 binary16 by hand, for compilers without _Float16 (GCC before 12 on x86-64).
inline float half_to_float(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_as<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // Bits moved into place are the value times 2^-112; subnormals come out right through the same product.
    return bits_as<float>(sign | bits_as<unsigned>(bits_as<float>(magnitude << 13) * 0x1p112f));
}
inline unsigned short float_to_half(float x) {
    const unsigned bits = bits_as<unsigned>(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (unsigned short)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal; adding 1/2 aligns its last bit with float's
        const float aligned = bits_as<float>(magnitude) + 0.5f;
        return (unsigned short)(sign | (bits_as<unsigned>(aligned) - 0x3f000000u));
    }
    const unsigned odd = magnitude >> 13 & 1u;
    return (unsigned short)(sign | (magnitude - 0x38000000u + 0xfffu + odd) >> 13);
}
#endif

}  // namespace simt

struct __half_raw {
    unsigned short x;
};

struct alignas(2) __half {
    unsigned short bits;

    __half() = default;
    __half(float x) : bits(simt::float_to_half(x)) {}
    __half(double x) : bits(simt::float_to_half(float(x))) {}
    __half(int x) : bits(simt::float_to_half(float(x))) {}
    __half(__half_raw raw) : bits(raw.x) {}
    operator float() const { return simt::half_to_float(bits); }
    operator __half_raw() const { return {bits}; }
    __half& operator+=(__half y) { return *this = __half(float(*this) + float(y)); }
    __half& operator-=(__half y) { return *this = __half(float(*this) - float(y)); }
    __half& operator*=(__half y) { return *this = __half(float(*this) * float(y)); }
    __half& operator/=(__half y) { return *this = __half(float(*this) / float(y)); }
};
typedef __half half;

inline __half operator+(__half x, __half y) { return x += y; }
inline __half operator-(__half x, __half y) { return x -= y; }
inline __half operator*(__half x, __half y) { return x *= y; }
inline __half operator/(__half x, __half y) { return x /= y; }
inline __half operator-(__half x) { return __half_raw{(unsigned short)(x.bits ^ 0x8000u)}; }

inline float __half2float(__half x) { return float(x); }
inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half __double2half(double x) { return __half(x); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
inline __half __hadd(__half x, __half y) { return x + y; }
inline __half __hsub(__half x, __half y) { return x - y; }
inline __half __hmul(__half x, __half y) { return x * y; }
inline bool __hisnan(__half x) { return (x.bits & 0x7fffu) > 0x7c00u; }

struct alignas(4) __half2 {
    __half x, y;
};
typedef __half2 half2;

inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
inline float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return float(v.x); }
inline float __high2float(__half2 v) { return float(v.y); }
