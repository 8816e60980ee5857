// Groups of small matrices from global to shared memory and back, neighbouring threads at neighbouring addresses.
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "../common/numbers/types.cuh"
#include "params.cuh"

// N elements from global to shared memory. From sm_80 on they do not pass through registers and arrive later
// (cp.async takes 4, 8 or 16 bytes); elsewhere the copy is done when the statement is.
template <class T, int N>
GEMM_DEVICE void copy_in(T* shared, const T* global) {
#if defined(GEMM_ASYNC_COPY)
    constexpr int BYTES = static_cast<int>(sizeof(T)) * N;
    if constexpr (BYTES >= 4) {
        copy_async<BYTES>(shared, global);
        return;
    }
#endif
    *reinterpret_cast<Vector<T, N>*>(shared) = *reinterpret_cast<const Vector<T, N>*>(global);
}

// How an operand lies: SLOW lines of FAST elements in global memory; in shared memory a line every LEADING elements and
// a matrix every MATRIX elements. VECTOR elements move at once.
//
// packed: matrices and their lines follow each other without gaps, in the batch's order. image: packed, and the same in
// shared memory, so that vectors may span lines and matrices (odd extents).
template <int SLOW_, int FAST_, int LEADING_, int MATRIX_, int VECTOR_, bool PACKED_, bool IMAGE_>
struct OperandLayout {
    static constexpr int SLOW = SLOW_, FAST = FAST_, LEADING = LEADING_, MATRIX = MATRIX_, VECTOR = VECTOR_;
    static constexpr int SIZE = SLOW * FAST;
    static constexpr bool PACKED = PACKED_, IMAGE = IMAGE_;
    static_assert(!IMAGE || (PACKED && LEADING == FAST && MATRIX == SIZE), "an image has no gaps");
    static_assert(IMAGE || FAST % VECTOR == 0, "a vector must not cross a line's end");
    static_assert(LEADING >= FAST && MATRIX >= (SLOW - 1) * LEADING + FAST, "lines must not overlap");
};

// Copies the first `count` of GROUP matrices from number `first` of the batch on.
template <class Layout, int GROUP, int THREADS, class Stored>
GEMM_DEVICE void copy_group(
    Stored* shared, const Stored* global, const MatrixParams& matrix, Long slow_stride, Long fast_stride,
    const SmallParams& params, Long first, int count, int thread) {
    constexpr int VECTOR = Layout::VECTOR;
    if constexpr (Layout::IMAGE) {
        static_assert(GROUP * Layout::SIZE % VECTOR == 0, "a group must end with a vector");
        constexpr int CHUNKS = GROUP * Layout::SIZE / VECTOR;
        global += first * Layout::SIZE;
        if (count == GROUP) {
#pragma unroll 8
            for (int chunk = thread; chunk < CHUNKS; chunk += THREADS) {
                copy_in<Stored, VECTOR>(shared + chunk * VECTOR, global + chunk * VECTOR);
            }
            return;
        }
        const int total = count * Layout::SIZE;
        for (int chunk = thread; chunk < CHUNKS; chunk += THREADS) {
            const int at = chunk * VECTOR;
            if (at + VECTOR <= total) {
                copy_in<Stored, VECTOR>(shared + at, global + at);
            } else {
                for (int e = at; e < total; ++e) shared[e] = global[e];
            }
        }
    } else {
        constexpr int PER_LINE = Layout::FAST / VECTOR, PER_MATRIX = PER_LINE * Layout::SLOW;
        constexpr int CHUNKS = GROUP * PER_MATRIX;
        if constexpr (Layout::PACKED) global += first * Layout::SIZE;
        // Where each pass over the lines moves all threads by the same distance, addresses are one base and constants.
        constexpr int LINES = THREADS % PER_LINE == 0 ? THREADS / PER_LINE : 1;
        constexpr bool REGULAR = THREADS % PER_LINE == 0 && (Layout::SLOW % LINES == 0 || LINES % Layout::SLOW == 0);
        if constexpr (Layout::PACKED && REGULAR) {
            if (count == GROUP) {
                const int line = thread / PER_LINE, number = line / Layout::SLOW;
                Stored* const to = shared + number * Layout::MATRIX + (line - number * Layout::SLOW) * Layout::LEADING +
                                   thread % PER_LINE * VECTOR;
                const Stored* const from = global + thread * VECTOR;
                constexpr int PASSES = (CHUNKS + THREADS - 1) / THREADS;
#pragma unroll
                for (int i = 0; i < PASSES; ++i) {
                    constexpr int SLOW = Layout::SLOW;
                    const int step = SLOW % LINES == 0 ? i * LINES / SLOW * Layout::MATRIX + i * LINES % SLOW * Layout::LEADING
                                                       : i * (LINES / SLOW) * Layout::MATRIX;
                    if (CHUNKS % THREADS == 0 || i < PASSES - 1 || i * THREADS + thread < CHUNKS) {
                        copy_in<Stored, VECTOR>(to + step, from + i * (THREADS * VECTOR));
                    }
                }
                return;
            }
        }
#pragma unroll 4
        for (int chunk = thread; chunk < CHUNKS; chunk += THREADS) {
            const int line = chunk / PER_LINE, fast = chunk % PER_LINE * VECTOR;
            const int number = line / Layout::SLOW, slow = line % Layout::SLOW;
            if (number >= count) break;
            Stored* to = shared + number * Layout::MATRIX + slow * Layout::LEADING + fast;
            if constexpr (Layout::PACKED) {
                copy_in<Stored, VECTOR>(to, global + chunk * VECTOR);
            } else {
                const Long offset = matrix_offset(first + number, params, matrix.batch_stride);
                copy_in<Stored, VECTOR>(to, global + offset + slow * slow_stride + fast * fast_stride);
            }
        }
    }
}

// Writes `total` elements of results that follow each other without gaps.
template <int VECTOR, int CAPACITY, int THREADS, class Stored>
GEMM_DEVICE void copy_out(Stored* global, const Stored* shared, int total, int thread) {
    static_assert(CAPACITY % VECTOR == 0, "a group must end with a vector");
#pragma unroll 4
    for (int chunk = thread; chunk < CAPACITY / VECTOR; chunk += THREADS) {
        const int at = chunk * VECTOR;
        if (at + VECTOR <= total) {
            using Piece = Vector<Stored, VECTOR>;
            *reinterpret_cast<Piece*>(global + at) = *reinterpret_cast<const Piece*>(shared + at);
        } else {
            for (int e = at; e < total; ++e) global[e] = shared[e];
        }
    }
}
