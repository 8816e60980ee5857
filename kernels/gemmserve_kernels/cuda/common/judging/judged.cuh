// Which tiles of a product its operands allow to be made of residues: gemmserve_kernels.algorithms.ozaki.bound has the theorem.
#pragma once

#include "../raster.cuh"

constexpr int JUDGED_LINES = 128;  // lines of an operand that are judged together
constexpr int JUDGED_M = 128, JUDGED_N = 256;
constexpr unsigned NEVER_PASSES = 1u << 30;  // the deficit of what is not finite
constexpr unsigned DOUBTED = 1, APART = 2;

// The largest of a group of lines: of all real parts that are not all zero, of both where there are two, of the better one.
struct LineDeficits {
    unsigned most, both, better;
};

// What `better` of a group is at least, as far as norms tell before anything is counted: of each quarter of its lines.
struct __align__(16) Least {
    unsigned quarter[4];

    GEMM_DEVICE unsigned all() const {
        const unsigned x = quarter[0] > quarter[1] ? quarter[0] : quarter[1];
        const unsigned y = quarter[2] > quarter[3] ? quarter[2] : quarter[3];
        return x > y ? x : y;
    }
};

GEMM_DEVICE LineDeficits worse(const LineDeficits& x, const LineDeficits& y) {
    return {x.most > y.most ? x.most : y.most, x.both > y.both ? x.both : y.both, x.better > y.better ? x.better : y.better};
}

// What kernels do beside looking which tiles pass: the first of a panel sets `failing` to 0, others write down which fail.
enum Judging : unsigned { JUDGES = 1, CLEARS = 2, LISTS = 4 };

constexpr int STATUS_WORDS = 4;  // ahead of `failing`, cleared with it: of what computes tiles that fail

// `a`, `b`: of the first matrix and line that a launch sees on. `failing`: how many tiles do not pass; where they are listed,
// those of the launch, and then their numbers in any order: matrix after matrix, row after row of tiles.
struct JudgedParams {
    const LineDeficits* a;
    const LineDeficits* b;
    const unsigned* doubt_a;  // DOUBTED: a deficit is more than half of what two may have together; APART: a line has outliers
    const unsigned* doubt_b;
    int* failing;
    Long a_step, b_step;  // groups between matrices; 0 where an operand is shared
    unsigned limit;
    unsigned judged;  // of Judging; 0: all tiles pass
};

// None is known yet: by a kernel ahead of those that add tiles.
GEMM_DEVICE void clear_failing(const JudgedParams& params) {
    if ((params.judged & CLEARS) != 0 && blockIdx.x == 0 && static_cast<int>(threadIdx.x) <= STATUS_WORDS) {
        params.failing[static_cast<int>(threadIdx.x) - STATUS_WORDS] = 0;
    }
}
GEMM_DEVICE void add_failing(const JudgedParams& params, Long tile) {
    const int before = atomicAdd(params.failing, 1);
    if ((params.judged & LISTS) != 0) params.failing[1 + before] = static_cast<int>(tile);
}

GEMM_DEVICE bool all_pass(const JudgedParams& params) {
    return params.judged == 0 || (*params.doubt_a | *params.doubt_b) == 0;
}

GEMM_DEVICE bool has_outliers(const JudgedParams& params) {
    return params.judged != 0 && ((*params.doubt_a | *params.doubt_b) & APART) != 0;
}

// A tile of JUDGED_M x JUDGED_N of the product whose deficits begin at `rows` and `columns`.
GEMM_DEVICE bool passes(const LineDeficits* rows, const LineDeficits* columns, Long tile_m, Long tile_n, unsigned limit) {
    columns += tile_n * (JUDGED_N / JUDGED_LINES);
    const LineDeficits a = rows[tile_m], b = worse(columns[0], columns[1]);
    return a.most + b.most <= limit || a.both + b.better <= limit || a.better + b.both <= limit;
}
GEMM_DEVICE bool passes(const JudgedParams& params, Long matrix, Long tile_m, Long tile_n) {
    return passes(params.a + matrix * params.a_step, params.b + matrix * params.b_step, tile_m, tile_n, params.limit);
}

// The same of the tile with an element, for kernels that compute those that do not pass. TURNED: rows are those of op(B).
template <bool TURNED>
GEMM_DEVICE bool element_passes(const int* rows, const int* columns, Long row, Long column, Long limit) {
    const auto* a = reinterpret_cast<const LineDeficits*>(TURNED ? columns : rows);
    const auto* b = reinterpret_cast<const LineDeficits*>(TURNED ? rows : columns);
    return passes(
        a, b, (TURNED ? column : row) / JUDGED_M, (TURNED ? row : column) / JUDGED_N, static_cast<unsigned>(limit));
}
// Whether blocks of so many rows and columns lie in one tile each.
template <bool TURNED>
GEMM_DEVICE constexpr bool lie_in_tiles(int rows, int columns) {
    return JUDGED_M % (TURNED ? columns : rows) == 0 && JUDGED_N % (TURNED ? rows : columns) == 0;
}

// The least `better` of `groups` groups of each of `matrices` matrices. By a whole warp.
GEMM_DEVICE unsigned least_better(const LineDeficits* deficits, Long step, Long matrices, Long groups) {
    unsigned least = NEVER_PASSES;
    for (Long first = 0; first < matrices * groups; first += 32) {
        const Long number = first + threadIdx.x % 32;
        const Quotient where = divide(number, groups);
        unsigned here = number < matrices * groups ? deficits[where.quotient * step + where.remainder].better : NEVER_PASSES;
#pragma unroll
        for (int lane = 16; lane > 0; lane /= 2) {
            const unsigned other = __shfl_xor_sync(0xffffffffu, here, lane);
            here = other < here ? other : here;
        }
        least = here < least ? here : least;
    }
    return least;
}

// Whether none of the tiles of these matrices passes, by what the best rows and the best columns lack: `most` and `both`
// are no less than `better`. By a whole warp.
GEMM_DEVICE bool none_pass(const JudgedParams& params, Long matrices, Long row_groups, Long column_groups) {
    const unsigned rows = least_better(params.a, params.a_step, params.a_step == 0 ? 1 : matrices, row_groups);
    const unsigned columns = least_better(params.b, params.b_step, params.b_step == 0 ? 1 : matrices, column_groups);
    return rows + columns > params.limit;
}
