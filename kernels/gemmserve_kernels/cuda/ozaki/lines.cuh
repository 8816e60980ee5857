// Elements of an operand as doubles.
#pragma once

#include "../common/raster.cuh"
#include "../common/numbers/bits.cuh"
#include "../common/numbers/types.cuh"
#include "params.cuh"

using Stored = GEMM_TYPE;
constexpr bool PLANAR = GEMM_PLANAR;
constexpr bool COMPLEX = GEMM_COMPLEX;
constexpr bool ALONG_K = GEMM_ALONG_K;
constexpr int PARTS = COMPLEX ? 2 : 1;

struct Element {
    double part[PARTS];
};

GEMM_DEVICE Element read(const MatrixParams& matrix, Long offset) {
    Element x;
    const Stored first = static_cast<const Stored*>(matrix.re)[offset];
    x.part[0] = real_part(first);
    if constexpr (COMPLEX) {
        x.part[PARTS - 1] = PLANAR ? real_part(static_cast<const Stored*>(matrix.im)[offset]) : imaginary_part(first);
    }
    return x;
}
GEMM_DEVICE Element read(const LineParams& line, Long offset) { return read(line.x, offset); }

// 2^e, -1022 <= e <= 1023.
GEMM_DEVICE double power(int e) { return double_of(static_cast<Long>(e + 1023) << 52); }
