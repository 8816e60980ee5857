// Elements of operands in double precision.
#pragma once

#include "../common/memory/lanes.cuh"
#include "../common/numbers/bits.cuh"
#include "../common/numbers/types.cuh"
#include "../common/raster.cuh"
#include "params.cuh"

using Stored = GEMM_TYPE_X;   // double or Complex<double>
using Acc = GEMM_TYPE_ACC;
constexpr bool PLANAR = GEMM_PLANAR, COMPLEX = is_complex<Acc>;
constexpr int PARTS = COMPLEX ? 2 : 1;

GEMM_DEVICE Acc read(const MatrixParams& matrix, Long offset) {
    const Stored first = static_cast<const Stored*>(matrix.re)[offset];
    if constexpr (PLANAR) {
        return widen<Acc>(first, static_cast<const Stored*>(matrix.im)[offset]);
    } else {
        return widen<Acc>(first);
    }
}

template <class T>
GEMM_DEVICE T conjugated(T x, int conjugate) {
    if constexpr (is_complex<T>) {
        if (conjugate) x.im = -x.im;
    }
    return x;
}
