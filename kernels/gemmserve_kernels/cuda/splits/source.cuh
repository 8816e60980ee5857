// From an operand of any strides to shared memory, 16 bytes at a time.
#pragma once

#include "../common/ptx/again.cuh"
#include "../common/ptx/cp_async.cuh"
#include "place.cuh"

constexpr int WIDTH = COMPLEX ? 2 : 4;  // elements of a piece
constexpr int PIECES = RUN / WIDTH;     // of a run

// Four floats as they are read at once: two complex or four real elements.
struct alignas(16) Piece {
    float at[4];
};

// The larger magnitudes, float by float.
GEMM_DEVICE void raise(Piece& largest, const Piece& piece) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest.at[i] = larger_magnitude(largest.at[i], fabsf(piece.at[i]));
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

    GEMM_DEVICE void step(Long elements) {
        re += elements * (COMPLEX && !PLANAR ? 2 : 1);
        if constexpr (PLANAR) im += elements;
    }

    // WIDTH elements from `offset` on, `stride` apart, of which `count` exist; the others are 0. VECTOR: the host found
    // them next to each other and aligned.
    template <bool VECTOR>
    GEMM_DEVICE Piece load(Long offset, Long stride, int count) const {
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
// STREAM: read once, it shall not push the planes, which are read next, out of L2. PREFETCH: bytes that a miss brings to
// L2 at once, 0 for the device's choice.
#if GEMM_PREFETCH == 256
#define GEMM_PREFETCH_SIZE ".L2::256B"
#elif GEMM_PREFETCH == 128
#define GEMM_PREFETCH_SIZE ".L2::128B"
#else
#define GEMM_PREFETCH_SIZE ""
#endif
#if GEMM_STREAM
GEMM_DEVICE unsigned long long read_once() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
#define GEMM_COPY(...) "cp.async.cg.shared.global.L2::cache_hint" GEMM_PREFETCH_SIZE " " __VA_ARGS__ ", %3;"
#define GEMM_COPY_POLICY , "l"(read_once())
#else
#define GEMM_COPY(...) "cp.async.cg.shared.global" GEMM_PREFETCH_SIZE " " __VA_ARGS__ ";"
#define GEMM_COPY_POLICY
#endif
GEMM_DEVICE void copy_async(Piece* to, const float* from) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile(GEMM_COPY("[%0], [%1], %2") ::"r"(address), "l"(from), "n"(16) GEMM_COPY_POLICY : "memory");
}
// `bytes` of 16; the rest becomes 0.
GEMM_DEVICE void copy_async(Piece* to, const float* from, int bytes) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile(GEMM_COPY("[%0], [%1], 16, %2") ::"r"(address), "l"(from), "r"(bytes) GEMM_COPY_POLICY : "memory");
}
#elif defined(GEMM_SHIM)
template <bool VECTOR>
constexpr bool ASYNC = VECTOR && !(COMPLEX && PLANAR);
// At once, which is one of the moments that are allowed.
GEMM_DEVICE void copy_async(Piece* to, const float* from, int bytes) {
    *to = Piece{};
    for (int i = 0; i < bytes / 4; ++i) to->at[i] = from[i];
}
GEMM_DEVICE void copy_async(Piece* to, const float* from) { copy_async(to, from, 16); }
#else
template <bool VECTOR>
constexpr bool ASYNC = false;
GEMM_DEVICE void copy_async(Piece*, const float*) {}
GEMM_DEVICE void copy_async(Piece*, const float*, int) {}
#endif

// WIDTH elements into shared memory, some time before the wait that covers it.
template <bool VECTOR>
GEMM_DEVICE void fetch(Piece* to, const Source& source, Long offset, Long stride, int count) {
    if constexpr (ASYNC<VECTOR>) {
        const int exist = count >= WIDTH ? WIDTH : count > 0 ? count : 0;
        copy_async(to, exist ? source.re + (COMPLEX ? 2 : 1) * offset : source.re, exist * (16 / WIDTH));
    } else {
        *to = source.load<VECTOR>(offset, stride, count);
    }
}
