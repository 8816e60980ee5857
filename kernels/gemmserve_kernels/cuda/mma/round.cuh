// float32 -> TF32 in four styles (those of models.ROUNDINGS, after CUTLASS's numeric_conversion.h), and the big and the
// small part of a float32. Bits: the lower 13 of a TF32 are not looked at by the tensor core.
#pragma once

#include "../common/numbers/bits.cuh"

enum Rounding { NEAREST, TOWARD_ZERO, HALF_ULP_TRUNCATE, HALF_ULP_TRUNCATE_FLUSH };

constexpr unsigned TF32_MASK = 0xffffe000u, TF32_HALF = 0x1000u, FLOAT_EXPONENT = 0x7f800000u;

// The sum's upper 19 bits are the TF32; a NaN may overflow into a number.
template <Rounding STYLE>
GEMM_DEVICE unsigned rounded(unsigned bits) {
    if constexpr (STYLE == NEAREST) return bits + (TF32_HALF - 1) + (bits >> 13 & 1u);
    if constexpr (STYLE == TOWARD_ZERO) return bits;
    if constexpr (STYLE == HALF_ULP_TRUNCATE) return bits + TF32_HALF;
    if constexpr (STYLE == HALF_ULP_TRUNCATE_FLUSH) return bits & FLOAT_EXPONENT ? bits + TF32_HALF : bits;
}

// The same with infinities and NaN kept, and a NaN still one when its lower bits are not looked at.
template <Rounding STYLE>
GEMM_DEVICE unsigned rounded_or_special(unsigned bits) {
    if constexpr (STYLE == TOWARD_ZERO) return bits;
    return (bits & FLOAT_EXPONENT) == FLOAT_EXPONENT ? bits : rounded<STYLE>(bits);
}

// PARTS = 1: x alone, by the style SMALL. PARTS = 2: x = big + small but for the rounding of small. Where x is not finite,
// neither is the TF32 of part 0; small is arbitrary.
//
// `mask` is TF32_MASK, but the compiler must not know it: it would leave out an AND before an instruction that does not
// look at these bits, and then bring the loaded registers into the instruction's order again for every instruction.
template <int PARTS, Rounding BIG, Rounding SMALL>
GEMM_DEVICE void split_tf32(unsigned x, unsigned mask, unsigned (&part)[PARTS]) {
    if constexpr (PARTS == 1) {
        part[0] = rounded_or_special<SMALL>(x) & mask;
    } else {
        part[0] = rounded_or_special<BIG>(x) & mask;
        part[1] = rounded<SMALL>(bits_of(float_of(x) - float_of(part[0])));
    }
}
