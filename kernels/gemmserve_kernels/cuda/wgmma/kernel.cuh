// One block of the kernels that multiply planes, or float16 operands as they are: the configuration of the prelude as
// one type, the barriers, the roles.
#pragma once

#include "../common/dependent.cuh"
#include "epilogue.cuh"

enum Scheme {
    SCHEME_3XFP16, SCHEME_3XFP16_3M, SCHEME_1XFP16, SCHEME_FP16, SCHEME_3XBF16, SCHEME_6XBF16, SCHEME_9XBF16
};

// The configuration of the prelude as one type.
struct Config {
    static constexpr Scheme SCHEME = static_cast<Scheme>(GEMM_SCHEME);
    static constexpr int COMPONENTS = GEMM_COMPLEX ? 2 : 1;
    static constexpr int BLOCK_M = GEMM_BLOCK_M, BLOCK_N = GEMM_BLOCK_N, BLOCK_K = GEMM_BLOCK_K;
    static constexpr int INSTRUCTION_N = GEMM_INSTRUCTION_N, STAGES = GEMM_STAGES, PROMOTE = GEMM_PROMOTE;
    static constexpr int CLUSTER = GEMM_CLUSTER, SPLIT = GEMM_SPLIT, RASTER = GEMM_RASTER;
    static constexpr bool SWAPPED = GEMM_SWAPPED, PLANAR = GEMM_PLANAR, VECTOR_D = GEMM_VECTOR_D, WIDE_D = GEMM_WIDE_D;
    static constexpr bool ADDS_C = GEMM_ADDS_C;  // else beta is 0
    using C = GEMM_TYPE_C;
    using D = GEMM_TYPE_D;
    using Value = Select<COMPONENTS == 2, Complex<float>, float>;

    static constexpr int PHASES = SCHEME == SCHEME_3XFP16_3M ? 3 : 1;
    static constexpr bool DIRECT = SCHEME == SCHEME_FP16;  // operands as they are: no planes, no exponents
    static constexpr bool NINE = SCHEME == SCHEME_9XBF16, BFLOAT = SCHEME >= SCHEME_3XBF16;
    static constexpr int DEPTH =  // parts of a number
        SCHEME >= SCHEME_6XBF16 ? 3 : DIRECT || SCHEME == SCHEME_1XFP16 ? 1 : 2;
    static constexpr int STAGE_PLANES = DEPTH * (PHASES == 1 ? COMPONENTS : 1);
    static constexpr int STEPS = (PROMOTE > 0 ? PROMOTE : BLOCK_K) / 16;  // instructions along k between promotions
    static constexpr Tiles TILES = static_cast<Tiles>(GEMM_TILES);
    static constexpr bool LEFT_ACROSS = GEMM_LEFT_ACROSS, RIGHT_ACROSS = GEMM_RIGHT_ACROSS;  // along m, n instead of k
    static constexpr int ROW_BYTES = BLOCK_K * 2;
    static constexpr int LEFT_PLANE = BLOCK_M * ROW_BYTES, RIGHT_PLANE = BLOCK_N * ROW_BYTES;
    static constexpr int LEFT_BYTES = STAGE_PLANES * LEFT_PLANE, RIGHT_BYTES = STAGE_PLANES * RIGHT_PLANE;
    static constexpr bool QUARTERED = GEMM_QUARTERED;
    static constexpr int STAGE_BYTES = QUARTERED ? LEFT_BYTES / 2 : LEFT_BYTES + RIGHT_BYTES;
    static constexpr int PARTS = BLOCK_N / INSTRUCTION_N, VALUES = INSTRUCTION_N / 2;
    static constexpr unsigned short ALL_BLOCKS = (1 << CLUSTER) - 1;  // of the cluster, a bit each
    static constexpr int CONSUMERS = BLOCK_M / 64, CONSUMER_THREADS = CONSUMERS * 128;
    static constexpr int THREADS = CONSUMER_THREADS + 128;
    // What `restored` gives back; Gauss's products are too different in size for it.
    static constexpr int ACCUMULATIONS =
        SCHEME == SCHEME_3XFP16 || SCHEME == SCHEME_FP16 ? PROMOTE / 16 * COMPONENTS : 0;
    static_assert(CLUSTER == 1 || SPLIT == 1, "a cluster shares operands or splits k");
    static_assert(
        !QUARTERED || (PROMOTE == BLOCK_K && BLOCK_M == BLOCK_N && PARTS == 1 && CLUSTER == 1),
        "a quarter is one side of a square tile");
    static_assert(
        (!LEFT_ACROSS && !RIGHT_ACROSS) || (STAGE_PLANES == 1 && PHASES == 1), "planes lie along k");
    static_assert(!RIGHT_ACROSS || BLOCK_N / CLUSTER % 64 == 0, "a block of a cluster fetches whole columns");
    static_assert(PROMOTE == 0 || BLOCK_K % PROMOTE == 0, "sums are promoted within a stage");
};

static_assert(sizeof(WgmmaParams) == GEMM_PARAMS_BYTES, "the host mirrors the structure");

constexpr int ALIGNMENT = 1024;  // of a 128-byte swizzle

#if GEMM_CLUSTER * GEMM_SPLIT > 1
#define GEMM_CLUSTER_ATTRIBUTE __cluster_dims__(GEMM_CLUSTER * GEMM_SPLIT, 1, 1)
#else
#define GEMM_CLUSTER_ATTRIBUTE
#endif

// The thread that finishes a unit. Where k is split over the cluster, the sums of all blocks are in `memory` of each.
struct Consumer {
    int group, thread;
    unsigned rank;
    Address memory;
    GEMM_DEVICE int number() const { return group * 128 + thread; }
};

// Walks over this block's units; `finish(work, consumer, exponents, sums)` gets each.
template <class Finish>
GEMM_DEVICE void multiply_block(const WgmmaParams& params, Finish finish) {
    GEMM_DYNAMIC_SHARED(dynamic);
    __shared__ __align__(8) Barrier full[Config::STAGES], empty[Config::STAGES];
    __shared__ Work work[Config::STAGES + 1];
    constexpr bool CLUSTERED = Config::CLUSTER * Config::SPLIT > 1;
    const Pipeline pipeline{
        (shared_address(dynamic) + ALIGNMENT - 1) & ~(ALIGNMENT - 1u), shared_address(full), shared_address(empty),
        work};
    // The same in all lanes, which the compiler cannot see: descriptors then live in uniform registers.
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
    const unsigned rank = CLUSTERED ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::STAGES; ++i) {
            barrier_init(shared_address(&full[i]), 1);
            barrier_init(shared_address(&empty[i]), Config::CONSUMERS * Config::CLUSTER);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if constexpr (CLUSTERED) cluster_sync();
    let_next_start();
    wait_for_previous();  // planes, exponents, C: nothing that others have written is read before
    const Verdicts<Config> verdicts(params);
    if (verdicts.none()) return;
    if constexpr (Config::SPLIT > 1) {
        if (!verdicts.wants(static_cast<int>(blockIdx.x) / Config::SPLIT)) return;  // all of the cluster
    }

    if (group == 0) {
        if constexpr (Config::CONSUMERS > 1) give_registers<40>();
        if (thread == 0) {
            produce<Config>(params, verdicts, pipeline, rank);
            if constexpr (Config::TILES >= TILES_REST) count_units<Config>(params, verdicts, rank);
        }
        __syncwarp();
        if constexpr (Config::SPLIT > 1) {
            cluster_sync();
            cluster_sync();
        }
    } else {
        if constexpr (Config::CONSUMERS > 1) take_registers<232>();
        Exponents<Config> exponents;
        constexpr bool AHEAD = !Config::QUARTERED;  // else there are no registers for them
        const auto begin = [&](const Work& work) {
            if constexpr (AHEAD) exponents.fetch(params, work, group - 1, thread);
        };
        const auto end = [&](const Work& work, Sums<Config>& sums) {
            const Consumer who{group - 1, thread, rank, pipeline.stages};
            if constexpr (Config::SPLIT > 1) {
                cluster_sync();  // all stages of all consumers have been read
                exchange_out<Config>(pipeline.stages, who.number(), sums);
                cluster_sync();
            }
            if constexpr (!AHEAD) exponents.fetch(params, work, group - 1, thread);
            finish(work, who, exponents, sums);
        };
        consume<Config>(params, verdicts, pipeline, rank, group - 1, thread, begin, end);
    }
    // Others may still write to this block's memory, or read it.
    if constexpr (CLUSTERED) cluster_sync();
}
