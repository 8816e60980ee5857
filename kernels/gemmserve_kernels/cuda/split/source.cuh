// From an operand of any strides to shared memory, 16 bytes at a time.
#pragma once

#include "element.cuh"

constexpr int WIDTH = COMPLEX ? 2 : 4;  // elements of a piece
constexpr int PIECES = RUN / WIDTH;     // of a run

// Four floats as they are read at once: two complex or four real elements.
struct alignas(16) Piece {
    float at[4];
};

// The larger magnitudes, float by float; NaN counts as nothing here (it shows in the norm).
GEMM_DEVICE void raise(Piece& largest, const Piece& piece) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest.at[i] = fmaxf(largest.at[i], fabsf(piece.at[i]));
}

// Where an operand's elements are.
struct Source {
    const float* re;
    const float* im;

    GEMM_DEVICE Source(const MatrixParams& matrix, Long offset) {
        constexpr int FLOATS = COMPLEX && !PLANAR ? 2 : 1;
        re = static_cast<const float*>(matrix.re) + offset * FLOATS;
        im = static_cast<const float*>(matrix.im) + offset * FLOATS;
    }

    // WIDTH elements from `offset` on, `stride` apart, of which `count` exist; the others are 0. VECTOR: the host found
    // them next to each other and aligned.
    template <bool VECTOR>
    GEMM_DEVICE Piece load(Long offset, Long stride, Long count) const {
        Piece piece = {};
        if constexpr (VECTOR) {
            if (count >= WIDTH) {
                if constexpr (COMPLEX && PLANAR) {
                    const auto x = *reinterpret_cast<const Vector<float, 2>*>(re + offset);
                    const auto y = *reinterpret_cast<const Vector<float, 2>*>(im + offset);
                    return {{x.at[0], y.at[0], x.at[1], y.at[1]}};
                } else {
                    const auto x = *reinterpret_cast<const Vector<float, 4>*>(re + (COMPLEX ? 2 : 1) * offset);
                    return {{x.at[0], x.at[1], x.at[2], x.at[3]}};
                }
            }
        }
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            if (e >= count) break;
            const Long at = offset + e * stride;
            if constexpr (!COMPLEX) {
                piece.at[e] = re[at];
            } else if constexpr (PLANAR) {
                piece.at[2 * e] = re[at];
                piece.at[2 * e + 1] = im[at];
            } else {
                const auto x = *reinterpret_cast<const Complex<float>*>(re + 2 * at);
                piece.at[2 * e] = x.re;
                piece.at[2 * e + 1] = x.im;
            }
        }
        return piece;
    }
};

// Whether pieces can go to shared memory without passing through registers.
#if defined(GEMM_CUDA)
template <bool VECTOR>
constexpr bool ASYNC = VECTOR && !(COMPLEX && PLANAR);
// `bytes` of 16; the rest becomes 0.
GEMM_DEVICE void copy_async(Piece* to, const float* from, int bytes) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
#if GEMM_STREAM
    // Read once: it shall not push the planes, which are read next, out of L2.
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(address), "l"(from),
                 "r"(bytes), "l"(policy)
                 : "memory");
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
#endif
}
GEMM_DEVICE void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
GEMM_DEVICE void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#else
template <bool VECTOR>
constexpr bool ASYNC = false;
GEMM_DEVICE void copy_async(Piece*, const float*, int) {}
GEMM_DEVICE void commit_async() {}
template <int PENDING>
GEMM_DEVICE void wait_async() {}
#endif

// WIDTH elements into shared memory, some time before the wait that covers it.
template <bool VECTOR>
GEMM_DEVICE void fetch(Piece* to, const Source& source, Long offset, Long stride, Long count) {
    if constexpr (ASYNC<VECTOR>) {
        const int exist = count >= WIDTH ? WIDTH : count > 0 ? static_cast<int>(count) : 0;
        copy_async(to, exist ? source.re + (COMPLEX ? 2 : 1) * offset : source.re, exist * (16 / WIDTH));
    } else {
        *to = source.load<VECTOR>(offset, stride, count);
    }
}
