// What must not be taken from tensor cores: flags of rows and columns, and the deficits of groups of them
// (common/judging/verdict.cuh). Where there are none (null), nothing is flagged by them. Where there is the wide way, which has
// the tiles that the deficits name, they say what of that is replaced. Where residues have the other tiles (GEMM_FAILING: 1,
// or 2 where rows are those of op(B)), nothing of those is.
#pragma once

#include "../common/judging/counters.cuh"
#include "../common/judging/flag_bits.cuh"
#include "../common/raster.cuh"
#include "../common/judging/judged.cuh"
#include "../common/judging/verdict.cuh"

#if defined(GEMM_FAILING)
constexpr bool FAILING = true, TURNED = GEMM_FAILING == 2;
#else
constexpr bool FAILING = false, TURNED = false;
#endif

struct FlagParams {
    MatrixParams rows;     // of op(A): flags as matrices of one row
    MatrixParams columns;  // of op(B)
    MatrixParams row_deficits, column_deficits;  // of groups, GROUP_WORDS each; GEMM_FAILING: LineDeficits (judged.cuh)
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

// Those of the rows and columns of one matrix of a batch of products.
class MatrixFlags {
  public:
    GEMM_DEVICE MatrixFlags(const FlagParams& flags, const GemmParams& gemm, Long batch)
        : flags_(flags),
          gemm_(gemm),
          batch_(batch),
          rows_(batch_offset(batch, gemm.batch_shape, flags.rows.batch_stride)),
          columns_(batch_offset(batch, gemm.batch_shape, flags.columns.batch_stride)) {}

    GEMM_DEVICE int row(Long i) const { return i < gemm_.m ? flags_at(flags_.rows, rows_ + i) : 0; }
    GEMM_DEVICE int column(Long j) const { return j < gemm_.n ? flags_at(flags_.columns, columns_ + j) : 0; }
    // Whether the tile at (i, j), which lies in one group of rows and one of columns, is none for float16 planes, or residues.
    GEMM_DEVICE bool rest(Long i, Long j) const {
        const Long rows = batch_offset(batch_, gemm_.batch_shape, flags_.row_deficits.batch_stride);
        const Long columns = batch_offset(batch_, gemm_.batch_shape, flags_.column_deficits.batch_stride);
        if constexpr (FAILING) {
            return !element_passes<TURNED>(
                static_cast<const int*>(flags_.row_deficits.re) + rows,
                static_cast<const int*>(flags_.column_deficits.re) + columns, i, j, flags_.most_deficit);
        } else {
            return !is_served(flags_, rows, i, columns, j);
        }
    }

  private:
    const FlagParams& flags_;
    const GemmParams& gemm_;
    Long batch_, rows_, columns_;
};

// Notes that elements are computed in plain arithmetic; `rest`: of a tile that the deficits name.
GEMM_DEVICE void count(const FlagParams& flags, Long elements, bool rest) {
    add_elements(flags.counters->plain, elements);
    if (rest && flags.widened) add_elements(flags.counters->wide, -elements);
}
