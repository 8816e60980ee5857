// What the host passes to the kernels of the residue scheme (gemmserve_kernels.device.structures).
#pragma once

#include "../common/judging/judged.cuh"
#include "../common/params.cuh"

constexpr int MAX_MODULI = 17;

// An operand as lines along k: rows of op(A) or columns of op(B), where rows of the view are lines.
// The scale of a line is n / 4 * 2^e, kept as 8 e + n: n = 4..7; ZERO_LINE for lines of zeros, FLAGGED_LINE where
// something is not finite. 8 e is even in its lowest three bits, so that e = code >> 3.
constexpr int FLAGGED_LINE = 0, ZERO_LINE = 1;

struct LineParams {
    MatrixParams x;
    Long batch_shape[BATCH_DIMS];
    Long first;  // matrix of the batch
    Long lines;  // of the whole operand
    Long k;
    int* codes;  // [matrix][line]
};

constexpr int MOST_OUTLIERS = 64;

// Elements of a line that are multiplied apart, in double (gemmserve_kernels.algorithms.ozaki.bound): those of which a real
// part is larger than `above`, which is infinite where there are none.
struct Outliers {
    double above;
    int count, reserved;
    int at[MOST_OUTLIERS];  // steps of k, the first ones first
};

// How the elements of each line are counted, and what is made of it (gemmserve_kernels.algorithms.ozaki.bound).
struct TallyParams {
    unsigned long long* sums;  // [matrix][line]: of the real parts, and above 32 bits of the imaginary ones
    unsigned* arrivals;        // [matrix][group]: blocks that have counted
    LineDeficits* deficits;        // [matrix][group]
    Least* least;              // [matrix][group]
    unsigned* doubt;           // DOUBTED where any deficit is more than half of the limit, APART where a line has outliers
    Outliers* outliers;        // [matrix][line]
    Long groups;
    unsigned limit;
    int counts;  // scale: doubt is set to 0; convert: lines are counted
    float step;  // a little less than TALLY_WHOLE over what counts as a whole element
    int most_outliers;  // of a line
};
constexpr int TALLY_WHOLE = 64;

struct ScaleParams {
    LineParams line;
    double target;  // the largest norm
    TallyParams tally;
};

struct ConvertParams {
    LineParams line;
    Long first_line, panel;  // the lines to convert
    Long pitch;              // bytes of a line, a multiple of 128
    Long plane;              // bytes of a plane: pitch times a multiple of 256 lines
    unsigned char* residues; // [matrix][modulus][part][plane]
    float modulus[MAX_MODULI], inverse[MAX_MODULI];
    int base[MAX_MODULI];    // bits of a float, half of the modulus less than a multiple of it
    float zero[MAX_MODULI];  // that multiple over the modulus, and 1.5 * 2^23
    int power[MAX_MODULI][2][2];  // 2^(8 d) modulo each, and times its root of -1: bytes, d = 0..3 and 4..7
    int conjugate;
    int reserved;
    TallyParams tally;
    const Least* partner;                // [matrix][group] of the other operand; nullptr: not known
    Long partner_step, partner_groups;   // groups between matrices, 0 where it is shared; of one matrix
};

struct MultiplyParams {
    const unsigned char* a;
    const unsigned char* b;
    unsigned char* products;  // [matrix][modulus][part][tile][word][thread], see layout.cuh
    Long matrices;
    Long a_planes, b_planes;  // planes between matrices; 0 where an operand is shared
    Long a_plane, b_plane;    // bytes
    Long a_first, b_first;    // line, a multiple of 128
    Long rows, columns;
    Long tiles_m, tiles_n;
    Long pitch;
    unsigned divisor[MAX_MODULI], reciprocal[MAX_MODULI];  // each modulus, or twice that, 129 to 256
    JudgedParams judged;
};

struct RemainderParams {
    MatrixParams c, d;
    Long batch_shape[BATCH_DIMS];
    Long first, matrices;
    Long first_row, first_column;  // of the panel
    Long rows, columns;            // of the panel
    Long m, n;                     // of the matrix: the lengths of the code arrays
    Long tiles_m, tiles_n;
    const unsigned char* products;
    const int* a_codes;
    const int* b_codes;
    Long a_codes_step, b_codes_step;  // lines between matrices
    double weight[MAX_MODULI][2][3];  // of each real part; limbs, the lowest first
    double product[3];
    double inverse_product;  // 2^84 / P
    double zero[MAX_MODULI];  // 2^52 plus what is taken away from sums of two residues: each modulus, or twice that
    double inverse[4][2];     // 4 / n, n = 4..7, and what is missing there
    double alpha[2], beta[2];
    JudgedParams judged;
    MatrixParams a, b;  // of which outliers are multiplied apart
    const Outliers* a_outliers;
    const Outliers* b_outliers;  // [matrix][line], as codes
    int conjugate_a, conjugate_b;
};
