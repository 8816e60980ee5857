// Floating-point numbers as their bits, for all three compilers.
#pragma once

#include "../platform.cuh"

GEMM_DEVICE unsigned bits_of(float x) { return __builtin_bit_cast(unsigned, x); }
GEMM_DEVICE float float_of(unsigned bits) { return __builtin_bit_cast(float, bits); }
GEMM_DEVICE Long bits_of(double x) { return __builtin_bit_cast(Long, x); }
GEMM_DEVICE double double_of(Long bits) { return __builtin_bit_cast(double, bits); }

// -126 <= exponent <= 127.
GEMM_DEVICE float power_of_two(int exponent) { return float_of(static_cast<unsigned>(exponent + 127) << 23); }
