// Elements of matrices in memory, read and written as what they are computed in.
#pragma once

#include "../params.cuh"
#include "../numbers/types.cuh"

// An element, of planar complex data one of either plane, `offset` elements from the first one.
template <class Stored, class Acc, bool PLANAR>
GEMM_DEVICE Acc read_element(const MatrixParams& matrix, Long offset) {
    if constexpr (PLANAR) {
        return widen<Acc>(static_cast<const Stored*>(matrix.re)[offset], static_cast<const Stored*>(matrix.im)[offset]);
    } else {
        return widen<Acc>(static_cast<const Stored*>(matrix.re)[offset]);
    }
}

template <class Stored, bool PLANAR, class Acc>
GEMM_DEVICE void write_element(const MatrixParams& matrix, Long offset, Acc value) {
    if constexpr (PLANAR) {
        static_cast<Stored*>(matrix.re)[offset] = static_cast<Stored>(value.re);
        static_cast<Stored*>(matrix.im)[offset] = static_cast<Stored>(value.im);
    } else {
        static_cast<Stored*>(matrix.re)[offset] = Narrow<Stored>::from(value);
    }
}

// N neighbouring elements of one row, as one vector where the host found the result contiguous and aligned.
template <class Stored, bool PLANAR, bool AS_VECTOR, class Acc, int N>
GEMM_DEVICE void write_piece(const MatrixParams& matrix, Long offset, Long stride, const Acc (&values)[N], int count) {
    constexpr bool FITS = AS_VECTOR && sizeof(Stored) * N <= 16;
    Vector<Stored, N> re;
    Vector<Stored, PLANAR ? N : 1> im;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        if constexpr (PLANAR) {
            re.at[j] = static_cast<Stored>(values[j].re);
            im.at[j] = static_cast<Stored>(values[j].im);
        } else {
            re.at[j] = Narrow<Stored>::from(values[j]);
        }
    }
    Stored* to_re = static_cast<Stored*>(matrix.re) + offset;
    Stored* to_im = static_cast<Stored*>(matrix.im) + offset;
    if constexpr (FITS) {
        if (count >= N) {
            *reinterpret_cast<Vector<Stored, N>*>(to_re) = re;
            if constexpr (PLANAR) *reinterpret_cast<Vector<Stored, N>*>(to_im) = im;
            return;
        }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
        if (j < count) {
            to_re[j * stride] = re.at[j];
            if constexpr (PLANAR) to_im[j * stride] = im.at[j];
        }
    }
}
