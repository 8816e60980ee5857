// Extremes of the rows of alpha op(A) op(B) from a product in float16 that says where they may be: those elements alone are
// made, in double precision (gemmserve_kernels.algorithms.screen.bound has the theorem).
//
// A warp has a row. It finds what the extreme is at least, then which elements may reach that; a row of which more than MOST
// may, or of which nothing is known, is left to the full product (dmma_reduce), and has nothing here.
#include "../epilogue/pre_op.cuh"
#include "../epilogue/reductions.cuh"
#include "lines.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, BLOCKS = 4, MOST = GEMM_MOST;
using Value = PreOpValue<GEMM_PRE_OP, Acc>;
constexpr unsigned KINDS = GEMM_REDUCTIONS;
constexpr unsigned LARGEST_KINDS = 1u << MAX | 1u << ARGMAX, SMALLEST_KINDS = 1u << MIN | 1u << ARGMIN;
// Which elements are looked for: those with the largest magnitude, the largest, the smallest.
constexpr bool IS_SIZE = is_complex<Acc> || GEMM_PRE_OP == ABS;
constexpr bool SIZES = (KINDS & 1u << ABSMAX) != 0 || (IS_SIZE && (KINDS & LARGEST_KINDS) != 0);
constexpr bool LARGEST = !IS_SIZE && (KINDS & LARGEST_KINDS) != 0, SMALLEST = !IS_SIZE && (KINDS & SMALLEST_KINDS) != 0;

// What is known of an element: it is nowhere further than `error` from `value`, in the scale of the row.
struct Known {
    double value, size, error;
};

// The least that each extreme is.
struct Least {
    double size, largest, smallest;

    GEMM_DEVICE void take(const Known& x) {
        if constexpr (SIZES) size = fmax(size, x.size - x.error);
        if constexpr (LARGEST) largest = fmax(largest, x.value - x.error);
        if constexpr (SMALLEST) smallest = fmax(smallest, -x.value - x.error);
    }
    GEMM_DEVICE bool may_reach(const Known& x) const {
        bool found = false;
        if constexpr (SIZES) found |= x.size + x.error >= size;
        if constexpr (LARGEST) found |= x.value + x.error >= largest;
        if constexpr (SMALLEST) found |= x.error - x.value >= smallest;
        return found;
    }
};

struct Row {
    const Half* products;
    Long pitch;
    LineInfo info;
    float accumulated, sign;

    GEMM_DEVICE Known known(Long j, const LineInfo& column) const {
        constexpr float ROUNDING = 6.9053396e-4f;  // 2^-10.5: to float16, and all that is computed here
        constexpr float LEAST = 9.5367432e-7f;     // 2^-20: subnormal numbers of it
        const float re = half_to_float(products[j]);
        float size = fabsf(re);
        if constexpr (COMPLEX) {
            const float im = half_to_float(products[pitch + j]);
            size = sqrtf(fmaf(re, re, im * im));
        }
        const float error = fmaf(info.norm, column.residual, info.residual * column.norm) +
                            accumulated * info.norm * column.norm + ROUNDING * size + LEAST;
        const double scale = column.scale;
        return {sign * re * scale, size * scale, error * scale};
    }
};

GEMM_DEVICE Acc element(const ScreenParams& params, Long a, Long b, int lane) {
    Acc sum{};
#pragma unroll 4
    for (Long i = lane; i < params.k; i += 32) {
        const Acc x = conjugated(read(params.a, a + i * params.a.column_stride), params.conjugate_a);
        const Acc y = conjugated(read(params.b, b + i * params.b.column_stride), params.conjugate_b);
        multiply_accumulate(sum, x, y);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum = add(sum, of_neighbour(sum, step));
    return scale(sum, params.alpha[0], params.alpha[1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) screen_rows(ScreenParams params) {
    __shared__ int found[WARPS][MOST];
    __shared__ Acc values[WARPS][MOST];
    const int warp = warp_number(), lane = static_cast<int>(threadIdx.x) % 32;
    const Quotient where = divide(static_cast<Long>(blockIdx.x), (params.rows + WARPS - 1) / WARPS);
    const Long matrix = where.quotient, in_panel = where.remainder * WARPS + warp, row = params.first_row + in_panel;
    if (in_panel >= params.rows) return;
    const Long batch = params.first_batch + params.first + matrix;
    const LineInfo* const columns = params.of_columns + matrix * params.columns_step;
    const Row it{
        params.products + (matrix * params.products_step + in_panel) * PARTS * params.pitch, params.pitch,
        params.of_rows[matrix * params.rows_step + in_panel], params.accumulated,
        params.alpha[0] < 0 ? -1.0f : 1.0f};
    const bool is_zero = it.info.norm == 0.0f;
    int count = it.info.norm < 0.0f ? MOST + 1 : 0;

    Least least{-infinity<double>(), -infinity<double>(), -infinity<double>()};
    if (count == 0 && !is_zero) {
#pragma unroll 4
        for (Long j = lane; j < params.n; j += 32) {
            const LineInfo column = columns[j];
            if (column.norm >= 0.0f) least.take(it.known(j, column));
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            if constexpr (SIZES) least.size = fmax(least.size, of_neighbour(least.size, step));
            if constexpr (LARGEST) least.largest = fmax(least.largest, of_neighbour(least.largest, step));
            if constexpr (SMALLEST) least.smallest = fmax(least.smallest, of_neighbour(least.smallest, step));
        }
    }
    int zero = -1;  // the first element that is zero as all of the row is
    for (Long first = 0; first < params.n && count <= MOST; first += 32) {
        const Long j = first + lane;
        bool may = false, none = false;
        if (j < params.n) {
            const LineInfo column = columns[j];
            none = is_zero && column.norm >= 0.0f;
            may = column.norm < 0.0f || (!is_zero && least.may_reach(it.known(j, column)));
        }
        const unsigned these = __ballot_sync(0xffffffffu, may), zeros = __ballot_sync(0xffffffffu, none);
        if (zero < 0 && zeros != 0) zero = static_cast<int>(first) + __ffs(static_cast<int>(zeros)) - 1;
        const int place = count + __popc(these & ((1u << lane) - 1u));
        if (may && place < MOST) found[warp][place] = static_cast<int>(j);
        count += __popc(these);
    }
    __syncwarp();

    const bool fails = count > MOST;
    if (fails && lane == 0) {
        params.failing[batch * params.blocks + row / params.block] = 1;
        params.failing_rows[batch * params.m + row] = 1;
    }
    const Long of_row = batch_offset(params.first + matrix, params.batch_shape, params.a.batch_stride) + row * params.a.row_stride;
    const Long of_matrix = batch_offset(params.first + matrix, params.batch_shape, params.b.batch_stride);
    const Long output = params.reduce_batch ? row : batch * params.m + row;
    const Long before = params.reduce_batch ? batch * params.parts : 0;
    const Long first_index = params.reduce_batch ? batch * params.n : 0;
    for (int c = 0; c < count && !fails; ++c) {
        const Acc value = element(params, of_row, of_matrix + found[warp][c] * params.b.row_stride, lane);
        if (lane == 0) values[warp][c] = value;
    }
    __syncwarp();
    for_each_reduction<KINDS, Value>([&](auto reduction) {
        using Each = decltype(reduction);
        for (Long part = lane + 1; part < params.parts; part += 32) {
            Each::store(params.partial, (before + part) * params.outputs + output, Each::identity());
        }
        if (lane != 0) return;
        auto local = Each::start();
        const auto take = [&](Acc x, int j) { Each::fold(local, apply<GEMM_PRE_OP>(x), j); };
        if (zero >= 0 && !fails) take(scale(Acc{}, params.alpha[0], params.alpha[1]), zero);
        for (int c = 0; c < count && !fails; ++c) take(values[warp][c], found[warp][c]);
        Each::store(params.partial, before * params.outputs + output, Each::lift(local, first_index));
    });
}
