// Which tiles of a product its operands allow to be made of residues: gemmserve_kernels.ozaki.bound has the theorem.
#pragma once

#include "platform.cuh"

constexpr int JUDGED_LINES = 128;  // lines of an operand that are judged together
constexpr int JUDGED_M = 128, JUDGED_N = 256;

// The largest of a group of lines: of all real parts that are not all zero, of both where there are two, of the better one.
struct Deficits {
    unsigned most, both, better;
};

GEMM_DEVICE Deficits worse(const Deficits& x, const Deficits& y) {
    return {x.most > y.most ? x.most : y.most, x.both > y.both ? x.both : y.both, x.better > y.better ? x.better : y.better};
}

// `a`, `b`: of the first matrix and line that a launch sees on.
struct JudgedParams {
    const Deficits* a;
    const Deficits* b;
    const unsigned* doubt_a;  // whether any deficit is more than half of what two may have together
    const unsigned* doubt_b;
    Long a_step, b_step;  // groups between matrices; 0 where an operand is shared
    unsigned limit;
    unsigned judged;  // 0: all tiles pass
};

GEMM_DEVICE bool all_pass(const JudgedParams& params) {
    return params.judged == 0 || (*params.doubt_a | *params.doubt_b) == 0;
}

// A tile of JUDGED_M x JUDGED_N.
GEMM_DEVICE bool passes(const JudgedParams& params, Long matrix, Long tile_m, Long tile_n) {
    const Deficits* columns = params.b + matrix * params.b_step + tile_n * (JUDGED_N / JUDGED_LINES);
    const Deficits a = params.a[matrix * params.a_step + tile_m], b = worse(columns[0], columns[1]);
    return a.most + b.most <= params.limit || a.both + b.better <= params.limit || a.better + b.both <= params.limit;
}
