// Products of residues modulo p on Hopper's INT8 tensor cores: persistent blocks, a warp that copies, two groups of four
// warps that multiply 64 x 256 each. Stages are straight copies of 16 KiB; blocks of a cluster, one above the other, have
// the same columns, and each brings its share of them to all: what is saved of the L2's power the tensor cores have (8192 x
// 8192 x 8192 is bound by the device's power limit). To have one group a few steps behind the other, so that not both of
// them store at once, gained nothing.
//
// Residues are bytes without a sign: operands and sums whose upper bits rarely change take less of the device's power limit
// than numbers around 0. Sums stay below 2^31; after every 32,768 steps of k they are reduced. Only bytes are written, in
// the order of the registers (layout.cuh).
#include "../common/ptx/wgmma.cuh"
#include "../common/raster.cuh"
#include "layout.cuh"
#include "params.cuh"

constexpr int PARTS = GEMM_PARTS, PLANES = GEMM_MODULI * PARTS;
constexpr int STAGES = GEMM_STAGES, RASTER = GEMM_RASTER, CLUSTER = GEMM_CLUSTER;
constexpr int THREADS = 2 * GROUP_THREADS + 32;  // at most 224 registers a thread
constexpr int STEP = BLOCK_STEPS;    // bytes of k a stage
constexpr int STEPS = MOST_STEPS / STEP;  // between reductions
constexpr int A_BYTES = TILE_M * STEP, B_BYTES = TILE_N * STEP, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr unsigned short ALL_BLOCKS = (1 << CLUSTER) - 1;  // of the cluster, a bit each
static_assert(CLUSTER == 1 || CLUSTER == 2, "a block of a cluster brings whole blocks of 128 lines");
static_assert(GEMM_SHARED_BYTES >= STAGES * STAGE_BYTES + 1024, "the host counts the bytes the same way");

struct Place {
    Long matrix;
    int plane;
    Long tile_m, tile_n;
};

// The place of a cluster's first block.
GEMM_DEVICE Place place_of(const MultiplyParams& params, Long number) {
    const TileCoordinate where = tile_of<RASTER>(number, (params.tiles_m + CLUSTER - 1) / CLUSTER, params.tiles_n);
    const Quotient by_plane = divide(where.batch, PLANES);
    return {by_plane.quotient, static_cast<int>(by_plane.remainder), where.tile_m * CLUSTER, where.tile_n};
}

// Whether none of the cluster's tiles is made of residues.
GEMM_DEVICE bool left_out(const MultiplyParams& params, const Place& at) {
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) {
        if (at.tile_m + i < params.tiles_m && passes(params.judged, at.matrix, at.tile_m + i, at.tile_n)) return false;
    }
    return true;
}

#if GEMM_CLUSTER > 1
#define GEMM_CLUSTER_ATTRIBUTE __cluster_dims__(GEMM_CLUSTER, 1, 1)
#else
#define GEMM_CLUSTER_ATTRIBUTE
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) GEMM_CLUSTER_ATTRIBUTE
    ozaki_multiply(const __grid_constant__ MultiplyParams params) {
    GEMM_DYNAMIC_SHARED(raw);
    __shared__ __align__(8) Barrier full[STAGES], empty[STAGES];
    const unsigned base = (shared_address(raw) + 1023u) & ~1023u;
    const int group = static_cast<int>(threadIdx.x) / 128, thread = static_cast<int>(threadIdx.x) % 128;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(shared_address(&full[s]), 1);
            barrier_init(shared_address(&empty[s]), 2 * CLUSTER);  // both groups
        }
        barrier_init_fence();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_sync();
    const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;

    const int steps = static_cast<int>(params.pitch / STEP);
    const Long tiles = (params.tiles_m + CLUSTER - 1) / CLUSTER * params.tiles_n;  // of clusters
    const int numbers = static_cast<int>(params.matrices * PLANES * tiles);
    const int first = static_cast<int>(blockIdx.x) / CLUSTER, stride = static_cast<int>(gridDim.x) / CLUSTER;
    clear_failing(params.judged);
    const bool all = all_pass(params.judged);
    const Long row_groups = (params.rows + JUDGED_LINES - 1) / JUDGED_LINES;
    const Long column_groups = (params.columns + JUDGED_LINES - 1) / JUDGED_LINES;
    if (!all && none_pass(params.judged, params.matrices, row_groups, column_groups)) return;
    // A stage that has been read, to whoever writes there.
    const auto release = [&](int stage) {
        if constexpr (CLUSTER > 1) {
            if (thread < CLUSTER) barrier_arrive_remote(shared_address(&empty[stage]), thread);
        } else {
            if (thread == 0) barrier_arrive(shared_address(&empty[stage]));
        }
    };
    if (group == 2) {
        if (thread == 0) {
            int stage = 0, parity = 1;
            for (int number = first; number < numbers; number += stride) {
                const Place at = place_of(params, number);
                if (!all && left_out(params, at)) continue;
                const Long row = steps * static_cast<Long>(BLOCK_BYTES);  // of blocks
                const unsigned char* a = params.a + (at.matrix * params.a_planes + at.plane) * params.a_plane +
                                         (params.a_first / BLOCK_LINES + at.tile_m + rank) * row;
                const unsigned char* b = params.b + (at.matrix * params.b_planes + at.plane) * params.b_plane +
                                         (params.b_first / BLOCK_LINES + at.tile_n * 2 + rank) * row;
                for (int step = 0; step < steps; ++step) {
                    barrier_wait(shared_address(&empty[stage]), parity);
                    const unsigned barrier = shared_address(&full[stage]), to = base + stage * STAGE_BYTES;
                    barrier_arrive_expecting(barrier, STAGE_BYTES);
                    copy_bytes(to, a, A_BYTES, barrier);
                    if constexpr (CLUSTER == 2) {
                        copy_bytes_multicast(to + A_BYTES + rank * (B_BYTES / 2), b, B_BYTES / 2, barrier, ALL_BLOCKS);
                    } else {
                        copy_bytes(to + A_BYTES, b, B_BYTES / 2, barrier);
                        copy_bytes(to + A_BYTES + B_BYTES / 2, b + row, B_BYTES / 2, barrier);
                    }
                    a += BLOCK_BYTES;
                    b += BLOCK_BYTES;
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        int stage = 0, parity = 0;
        for (int number = first; number < numbers; number += stride) {
            const Place of = place_of(params, number);
            if (!all && left_out(params, of)) continue;
            const int m = of.plane / PARTS;
            const unsigned divisor = params.divisor[m], reciprocal = params.reciprocal[m];
            unsigned acc[128];
#pragma unroll
            for (int i = 0; i < 128; ++i) acc[i] = 0;
            for (int step = 0; step < steps;) {
                const int end = steps - step < STEPS ? steps : step + STEPS;
                int before = -1;  // the stage that is being multiplied
#pragma unroll 1
                for (; step < end; ++step) {
                    barrier_wait(shared_address(&full[stage]), parity);
                    const unsigned a = base + stage * STAGE_BYTES + group * (64 * STEP);
                    const unsigned b = base + stage * STAGE_BYTES + A_BYTES;
                    const Descriptor a_matrix = describe<STEP>(a), b_matrix = describe<STEP>(b);
                    wgmma_fence();
#pragma unroll
                    for (int q = 0; q < STEP / 32; ++q) multiply_bytes(acc, a_matrix + 2 * q, b_matrix + 2 * q);
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (before >= 0) release(before);
                    before = stage;
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                wgmma_wait<0>();
                release(before);
                if (step == steps) break;
#pragma unroll
                for (int i = 0; i < 128; ++i) acc[i] = reduce(acc[i], divisor, reciprocal);
            }
            const Place at = place_of(params, number);  // once more: registers are short in the loop
            const Long tile_m = at.tile_m + rank;
            if (CLUSTER > 1 && tile_m >= params.tiles_m) continue;
            const Long tile = ((at.matrix * PLANES + at.plane) * params.tiles_m + tile_m) * params.tiles_n + at.tile_n;
            unsigned* to = reinterpret_cast<unsigned*>(params.products + tile * TILE_BYTES) + group * (WORDS * GROUP_THREADS) + thread;
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                // Words 0..15: the first of the two rows, columns 16 w and 16 w + 8 of the fragment.
                const int from = w % 16 * 8 + w / 16 * 2;
                const unsigned low = __byte_perm(
                    reduce(acc[from], divisor, reciprocal), reduce(acc[from + 1], divisor, reciprocal), 0x0040);
                const unsigned high = __byte_perm(
                    reduce(acc[from + 4], divisor, reciprocal), reduce(acc[from + 5], divisor, reciprocal), 0x0040);
                __stcs(to + w * GROUP_THREADS, __byte_perm(low, high, 0x5410));
            }
        }
    }
    // The other may still write here, or wait for what is told here.
    if constexpr (CLUSTER > 1) cluster_sync();
}
