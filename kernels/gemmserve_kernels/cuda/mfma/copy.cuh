// Blockwise copy: an operand's tile from global memory through registers into a PackedTile.
#pragma once

#include "../common/numbers/bits.cuh"
#include "../common/params.cuh"
#include "tile.cuh"

// What is done to an element on its way.
enum Rounding { EXACT, TF32 };

// The nearest float with 10 bits of fraction, ties to even; but nothing becomes infinite or zero that was not, and NaN
// stays NaN.
GEMM_DEVICE float nearest_tf32(float x) {
    constexpr unsigned EXPONENT = 0x7f800000u, LAST = 0x2000u, KEPT = 0xffffe000u;
    const unsigned bits = bits_of(x), up = bits + (LAST / 2 - 1) + (bits >> 13 & 1u);
    const bool finite = (up & EXPONENT) != EXPONENT;
    unsigned word = (finite ? up : bits) & KEPT;
    const bool was_nan = (bits & ~0x80000000u) > EXPONENT, vanished = (word << 1) == 0 && (bits << 1) != 0;
    if (was_nan || vanished) word |= LAST;
    return float_of(word);
}

// Stored: element type in memory, in SOURCES arrays; a complex Stored becomes two planes. Chunks of ROWS rows by PACK
// steps of k are read and written by one thread: along k (ALONG_K) one row, VECTOR elements at once; else VECTOR rows at
// once. The host grants VECTOR > 1 only where that stride is 1, the extent a multiple of it and every address aligned.
//
// Past k, zeros are written (0 * NaN cannot arise: both operands are zero there). Past the last row the last one is read
// again: whatever comes out lies in rows that the epilogue never stores.
template <
    class Stored, class Element, int SOURCES, int PLANES, int EXTENT, int DEPTH, int THREADS, int VECTOR, bool ALONG_K,
    Rounding ROUND, class Index>
class PackedCopy {
  public:
    using Tile = PackedTile<Element, EXTENT, DEPTH, PLANES>;

    // `row_stride` over the tile's rows, `k_stride` over k, `rows` in the whole matrix, of which the tile begins at
    // `first_row`. `base`: the matrix of the batch in each array.
    GEMM_DEVICE PackedCopy(
        const void* const (&base)[SOURCES], Long row_stride, Long k_stride, Long first_row, Long rows, int conjugate,
        int thread)
        : thread_(thread), conjugate_(conjugate), k_stride_(static_cast<Index>(k_stride)), step_(k_stride * DEPTH) {
#pragma unroll
        for (int s = 0; s < SOURCES; ++s) from_[s] = static_cast<const Stored*>(base[s]) + first_row * row_stride;
        const Long last = rows - first_row - ROWS;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int row = last < row_of(i) ? static_cast<int>(last) : row_of(i);
            offset_[i] = static_cast<Index>(row) * static_cast<Index>(row_stride) +
                         static_cast<Index>(line_of(i) * PACK) * k_stride_;
        }
    }

    // Reads the tile at the current k into registers, `remaining` steps of it, and moves on to the next.
    GEMM_DEVICE void load(int remaining) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int v = 0; v < LOADS; ++v) {
                const int k = v * (ALONG_K ? VECTOR : 1);
                const bool inside = line_of(i) * PACK + k < remaining && owns(i);
#pragma unroll
                for (int s = 0; s < SOURCES; ++s) {
                    const Stored* const from = from_[s] + offset_[i] + static_cast<Index>(k) * k_stride_;
                    held_[i][s][v] = inside ? *reinterpret_cast<const Piece*>(from) : Piece{};
                }
            }
        }
#pragma unroll
        for (int s = 0; s < SOURCES; ++s) from_[s] += step_;
    }

    // Converts, conjugates and writes what was read.
    GEMM_DEVICE void store(unsigned char* shared) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (!owns(i)) continue;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int at = Tile::at(line_of(i), row_of(i) + r);
#pragma unroll
                for (int p = 0; p < PLANES; ++p) {
                    typename Tile::Piece piece;
#pragma unroll
                    for (int k = 0; k < PACK; ++k) piece.at[k] = element(i, p, r, k);
                    *reinterpret_cast<typename Tile::Piece*>(shared + p * Tile::PLANE + at) = piece;
                }
            }
        }
    }

  private:
    static constexpr int PACK = Tile::PACK, ROWS = ALONG_K ? 1 : VECTOR;
    static constexpr int LOADS = ALONG_K ? PACK / VECTOR : PACK;
    static constexpr int CHUNKS = EXTENT / ROWS * Tile::LINES, COUNT = (CHUNKS + THREADS - 1) / THREADS;
    static constexpr bool EVEN = CHUNKS % THREADS == 0;
    static constexpr int FAST = ALONG_K ? Tile::LINES : EXTENT / ROWS;  // chunks that neighbouring threads follow
    static_assert((ALONG_K ? PACK : EXTENT) % VECTOR == 0, "a vector must not cross the edge of a piece or the tile");
    using Piece = Vector<Stored, VECTOR>;

    int thread_, conjugate_;
    Index k_stride_;
    Long step_;
    const Stored* from_[SOURCES];
    Index offset_[COUNT];
    Piece held_[COUNT][SOURCES][LOADS];

    GEMM_DEVICE int chunk(int i) const { return i * THREADS + thread_; }
    GEMM_DEVICE bool owns(int i) const { return EVEN || chunk(i) < CHUNKS; }
    GEMM_DEVICE int line_of(int i) const { return ALONG_K ? chunk(i) % FAST : chunk(i) / FAST; }
    GEMM_DEVICE int row_of(int i) const { return ALONG_K ? chunk(i) / FAST : chunk(i) % FAST * ROWS; }

    GEMM_DEVICE Element element(int i, int plane, int r, int k) const {
        const int source = SOURCES == 1 ? 0 : plane;
        const Stored x = held_[i][source][ALONG_K ? k / VECTOR : k].at[ALONG_K ? k % VECTOR : r];
        if constexpr (SAME) {
            return x;
        } else {
            Element value = static_cast<Element>(plane == 1 && SOURCES == 1 ? imaginary_part(x) : real_part(x));
            if constexpr (ROUND == TF32) value = nearest_tf32(value);
            return plane == 1 && conjugate_ ? -value : value;
        }
    }
    template <class X, class Y>
    struct Equal {
        static constexpr bool value = false;
    };
    template <class X>
    struct Equal<X, X> {
        static constexpr bool value = true;
    };
    static constexpr bool SAME = Equal<Element, Half>::value;  // float16 goes as it is, planes have been conjugated
};
