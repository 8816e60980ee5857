// Lines of both operands in double precision as float16, scaled by powers of two, and bounds of what that takes from them.
//
// Complex numbers lie along k as real ones, (re, im). Of the left operand every line is two, (re, -im) and (im, re): by a
// column they give the real and the imaginary part. Lines are padded with zeros. A block has LINES lines; they come to
// shared memory whole, or `steps` of k at a time and then twice, and either way round: next to each other along k (LEFT_ALONG,
// RIGHT_ALONG) or across it.
#include "../common/dependent.cuh"
#include "../common/ptx/cp_async.cuh"
#include "lines.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, LINES = GEMM_LINES, EACH = LINES / WARPS;  // lines of a warp
constexpr int LARGEST = 450;  // binary orders of magnitude: no product of two lines overflows
static_assert(LINES % WARPS == 0, "whole lines for each warp");

// Size of the largest number of a line: the upper word of its magnitude, and what lower words there are.
struct Size {
    unsigned upper, lower;

    GEMM_DEVICE void take(double x) {
        const Long bits = bits_of(x);
        const unsigned high = static_cast<unsigned>(bits >> 32) & 0x7fffffffu;
        upper = high > upper ? high : upper;
        lower |= static_cast<unsigned>(bits);
    }
    GEMM_DEVICE void of_warp() {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            const Size other = of_neighbour(*this, step);
            upper = other.upper > upper ? other.upper : upper;
            lower |= other.lower;
        }
    }
};

// How a line is scaled.
struct Scaling {
    double factor, back;
    bool known, zero;

    GEMM_DEVICE Scaling(const Size& largest, int wanted) {
        const int exponent = static_cast<int>(largest.upper >> 20) - 1023;
        zero = (largest.upper | largest.lower) == 0;
        known = zero || (exponent >= -LARGEST && exponent <= LARGEST);
        const int by = known && !zero ? wanted - exponent : 0;
        factor = double_of(static_cast<Long>(by + 1023) << 52);
        back = double_of(static_cast<Long>(1023 - by) << 52);
    }
};

struct Norms {
    float all, lost;  // sums of squares

    // What a float takes from a double is in put_info.
    GEMM_DEVICE unsigned round(double x) {
        const float value = static_cast<float>(x);
        const Half half = float_to_half(value);
        const float lost_here = value - half_to_float(half);
        all = fmaf(value, value, all);
        lost = fmaf(lost_here, lost_here, lost);
        return half.bits;
    }
};

// Element i of a line, or of both.
template <bool LEFT>
GEMM_DEVICE void put(Half* to, Long pitch, Long i, unsigned re, unsigned im) {
    if constexpr (COMPLEX) {
        unsigned* const words = reinterpret_cast<unsigned*>(to);
        if constexpr (LEFT) {
            words[i] = re | (im ^ 0x8000u) << 16;
            words[pitch / 2 + i] = im | re << 16;
        } else {
            words[i] = re | im << 16;
        }
    } else {
        to[i].bits = static_cast<unsigned short>(re);
    }
}

GEMM_DEVICE void put_info(LineInfo& info, const Scaling& scaling, const Norms& norms) {
    // Sums of squares in single precision, squares that vanish there, and half a unit of a float of each number.
    constexpr float MORE = 1.001f, LEAST = 9.3132257e-10f, FLOAT = 1.1920929e-7f;
    const float all = sqrtf(norms.all), lost = sqrtf(norms.lost) * MORE + (all * FLOAT + LEAST);
    info.scale = scaling.back;
    info.residual = scaling.zero ? 0.0f : lost;
    info.norm = !scaling.known ? UNKNOWN : scaling.zero ? 0.0f : all * MORE + lost;
}

// The lines of a block in shared memory, numbers of a line next to each other. Lines are so far apart that neither LINES
// numbers of one step nor those of one line meet in a bank.
struct Chunk {
    double* numbers;
    int pitch;

    GEMM_DEVICE Chunk(unsigned char* memory, int steps)
        : numbers(reinterpret_cast<double*>(memory)), pitch(steps * PARTS + PARTS) {}
    GEMM_DEVICE double* line(int l) const { return numbers + l * pitch; }

    // Steps [first, first + steps) of k of `lines` lines, from the first of them on.
    template <bool ALONG_K>
    GEMM_DEVICE void load(const MatrixParams& x, Long from, int lines, int steps) const {
        const int thread = static_cast<int>(threadIdx.x);
        if constexpr (ALONG_K) {
#pragma unroll
            for (int l = thread / 32; l < LINES; l += WARPS) {
                if (l >= lines) break;
                const Long line_at = from + l * x.row_stride;
#pragma unroll 4
                for (int i = thread % 32; i < steps; i += 32) bring(x, line_at + i * x.column_stride, l, i);
            }
        } else if (thread % LINES < lines) {
            const int l = thread % LINES;
            const Long line_at = from + l * x.row_stride;
#pragma unroll 4
            for (int i = thread / LINES; i < steps; i += THREADS / LINES) bring(x, line_at + i * x.column_stride, l, i);
        }
        copy_commit();
        copy_wait<0>();
        __syncthreads();
    }

  private:
    GEMM_DEVICE void bring(const MatrixParams& x, Long offset, int l, int step) const {
        double* const to = line(l) + step * PARTS;
        copy_async<sizeof(Stored)>(to, static_cast<const Stored*>(x.re) + offset);
        if constexpr (PLANAR) copy_async<sizeof(Stored)>(to + 1, static_cast<const Stored*>(x.im) + offset);
    }
};

template <bool LEFT, bool ALONG_K>
GEMM_DEVICE void round_lines(const RoundParams& params, const RoundSide& side, Long block, unsigned char* memory) {
    constexpr int ROWS = LEFT ? PARTS : 1;  // for each line
    const int warp = warp_number(), lane = static_cast<int>(threadIdx.x) % 32;
    const Quotient where = divide(block, (side.lines + LINES - 1) / LINES);
    const Long matrix = where.quotient, first = where.remainder * LINES, k = params.k, padded = params.pitch / PARTS;
    const int lines = side.lines - first < LINES ? static_cast<int>(side.lines - first) : LINES;
    const Long from = batch_offset(side.first + matrix, params.batch_shape, side.x.batch_stride) +
                      (side.first_line + first) * side.x.row_stride;
    Half* const rounded = side.rounded + (matrix * side.stored + first) * ROWS * params.pitch;
    const Chunk chunk(memory, params.steps);
    const auto steps_from = [&](Long step) { return k - step < params.steps ? static_cast<int>(k - step) : params.steps; };
    const auto load = [&](Long step) {
        chunk.load<ALONG_K>(side.x, from + step * side.x.column_stride, lines, steps_from(step));
    };

    Size largest[EACH]{};
    Long step = 0;
    for (;; step += params.steps) {
        load(step);
        const int numbers = steps_from(step) * PARTS;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            if (warp + e * WARPS >= lines) break;
            const double* const line = chunk.line(warp + e * WARPS);
#pragma unroll 4
            for (int i = lane; i < numbers; i += 32) largest[e].take(line[i]);
        }
        if (step + params.steps >= k) break;
        __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) largest[e].of_warp();

    // Backwards: what came last is still there.
    Norms norms[EACH]{};
    for (;; step -= params.steps) {
        const int steps = steps_from(step);
        const Long end = step + steps == k ? padded : step + steps;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int l = warp + e * WARPS;
            if (l >= lines) break;
            const double* const line = chunk.line(l);
            const Scaling scaling(largest[e], params.exponent);
            Half* const to = rounded + static_cast<Long>(l) * ROWS * params.pitch;
            const int elements = static_cast<int>(end - step);
#pragma unroll 4
            for (int i = lane; i < elements; i += 32) {
                unsigned re = 0, im = 0;
                if (i < steps && scaling.known) {
                    re = norms[e].round(line[i * PARTS] * scaling.factor);
                    if constexpr (COMPLEX) {
                        const double part = line[i * PARTS + 1];
                        im = norms[e].round((side.conjugate ? -part : part) * scaling.factor);
                    }
                }
                put<LEFT>(to, params.pitch, step + i, re, im);
            }
        }
        if (step == 0) break;
        __syncthreads();
        load(step - params.steps);
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int l = warp + e * WARPS;
#pragma unroll
        for (int other = 16; other > 0; other /= 2) {
            const Norms there = of_neighbour(norms[e], other);
            norms[e].all += there.all;
            norms[e].lost += there.lost;
        }
        if (l < lines && lane == 0) {
            put_info(side.info[matrix * side.lines + first + l], Scaling(largest[e], params.exponent), norms[e]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) screen_round(const RoundParams params) {
    GEMM_DYNAMIC_SHARED(memory);
    let_next_start();
    wait_for_previous();
    const Long block = static_cast<Long>(blockIdx.x);
    for (Long i = block * THREADS + threadIdx.x; i < params.clear; i += static_cast<Long>(gridDim.x) * THREADS) {
        params.cleared[i] = 0;
    }
    if (block < params.left.blocks) {
        round_lines<true, GEMM_LEFT_ALONG>(params, params.left, block, memory);
    } else {
        round_lines<false, GEMM_RIGHT_ALONG>(params, params.right, block - params.left.blocks, memory);
    }
}
