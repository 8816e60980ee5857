// The builtin vector types, with the sizes and alignments of the CUDA programming guide (table "Alignment
// requirements"), and dim3.
#pragma once

typedef unsigned long long ulonglong;
typedef long long longlong;
typedef unsigned char uchar;
typedef signed char schar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#define SIMT_VECTOR_TYPES(name, scalar, align2, align4)                             \
    struct name##1 {                                                                \
        scalar x;                                                                   \
    };                                                                              \
    struct alignas(align2) name##2 {                                                \
        scalar x, y;                                                                \
    };                                                                              \
    struct name##3 {                                                                \
        scalar x, y, z;                                                             \
    };                                                                              \
    struct alignas(align4) name##4 {                                                \
        scalar x, y, z, w;                                                          \
    };                                                                              \
    inline name##1 make_##name##1(scalar x) { return {x}; }                         \
    inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }            \
    inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; } \
    inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

SIMT_VECTOR_TYPES(char, schar, 2, 4)
SIMT_VECTOR_TYPES(uchar, uchar, 2, 4)
SIMT_VECTOR_TYPES(short, short, 4, 8)
SIMT_VECTOR_TYPES(ushort, ushort, 4, 8)
SIMT_VECTOR_TYPES(int, int, 8, 16)
SIMT_VECTOR_TYPES(uint, uint, 8, 16)
SIMT_VECTOR_TYPES(long, long, 16, 16)
SIMT_VECTOR_TYPES(ulong, ulong, 16, 16)
SIMT_VECTOR_TYPES(longlong, longlong, 16, 16)
SIMT_VECTOR_TYPES(ulonglong, ulonglong, 16, 16)
SIMT_VECTOR_TYPES(float, float, 8, 16)
SIMT_VECTOR_TYPES(double, double, 16, 16)

#undef SIMT_VECTOR_TYPES

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
