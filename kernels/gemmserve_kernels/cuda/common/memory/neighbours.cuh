// Neighbours along the fast axis of a matrix, read at once: what kernels bound by memory share.
#pragma once

#include "../params.cuh"
#include "../numbers/types.cuh"

// As they are stored; PLANAR: imaginary parts come from an array of their own.
template <class Stored, int VECTOR, bool PLANAR>
struct Neighbours {
    Vector<Stored, VECTOR> re, im;

    template <class Acc>
    GEMM_DEVICE Acc at(int v) const {
        if constexpr (PLANAR) {
            return widen<Acc>(re.at[v], im.at[v]);
        } else {
            return widen<Acc>(re.at[v]);
        }
    }

    // VECTOR of them from `offset` on, `stride` apart, of which the first `count` exist; the others are 0. The host found
    // more than one next to each other and aligned.
    static GEMM_DEVICE Neighbours read(const MatrixParams& matrix, Long offset, Long stride, Long count) {
        const Stored* const re = static_cast<const Stored*>(matrix.re) + offset;
        const Stored* const im = static_cast<const Stored*>(matrix.im) + offset;
        Neighbours x{};
        if (VECTOR > 1 && count >= VECTOR) {
            x.re = *reinterpret_cast<const Vector<Stored, VECTOR>*>(re);
            if constexpr (PLANAR) x.im = *reinterpret_cast<const Vector<Stored, VECTOR>*>(im);
        } else {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                if (v >= count) break;
                x.re.at[v] = re[v * stride];
                if constexpr (PLANAR) x.im.at[v] = im[v * stride];
            }
        }
        return x;
    }
};
