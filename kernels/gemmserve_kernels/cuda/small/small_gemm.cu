// D = alpha op(A) op(B) + beta C for batches of products with extents of at most 32, at the speed of memory.
//
// A block walks over groups of GROUP consecutive products. A group's operands come into shared memory STAGES - 1 groups
// ahead; one to a few dozen threads compute each product from there, a register tile each.
#include "store.cuh"
#include "tensor.cuh"

// Brings the operands of `count` products from number `first` on into a stage.
GEMM_DEVICE void fetch(const SmallParams& params, unsigned char* stage, Long first, int count, int thread) {
    using A = Config::A;
    using B = Config::B;
    if constexpr (!Config::A_BROADCAST) {
        A* to = reinterpret_cast<A*>(stage);
#pragma unroll
        for (int part = 0; part < Config::PARTS; ++part) {
            copy_group<Config::LayoutA, Config::GROUP_A, Config::THREADS>(
                to + part * Config::PART_A, static_cast<const A*>(part ? params.a.im : params.a.re), params.a,
                Config::A_ALONG_K ? params.a.row_stride : params.a.column_stride,
                Config::A_ALONG_K ? params.a.column_stride : params.a.row_stride, params, first, count, thread);
        }
    }
    if constexpr (!Config::B_BROADCAST) {
        B* to = reinterpret_cast<B*>(stage + (Config::A_BROADCAST ? 0 : Config::BYTES_A));
#pragma unroll
        for (int part = 0; part < Config::PARTS; ++part) {
            copy_group<Config::LayoutB, Config::GROUP_B, Config::THREADS>(
                to + part * Config::PART_B, static_cast<const B*>(part ? params.b.im : params.b.re), params.b,
                Config::B_ALONG_K ? params.b.column_stride : params.b.row_stride,
                Config::B_ALONG_K ? params.b.row_stride : params.b.column_stride, params, first, count, thread);
        }
    }
}

// Brings what all products share.
GEMM_DEVICE void fetch_kept(const SmallParams& params, unsigned char* kept, int thread) {
    using A = Config::A;
    using B = Config::B;
    if constexpr (Config::A_BROADCAST) {
        A* to = reinterpret_cast<A*>(kept);
#pragma unroll
        for (int part = 0; part < Config::PARTS; ++part) {
            copy_group<Config::LayoutA, 1, Config::THREADS>(
                to + part * Config::PART_A, static_cast<const A*>(part ? params.a.im : params.a.re), params.a,
                Config::A_ALONG_K ? params.a.row_stride : params.a.column_stride,
                Config::A_ALONG_K ? params.a.column_stride : params.a.row_stride, params, 0, 1, thread);
        }
    }
    if constexpr (Config::B_BROADCAST) {
        B* to = reinterpret_cast<B*>(kept + (Config::A_BROADCAST ? Config::BYTES_A : 0));
#pragma unroll
        for (int part = 0; part < Config::PARTS; ++part) {
            copy_group<Config::LayoutB, 1, Config::THREADS>(
                to + part * Config::PART_B, static_cast<const B*>(part ? params.b.im : params.b.re), params.b,
                Config::B_ALONG_K ? params.b.column_stride : params.b.row_stride,
                Config::B_ALONG_K ? params.b.row_stride : params.b.column_stride, params, 0, 1, thread);
        }
    }
}

GEMM_DEVICE int products_of(const SmallParams& params, Long group) {
    const Long left = params.batch - group * Config::GROUP;
    return left < Config::GROUP ? static_cast<int>(left) : Config::GROUP;
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) small_gemm(SmallParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    static_assert(Config::SHARED_BYTES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    constexpr int STAGES = Config::STAGES;
    const int thread = static_cast<int>(threadIdx.x);
    const Long groups = (params.batch + Config::GROUP - 1) / Config::GROUP, stride = static_cast<Long>(gridDim.x);
    unsigned char* const stages = shared + Config::BYTES_KEPT;
    Config::D* const staged = reinterpret_cast<Config::D*>(stages + STAGES * Config::BYTES_STAGE);
    const int slot = thread / Config::THREADS_EACH, lane = thread % Config::THREADS_EACH;
    const int tile = Config::TENSOR ? lane / 32 : lane;
    const int tile_m = tile / Config::TILES_N, tile_n = tile % Config::TILES_N;

    const Scalars scalars(params);

    Long ahead = static_cast<Long>(blockIdx.x);  // the next group to bring
    const auto bring = [&](int stage) {
        if (ahead < groups) {
            fetch(params, stages + stage * Config::BYTES_STAGE, ahead * Config::GROUP, products_of(params, ahead), thread);
        }
        ahead += stride;
        copy_commit();
    };
    fetch_kept(params, shared, thread);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) bring(stage);

    int stage = 0;
    for (Long group = static_cast<Long>(blockIdx.x); group < groups; group += stride) {
        if constexpr (STAGES == 1) bring(0);
        copy_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        __syncthreads();
        // Every thread has left the stage before this one: it is free.
        if constexpr (STAGES > 1) bring(stage == 0 ? STAGES - 1 : stage - 1);
        const unsigned char* const here = stages + stage * Config::BYTES_STAGE;
        const Config::A* const a = reinterpret_cast<const Config::A*>(Config::A_BROADCAST ? shared : here);
        const Config::B* const b = reinterpret_cast<const Config::B*>(
            Config::B_BROADCAST ? shared + (Config::A_BROADCAST ? Config::BYTES_A : 0)
                                : here + (Config::A_BROADCAST ? 0 : Config::BYTES_A));
        const Long first = group * Config::GROUP;
        const int count = products_of(params, group);
#pragma unroll 1
        for (int round = 0; round < Config::ROUNDS; ++round) {
            const int product = round * Config::AT_ONCE + slot;
            if (slot >= Config::AT_ONCE || product >= count) break;
            const Config::A* const one_a = a + (Config::A_BROADCAST ? 0 : product * Config::LayoutA::MATRIX);
            const Config::B* const one_b = b + (Config::B_BROADCAST ? 0 : product * Config::LayoutB::MATRIX);
            const Store to(params, scalars, first + product, product, staged);
#if GEMM_TENSOR
            multiply_in_warp(to, one_a, one_b, tile_m, tile_n);
#else
            Config::Acc acc[THREAD_M][THREAD_N];
            multiply(acc, one_a, one_b, tile_m, tile_n);
            store_tile(to, acc, tile_m, tile_n);
#endif
        }
        if constexpr (Config::STAGED_D) {
            __syncthreads();
            constexpr int SIZE = Config::M * Config::N;
#pragma unroll
            for (int part = 0; part < Config::PARTS; ++part) {
                copy_out<GEMM_D_VECTOR, Config::PART_D, Config::THREADS>(
                    static_cast<Config::D*>(part ? params.d.im : params.d.re) + first * SIZE,
                    staged + part * Config::PART_D, count * SIZE, thread);
            }
        }
        if constexpr (STAGES == 1) {
            __syncthreads();
        } else {
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }
}
