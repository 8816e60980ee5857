// Freivalds' check of a product, around freivalds.cu: vectors of random signs, partial sums added up, and the rows of both
// sides compared.
#include "../common/numbers/exact.cuh"
#include "../common/memory/lanes.cuh"
#include "../common/numbers/random.cuh"
#include "../common/raster.cuh"
#include "../common/numbers/types.cuh"

constexpr int VECTORS = 4, THREADS = 256, WARPS = THREADS / 32;

struct SignsParams {
    double* out;  // (VECTORS, count)
    unsigned long long* seed_out;  // the seed, for kernels that are launched with no number of their own
    Long count;
    unsigned long long seed;
    Long first_block;
};

extern "C" __global__ void __launch_bounds__(THREADS) freivalds_signs(SignsParams params) {
    const Long j = (params.first_block + static_cast<Long>(blockIdx.x)) * THREADS + static_cast<Long>(threadIdx.x);
    if (j >= params.count) return;
    if (j == 0) *params.seed_out = params.seed;
    const unsigned long long bits = random_bits(params.seed, j);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) params.out[v * params.count + j] = (bits >> v & 1) != 0 ? -1.0 : 1.0;
}

struct FoldParams {
    double* values;  // `parts` of `count`, `stride` apart; the sum goes where the first part is
    Long count, parts, stride;
    Long first_block;
};

extern "C" __global__ void __launch_bounds__(THREADS) freivalds_fold(FoldParams params) {
    const Long i = (params.first_block + static_cast<Long>(blockIdx.x)) * THREADS + static_cast<Long>(threadIdx.x);
    if (i >= params.count) return;
    double sum = params.values[i];
    for (Long part = 1; part < params.parts; ++part) sum += params.values[part * params.stride + i];
    params.values[i] = sum;
}

using Acc = GEMM_TYPE_ACC;

// What freivalds_times left of one matrix of each product: in each part (matrices, VECTORS, rows) values, and `squares`
// doubles further on (matrices, rows) squares. Null: nothing.
struct SideParams {
    const double* values;
    Long squares;
    Long parts, part_stride;  // doubles
};

struct JudgeParams {
    SideParams d, a, c;
    Long rows, matrices, blocks;  // blocks of each matrix
    Long first_block;
    double alpha[2], beta[2];
    double floor;  // added to what the square of a row's error is measured by
    double* out;   // (matrices, blocks, FIGURES)
};
constexpr int FIGURES = 3;  // squares of the error, of what was expected; the worst row's error, squared and measured

struct Row {
    Acc value[VECTORS];
    double square;

    GEMM_DEVICE Row(const SideParams& side, const JudgeParams& params, Long matrix, Long row) : value{}, square(0) {
        if (side.values == nullptr) return;
        for (Long part = 0; part < side.parts; ++part) {
            const double* const from = side.values + part * side.part_stride;
            const Acc* const values = reinterpret_cast<const Acc*>(from);
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                value[v] = add(value[v], values[(matrix * VECTORS + v) * params.rows + row]);
            }
            square += from[side.squares + matrix * params.rows + row];
        }
    }
};

GEMM_DEVICE double norm(Acc x) { return real_part(x) * real_part(x) + imaginary_part(x) * imaginary_part(x); }
// NaN wins.
GEMM_DEVICE double worse(double x, double y) { return is_nan(x) || x > y ? x : y; }

extern "C" __global__ void __launch_bounds__(THREADS) freivalds_judge(JudgeParams params) {
    __shared__ double shared[FIGURES][WARPS];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const Quotient at = divide(params.first_block + static_cast<Long>(blockIdx.x), params.blocks);
    const Long row = at.remainder * THREADS + thread;
    double figure[FIGURES] = {};
    if (row < params.rows) {
        const Row d(params.d, params, at.quotient, row), a(params.a, params, at.quotient, row);
        const Row c(params.c, params, at.quotient, row);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            Acc expected = scale(a.value[v], params.alpha[0], params.alpha[1]);
            if (params.c.values != nullptr) {
                expected = add(expected, scale(c.value[v], params.beta[0], params.beta[1]));
            }
            figure[0] += norm(add(d.value[v], scale(expected, -1, 0)));
            figure[1] += norm(expected);
        }
        const double of_a = params.alpha[0] * params.alpha[0] + params.alpha[1] * params.alpha[1];
        const double of_c = params.beta[0] * params.beta[0] + params.beta[1] * params.beta[1];
        const double data = of_a * a.square + (params.c.values != nullptr ? of_c * c.square : 0.0) + params.floor;
        const double size = VECTORS * (data + d.square);
        if (!finite(figure[1]) || !finite(data)) {
            figure[2] = figure[1] - figure[1] + (data - data);  // NaN: there is nothing to measure it by
        } else if (!finite(figure[0])) {
            figure[0] = figure[2] = __builtin_bit_cast(double, 0x7ff0000000000000ULL);
        } else {
            figure[2] = figure[0] == 0 ? 0.0 : figure[0] / size;
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        figure[0] += of_neighbour(figure[0], step);
        figure[1] += of_neighbour(figure[1], step);
        figure[2] = worse(figure[2], of_neighbour(figure[2], step));
    }
    if (lane == 0) {
#pragma unroll
        for (int f = 0; f < FIGURES; ++f) shared[f][warp] = figure[f];
    }
    __syncthreads();
    if (thread != 0) return;
    for (int w = 1; w < WARPS; ++w) {
        figure[0] += shared[0][w];
        figure[1] += shared[1][w];
        figure[2] = worse(figure[2], shared[2][w]);
    }
    double* const out = params.out + (params.first_block + static_cast<Long>(blockIdx.x)) * FIGURES;
#pragma unroll
    for (int f = 0; f < FIGURES; ++f) out[f] = figure[f];
}
