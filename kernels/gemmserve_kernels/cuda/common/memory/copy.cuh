// Blockwise copy: one operand's tile from global memory through registers into shared memory.
#pragma once

#include "layout.cuh"
#include "../params.cuh"

// Stored: element type in memory. Acc: element type in shared memory. The tile is EXTENT rows by DEPTH steps of k.
// VECTOR neighbouring elements are read at once, along k (ALONG_K) or along the rows; neighbouring threads follow the
// same direction, which the host takes to be the one of the smaller stride. The host grants VECTOR > 1 only where that
// stride is 1, the extent is a multiple of it and every address is aligned, so a vector is never cut.
//
// Padding by predication: past k, zeros are written (so 0 * NaN cannot arise: both operands are zero there). Past the
// last row the last one is read again: whatever comes out lies in rows that the epilogue never stores.
// PADDED: whether rows of the shared tile are a vector longer than they must be.
template <
    class Stored, class Acc, bool PLANAR, int EXTENT, int DEPTH, int THREADS, int VECTOR, bool ALONG_K, class Index,
    bool PADDED = ALONG_K>
class BlockCopy {
    static_assert((ALONG_K ? DEPTH : EXTENT) % VECTOR == 0, "a vector must not cross the tile's edge");
    static constexpr int VECTORS = EXTENT * DEPTH / VECTOR;
    static constexpr int COUNT = (VECTORS + THREADS - 1) / THREADS;
    static constexpr bool EVEN = VECTORS % THREADS == 0;
    static constexpr int FAST = (ALONG_K ? DEPTH : EXTENT) / VECTOR;
    using Piece = Vector<Stored, VECTOR>;

  public:
    using Shared = SharedTile<Acc, EXTENT, DEPTH, PADDED>;

    // `row_stride` over the tile's rows, `k_stride` over k, `rows` in the whole matrix, of which the tile begins at
    // `first_row`; `offset` to the matrix in the batch.
    GEMM_DEVICE BlockCopy(
        const MatrixParams& matrix, Long row_stride, Long k_stride, Long offset, Long first_row, Long rows,
        int conjugate, int thread)
        : thread_(thread), sign_(conjugate ? Real<Acc>(-1) : Real<Acc>(1)), step_(k_stride * DEPTH) {
        offset += first_row * row_stride;
        re_ = static_cast<const Stored*>(matrix.re) + offset;
        im_ = PLANAR ? static_cast<const Stored*>(matrix.im) + offset : nullptr;
        const Long last = rows - first_row - (ALONG_K ? 1 : VECTOR);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int row = last < row_of(i) ? static_cast<int>(last) : row_of(i);
            offset_[i] = static_cast<Index>(row) * static_cast<Index>(row_stride) +
                         static_cast<Index>(k_of(i)) * static_cast<Index>(k_stride);
        }
    }

    // Reads the tile at the current k into registers, `remaining` steps of it, and moves on to the next.
    GEMM_DEVICE void load(int remaining) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool inside = k_of(i) < remaining && owns(i);
            real_[i] = inside ? *reinterpret_cast<const Piece*>(re_ + offset_[i]) : Piece{};
            if constexpr (PLANAR) {
                imaginary_[i] = inside ? *reinterpret_cast<const Piece*>(im_ + offset_[i]) : Piece{};
            }
        }
        re_ += step_;
        if constexpr (PLANAR) im_ += step_;
    }

    // Converts, conjugates and writes what was read.
    GEMM_DEVICE void store(typename Shared::View tile) const {
        constexpr int WIDTH = piece_of<Acc>(VECTOR);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (!owns(i)) continue;
            if constexpr (ALONG_K) {
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) tile(k_of(i) + v, row_of(i)) = element(i, v);
            } else {
#pragma unroll
                for (int v = 0; v < VECTOR; v += WIDTH) {
                    Vector<Acc, WIDTH> piece;
#pragma unroll
                    for (int w = 0; w < WIDTH; ++w) piece.at[w] = element(i, v + w);
                    tile.template vector<WIDTH>(k_of(i), row_of(i) + v) = piece;
                }
            }
        }
    }

  private:
    int thread_;
    Real<Acc> sign_;
    Long step_;
    const Stored* re_;
    const Stored* im_;
    Index offset_[COUNT];
    Piece real_[COUNT];
    Piece imaginary_[PLANAR ? COUNT : 1];

    GEMM_DEVICE int vector_of(int i) const { return i * THREADS + thread_; }
    GEMM_DEVICE bool owns(int i) const { return EVEN || vector_of(i) < VECTORS; }
    GEMM_DEVICE int k_of(int i) const {
        return ALONG_K ? vector_of(i) % FAST * VECTOR : vector_of(i) / FAST;
    }
    GEMM_DEVICE int row_of(int i) const {
        return ALONG_K ? vector_of(i) / FAST : vector_of(i) % FAST * VECTOR;
    }
    GEMM_DEVICE Acc element(int i, int v) const {
        Acc x;
        if constexpr (PLANAR) {
            x = widen<Acc>(real_[i].at[v], imaginary_[i].at[v]);
        } else {
            x = widen<Acc>(real_[i].at[v]);
        }
        if constexpr (is_complex<Acc>) x.im *= sign_;
        return x;
    }
};
