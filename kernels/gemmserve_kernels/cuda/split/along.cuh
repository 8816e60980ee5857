// Vectors that lie along memory: a block takes one after another, whole, while the next ones are on their way.
#pragma once

#include "element.cuh"

constexpr int HELD = 8 * GEMM_TILE_K / (THREADS * WIDTH);  // pieces of one thread in a chunk
constexpr int CHUNK = THREADS * HELD * WIDTH;
constexpr bool WHOLE = GEMM_WHOLE;  // whether a chunk is a vector
constexpr int STAGES = 2;  // chunks on their way

struct AlongShared {
    Piece stage[STAGES][HELD * THREADS];  // each thread reads what it has fetched: no barriers
    float largest[2][WARPS];
    Tally tally[2][WARPS];
};

template <bool SIDE_B, bool VECTOR>
struct Along {
    const SplitOperand& operand;
    AlongShared& shared;
    const int thread;

    GEMM_DEVICE Along(const SplitOperand& o, AlongShared& s, int t) : operand(o), shared(s), thread(t) {}

    GEMM_DEVICE Long k_of(Long chunk, int h) const { return chunk * CHUNK + (h * THREADS + thread) * WIDTH; }

    // Chunk number `step` of the block's vectors, all chunks of one after another, or nothing past the end.
    GEMM_DEVICE void begin(Long base, Long first_row, Long chunks, Long step, Long steps) {
        if (step < steps) {
            const Quotient at = divide(step, chunks);
            const Source source(operand.source, base + (first_row + at.quotient) * operand.source.row_stride);
            Piece* stage = shared.stage[step % STAGES];
#pragma unroll
            for (int h = 0; h < HELD; ++h) {
                const Long k = k_of(at.remainder, h);
                fetch<VECTOR>(
                    stage + h * THREADS + thread, source, k * operand.source.column_stride, operand.source.column_stride,
                    operand.k - k);
            }
        }
        commit_async();
    }

    GEMM_DEVICE Piece* own(Long step) const { return shared.stage[step % STAGES] + thread; }

    GEMM_DEVICE void run(Long matrix, Long first_row, int* status) {
        const Long base = batch_offset(matrix, operand.batch_shape, operand.source.batch_stride);
        const Long chunks = WHOLE ? 1 : (operand.pitch + CHUNK - 1) / CHUNK;
        const Long left = operand.rows - first_row;
        const Long rows = left < operand.rows_per_block ? left : operand.rows_per_block;
        const Long steps = rows * chunks;
        const int warp = thread / 32, lane = thread % 32;
        float relative[HELD][WIDTH] = {}, absolute[HELD][WIDTH] = {};
        if (rows <= 0) return;
        for (int step = 0; step < STAGES; ++step) begin(base, first_row, chunks, step, steps);
        float previous = 0;
        for (Long count = 0; count < rows; ++count) {
            const int parity = static_cast<int>(count & 1);
            const Long row = first_row + count;
            float largest = 0;
            for (Long chunk = 0; chunk < chunks; ++chunk) {
                const Long step = count * chunks + chunk;
                wait_async<STAGES - 1>();
#pragma unroll
                for (int h = 0; h < HELD; ++h) {
                    const Piece piece = own(step)[h * THREADS];
#pragma unroll
                    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(piece.at[i]));
                }
                if (chunk + 1 < chunks) begin(base, first_row, chunks, step + STAGES, steps);
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
            }
            if (lane == 0) shared.largest[parity][warp] = largest;
            __syncthreads();
            if (count > 0 && thread == 0) finish(matrix, row - 1, previous, shared.tally[parity ^ 1], status);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, shared.largest[parity][w]);
            previous = largest;
            const Scaling by = scaling_for(bits_of(largest));
            Tally tally = {};
            // The last chunk is still here. The others come from L2.
            const Long last = count * chunks + chunks - 1;
            convert<true>(matrix, row, chunks - 1, own(last), Source(operand.source, 0), by, tally, relative, absolute);
            begin(base, first_row, chunks, last + STAGES, steps);
            if constexpr (!WHOLE) {
                const Source source(operand.source, base + row * operand.source.row_stride);
                for (Long chunk = 0; chunk + 1 < chunks; ++chunk) {
                    convert<false>(matrix, row, chunk, nullptr, source, by, tally, relative, absolute);
                }
            }
            tally.reduce<32>();
            if (lane == 0) shared.tally[parity][warp] = tally;
        }
        __syncthreads();
        if (thread == 0) finish(matrix, first_row + rows - 1, previous, shared.tally[(rows - 1) & 1], status);
        if constexpr (!WHOLE) return;
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) record(matrix, k_of(0, h) + e, relative[h][e], absolute[h][e]);
        }
    }

    GEMM_DEVICE void record(Long matrix, Long k, float relative, float absolute) const {
        if (k >= operand.k) return;
        raise(operand.relative + matrix * operand.k + k, bits_of(relative));
        raise(operand.absolute + matrix * operand.k + k, bits_of(absolute));
    }

    // HERE: the chunk is in shared memory, at `stage`; otherwise it is read from `source`.
    template <bool HERE>
    GEMM_DEVICE void convert(
        Long matrix, Long row, Long chunk, const Piece* stage, const Source& source, const Scaling& by, Tally& tally,
        float (&relative)[HELD][WIDTH], float (&absolute)[HELD][WIDTH]) const {
        const Scaling by_im = conjugated(by, operand.conjugate);
        const bool finite = by.first != 0.0f;
        const Long plane = operand.rows * operand.pitch;
        Half* to = operand.planes + (matrix * PLANES * operand.rows + row) * operand.pitch;
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const Long k = k_of(chunk, h);
            if (k >= operand.pitch) continue;
            const Long stride = operand.source.column_stride;
            const Piece piece = HERE ? stage[h * THREADS] : source.load<VECTOR>(k * stride, stride, operand.k - k);
            unsigned packed[PLANES][WIDTH / 2];
            float size[WIDTH];
#pragma unroll
            for (int pair = 0; pair < WIDTH / 2; ++pair) {
                float re[2], im[2] = {}, magnitude[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    re[i] = piece.at[COMPLEX ? 2 * i : 2 * pair + i];
                    if constexpr (COMPLEX) im[i] = piece.at[2 * i + 1];
                }
                unsigned out[PLANES];
                convert_pair<SIDE_B>(re, im, by, by_im, out, tally, magnitude);
#pragma unroll
                for (int p = 0; p < PLANES; ++p) packed[p][pair] = out[p];
                size[2 * pair] = magnitude[0];
                size[2 * pair + 1] = magnitude[1];
            }
#pragma unroll
            for (int p = 0; p < PLANES; ++p) {
                Vector<unsigned, WIDTH / 2> words;
#pragma unroll
                for (int pair = 0; pair < WIDTH / 2; ++pair) words.at[pair] = packed[p][pair];
                *reinterpret_cast<Vector<unsigned, WIDTH / 2>*>(to + p * plane + k) = words;
            }
            if (!finite) continue;
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                const float here = piece_magnitude(piece, e);
                if constexpr (WHOLE) {
                    relative[h][e] = fmaxf(relative[h][e], size[e]);
                    absolute[h][e] = fmaxf(absolute[h][e], here);
                } else {
                    record(matrix, k + e, size[e], here);
                }
            }
        }
    }

    GEMM_DEVICE void finish(Long matrix, Long row, float largest, const Tally (&parts)[WARPS], int* status) const {
        Tally tally = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) tally.add(parts[w]);
        const bool flag = tally.too_much();
        operand.exponents[matrix * operand.rows + row] = undo_exponent(bits_of(largest));
        operand.flags[matrix * operand.rows + row] = flag || bits_of(largest) >= INFINITE;
        if (flag || bits_of(largest) >= INFINITE) atomicOr(status, 1);
    }
};
