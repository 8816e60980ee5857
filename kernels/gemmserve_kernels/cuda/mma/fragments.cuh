// From shared memory to the registers of matrix instructions.
//
// A fragment holds 16 rows of an operand (of op(A), or columns of op(B)) by GROUP steps of k for one lane, cut into
// parts: at[part][component][half][w]. Lane (g, t) = (lane / 4, lane % 4) owns rows `row(g, half)` and WIDTH registers of
// k for each. The order of k inside a group is the same for A and B, and so free: it is what one wide read brings.
#pragma once

#include "round.cuh"
#include "tile.cuh"

template <int PARTS, int COMPONENTS, int WIDTH>
struct Fragment {
    unsigned at[PARTS][COMPONENTS][2][WIDTH];
};

// float32 or complex64 as it is stored, split while it is read. A planar operand has one plane a component.
template <
    bool COMPLEX, bool PLANAR, bool CONJUGATE, int EXTENT, int DEPTH, bool ALONG_K_, int UNIT, int THREADS, int PARTS,
    Rounding BIG, Rounding SMALL, int GROUP_>
struct Tf32Operand {
    static constexpr bool ALONG_K = ALONG_K_;
    static constexpr int COMPONENTS = COMPLEX ? 2 : 1, PLANES = PLANAR ? 2 : 1, GROUP = GROUP_, WIDTH = GROUP / 4;
    static constexpr int ELEMENT = COMPLEX && !PLANAR ? 8 : 4;
    using Tile = FragmentTile<ELEMENT, EXTENT, DEPTH, ALONG_K, 2 * ELEMENT>;
    using Copy = TileCopy<Tile, ELEMENT, EXTENT, DEPTH, ALONG_K, UNIT, PLANES, THREADS>;
    using Registers = Fragment<PARTS, COMPONENTS, WIDTH>;
    static constexpr int BYTES = PLANES * Tile::BYTES;

    static GEMM_DEVICE void bases(const MatrixParams& matrix, Long, Long offset, const void* (&base)[PLANES]) {
        base[0] = static_cast<const unsigned char*>(matrix.re) + offset * ELEMENT;
        if constexpr (PLANAR) base[1] = static_cast<const unsigned char*>(matrix.im) + offset * ELEMENT;
    }

    // Rows from `row` on, steps from `group` * GROUP on, 8 of them at a time.
    static GEMM_DEVICE void read(const unsigned char* shared, int row, int group, int lane, unsigned mask, Registers& to) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int eight = 0; eight < GROUP / 8; ++eight) {
            const int k = group * GROUP + eight * 8 + 2 * t;
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // along k: i is the half, a read brings two k; else i is k, a read both halves
                const int line = ALONG_K ? row + 8 * i + g : k + i;
                const int byte = (ALONG_K ? k : row + 2 * g) * ELEMENT;
                const unsigned char* from = shared + Tile::at(line, byte);
#pragma unroll
                for (int p = 0; p < PLANES; ++p) {
                    const auto pair = *reinterpret_cast<const Vector<unsigned, ELEMENT / 2>*>(from + p * Tile::BYTES);
#pragma unroll
                    for (int v = 0; v < ELEMENT / 2; ++v) {
                        const int component = PLANAR ? p : v % COMPONENTS, j = PLANAR ? v : v / COMPONENTS;
                        unsigned x = pair.at[v];
                        if (CONJUGATE && component == 1) x ^= 0x80000000u;
                        unsigned part[PARTS];
                        split_tf32<PARTS, BIG, SMALL>(x, mask, part);
#pragma unroll
                        for (int q = 0; q < PARTS; ++q)
                            to.at[q][component][ALONG_K ? i : j][2 * eight + (ALONG_K ? j : i)] = part[q];
                    }
                }
            }
        }
    }
};

// Planes of float16 or bfloat16 in the order of planes.PLANES, part by part; k runs fastest. A register holds two steps of k.
//
// `mask` has all bits, but the compiler must not know it: an AND puts the registers of a LEFT operand, which come from
// several reads, into the instruction's order, where the compiler would copy them again for every instruction.
template <bool LEFT, bool COMPLEX, int EXTENT, int DEPTH, int THREADS, int PARTS, int GROUP_>
struct PlaneOperand {
    static constexpr bool ALONG_K = true;
    static constexpr int COMPONENTS = COMPLEX ? 2 : 1, PLANES = PARTS * COMPONENTS, ELEMENT = 2;
    static constexpr int GROUP = GROUP_, WIDTH = GROUP / 8;
    using Tile = FragmentTile<ELEMENT, EXTENT, DEPTH, true, 16>;
    using Copy = TileCopy<Tile, ELEMENT, EXTENT, DEPTH, true, 16, PLANES, THREADS>;
    using Registers = Fragment<PARTS, COMPONENTS, WIDTH>;
    static constexpr int BYTES = PLANES * Tile::BYTES;

    static GEMM_DEVICE void bases(const MatrixParams& matrix, Long step, Long offset, const void* (&base)[PLANES]) {
#pragma unroll
        for (int p = 0; p < PLANES; ++p) base[p] = static_cast<const Half*>(matrix.re) + offset + p * step;
    }

    static GEMM_DEVICE void read(const unsigned char* shared, int row, int group, int lane, unsigned mask, Registers& to) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int part = 0; part < GROUP / 32; ++part) {
            const int k = group * GROUP + 32 * part + 8 * t;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned char* from = shared + Tile::at(row + 8 * half + g, k * ELEMENT);
#pragma unroll
                for (int p = 0; p < PLANES; ++p) {
                    const auto words = *reinterpret_cast<const Vector<unsigned, 4>*>(from + p * Tile::BYTES);
#pragma unroll
                    for (int w = 0; w < 4; ++w)
                        to.at[p / COMPONENTS][p % COMPONENTS][half][4 * part + w] = LEFT ? words.at[w] & mask : words.at[w];
                }
            }
        }
    }
};

// Where the i-th of 16 rows (i = half * 8 + g) of a fragment at `row` lies in its operand.
template <bool ALONG_K>
GEMM_DEVICE int fragment_row(int row, int half, int g) {
    return ALONG_K ? row + 8 * half + g : row + 2 * g + half;
}
