// What is known of a vector beside its bfloat16 planes (planes/verdict.py). A pair of vectors of which one is deep and one
// is sparse, or one both, must not be multiplied by them.
#pragma once

#include "../numbers/types.cuh"

enum Flag : int {
    FLAG_DEEP = 1,    // has elements that are too small for the planes
    FLAG_SPARSE = 2,  // half of its elements or more are far from its largest one
    FLAG_BOTH = 3,
};

// `both`: the flags of two vectors.
GEMM_DEVICE bool is_unfit(int both) { return (both & FLAG_BOTH) == FLAG_BOTH; }

// The flags of many vectors in one word, so that two words tell whether a pair of them is unfit.
GEMM_DEVICE int summary_of(int flags) { return is_unfit(flags) ? FLAG_BOTH | FLAG_BOTH + 1 : flags; }
GEMM_DEVICE bool any_is_unfit(int rows, int columns) {
    constexpr int ONE_IS = FLAG_BOTH + 1;
    return ((rows | columns) & ONE_IS) != 0 || ((rows & FLAG_DEEP) && (columns & FLAG_SPARSE)) ||
           ((rows & FLAG_SPARSE) && (columns & FLAG_DEEP));
}

// The number of unfit pairs of `rows` vectors, of_rows[f] of them with flags f, and `columns` others.
GEMM_DEVICE Long unfit_pairs(
    const int (&of_rows)[FLAG_BOTH + 1], const int (&of_columns)[FLAG_BOTH + 1], Long rows, Long columns) {
    return of_rows[FLAG_BOTH] * columns + (rows - of_rows[FLAG_BOTH]) * of_columns[FLAG_BOTH] +
           static_cast<Long>(of_rows[FLAG_DEEP]) * of_columns[FLAG_SPARSE] +
           static_cast<Long>(of_rows[FLAG_SPARSE]) * of_columns[FLAG_DEEP];
}
