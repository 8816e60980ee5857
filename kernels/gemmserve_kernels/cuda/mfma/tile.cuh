// An operand's tile in shared memory as matrix instructions read it.
#pragma once

#include "../common/numbers/types.cuh"

// EXTENT rows of the operand by DEPTH steps of k, in PLANES planes of real numbers (real and imaginary parts; parts of
// a split). PACK neighbours in k are one piece of 16 bytes; a line holds the pieces of all rows at the same PACK steps.
//
// Banks are 4 bytes wide and there are 32: what is accessed together, 8 pieces, must differ in the number of the piece
// modulo 8. A fragment reads neighbouring rows of one line. The copy writes rows 1, 2, 4 or 8 apart where memory runs
// along the rows, and the lines of few rows where it runs along k. XOR with the row's number by eights serves the
// former, XOR with the line's number, spread over the 8 pieces, the latter; both leave eight neighbours together.
template <class Element, int EXTENT, int DEPTH, int PLANES>
struct PackedTile {
    static constexpr int PIECE = 16, PACK = PIECE / static_cast<int>(sizeof(Element)), LINES = DEPTH / PACK;
    static constexpr int SKEW = LINES >= 8 ? 1 : 8 / LINES;
    static constexpr int LINE = EXTENT * PIECE, PLANE = LINE * LINES, BYTES = PLANE * PLANES;
    static_assert(EXTENT % 8 == 0 && DEPTH % PACK == 0, "whole pieces");
    using Piece = Vector<Element, PACK>;

    // Where the piece of a row in a line of the first plane lies.
    static GEMM_DEVICE int at(int line, int row) {
        return line * LINE + ((row ^ (row >> 3 & 7) ^ (line * SKEW & 7)) * PIECE);
    }
};
