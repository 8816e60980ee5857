// Numbers of either precision in shared memory, and the way from there to the registers of matrix instructions in double.
//
// An octet is eight rows of an operand (of op(A), or columns of op(B)) by four steps of k: what m8n8k4 reads of it. Lane
// (g, t) = (lane / 4, lane % 4) has row `position(octet, g)` and step t. A tile is one step of the pipeline deep; its lines
// are 128 bytes long and run along k, a line for each row, or along the rows, a line for each step of k and 128 bytes of
// rows. The eight 16-byte chunks of a line are exchanged (XOR with the line's number), as the copy engine does (PTX ISA,
// swizzling modes). Which row a lane has is free, so `position` is such that the lanes whose reads are served together, 32
// for 4 bytes, 16 for 8 and 8 for 16, find theirs in different banks.
//
// Every number is read into the register where an instruction wants it: wider reads of float64, two steps or two rows at
// once, cost up to a dozen moves for each instruction. Those of single precision are converted, which is exact, whenever
// they are read.
#pragma once

#include "../common/numbers/bits.cuh"
#include "../mma/tile.cuh"

template <class Stored>
using PairOf = Vector<Stored, 2>;
using Pair = PairOf<double>;

// x, or -x, in registers of its own. `zero` is 0, but the compiler must not know it: it would put a number that an
// instruction wants twice in its place with a move for every instruction.
template <bool NEGATE>
GEMM_DEVICE double again(double x, unsigned zero) {
    const Long bits = bits_of(x);
    const unsigned low = static_cast<unsigned>(bits) ^ zero;
    const unsigned high = static_cast<unsigned>(bits >> 32) ^ zero ^ (NEGATE ? 1u << 31 : 0u);
    return double_of(static_cast<Long>(high) << 32 | low);
}

GEMM_DEVICE unsigned high_bits(double x) { return static_cast<unsigned>(bits_of(x) >> 32); }

template <int ELEMENT, int EXTENT, bool ALONG_K>
struct OctetTile {
    static constexpr int SPAN = 128, DEPTH = SPAN / ELEMENT;  // bytes of a line; steps of k
    static constexpr int LINE = ALONG_K ? SPAN : EXTENT * ELEMENT;  // in memory
    static constexpr int LINES = ALONG_K ? EXTENT : DEPTH;
    static constexpr int BYTES = EXTENT * SPAN;
    static constexpr int ROWS_TOGETHER = ELEMENT == 4 && !ALONG_K ? 32 : 16;  // whose octets share them
    static_assert(ELEMENT == 4 || ELEMENT == 8 || ELEMENT == 16, "what is read at once");
    static_assert(EXTENT % ROWS_TOGETHER == 0, "whole groups of octets");

    // Where byte `byte` of line `line` lies.
    static GEMM_DEVICE int at(int line, int byte) {
        return byte / SPAN * (LINES * SPAN) + line * SPAN + ((byte / 16 % 8) ^ (line % 8)) * 16 + byte % 16;
    }

    static GEMM_DEVICE constexpr int position(int octet, int g) {
        if constexpr (ELEMENT == 16) return octet * 8 + g % 2 * 4 + g / 2;
        if constexpr (ELEMENT == 4 && ALONG_K) return octet * 8 + g;
        if constexpr (ELEMENT == 4) return octet / 4 * 32 + octet % 4 * 4 + g % 4 + g / 4 * 16;
        if constexpr (ALONG_K) return octet / 2 * 16 + g * 2 + octet % 2;
        return octet / 2 * 16 + octet % 2 * 4 + g % 2 + g / 2 % 2 * 8 + g / 4 * 2;
    }

    // Where a lane's number of octet 0 and of the first four steps lies.
    static GEMM_DEVICE int first(int lane) {
        const int row = position(0, lane / 4), step = lane % 4;
        return ALONG_K ? at(row, step * ELEMENT) : at(step, row * ELEMENT);
    }
    // The same of another octet and other four steps, of whose numbers the compiler knows: one address for a lane, with
    // bits turned and constants added.
    static GEMM_DEVICE int at_octet(int first, int octet, int quarter) {
        if constexpr (ELEMENT == 16) {
            return (first ^ quarter * 64) + octet * 8 * SPAN + (ALONG_K ? 0 : quarter * 4 * SPAN);
        } else if constexpr (ELEMENT == 4 && ALONG_K) {
            return (first ^ quarter * 16) + octet * 8 * SPAN;
        } else if constexpr (ELEMENT == 4) {
            return (first ^ (quarter % 2 * 64 + octet % 4 * 16)) + quarter * 4 * SPAN + octet / 4 * DEPTH * SPAN;
        } else if constexpr (ALONG_K) {
            return (first ^ (quarter * 32 + octet % 2 * 16)) + octet % 2 * SPAN + octet / 2 * 16 * SPAN;
        } else {
            return (first ^ (quarter % 2 * 64 + octet % 2 * 32)) + quarter * 4 * SPAN + octet / 2 * DEPTH * SPAN;
        }
    }
};

// What a lane has of one octet: the number, or its two parts.
template <class Stored, int COMPONENTS, int PLANES, class Tile>
GEMM_DEVICE void read_octet(const unsigned char* tile, int first, int octet, int quarter, double (&to)[COMPONENTS]) {
    const unsigned char* from = tile + Tile::at_octet(first, octet, quarter);
    if constexpr (PLANES == COMPONENTS) {
#pragma unroll
        for (int p = 0; p < PLANES; ++p) to[p] = *reinterpret_cast<const Stored*>(from + p * Tile::BYTES);
    } else {
        const auto both = *reinterpret_cast<const PairOf<Stored>*>(from);
        to[0] = both.at[0];
        to[1] = both.at[1];
    }
}

// What m16n8k8 multiplies. Of real numbers, two octets of rows by eight steps. Of complex ones, one octet of each operand: sixteen
// rows are the real and the imaginary parts of eight, and eight steps the real and the imaginary parts of four:
//
//     re | re  -im |  times  | re |  of op(B)
//     im | im   re |         | im |
//
// Conjugation is in the signs of the left one. A register pair holds (row, step), (row + 8, step), (row, step + 4),
// (row + 8, step + 4), in this order (PTX ISA, fragments of mma.m16n8k8).
template <class Stored, int COMPONENTS, int PLANES, class Tile, bool CONJUGATE_A, bool CONJUGATE_B>
struct LeftFragment {
    double at[4];

    GEMM_DEVICE void read(const unsigned char* tile, int first, int number, int step, unsigned zero) {
        double x[COMPONENTS];
        if constexpr (COMPONENTS == 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                read_octet<Stored, 1, 1, Tile>(tile, first, 2 * number + i % 2, 2 * step + i / 2, x);
                at[i] = x[0];
            }
        } else {
            read_octet<Stored, 2, PLANES, Tile>(tile, first, number, step, x);
            at[0] = x[0];
            at[1] = CONJUGATE_A ? again<true>(x[1], zero) : x[1];
            at[2] = again<CONJUGATE_A == CONJUGATE_B>(x[1], zero);
            at[3] = again<CONJUGATE_B>(x[0], zero);
        }
    }
    // Made of every number that was read.
    GEMM_DEVICE unsigned read_bits() const {
        return COMPONENTS == 1 ? high_bits(at[0]) ^ high_bits(at[1]) ^ high_bits(at[2]) ^ high_bits(at[3])
                               : high_bits(at[0]) ^ high_bits(at[1]);
    }
};

template <class Stored, int COMPONENTS, int PLANES, class Tile>
struct RightFragment {
    double at[2];

    GEMM_DEVICE void read(const unsigned char* tile, int first, int number, int step) {
        if constexpr (COMPONENTS == 1) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                double x[1];
                read_octet<Stored, 1, 1, Tile>(tile, first, number, 2 * step + i, x);
                at[i] = x[0];
            }
        } else {
            read_octet<Stored, 2, PLANES, Tile>(tile, first, number, step, at);
        }
    }
    // Made of every number that was read.
    GEMM_DEVICE unsigned read_bits() const { return high_bits(at[0]) ^ high_bits(at[1]); }
};
