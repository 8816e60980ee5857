// Rows of op(A) from where they lie to float16 planes in registers, as wgmma takes its first operand from there.
//
// Warps of producers copy a chunk of the rows into a slot of shared memory as it is, and each warp of consumers has sixteen
// of them. Of 16 steps of k a lane has four, of two rows: which steps those are follows from the order in which the planes
// of the columns have theirs (operand.cuh). Rows are measured first, and split by halves of a chunk then: so a warp splits
// one half while the tensor cores multiply the other one.
#pragma once

#include "copies.cuh"

// Where a number of a warp's rows lies in its slot: lanes that read together meet in no bank.
template <bool ALONG_K>
GEMM_DEVICE int place_in_slot(int row, int k) {
    if constexpr (ALONG_K) return row * Config::SLOT_ROW + k * 8;
    return k * (Config::ROWS * 8) + ((row / 2) ^ ((k & 2) | (k >> 1 & 4))) * 16 + row % 2 * 8;
}

// The slots of the rows that a warp of producers copies, for PAIR warps of consumers.
template <bool ALONG_K>
struct RowSlots {
    static constexpr int PAIR = Config::CONSUMER_WARPS / Config::PRODUCER_WARPS, VECTORS = PAIR * Config::ROWS, AT_ONCE = 4;
    static GEMM_DEVICE int at(int row, int k) {
        return row / Config::ROWS * Config::SLOT_BYTES + place_in_slot<ALONG_K>(row % Config::ROWS, k);
    }
};

// A lane's part of the planes of half a chunk.
struct RowPlanes {
    static constexpr int SLICES = Config::CHUNK / 32;
    unsigned at[Config::PLANES][SLICES][4];
};

// What is known of a lane's two rows of a chunk: the exponents of their largest parts, and how many parts are not large, of
// what the lane has split so far.
struct RowsKnown {
    enum Flag : unsigned { SOME_REAL = 1, SOME_IMAGINARY = 2 };
    unsigned most[2], small_re[2], small_im[2];

    GEMM_DEVICE RowsKnown() : small_re{NONE_SMALL, NONE_SMALL}, small_im{NONE_SMALL, NONE_SMALL} {}
    GEMM_DEVICE void set(int h, unsigned most_re, unsigned most_im) {
        most[h] = (larger_bits(most_re, most_im) & 0x7f800000u) | (most_re != 0 ? SOME_REAL : 0) |
                  (most_im != 0 ? SOME_IMAGINARY : 0);
    }
    GEMM_DEVICE VectorScale scale(int h) const {
        return VectorScale((most[h] & SOME_REAL) != 0 ? most[h] : 0, (most[h] & SOME_IMAGINARY) != 0 ? most[h] : 0);
    }
};

template <bool ALONG_K, bool CONJUGATE>
class RowOperand {
  public:
    // The lane's rows among those of the warp, and the first of its steps of k.
    int lane, row, apart, step;

    GEMM_DEVICE explicit RowOperand(int thread) : lane(thread % 32) {
        const int quad = lane / 4;
        row = ALONG_K ? quad : 2 * quad;
        apart = ALONG_K ? 8 : 1;
        step = lane % 2 * 8 + lane / 2 % 2 * 2;
    }

    // Finds the largest parts of the rows of a chunk.
    GEMM_DEVICE RowsKnown measure(const unsigned char* slot) const {
        unsigned most_re[2] = {0, 0}, most_im[2] = {0, 0};
#pragma unroll
        for (int slice = 0; slice < 2 * RowPlanes::SLICES; ++slice) {
            Value x[2][4];
            read(x, slot, slice);
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    most_re[h] = larger_bits(most_re[h], magnitude_bits(x[h][e].re));
                    most_im[h] = larger_bits(most_im[h], magnitude_bits(x[h][e].im));
                }
        }
        RowsKnown known;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int lane = 1; lane < 4; lane *= 2) {
                most_re[h] = larger_bits(most_re[h], __shfl_xor_sync(0xffffffffu, most_re[h], lane));
                most_im[h] = larger_bits(most_im[h], __shfl_xor_sync(0xffffffffu, most_im[h], lane));
            }
            known.set(h, most_re[h], most_im[h]);
        }
        return known;
    }

    // Splits the lane's share of half a chunk that was measured, and counts what is not large.
    GEMM_DEVICE void split(RowPlanes& planes, RowsKnown& known, const unsigned char* slot, int half) const {
        const float down[2] = {known.scale(0).down(), known.scale(1).down()};
#pragma unroll
        for (int s = 0; s < RowPlanes::SLICES; ++s) {
            Value x[2][4];
            read(x, slot, half * RowPlanes::SLICES + s);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    const Value &first = x[h][2 * pair], &second = x[h][2 * pair + 1];
                    const unsigned re = pack_halves(first.re * down[h], second.re * down[h]);
                    const unsigned im = pack_halves(first.im * down[h], second.im * down[h]);
                    count_small(known.small_re[h], re);
                    count_small(known.small_im[h], im);
                    constexpr unsigned MINUS = CONJUGATE ? 0x80008000u : 0u;
                    planes.at[0][s][h + 2 * pair] = re;
                    planes.at[1][s][h + 2 * pair] = im ^ MINUS;
                    planes.at[2][s][h + 2 * pair] = rest_of(first.re, second.re, down[h], re);
                    planes.at[3][s][h + 2 * pair] = rest_of(first.im, second.im, down[h], im) ^ MINUS;
                }
            }
        }
    }

    // What is known of a row of which all of a chunk has been split: by all lanes.
    static GEMM_DEVICE VectorCounts counts(const RowsKnown& known, int h, int steps) {
        unsigned small = static_cast<unsigned>(counted(known.small_re[h]) | counted(known.small_im[h]) << 16);
#pragma unroll
        for (int lane = 1; lane < 4; lane *= 2) small += __shfl_xor_sync(0xffffffffu, small, lane);
        return VectorCounts(static_cast<int>(small & 0xffffu), static_cast<int>(small >> 16), steps);
    }

    // A number of the lane's row `h` as it is.
    GEMM_DEVICE Value number(const unsigned char* slot, int h, int k) const {
        Value x = *reinterpret_cast<const Value*>(slot + place_in_slot<ALONG_K>(row + h * apart, k));
        if constexpr (CONJUGATE) x.im = -x.im;
        return x;
    }

  private:
    // The lane's numbers of 16 steps of k: there are no registers for those of many at once.
    GEMM_DEVICE void read(Value (&x)[2][4], const unsigned char* slot, int slice) const {
        // The swizzle of all the lane's steps is alike.
        const unsigned char* const from = slot + place_in_slot<ALONG_K>(row, step);
        constexpr int NEXT_STEP = ALONG_K ? 8 : Config::ROWS * 8, EIGHT_ROWS = 8 * Config::SLOT_ROW;
        __syncwarp();
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = (16 * slice + 4 * pair) * NEXT_STEP + i * (ALONG_K ? EIGHT_ROWS : NEXT_STEP);
                const auto two = *reinterpret_cast<const Vector<Value, 2>*>(from + at);
#pragma unroll
                for (int v = 0; v < 2; ++v) x[ALONG_K ? i : v][2 * pair + (ALONG_K ? v : i)] = two.at[v];
            }
        }
    }
};
