// Products whose operands are graded along k, which scaled rows and columns do not serve: found, balanced, tested.
//
// Launched after the pre-pass for every product and over at once where both operands are flat: at every k some vector
// of each reaches 2^-4 of its own largest magnitude. A block takes its share of the vectors of one matrix pair: one
// after another where they lie along memory, SIDE_BY_SIDE at a time where they lie across it.
#include "split/source.cuh"

constexpr int DEEPEST = 60;  // binades that one step of k is moved at most
constexpr int SIDE_BY_SIDE = 16;
constexpr int AGREE = 8;     // binades by which scaled and unscaled magnitudes may differ from k to k

struct BalanceParams {
    SplitOperand a, b;
    int* more_a;  // (matrices, rows) flags of this product alone; zero before the launch
    int* more_b;
    int* pairs;  // (pairs): 1 where nothing of a product is to be taken from the planes
    int* status;
    Long pair_shape[BATCH_DIMS];
    Long matrix_a[BATCH_DIMS], matrix_b[BATCH_DIMS];  // matrices to step for each axis of the batch
    Long parts;                                       // blocks of one pair
    Long first_block;
    int shared_a, shared_b;  // whether other pairs use the same matrix
};

enum Verdict : int { FLAT_A = 1, FLAT_B = 2 };

// What a pair's statistics say of it: bits of Verdict that every thread agrees to.
GEMM_DEVICE int block_and(int word, int thread, int* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) word &= __shfl_xor_sync(0xffffffffu, word, step);
    if (thread % 32 == 0) shared[thread / 32] = word;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) word &= shared[w];
    __syncthreads();
    return word;
}

GEMM_DEVICE int block_max(int word, int thread, int* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const int other = __shfl_xor_sync(0xffffffffu, word, step);
        word = other > word ? other : word;
    }
    if (thread % 32 == 0) shared[thread / 32] = word;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) word = shared[w] > word ? shared[w] : word;
    __syncthreads();
    return word;
}

struct Statistic {
    const unsigned* relative;
    const unsigned* absolute;
};

// Whether some vector reaches 2^-4 of its own largest magnitude at every step of k that is not all zeros, as far as this
// thread has looked. Several loads are under way at once: this is all that usual data wait for.
GEMM_DEVICE bool flat_here(const Statistic& of, Long length, int thread) {
    constexpr int AT_ONCE = 8;
    const unsigned enough = bits_of(power_of_two(TOP - 4));
    bool flat = true;
    for (Long first = thread; first < length; first += AT_ONCE * THREADS) {
        unsigned relative[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Long k = first + i * THREADS;
            relative[i] = k < length ? of.relative[k] : enough;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (relative[i] < enough) flat = flat && of.absolute[first + i * THREADS] == 0;
        }
    }
    return flat;
}

// Whether scaling changed every k alike, up to AGREE binades: then one weight a k says what a vector's loss means for
// the norm of the product, whichever vectors dominate that.
GEMM_DEVICE bool regular(const Statistic& of, Long length, int thread, int* shared) {
    constexpr int NONE = -100000;
    int highest = NONE, lowest = NONE;  // of the differences, and of their negatives
    int vanished = 0;
    for (Long k = thread; k < length; k += THREADS) {
        if (of.absolute[k] == 0) continue;
        if (of.relative[k] == 0) {
            vanished = 1;
            continue;
        }
        const int difference = exponent_of(of.absolute[k]) - exponent_of(of.relative[k]);
        highest = difference > highest ? difference : highest;
        lowest = -difference > lowest ? -difference : lowest;
    }
    vanished = block_max(vanished, thread, shared);
    highest = block_max(highest, thread, shared);
    lowest = block_max(lowest, thread, shared);
    return !vanished && (highest == NONE || highest + lowest <= AGREE);
}

// Of the real or of the imaginary parts of a vector, as one warp has seen them.
struct Found {
    Part part;
    bool present;  // whether any is not 0
};

struct Shared {
    int words[WARPS][SIDE_BY_SIDE];
    Found found[WARPS][SIDE_BY_SIDE][PARTS];
};

// The threads of a block as `wide` vectors, neighbouring threads at the same step of k of neighbouring vectors.
struct Team {
    const int thread, wide;

    GEMM_DEVICE int vector() const { return thread & (wide - 1); }
    GEMM_DEVICE int first() const { return thread / wide * RUN; }  // step of k
    GEMM_DEVICE int stride() const { return THREADS / wide * RUN; }

    // Of each vector, in all its threads.
    GEMM_DEVICE int largest(int word, Shared& shared) const {
        for (int step = 16; step >= wide; step /= 2) {
            const int other = __shfl_xor_sync(ALL_LANES, word, step);
            word = other > word ? other : word;
        }
        if (thread % 32 < wide) shared.words[thread / 32][thread % 32] = word;
        __syncthreads();
        for (int w = 0; w < WARPS; ++w) {
            const int other = shared.words[w][vector()];
            word = other > word ? other : word;
        }
        __syncthreads();
        return word;
    }

    // Whether too much is lost of the thread's vector; known to the first `wide` threads.
    GEMM_DEVICE bool too_much(const Tally& tally, const unsigned (&present)[PARTS], Shared& shared) const {
        bool flag = false;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            Part sum = tally.part[p];
            int any = present[p] != 0;
            for (int step = 16; step >= wide; step /= 2) {
                sum.lost += __shfl_xor_sync(ALL_LANES, sum.lost, step);
                sum.norm += __shfl_xor_sync(ALL_LANES, sum.norm, step);
                any |= __shfl_xor_sync(ALL_LANES, any, step);
            }
            if (thread % 32 < wide) shared.found[thread / 32][thread % 32][p] = {sum, any != 0};
        }
        __syncthreads();
        if (thread < wide) {
            for (int p = 0; p < PARTS; ++p) {
                Found all = {};
                for (int w = 0; w < WARPS; ++w) {
                    all.part.add(shared.found[w][thread][p].part);
                    all.present = all.present || shared.found[w][thread][p].present;
                }
                flag = flag || all.part.too_much(all.present);
            }
        }
        __syncthreads();
        return flag;
    }
};

template <bool SIDE_B>
struct Vectors {
    const SplitOperand& operand;
    const Statistic mine, other;
    const bool balance;
    const Team team;

    // The power of two that a step of k is multiplied by: op(A) takes its inverse.
    GEMM_DEVICE int step_of(Long k) const {
        const unsigned bits = (SIDE_B ? other : mine).relative[k];
        if (!balance || bits == 0) return 0;
        const int depth = exponent_of(bits) - TOP;
        return depth < -DEEPEST ? -DEEPEST : depth;
    }

    GEMM_DEVICE void read(const Source& source, Long k, float& re, float& im) const {
        const Long at = k * operand.source.column_stride;
        im = 0.0f;
        if constexpr (!COMPLEX) {
            re = source.re[at];
        } else if constexpr (PLANAR) {
            re = source.re[at];
            im = source.im[at];
        } else {
            re = source.re[2 * at];
            im = source.re[2 * at + 1];
        }
    }

    GEMM_DEVICE void element(
        const Source& source, Long k, const Scaling& by, float& x, float& y, unsigned (&present)[PARTS]) const {
        x = y = 0.0f;
        // What meets only zeros adds nothing, and should not set the scale.
        if (k >= operand.k || other.absolute[k] == 0) return;
        float re, im;
        read(source, k, re, im);
        const int depth = step_of(k);
        const float factor = power_of_two(SIDE_B ? depth : -depth);
        x = scaled(re, by) * factor;
        y = (operand.conjugate ? -1.0f : 1.0f) * scaled(im, by) * factor;
        present[0] |= magnitude_bits(re);
        if constexpr (COMPLEX) present[1] |= magnitude_bits(im);
    }

    GEMM_DEVICE float weight_of(Long k) const {
        if (k >= operand.k) return 0.0f;
        const int depth = step_of(k);
        return float_of(other.relative[k]) * power_of_two(SIDE_B ? -depth : depth);
    }

    // The vectors of a matrix from `first_row` on, as many as the team is wide.
    GEMM_DEVICE void run(Long matrix, Long first_row, int* more, int* status, Shared& shared) const {
        const bool exists = first_row + team.vector() < operand.rows;
        const Long row = exists ? first_row + team.vector() : first_row;
        const Long vector = matrix * operand.rows + row;
        const Long base = batch_offset(matrix, operand.batch_shape, operand.source.batch_stride);
        const Source source(operand.source, base + row * operand.source.row_stride);

        // Once more from the source: the pre-pass has found the largest magnitude, not whether it was finite.
        int largest = 0;
        for (Long first = team.first(); first < operand.k; first += team.stride()) {
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                if (first + i >= operand.k) break;
                float re, im;
                read(source, first + i, re, im);
                const int bits = static_cast<int>(larger(magnitude_bits(re), magnitude_bits(im)));
                largest = bits > largest ? bits : largest;
            }
        }
        const unsigned all = static_cast<unsigned>(team.largest(largest, shared));
        const bool usable = exists && all < INFINITE;  // others are flagged already
        const Scaling by = scaling_for(all);

        int deeper = 0;
        if (balance) {
            int top = 0;
            for (Long first = team.first(); first < operand.k; first += team.stride()) {
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    float x, y;
                    unsigned unused[PARTS] = {};
                    element(source, first + i, by, x, y, unused);
                    const int bits = static_cast<int>(larger(magnitude_bits(x), magnitude_bits(y)));
                    top = bits > top ? bits : top;
                }
            }
            deeper = undo_exponent(static_cast<unsigned>(team.largest(top, shared)));
        }
        const Scaling again = scaling_of(-deeper);

        Tally tally = {};
        unsigned present[PARTS] = {};
        Half* const to = operand.planes + (matrix * PLANES * operand.rows + row) * operand.pitch;
        for (Long first = team.first(); first < operand.pitch; first += team.stride()) {
            Vector<unsigned, RUN / 2> words[PLANES];
#pragma unroll
            for (int pair = 0; pair < RUN / 2; ++pair) {
                float x[2], y[2], weight[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const Long k = first + 2 * pair + i;
                    element(source, k, by, x[i], y[i], present);
                    weight[i] = weight_of(k);
                    x[i] = scaled(x[i], again);
                    y[i] = scaled(y[i], again);
                }
                unsigned out[PLANES];
                cut_pair<SIDE_B>(x, y, weight, true, out, tally);
#pragma unroll
                for (int p = 0; p < PLANES; ++p) words[p].at[pair] = out[p];
            }
            if (balance && usable) store_run(to + first, operand.rows * operand.pitch, words);
        }
        const bool flag = team.too_much(tally, present, shared);
        if (team.thread < team.wide && usable) {
            if (balance) {
                operand.exponents[vector] = undo_exponent(all) + deeper;
                operand.flags[vector] = flag;  // the pre-pass knew no weights
            } else {
                more[vector] = flag;
            }
            if (flag) atomicOr(status, 1);
        }
    }
};

// The vectors of a matrix that are taken at a time.
GEMM_DEVICE int width_of(const SplitOperand& operand) {
    return operand.source.row_stride == 1 && operand.source.column_stride != 1 ? SIDE_BY_SIDE : 1;
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS) balance(BalanceParams params) {
    __shared__ int words[WARPS];
    __shared__ Shared shared;
    const int thread = static_cast<int>(threadIdx.x);
    let_next_start();
    wait_for_previous();
    const Quotient where = divide(params.first_block + static_cast<Long>(blockIdx.x), params.parts);
    const Long pair = where.quotient, length = params.a.k;
    const Long matrix_a = batch_offset(pair, params.pair_shape, params.matrix_a);
    const Long matrix_b = batch_offset(pair, params.pair_shape, params.matrix_b);
    const Statistic a{params.a.relative + matrix_a * length, params.a.absolute + matrix_a * length};
    const Statistic b{params.b.relative + matrix_b * length, params.b.absolute + matrix_b * length};

    int flat = (flat_here(a, length, thread) ? FLAT_A : 0) | (flat_here(b, length, thread) ? FLAT_B : 0);
    flat = block_and(flat, thread, words);
    if (flat == (FLAT_A | FLAT_B)) return;

    const bool fits = !params.shared_a && !params.shared_b && regular(a, length, thread, words) && regular(b, length, thread, words);
    if (!fits) {
        if (where.remainder == 0 && thread == 0) {
            params.pairs[pair] = 1;
            atomicOr(params.status, 1);
        }
        return;
    }
    const int wide_a = width_of(params.a), wide_b = width_of(params.b);
    const Vectors<false> rows{params.a, a, b, flat == 0, {thread, wide_a}};
    const Vectors<true> columns{params.b, b, a, flat == 0, {thread, wide_b}};
    const Long units_a = (params.a.rows + wide_a - 1) / wide_a, units_b = (params.b.rows + wide_b - 1) / wide_b;
    for (Long unit = where.remainder; unit < units_a + units_b; unit += params.parts) {
        if (unit < units_a) {
            rows.run(matrix_a, unit * wide_a, params.more_a, params.status, shared);
        } else {
            columns.run(matrix_b, (unit - units_a) * wide_b, params.more_b, params.status, shared);
        }
    }
}
