// One wave's part of a tile: fragments from shared memory, matrix instructions, what they leave in the accumulators.
#pragma once

#include "instructions.cuh"
#include "tile.cuh"

// Which elements of a BLOCK_M x BLOCK_N tile one lane owns: of each TILE x TILE square of its wave's WARP_M x WARP_N part,
// COUNT elements of one column. So lanes next to each other write neighbouring columns, and a reduction over rows begins
// in registers.
template <class Instruction, int BLOCK_M, int BLOCK_N, int WARP_M, int WARP_N>
struct WavePartition {
    static constexpr int TILE = Instruction::TILE, COUNT = Instruction::COUNT, WAVE = Instruction::WAVE;
    static constexpr int WAVES_M = BLOCK_M / WARP_M, WAVES_N = BLOCK_N / WARP_N, THREADS = WAVE * WAVES_M * WAVES_N;
    static constexpr int THREAD_M = WARP_M / TILE * COUNT, THREAD_N = WARP_N / TILE, SHARERS = WAVE / TILE;
    static constexpr int THREADS_M = WAVES_M * SHARERS;  // threads that share a column
    static constexpr int PIECE_N = 1;
    static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0 && WARP_M % TILE == 0 && WARP_N % TILE == 0, "whole waves");

    int lane, first_row, first_column, thread_m;

    GEMM_DEVICE explicit WavePartition(int thread)
        : lane(thread % WAVE), first_row(thread / WAVE / WAVES_N * WARP_M),
          first_column(thread / WAVE % WAVES_N * WARP_N), thread_m(thread / WAVE / WAVES_N * SHARERS + thread % WAVE / TILE) {}

    GEMM_DEVICE int row(int i) const { return first_row + i / COUNT * TILE + Instruction::row(i % COUNT, lane); }
    GEMM_DEVICE int column(int j) const { return first_column + j * TILE + lane % TILE; }
};

// x with the other sign.
GEMM_DEVICE float negated(float x) { return -x; }
GEMM_DEVICE double negated(double x) { return -x; }
GEMM_DEVICE Half negated(Half x) { return Half{static_cast<unsigned short>(x.bits ^ 0x8000u)}; }

// A lane's pieces of ALL planes of one row: PIECES times PACK neighbours in k.
template <class Tile, int PLANES, int PIECES>
struct Fragment {
    using Pieces = typename Tile::Piece[PIECES];
    Pieces plane[PLANES];

    // Of the row `row` of the tile, from line `line` on.
    GEMM_DEVICE void read(const unsigned char* shared, int line, int row) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int at = Tile::at(line + i, row);
#pragma unroll
            for (int p = 0; p < PLANES; ++p) {
                plane[p][i] = *reinterpret_cast<const typename Tile::Piece*>(shared + p * Tile::PLANE + at);
            }
        }
    }
};

// d += a b over the steps that the pieces hold.
template <class Instruction, class Piece, int PIECES>
GEMM_DEVICE void multiply_pieces(
    typename Instruction::Sums& d, const Piece (&a)[PIECES], const Piece (&b)[PIECES], bool negative) {
    using Element = typename Instruction::Element;
    constexpr int PER = Instruction::PER, PACK = sizeof(Piece) / sizeof(Element);
#pragma unroll
    for (int first = 0; first < PIECES * PACK; first += PER) {
        Vector<Element, PER> left, right;
#pragma unroll
        for (int e = 0; e < PER; ++e) {
            const int piece = (first + e) / PACK, at = (first + e) % PACK;
            left.at[e] = negative ? negated(a[piece].at[at]) : a[piece].at[at];
            right.at[e] = b[piece].at[at];
        }
        Instruction::run(d, left, right);
    }
}

// The products of a wave. COMPONENTS: 2 of complex data. PARTS: 2 where numbers are split into a high and a low part; the
// planes are part by part. The product of the low parts is below the last bit. PIECES: what a lane holds of a row at once,
// two where an instruction takes more than one piece.
template <class Instruction, class TileA, class TileB, int COMPONENTS, int PARTS, int WARP_M, int WARP_N>
struct WaveMultiply {
    static constexpr int TILE = Instruction::TILE, ROWS = WARP_M / TILE, COLUMNS = WARP_N / TILE;
    static constexpr int PIECES = Instruction::PER > TileA::PACK ? Instruction::PER / TileA::PACK : 1;
    static constexpr int PLANES = COMPONENTS * PARTS, LINES = PIECES * Instruction::GROUPS, STEPS = TileA::LINES / LINES;
    static_assert(TileA::LINES % LINES == 0 && PIECES * TileA::PACK % Instruction::PER == 0, "whole instructions");
    using Sums = typename Instruction::Sums;
    using Tiles = Sums[ROWS][COLUMNS][COMPONENTS];
    using FragmentA = Fragment<TileA, PLANES, PIECES>;
    using FragmentB = Fragment<TileB, PLANES, PIECES>;

    static GEMM_DEVICE void zero(Tiles& tiles) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                for (int c = 0; c < COMPONENTS; ++c) tiles[i][j][c] = Sums{};
    }

    // tiles += A B for the tiles in shared memory, rows and columns from `row` and `column` on.
    static GEMM_DEVICE void run(const unsigned char* a, const unsigned char* b, int row, int column, int lane, Tiles& tiles) {
        const int group = lane / TILE % Instruction::GROUPS, here = lane % TILE;
        // Beside the sums, RDNA 3's registers hold the fragments of one step; unrolled, the compiler reads ahead and spills.
#pragma unroll(PIECES == 1 ? STEPS : 1)
        for (int step = 0; step < STEPS; ++step) {
            const int line = step * LINES + group * PIECES;
            FragmentA left[ROWS];
            FragmentB right[COLUMNS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) left[i].read(a, line, row + i * TILE + here);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) right[j].read(b, line, column + j * TILE + here);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) products(left[i], right[j], tiles[i][j]);
        }
    }

  private:
    static GEMM_DEVICE void products(const FragmentA& a, const FragmentB& b, Sums (&d)[COMPONENTS]) {
#pragma unroll
        for (int pass = PARTS == 2 ? 0 : 2; pass < 3; ++pass) {  // small things first: low high, high low, high high
            const int of_a = pass == 0 ? COMPONENTS : 0, of_b = pass == 1 ? COMPONENTS : 0;
            multiply_pieces<Instruction>(d[0], a.plane[of_a], b.plane[of_b], false);
            if constexpr (COMPONENTS == 2) {
                multiply_pieces<Instruction>(d[1], a.plane[of_a], b.plane[of_b + 1], false);
                multiply_pieces<Instruction>(d[0], a.plane[of_a + 1], b.plane[of_b + 1], true);
                multiply_pieces<Instruction>(d[1], a.plane[of_a + 1], b.plane[of_b], false);
            }
        }
    }
};
