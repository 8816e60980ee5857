// Extremes of the rows of alpha op(A) op(B) from a product in float16 that says where they may be: those elements alone are
// made, in double precision (gemmserve_kernels.algorithms.screen.bound has the theorem).
//
// A block has ROWS rows. It finds what the extreme of each is at least, then which elements may reach that, and makes these
// together; a row of which more than MOST may, or of which nothing is known, is left to the full product (dmma_reduce), and
// has nothing here. What columns allow is kept in shared memory, and so are the rows of A where they do not run along k
// (ACROSS): neighbours in memory are then fetched together, not an element of each sector.
#include "../common/dependent.cuh"
#include "../common/ptx/cp_async.cuh"
#include "../epilogue/pre_op.cuh"
#include "../epilogue/reductions.cuh"
#include "lines.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, MOST = GEMM_MOST;
constexpr int ROWS = GEMM_ROWS, EACH = ROWS / WARPS;        // rows of a warp
constexpr int COLUMNS = 1024, LANE = 4, GROUP = 32 * LANE;  // in shared memory; next to each other of a lane, of a warp
constexpr int AHEAD = 4 / PARTS;  // groups that are fetched together
constexpr bool ACROSS = GEMM_ACROSS;
constexpr int STEPS = 256 / PARTS, PITCH = STEPS * PARTS + PARTS;  // of k, of a row in shared memory; numbers of it
constexpr int TOGETHER = 8 / PARTS;                             // numbers that a lane waits for at once
using Value = PreOpValue<GEMM_PRE_OP, Acc>;
constexpr unsigned KINDS = GEMM_REDUCTIONS;
constexpr unsigned LARGEST_KINDS = 1u << MAX | 1u << ARGMAX, SMALLEST_KINDS = 1u << MIN | 1u << ARGMIN;
// Which elements are looked for: those with the largest magnitude, the largest, the smallest.
constexpr bool IS_SIZE = is_complex<Acc> || GEMM_PRE_OP == ABS;
constexpr bool SIZES = (KINDS & 1u << ABSMAX) != 0 || (IS_SIZE && (KINDS & LARGEST_KINDS) != 0);
constexpr bool LARGEST = !IS_SIZE && (KINDS & LARGEST_KINDS) != 0, SMALLEST = !IS_SIZE && (KINDS & SMALLEST_KINDS) != 0;

// What is known of an element: it is nowhere further than `error` from `value`, in the scale of the row and of the largest
// column.
struct Known {
    float value, size, error;
};

// The least that each extreme is.
struct Least {
    float size, largest, smallest;

    GEMM_DEVICE void take(const Known& x) {
        if constexpr (SIZES) size = fmaxf(size, x.size - x.error);
        if constexpr (LARGEST) largest = fmaxf(largest, x.value - x.error);
        if constexpr (SMALLEST) smallest = fmaxf(smallest, -x.value - x.error);
    }
    GEMM_DEVICE bool may_reach(const Known& x) const {
        bool found = false;
        if constexpr (SIZES) found |= x.size + x.error >= size;
        if constexpr (LARGEST) found |= x.value + x.error >= largest;
        if constexpr (SMALLEST) found |= x.error - x.value >= smallest;
        return found;
    }
    GEMM_DEVICE void of_warp() {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            if constexpr (SIZES) size = fmaxf(size, of_neighbour(size, step));
            if constexpr (LARGEST) largest = fmaxf(largest, of_neighbour(largest, step));
            if constexpr (SMALLEST) smallest = fmaxf(smallest, of_neighbour(smallest, step));
        }
    }
};

using Four = Vector<float, LANE>;

// What columns allow, in the scale of the one whose scale is the largest: alpha's sign times an element of a row of norm r,
// of which rounding took d, is within r `of_norm` + d `of_residual` of its float16 times `scale`, but for the rounding of that.
struct Columns {
    Four scale[COLUMNS / LANE], of_norm[COLUMNS / LANE], of_residual[COLUMNS / LANE];

    // Column `at` of those that are here. Beyond the last column is nothing: NaN is in no comparison's favour.
    GEMM_DEVICE void set(int at, bool exists, const LineInfo& info, int largest, float accumulated, float sign) {
        constexpr float LEAST = 1.9073486e-6f;  // 2^-19: subnormal numbers of float16, a row's norm being 1/2 at least
        constexpr int FAR = 100;                // what is left of a float's range is room for bounds
        const int below = largest - exponent_of(info.scale);
        const bool counts = info.norm > 0.0f, near = counts && below < FAR;
        const float factor = power_of_two(near ? -below : -FAR);
        // A column further below the largest is known by the size of its largest elements alone.
        float r = near ? fmaf(accumulated, info.norm, info.residual) * factor + LEAST * factor : info.norm * factor;
        if (info.norm < 0.0f) r = infinity<float>();
        scale[at / LANE].at[at % LANE] = near ? sign * factor : 0.0f;
        of_norm[at / LANE].at[at % LANE] = exists ? r : float_of(0x7fffffffu);
        of_residual[at / LANE].at[at % LANE] = near ? info.norm * factor : 0.0f;
    }
    static GEMM_DEVICE int exponent_of(double power) { return static_cast<int>(bits_of(power) >> 52) - 1023; }
};

struct Shared {
    union {
        Columns columns;
        Acc values[ROWS * MOST];  // when all columns are looked through
    };
    double rows[ACROSS ? ROWS * PITCH : 1];
    int found[ROWS * MOST], pairs[ROWS * MOST];
    int count[ROWS], zero[ROWS];  // elements of a row that are made, -1: none is; the first that is zero as all of them are
    int largest[WARPS];
    int total;
};

// LANE numbers of a row of the product.
using Numbers = Vector<unsigned, LANE / 2>;
GEMM_DEVICE float number(const Numbers& x, int i) {
    return half_to_float(Half{static_cast<unsigned short>(x.at[i / 2] >> i % 2 * 16)});
}

// A row of the product.
struct Row {
    const Half* products;
    float norm, residual;
    bool looked_through;

    GEMM_DEVICE Numbers part(Long j, bool exists) const {
        return exists && looked_through ? *reinterpret_cast<const Numbers*>(products + j) : Numbers{};
    }
    GEMM_DEVICE Known known(float re, float im, float scale, float of_norm, float of_residual) const {
        constexpr float ROUNDING = 6.9053396e-4f;  // 2^-10.5: to float16, and all that is computed here
        const float value = re * scale;
        float size = fabsf(value);
        if constexpr (COMPLEX) size = sqrtf(fmaf(re, re, im * im)) * scale;
        return {value, size, fmaf(norm, of_norm, fmaf(residual, of_residual, ROUNDING * size))};
    }
};

// Calls visit(row of the warp, column, what is known of it) for a lane's elements of the columns that are in shared memory,
// which are `first` and those behind it, and after(first column of a group) where all lanes are through with a group.
template <class Visit, class After>
GEMM_DEVICE void look_through(
    const Columns& columns, const Row (&rows)[EACH], const ScreenParams& params, Long first, int lane, Visit visit, After after) {
    const int here = params.n - first < COLUMNS ? static_cast<int>(params.n - first) : COLUMNS;
#pragma unroll 1
    for (int begin = 0; begin < here; begin += AHEAD * GROUP) {
        Numbers re[AHEAD][EACH], im[COMPLEX ? AHEAD : 1][EACH];
#pragma unroll
        for (int g = 0; g < AHEAD; ++g) {
            const int at = begin + g * GROUP + lane * LANE;
#pragma unroll
            for (int e = 0; e < EACH; ++e) {  // rows are padded
                re[g][e] = rows[e].part(first + at, at < here);
                if constexpr (COMPLEX) im[g][e] = rows[e].part(params.pitch + first + at, at < here);
            }
        }
#pragma unroll
        for (int g = 0; g < AHEAD; ++g) {
            const int group = begin + g * GROUP, four = group / LANE + lane;
            const Four scale = columns.scale[four], of_norm = columns.of_norm[four], of_residual = columns.of_residual[four];
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
#pragma unroll
                for (int i = 0; i < LANE; ++i) {
                    const float x = number(re[g][e], i), y = COMPLEX ? number(im[COMPLEX ? g : 0][e], i) : 0.0f;
                    visit(e, i, rows[e].known(x, y, scale.at[i], of_norm.at[i], of_residual.at[i]));
                }
            }
            after(first + group);
        }
    }
}

// By one load.
GEMM_DEVICE LineInfo info_at(const LineInfo* lines, Long j) {
    return __builtin_bit_cast(LineInfo, reinterpret_cast<const Vector<unsigned, 4>*>(lines)[j]);
}

// Asks for steps [step, step + steps) of k of the block's rows of A.
GEMM_DEVICE void bring_rows(Shared& shared, const ScreenParams& params, Long from, int rows, int steps) {
    const int thread = static_cast<int>(threadIdx.x), row = thread % ROWS;
    if (row < rows) {
        const Long at = from + row * params.a.row_stride;
#pragma unroll 4
        for (int i = thread / ROWS; i < steps; i += THREADS / ROWS) {
            const Long offset = at + i * params.a.column_stride;
            double* const to = shared.rows + row * PITCH + i * PARTS;
            copy_async<sizeof(Stored)>(to, static_cast<const Stored*>(params.a.re) + offset);
            if constexpr (PLANAR) copy_async<sizeof(Stored)>(to + 1, static_cast<const Stored*>(params.a.im) + offset);
        }
    }
    copy_commit();
}

GEMM_DEVICE Acc sum_of_warp(Acc sum) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum = add(sum, of_neighbour(sum, step));
    return sum;
}

// Steps from one number along k to the next; often known to be 1.
GEMM_DEVICE Long step_of_a(const ScreenParams& params) { return GEMM_A_NEXT ? 1 : params.a.column_stride; }
GEMM_DEVICE Long step_of_b(const ScreenParams& params) { return GEMM_B_NEXT ? 1 : params.b.column_stride; }

// A lane's share of steps of k of an element, of row `row` of the block where rows are in shared memory. `a`, `b`: where the
// steps begin.
GEMM_DEVICE Acc share(const Shared& shared, const ScreenParams& params, int row, Long a, Long b, Long steps, int lane) {
    Acc sum{};
    const auto take = [&](Long i, Acc y) {
        Acc x;
        if constexpr (ACROSS) {
            const double* const at = shared.rows + row * PITCH + static_cast<int>(i) * PARTS;
            x = make<Acc>(at[0], at[PARTS - 1]);
        } else {
            x = read(params.a, a + i * step_of_a(params));
        }
        multiply_accumulate(sum, conjugated(x, params.conjugate_a), conjugated(y, params.conjugate_b));
    };
    Long i = lane;
    for (; i + 32 * (TOGETHER - 1) < steps; i += 32 * TOGETHER) {  // all are on their way before the first is waited for
        Acc y[TOGETHER];
#pragma unroll
        for (int s = 0; s < TOGETHER; ++s) y[s] = read(params.b, b + (i + 32 * s) * step_of_b(params));
#pragma unroll
        for (int s = 0; s < TOGETHER; ++s) take(i + 32 * s, y[s]);
    }
#pragma unroll 1
    for (; i < steps; i += 32) take(i, read(params.b, b + i * step_of_b(params)));
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, COMPLEX ? 3 : 4) screen_rows(const ScreenParams params) {
    __shared__ Shared shared;
    const int warp = warp_number(), lane = static_cast<int>(threadIdx.x) % 32, thread = static_cast<int>(threadIdx.x);
    const Quotient where = divide(static_cast<Long>(blockIdx.x), (params.rows + ROWS - 1) / ROWS);
    const Long matrix = where.quotient, first_row = where.remainder * ROWS;  // of the panel
    const int rows = params.rows - first_row < ROWS ? static_cast<int>(params.rows - first_row) : ROWS;
    const Long a = batch_offset(params.first + matrix, params.batch_shape, params.a.batch_stride) +
                   (params.first_row + first_row) * params.a.row_stride;
    const auto bring = [&](Long step) {
        const int steps = params.k - step < STEPS ? static_cast<int>(params.k - step) : STEPS;
        bring_rows(shared, params, a + step * params.a.column_stride, rows, steps);
    };
    // No kernel of a program writes operands: they are there before the kernel ahead has ended.
    if constexpr (ACROSS) bring(0);
    let_next_start();
    wait_for_previous();

    const LineInfo* const columns = params.of_columns + matrix * params.columns_step;
    const LineInfo* const of_rows = params.of_rows + matrix * params.rows_step + first_row;
    Row mine[EACH];
    int count[EACH], zero[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int row = warp * EACH + e;
        const LineInfo info = row < rows ? info_at(of_rows, row) : LineInfo{1.0, 0.0f, 0.0f};
        mine[e].products = params.products + (matrix * params.products_step + first_row + row) * PARTS * params.pitch;
        mine[e].norm = info.norm;
        mine[e].residual = info.residual;
        mine[e].looked_through = info.norm > 0.0f;
        count[e] = info.norm < 0.0f ? MOST + 1 : 0;
        zero[e] = -1;
    }
    // The largest scale of a column.
    int largest = -(1 << 20);
#pragma unroll 4
    for (Long j = thread; j < params.n; j += THREADS) {
        const LineInfo info = info_at(columns, j);
        const int exponent = Columns::exponent_of(info.scale);
        if (info.norm > 0.0f && exponent > largest) largest = exponent;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const int other = of_neighbour(largest, step);
        largest = other > largest ? other : largest;
    }
    if (lane == 0) shared.largest[warp] = largest;
    if (thread == 0) shared.total = 0;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = shared.largest[w] > largest ? shared.largest[w] : largest;
    const auto set_columns = [&](Long first) {
        if (first > 0 || params.n > COLUMNS) __syncthreads();
        const float sign = COMPLEX || params.alpha[0] >= 0 ? 1.0f : -1.0f;
        LineInfo info[COLUMNS / THREADS];
#pragma unroll
        for (int i = 0; i < COLUMNS / THREADS; ++i) {
            const Long j = first + i * THREADS + thread;
            info[i] = info_at(columns, j < params.n ? j : params.n - 1);
        }
#pragma unroll
        for (int i = 0; i < COLUMNS / THREADS; ++i) {
            const int c = i * THREADS + thread;
            shared.columns.set(c, first + c < params.n, info[i], largest, params.accumulated, sign);
        }
        __syncthreads();
    };

    Least least[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) least[e] = {-infinity<float>(), -infinity<float>(), -infinity<float>()};
    for (Long first = 0; first < params.n; first += COLUMNS) {
        set_columns(first);
        const auto take = [&](int e, int, const Known& x) { least[e].take(x); };
        look_through(shared.columns, mine, params, first, lane, take, [](Long) {});
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) least[e].of_warp();

    unsigned may[EACH]{};
    const auto take = [&](int e, int i, const Known& x) {
        if (least[e].may_reach(x)) may[e] |= 1u << i;
    };
    const auto after = [&](Long group) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            unsigned lanes = __ballot_sync(0xffffffffu, may[e] != 0);
            while (lanes != 0 && count[e] <= MOST && mine[e].looked_through) {
                const int from = __ffs(static_cast<int>(lanes)) - 1;
                lanes &= lanes - 1;
                unsigned those = __shfl_sync(0xffffffffu, may[e], from);
                for (; those != 0; those &= those - 1) {
                    const int j = static_cast<int>(group) + from * LANE + __ffs(static_cast<int>(those)) - 1;
                    if (count[e] < MOST && lane == 0) shared.found[(warp * EACH + e) * MOST + count[e]] = j;
                    ++count[e];
                }
            }
            may[e] = 0;
        }
    };
    for (Long first = 0; first < params.n; first += COLUMNS) {
        if (params.n > COLUMNS) set_columns(first);
        look_through(shared.columns, mine, params, first, lane, take, after);
    }
    // Rows of zeros: all elements are zero but those of columns that are not finite.
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        if (mine[e].norm != 0.0f || warp * EACH + e >= rows) continue;
        for (Long first = 0; first < params.n && count[e] <= MOST; first += 32) {
            const Long j = first + lane;
            const bool exists = j < params.n, known = exists && columns[j].norm >= 0.0f;
            const unsigned zeros = __ballot_sync(0xffffffffu, known);
            unsigned others = __ballot_sync(0xffffffffu, exists && !known);
            if (zero[e] < 0 && zeros != 0) zero[e] = static_cast<int>(first) + __ffs(static_cast<int>(zeros)) - 1;
            for (; others != 0; others &= others - 1) {
                const int found = static_cast<int>(first) + __ffs(static_cast<int>(others)) - 1;
                if (count[e] < MOST && lane == 0) shared.found[(warp * EACH + e) * MOST + count[e]] = found;
                ++count[e];
            }
        }
    }
    const Long batch = params.first_batch + params.first + matrix;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int row = warp * EACH + e;
        if (lane != 0 || row >= rows) continue;
        const bool fails = count[e] > MOST;
        shared.count[row] = fails ? -1 : count[e];
        shared.zero[row] = zero[e];
        if (fails) {
            const Long of_product = params.first_row + first_row + row;
            params.failing[batch * params.blocks + of_product / params.block] = 1;
            params.failing_rows[batch * params.m + of_product] = 1;
            *params.failing_any = 1;
        } else if (count[e] > 0) {
            const int place = atomicAdd(&shared.total, count[e]);
            for (int c = 0; c < count[e]; ++c) shared.pairs[place + c] = row * MOST + c;
        }
    }
    __syncthreads();

    // The elements: of all rows together, a warp each.
    const Long b = batch_offset(params.first + matrix, params.batch_shape, params.b.batch_stride);
    const int total = shared.total;
    const Long each = ACROSS ? STEPS : params.k;
    for (Long step = 0; step < params.k && total > 0; step += each) {
        if constexpr (ACROSS) {
            if (step > 0) {
                __syncthreads();
                bring(step);
            }
            copy_wait<0>();
            __syncthreads();
        }
        const Long steps = params.k - step < each ? params.k - step : each;
        for (int p = warp; p < total; p += WARPS) {
            const int pair = shared.pairs[p], row = pair / MOST;
            const Long of_a = a + row * params.a.row_stride + step * params.a.column_stride;
            const Long of_b = b + shared.found[pair] * params.b.row_stride + step * params.b.column_stride;
            const Acc sum = sum_of_warp(share(shared, params, row, of_a, of_b, steps, lane));
            if (lane == 0) shared.values[pair] = step == 0 ? sum : add(shared.values[pair], sum);
        }
    }
    if constexpr (ACROSS) copy_wait<0>();
    __syncthreads();

    const bool folds = params.reduce_batch != 0;
    const Long before = folds ? batch * params.parts : 0, first_index = folds ? batch * params.n : 0;
    const Long first_output = (folds ? 0 : batch * params.m) + params.first_row + first_row;
    for_each_reduction<KINDS, Value>([&](auto reduction) {
        using Each = decltype(reduction);
        if (folds) {  // nothing in all slots of the full product but the first
            for (Long i = thread + ROWS; i < params.parts * ROWS; i += THREADS) {
                const Long row = i % ROWS;
                if (row >= rows) continue;
                Each::store(params.partial, (before + i / ROWS) * params.outputs + first_output + row, Each::identity());
            }
        }
        if (thread >= rows) return;
        const int made = shared.count[thread];
        const auto scaled = [&](Acc x) { return apply<GEMM_PRE_OP>(scale(x, params.alpha[0], params.alpha[1])); };
        const auto local = fold_elements<Each>([&](auto fold) {
            if (made >= 0 && shared.zero[thread] >= 0) fold(scaled(Acc{}), shared.zero[thread]);
            for (int c = 0; c < made; ++c) fold(scaled(shared.values[thread * MOST + c]), shared.found[thread * MOST + c]);
        });
        const auto found = Each::lift(local, first_index);
        const Long output = first_output + thread;
        if (folds) {
            Each::store(params.partial, before * params.outputs + output, found);
        } else if (made >= 0) {
            void* const result = params.result[Each::WHICH];
            if constexpr (Each::WHICH == ARGMAX || Each::WHICH == ARGMIN) {
                static_cast<Long*>(result)[output] = found.index;
            } else {
                static_cast<double*>(result)[output] = found;
            }
        }
    });
}
