// What must not be taken from tensor cores: flags of rows and columns, and the deficits of groups of them
// (common/verdict.cuh). Where there are none (null), nothing is flagged by them. Where there is the wide way, which has
// the tiles that the deficits name, they say what of that is replaced.
#pragma once

#include "../common/counters.cuh"
#include "../common/flag_bits.cuh"
#include "../common/verdict.cuh"

struct FlagParams {
    MatrixParams rows;     // of op(A): flags as matrices of one row
    MatrixParams columns;  // of op(B)
    MatrixParams row_deficits, column_deficits;  // of groups, GROUP_WORDS each
    const int* status_a;   // where both words are 0, nothing is flagged
    const int* status_b;
    Long most_deficit;     // of a row and a column that tensor cores may answer
    ElementCounters* counters;  // null: what is computed is no result of its own
    int widened;                // whether there is the wide way
    int unused;

    GEMM_DEVICE bool none() const { return (*status_a | *status_b) == 0; }
};

GEMM_DEVICE int flags_at(const MatrixParams& flags, Long at) {
    return flags.re != nullptr ? static_cast<const int*>(flags.re)[at] : 0;
}

// Whether tensor cores may answer the products of row `i` by column `j`, of the matrices whose deficits begin at
// `rows` and `columns`.
GEMM_DEVICE bool is_served(const FlagParams& flags, Long rows, Long i, Long columns, Long j) {
    if (flags.row_deficits.re == nullptr) return true;
    return is_served(
        Deficits(static_cast<const int*>(flags.row_deficits.re) + rows + i / GROUP * GROUP_WORDS),
        Deficits(static_cast<const int*>(flags.column_deficits.re) + columns + j / GROUP * GROUP_WORDS), flags.most_deficit);
}

// Notes that elements are computed in plain arithmetic; `rest`: of a tile that the deficits name.
GEMM_DEVICE void count(const FlagParams& flags, Long elements, bool rest) {
    add_elements(flags.counters->plain, elements);
    if (rest && flags.widened) add_elements(flags.counters->wide, -elements);
}
