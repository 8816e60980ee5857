// Gram matrices A^H A in double, of a part of A's rows each: half of a sum of squares over a product, since the sum of
// |A b|^2 is b^H (A^H A) b. Products of 32-bit numbers are exact in double; what is rounded is their sum.
//
// A block makes one tile of the triangle on and above the diagonal on the matrix units. A's rows come through registers
// into shared memory as they are, one stage ahead, and are widened on the way into fragments. Two neighbouring columns
// belong to neighbouring fragments, and rows of one step lie two apart: with one vector of padding a row, a quarter of a
// warp (half of one, for real data) meets every bank once. After every RUN rows sums are added to those in memory: long
// ones would round too often.
//
// What is left is twice the matrix above the diagonal of SHARE x SHARE squares, the matrix in them and zeros below:
// b^H G b is as much.
#include "../common/memory/copy.cuh"
#include "../common/ptx/mma.cuh"
#include "../common/raster.cuh"

struct GramParams {
    MatrixParams a;  // op(A), conjugated where op says so
    Long rows, columns;
    Long batch_shape[BATCH_DIMS];
    void* out;  // Acc, (parts, matrices, columns, columns)
    Long out_stride[BATCH_DIMS];
    Long part_stride;
    Long part_rows, parts;
    Long tiles, triangle;  // along one side, and in the triangle
    Long first_block;
    int conjugate;
    int reserved;
};

using Stored = GEMM_TYPE_X;
using Element = GEMM_TYPE_ELEMENT;  // float or Complex<float>
using Acc = Select<is_complex<Element>, Complex<double>, double>;
constexpr int BLOCK = GEMM_BLOCK, SHARE = GEMM_SHARE, RUN = GEMM_RUN, DEPTH = GEMM_DEPTH, THREADS = GEMM_THREADS;
constexpr int HEIGHT = BLOCK / 2, WIDTH = 16, BESIDE = BLOCK / WIDTH;  // a warp's tile, and warps beside each other
constexpr int DOWN = HEIGHT / 8, ACROSS = WIDTH / 8;                   // fragments of a warp's tile
constexpr int K = GEMM_INSTRUCTION_K, STEPS = K / 4;
constexpr int PARTS = is_complex<Element> ? 2 : 1;
static_assert(THREADS == 2 * BESIDE * 32, "two rows of warps");
static_assert(DEPTH % 8 == 0 && RUN % DEPTH == 0, "whole steps and stages");

using Copy = BlockCopy<Stored, Element, GEMM_PLANAR, BLOCK, DEPTH, THREADS, GEMM_VECTOR, GEMM_ALONG_K, GEMM_INDEX, true>;
using Multiply = MultiplyDouble<K>;
using Panel = Copy::Shared::View;

// The column, of a warp's, that is number `x` of fragment `block`.
GEMM_DEVICE int column_of(int block, int x) { return (block / 2 * 8 + x) * 2 + block % 2; }

// Two fragments, of 16 columns from `column` on and K rows from `row` on: re, and im where there is one.
GEMM_DEVICE void read(const Panel& panel, int row, int column, int lane, double (&to)[2][PARTS][STEPS]) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int from = row / 8 * 8 + 2 * t + (K == 8 ? s : row / 4 % 2);
        const auto pair = panel.template vector<2>(from, column + g * 2);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
            to[v][0][s] = static_cast<double>(real_part(pair.at[v]));
            if constexpr (PARTS == 2) to[v][1][s] = static_cast<double>(imaginary_part(pair.at[v]));
        }
    }
}

struct Sums {
    double at[PARTS][DOWN][ACROSS][2];

    GEMM_DEVICE void clear() {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
#pragma unroll
            for (int i = 0; i < DOWN; ++i) {
#pragma unroll
                for (int j = 0; j < ACROSS; ++j) at[p][i][j][0] = at[p][i][j][1] = 0;
            }
        }
    }

    // Adds the product of one stage's left columns, conjugate transposed, and its right ones.
    GEMM_DEVICE void add(const Panel& left, const Panel& right, int first_left, int first_right, int lane) {
#pragma unroll
        for (int row = 0; row < DEPTH; row += K) {
            double b[2][PARTS][STEPS];
            read(right, row, first_right, lane, b);
#pragma unroll
            for (int i = 0; i < DOWN; i += 2) {
                double a[2][PARTS][STEPS];
                read(left, row, first_left + i * 8, lane, a);
#pragma unroll
                for (int j = 0; j < ACROSS; ++j) {
                    Multiply::run(at[0][i][j], at[0][i + 1][j], a[0][0], a[1][0], b[j][0]);
                }
                if constexpr (PARTS == 2) {
                    auto &re = at[0], &im = at[1];
#pragma unroll
                    for (int j = 0; j < ACROSS; ++j) {
                        Multiply::run(im[i][j], im[i + 1][j], a[0][0], a[1][0], b[j][1]);
                        Multiply::run(re[i][j], re[i + 1][j], a[0][1], a[1][1], b[j][1]);
                    }
#pragma unroll
                    for (int s = 0; s < STEPS; ++s) a[0][1][s] = -a[0][1][s], a[1][1][s] = -a[1][1][s];
#pragma unroll
                    for (int j = 0; j < ACROSS; ++j) {
                        Multiply::run(im[i][j], im[i + 1][j], a[0][1], a[1][1], b[j][0]);
                    }
                }
            }
        }
    }

    // Writes them to the matrix at `out`, the warp's tile beginning at (row, column), or adds them to what is there.
    GEMM_DEVICE void keep(Acc* out, int row, int column, int extent, bool first, int lane) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
            const int r = row + column_of(i, g);
            if (r >= extent) continue;
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int c = column + column_of(j, 2 * t + e);
                    if (c >= extent) continue;
                    const double times = c / SHARE > r / SHARE ? 2.0 : c / SHARE == r / SHARE ? 1.0 : 0.0;
                    Acc value = make<Acc>(at[0][i][j][e] * times, at[PARTS - 1][i][j][e] * times);
                    Acc& to = out[r * extent + c];
                    if (!first) value = ::add(to, value);
                    to = value;
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) gram(GramParams params) {
    __shared__ __align__(16) unsigned char shared[2][2][Copy::Shared::BYTES];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int down = thread / 32 / BESIDE * HEIGHT, right = thread / 32 % BESIDE * WIDTH;  // where the warp's tile is
    const Quotient at = divide(params.first_block + static_cast<Long>(blockIdx.x), params.triangle);
    const Quotient of = divide(at.quotient, params.parts);
    // The tile's row and column in the triangle. A matrix of the workspace has fewer than 2^31 elements.
    const int tiles = static_cast<int>(params.tiles), extent = static_cast<int>(params.columns);
    int across = 0, along = static_cast<int>(at.remainder);
    while (along >= tiles - across) along -= tiles - across++;
    along += across;
    const bool diagonal = along == across;

    const Long first = of.remainder * params.part_rows, left = params.rows - first;
    Long remaining = left < params.part_rows ? left : params.part_rows;
    const Long offset = batch_offset(of.quotient, params.batch_shape, params.a.batch_stride) + first * params.a.row_stride;
    Copy copy_left(
        params.a, params.a.column_stride, params.a.row_stride, offset, across * BLOCK, params.columns, params.conjugate,
        thread);
    Copy copy_right(
        params.a, params.a.column_stride, params.a.row_stride, offset, along * BLOCK, params.columns, params.conjugate,
        thread);
    Acc* const out = static_cast<Acc*>(params.out) + of.remainder * params.part_stride +
                     batch_offset(of.quotient, params.batch_shape, params.out_stride);

    const auto load = [&] {
        const int steps = remaining < DEPTH ? static_cast<int>(remaining) : DEPTH;
        copy_left.load(steps);
        if (!diagonal) copy_right.load(steps);
    };
    const auto store = [&](int stage) {
        copy_left.store(Copy::Shared::at(shared[stage][0]));
        if (!diagonal) copy_right.store(Copy::Shared::at(shared[stage][1]));
        __syncthreads();
    };
    Sums sums;
    sums.clear();
    load();
    store(0);
    bool started = false;
    int stage = 0, until = RUN;
    while (true) {
        remaining -= DEPTH;
        until -= DEPTH;
        const bool more = remaining > 0;
        if (more) load();
        const Panel panel = Copy::Shared::at(shared[stage][0]);
        sums.add(panel, diagonal ? panel : Copy::Shared::at(shared[stage][1]), down, right, lane);
        if (!more || until == 0) {
            sums.keep(out, across * BLOCK + down, along * BLOCK + right, extent, !started, lane);
            sums.clear();
            started = true;
            until = RUN;
        }
        if (!more) break;
        stage ^= 1;
        store(stage);
    }
    // Below the tiles of the diagonal nothing was summed up, but what adds up the parts reads everything.
    if (diagonal) return;
    for (int i = thread; i < BLOCK * BLOCK; i += THREADS) {
        const int r = along * BLOCK + i / BLOCK, c = across * BLOCK + i % BLOCK;
        if (r < extent && c < extent) out[r * extent + c] = Acc{};
    }
}
