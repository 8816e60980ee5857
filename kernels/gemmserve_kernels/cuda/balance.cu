// Products whose operands are graded along k, which scaled rows and columns do not serve: found, balanced, tested.
//
// Launched after the pre-pass for every product and over at once where both operands are flat: at every k some vector
// of each reaches 2^-4 of its own largest magnitude. A block takes its share of the vectors of one matrix pair.
#include "split/source.cuh"

constexpr int DEEPEST = 60;  // binades that one step of k is moved at most
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

enum Verdict : int { FLAT_A = 1, FLAT_B = 2, REGULAR = 4 };

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

GEMM_DEVICE bool flat_at(const Statistic& of, Long k) {
    return of.absolute[k] == 0 || of.relative[k] >= bits_of(power_of_two(TOP - 4));
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

template <bool SIDE_B>
struct Vectors {
    const SplitOperand& operand;
    const Statistic mine, other;
    const bool balance;
    const int thread;

    // The power of two that a step of k is multiplied by: op(A) takes its inverse.
    GEMM_DEVICE int step_of(Long k) const {
        const unsigned bits = (SIDE_B ? other : mine).relative[k];
        if (!balance || bits == 0) return 0;
        const int depth = exponent_of(bits) - TOP;
        return depth < -DEEPEST ? -DEEPEST : depth;
    }

    GEMM_DEVICE void element(
        const Source& source, Long k, const Scaling& by, float& x, float& y, unsigned (&present)[PARTS]) const {
        x = y = 0.0f;
        // What meets only zeros adds nothing, and should not set the scale.
        if (k >= operand.k || other.absolute[k] == 0) return;
        const Long at = k * operand.source.column_stride;
        float re, im = 0.0f;
        if constexpr (!COMPLEX) {
            re = source.re[at];
        } else if constexpr (PLANAR) {
            re = source.re[at];
            im = source.im[at];
        } else {
            re = source.re[2 * at];
            im = source.re[2 * at + 1];
        }
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

    GEMM_DEVICE void run(Long matrix, Long row, int* more, int* status, int* shared, Found (*found)[PARTS]) const {
        const Long vector = matrix * operand.rows + row;
        const Long base = batch_offset(matrix, operand.batch_shape, operand.source.batch_stride);
        const Source source(operand.source, base + row * operand.source.row_stride);
        const Long first = matrix * PLANES * operand.rows + row;

        // Once more from the source: the pre-pass has found the largest magnitude, not whether it was finite.
        int largest = 0;
        for (Long k = thread; k < operand.k; k += THREADS) {
            const Long at = k * operand.source.column_stride;
            unsigned bits;
            if constexpr (!COMPLEX) {
                bits = magnitude_bits(source.re[at]);
            } else if constexpr (PLANAR) {
                bits = larger(magnitude_bits(source.re[at]), magnitude_bits(source.im[at]));
            } else {
                bits = larger(magnitude_bits(source.re[2 * at]), magnitude_bits(source.re[2 * at + 1]));
            }
            largest = static_cast<int>(bits) > largest ? static_cast<int>(bits) : largest;
        }
        const unsigned all = static_cast<unsigned>(block_max(largest, thread, shared));
        if (all >= INFINITE) return;  // flagged already
        const Scaling by = scaling_for(all);

        int deeper = 0;
        if (balance) {
            int top = 0;
            for (Long k = thread; k < operand.k; k += THREADS) {
                float x, y;
                unsigned unused[PARTS] = {};
                element(source, k, by, x, y, unused);
                const int bits = static_cast<int>(larger(magnitude_bits(x), magnitude_bits(y)));
                top = bits > top ? bits : top;
            }
            deeper = undo_exponent(static_cast<unsigned>(block_max(top, thread, shared)));
        }
        const Scaling again = scaling_of(-deeper);

        Tally tally = {};
        unsigned present[PARTS] = {};
        for (Long k = 2 * thread; k < operand.pitch; k += 2 * THREADS) {
            float x[2], y[2], weight[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                element(source, k + i, by, x[i], y[i], present);
                weight[i] = weight_of(k + i);
                x[i] = x[i] * again.first * again.second;
                y[i] = y[i] * again.first * again.second;
            }
            unsigned out[PLANES];
            cut_pair<SIDE_B>(x, y, weight, true, out, tally);
            if (balance) {
#pragma unroll
                for (int p = 0; p < PLANES; ++p) {
                    *reinterpret_cast<unsigned*>(operand.planes + (first + p * operand.rows) * operand.pitch + k) = out[p];
                }
            }
        }
        const Part sum = sum_of_lanes<32>(tally, thread % 32);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) present[p] = __any_sync(ALL_LANES, present[p] != 0);
        if (thread % 32 < PARTS) {
            found[thread / 32][thread % 32] = {sum, thread % 32 == 0 ? present[0] != 0 : present[PARTS - 1] != 0};
        }
        __syncthreads();
        if (thread == 0) {
            bool flag = false;
            for (int p = 0; p < PARTS; ++p) {
                Found all = {};
                for (int w = 0; w < WARPS; ++w) {
                    all.part.add(found[w][p].part);
                    all.present = all.present || found[w][p].present;
                }
                flag = flag || all.part.too_much(all.present);
            }
            if (balance) {
                operand.exponents[vector] = undo_exponent(all) + deeper;
                operand.flags[vector] = flag;  // the pre-pass knew no weights
            } else {
                more[vector] = flag;
            }
            if (flag) atomicOr(status, 1);
        }
        __syncthreads();
    }
};

extern "C" __global__ void __launch_bounds__(GEMM_THREADS) balance(BalanceParams params) {
    __shared__ int words[WARPS];
    __shared__ Found found[WARPS][PARTS];
    const int thread = static_cast<int>(threadIdx.x);
    let_next_start();
    wait_for_previous();
    const Quotient where = divide(params.first_block + static_cast<Long>(blockIdx.x), params.parts);
    const Long pair = where.quotient, length = params.a.k;
    const Long matrix_a = batch_offset(pair, params.pair_shape, params.matrix_a);
    const Long matrix_b = batch_offset(pair, params.pair_shape, params.matrix_b);
    const Statistic a{params.a.relative + matrix_a * length, params.a.absolute + matrix_a * length};
    const Statistic b{params.b.relative + matrix_b * length, params.b.absolute + matrix_b * length};

    int flat = FLAT_A | FLAT_B;
    for (Long k = thread; k < length; k += THREADS) {
        flat &= (flat_at(a, k) ? FLAT_A : 0) | (flat_at(b, k) ? FLAT_B : 0);
    }
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
    const Vectors<false> rows{params.a, a, b, flat == 0, thread};
    const Vectors<true> columns{params.b, b, a, flat == 0, thread};
    for (Long v = where.remainder; v < params.a.rows + params.b.rows; v += params.parts) {
        if (v < params.a.rows) {
            rows.run(matrix_a, v, params.more_a, params.status, words, found);
        } else {
            columns.run(matrix_b, v - params.a.rows, params.more_b, params.status, words, found);
        }
    }
}
