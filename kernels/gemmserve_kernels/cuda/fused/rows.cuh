// Rows of op(A) from where they lie to float16 planes in registers, as wgmma takes its first operand from there.
//
// A warp has sixteen rows. It asks for its share of a chunk two chunks ahead, by copies that arrive in a slot of shared
// memory which no other warp sees. Of 16 steps of k a lane has four, of two rows: which steps those are follows from the
// order in which the planes of the columns have theirs (operand.cuh).
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "operand.cuh"

// A lane's part of the planes of a chunk, and what is known of its two rows.
struct RowPlanes {
    static constexpr int SLICES = Config::CHUNK / 16;
    unsigned at[Config::PLANES][SLICES][4];
    float scale[2];
    int word[2];
};

template <bool ALONG_K, int VECTOR, bool CONJUGATE>
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

    // Asks for a chunk of the warp's rows; what lies outside is zero.
    GEMM_DEVICE void request(
        unsigned char* slot, const ChunkPlace& place, const Long& vector_stride, const Long& k_stride) const {
        if (place.vectors >= Config::ROWS && place.steps == Config::CHUNK) {
            copy<true>(slot, place, vector_stride, k_stride);
        } else {
            copy<false>(slot, place, vector_stride, k_stride);
        }
    }

    // Splits the lane's share of a chunk that has arrived. False: some row alone does not promise that planes serve.
    GEMM_DEVICE bool split(RowPlanes& planes, const unsigned char* slot, int steps) const {
        Value x[2][RowPlanes::SLICES][4];
        const unsigned char* const from = slot + place_of(row, step);  // the swizzle of all the lane's steps is alike
        constexpr int NEXT_STEP = ALONG_K ? 8 : Config::ROWS * 8, EIGHT_ROWS = 8 * Config::SLOT_ROW;
#pragma unroll
        for (int s = 0; s < RowPlanes::SLICES; ++s) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int at = (16 * s + 4 * pair) * NEXT_STEP + i * (ALONG_K ? EIGHT_ROWS : NEXT_STEP);
                    const auto two = *reinterpret_cast<const Vector<Value, 2>*>(from + at);
#pragma unroll
                    for (int v = 0; v < 2; ++v) x[ALONG_K ? i : v][s][2 * pair + (ALONG_K ? v : i)] = two.at[v];
                }
            }
        }
        bool promised = true;
#pragma unroll
        for (int h = 0; h < 2; ++h) promised &= split_row(planes, x[h], h, steps);
        return promised;
    }

    // A number of the lane's row `h` as it is.
    GEMM_DEVICE Value number(const unsigned char* slot, int h, int k) const {
        Value x = *reinterpret_cast<const Value*>(slot + place_of(row + h * apart, k));
        if constexpr (CONJUGATE) x.im = -x.im;
        return x;
    }

  private:
    template <bool WHOLE>
    GEMM_DEVICE void copy(
        unsigned char* slot, const ChunkPlace& place, const Long& vector_stride, const Long& k_stride) const {
        constexpr int FAST = ALONG_K ? Config::CHUNK / VECTOR : Config::ROWS / VECTOR;  // copies along the fast axis
        constexpr int LANES = FAST < 32 ? FAST : 32, ROUNDS = FAST / LANES;             // of one row, or of one step
        constexpr int SLOW = 32 / LANES, COUNT = (ALONG_K ? Config::ROWS : Config::CHUNK) / SLOW;
        const Long& fast_stride = ALONG_K ? k_stride : vector_stride;
        const Long& slow_stride = ALONG_K ? vector_stride : k_stride;
        const int fast = lane % LANES * VECTOR, slow = lane / LANES;
        const Value* from = place.first + fast * fast_stride + slow * slow_stride;
#pragma unroll 8
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const int on = fast + round * LANES * VECTOR, down = slow + i * SLOW;
                const int vector = ALONG_K ? down : on, k = ALONG_K ? on : down;
                const Value* const here = from + round * LANES * VECTOR * fast_stride;
                if constexpr (WHOLE) {
                    copy_async<8 * VECTOR>(slot + place_of(vector, k), here);
                } else {
                    const bool inside = vector < place.vectors && k < place.steps;
                    copy_async<8 * VECTOR>(
                        slot + place_of(vector, k), inside ? here : place.first, inside ? 8 * VECTOR : 0);
                }
            }
            from += SLOW * slow_stride;
        }
    }

    // Where a number lies in a slot: lanes that read together meet in no bank.
    static GEMM_DEVICE int place_of(int vector, int k) {
        if constexpr (ALONG_K) return vector * Config::SLOT_ROW + k * 8;
        return k * (Config::ROWS * 8) + ((vector / 2) ^ ((k & 2) | (k >> 1 & 4))) * 16 + vector % 2 * 8;
    }

    static GEMM_DEVICE bool split_row(RowPlanes& planes, const Value (&x)[RowPlanes::SLICES][4], int h, int steps) {
        unsigned most_re = 0, most_im = 0;
#pragma unroll
        for (int s = 0; s < RowPlanes::SLICES; ++s) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                most_re = larger_bits(most_re, magnitude_bits(x[s][e].re));
                most_im = larger_bits(most_im, magnitude_bits(x[s][e].im));
            }
        }
#pragma unroll
        for (int lane = 1; lane < 4; lane *= 2) {
            most_re = larger_bits(most_re, __shfl_xor_sync(0xffffffffu, most_re, lane));
            most_im = larger_bits(most_im, __shfl_xor_sync(0xffffffffu, most_im, lane));
        }
        const VectorScale scale(most_re, most_im);
        const float down = scale.down();
        unsigned small_re = 0, small_im = 0;
#pragma unroll
        for (int s = 0; s < RowPlanes::SLICES; ++s) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const Value &first = x[s][2 * pair], &second = x[s][2 * pair + 1];
                const unsigned re = pack_halves(first.re * down, second.re * down);
                const unsigned im = pack_halves(first.im * down, second.im * down);
                count_small(small_re, re);
                count_small(small_im, im);
                constexpr unsigned MINUS = CONJUGATE ? 0x80008000u : 0u;
                planes.at[0][s][h + 2 * pair] = re;
                planes.at[1][s][h + 2 * pair] = im ^ MINUS;
                planes.at[2][s][h + 2 * pair] = rest_of(first.re, second.re, down, re);
                planes.at[3][s][h + 2 * pair] = rest_of(first.im, second.im, down, im) ^ MINUS;
            }
        }
        unsigned small = static_cast<unsigned>(counted(small_re) | counted(small_im) << 16);
#pragma unroll
        for (int lane = 1; lane < 4; lane *= 2) small += __shfl_xor_sync(0xffffffffu, small, lane);
        const VectorCounts known(small, steps);
        planes.scale[h] = scale.up();
        planes.word[h] = known.word(scale);
        return known.promise(scale, steps);
    }
};
