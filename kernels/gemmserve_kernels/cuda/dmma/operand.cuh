// Double precision in shared memory, and the way from there to the registers of matrix instructions.
//
// A fragment holds 16 rows of an operand (of op(A), or columns of op(B)) by K steps of k for one lane (g, t) =
// (lane / 4, lane % 4): at[component][half][i], of row `position(half, g)` and WIDTH = K / 4 steps of k. Which steps a lane
// has is the same for A and B, and so free: what lies next to each other is read together. A line of shared memory is a
// row and runs along k, or is a step of k and runs along the rows. The 16-byte chunks of a line are exchanged (XOR with a
// key of the line), so that every eight lanes, which are served together, find theirs in different banks.
#pragma once

#include "../mma_sync/tile.cuh"

using Pair = Vector<double, 2>;

template <int COMPONENTS, int WIDTH>
struct DoubleFragment {
    double at[COMPONENTS][2][WIDTH];
};

template <int ELEMENT, int EXTENT, int DEPTH, bool ALONG_K, int K>
struct DoubleTile {
    static constexpr int LINE = (ALONG_K ? DEPTH : EXTENT) * ELEMENT;
    static constexpr int LINES = ALONG_K ? EXTENT : DEPTH;
    static constexpr int BYTES = LINE * LINES, WIDTH = K / 4;
    static_assert(LINE % 128 == 0 && DEPTH % K == 0, "a line must meet every bank");

    static GEMM_DEVICE int key(int line) {
        if constexpr (ELEMENT == 16) {  // lanes t = 0 .. 3 have four neighbouring elements, of a line or of lines
            return ALONG_K ? line % 2 * 4 : line % 4 * 2;
        } else if constexpr (ALONG_K) {  // two chunks of each lane, or one
            return WIDTH == 4 ? line % 2 : line % 2 * 4;
        } else {
            return line / WIDTH % 4 * 2;
        }
    }
    // How far `steps` of k reach, 128 bytes or lines of them: keys exchange chunks within both.
    static GEMM_DEVICE constexpr int skipped(int steps) { return steps * (ALONG_K ? ELEMENT : LINE); }
    static GEMM_DEVICE int at(int line, int byte) { return line * LINE + (((byte / 16) ^ key(line)) * 16) + byte % 16; }
};

// float64, or complex128 as two planes: lane t has the steps WIDTH t .. WIDTH t + WIDTH - 1 of K.
template <bool COMPLEX, int EXTENT, int DEPTH, bool ALONG_K_, int UNIT, int THREADS, int K>
struct RealOperand {
    static constexpr bool ALONG_K = ALONG_K_;
    static constexpr int PLANES = COMPLEX ? 2 : 1, WIDTH = K / 4;
    using Tile = DoubleTile<8, EXTENT, DEPTH, ALONG_K, K>;
    using Copy = TileCopy<Tile, 8, EXTENT, DEPTH, ALONG_K, UNIT, PLANES, THREADS>;
    using Registers = DoubleFragment<PLANES, WIDTH>;
    static constexpr int BYTES = PLANES * Tile::BYTES;
    static_assert(WIDTH == 2 || WIDTH == 4, "lanes read two numbers at once");

    static GEMM_DEVICE void bases(const MatrixParams& matrix, Long offset, const void* (&base)[PLANES]) {
        base[0] = static_cast<const double*>(matrix.re) + offset;
        if constexpr (COMPLEX) base[1] = static_cast<const double*>(matrix.im) + offset;
    }
    static GEMM_DEVICE constexpr int position(int half, int x) { return ALONG_K ? 8 * half + x : 2 * x + half; }

    // Rows are 16 apart and steps K: what they add to an address is no matter of keys, so that the compiler has one
    // address for a lane and constants besides.
    static GEMM_DEVICE void read(const unsigned char* shared, int row, int first, int lane, Registers& to) {
        const int g = lane / 4, k = lane % 4 * WIDTH;
        if constexpr (ALONG_K) {
#pragma unroll
            for (int r = 0; r < WIDTH; r += 2) {
                const unsigned char* from = shared + row * Tile::LINE + Tile::at(g, (first + k + r) * 8);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int p = 0; p < PLANES; ++p) {
                        const auto pair = *reinterpret_cast<const Pair*>(from + half * 8 * Tile::LINE + p * Tile::BYTES);
                        to.at[p][half][r] = pair.at[0];
                        to.at[p][half][r + 1] = pair.at[1];
                    }
                }
            }
        } else {
            const unsigned char* from = shared + row * 8 + first * Tile::LINE + Tile::at(k, 2 * g * 8);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
#pragma unroll
                for (int p = 0; p < PLANES; ++p) {
                    const auto pair = *reinterpret_cast<const Pair*>(from + i * Tile::LINE + p * Tile::BYTES);
                    to.at[p][0][i] = pair.at[0];
                    to.at[p][1][i] = pair.at[1];
                }
            }
        }
    }
};

// complex128 as it is stored: lane t has the steps t, t + 4, ... of K.
template <int EXTENT, int DEPTH, bool ALONG_K_, int THREADS, int K>
struct ComplexOperand {
    static constexpr bool ALONG_K = ALONG_K_;
    static constexpr int PLANES = 1, WIDTH = K / 4;
    using Tile = DoubleTile<16, EXTENT, DEPTH, ALONG_K, K>;
    using Copy = TileCopy<Tile, 16, EXTENT, DEPTH, ALONG_K, 16, 1, THREADS>;
    using Registers = DoubleFragment<2, WIDTH>;
    static constexpr int BYTES = Tile::BYTES;

    static GEMM_DEVICE void bases(const MatrixParams& matrix, Long offset, const void* (&base)[1]) {
        base[0] = static_cast<const Complex<double>*>(matrix.re) + offset;
    }
    static GEMM_DEVICE constexpr int position(int half, int x) { return 8 * half + x; }

    static GEMM_DEVICE void read(const unsigned char* shared, int row, int first, int lane, Registers& to) {
        const int g = lane / 4, t = lane % 4;
        const unsigned char* from = ALONG_K ? shared + row * Tile::LINE + Tile::at(g, (first + t) * 16)
                                            : shared + row * 16 + first * Tile::LINE + Tile::at(t, g * 16);
        constexpr int NEXT_ROWS = 8 * (ALONG_K ? Tile::LINE : 16), NEXT_STEPS = 4 * (ALONG_K ? 16 : Tile::LINE);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                // Along k the second four steps lie on the other side of the first, by the key of the line.
                const unsigned char* at = ALONG_K && i % 2 == 1 ? shared + row * Tile::LINE + Tile::at(g, (first + t + 4 * i) * 16)
                                                                : from + i * NEXT_STEPS;
                const auto x = *reinterpret_cast<const Pair*>(at + half * NEXT_ROWS);
                to.at[0][half][i] = x.at[0];
                to.at[1][half][i] = x.at[1];
            }
        }
    }
};
