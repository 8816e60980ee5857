// Reductions of the rows of alpha op(A) op(B) on Hopper's tensor cores: wgmma_gemm's product, whose tiles leave partials
// instead of D (or beside it). combine.cu folds them. The host's side is gemmserve_kernels.wgmma.gemm.
#include "wgmma/kernel.cuh"
#include "epilogue/quad.cuh"

// Calls visit(column, sum) for a thread's sums in its upper or lower row, `column` counting in the tile.
template <class Visit>
GEMM_DEVICE void visit_sums(const Consumer& who, const Sums<Config>& sums, bool lower, Visit visit) {
    constexpr int EIGHTS = Config::BLOCK_N / 8, SHARE = EIGHTS / Config::SPLIT, IM = Config::COMPONENTS - 1;
    const int first = who.thread % 4 * 2, at = lower ? 2 : 0;
    if constexpr (Config::SPLIT > 1) {
#pragma unroll 1
        for (int i = 0; i < SHARE; ++i) {
            const int eight = static_cast<int>(who.rank) * SHARE + i;
            float re[4], im[4];
            exchanged<Config>(who.memory, who.number(), eight, re, im);
            visit(8 * eight + first, make<Config::Value>(re[at], im[at]));
            visit(8 * eight + first + 1, make<Config::Value>(re[at + 1], im[at + 1]));
        }
    } else {
#pragma unroll
        for (int part = 0; part < Config::PARTS; ++part) {
#pragma unroll
            for (int eight = 0; eight < Config::INSTRUCTION_N / 8; ++eight) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int value = 4 * eight + e;
                    const float re = lower ? sums[0][part][value + 2] : sums[0][part][value];
                    const float im = lower ? sums[IM][part][value + 2] : sums[IM][part][value];
                    visit(part * Config::INSTRUCTION_N + 8 * eight + first + e, make<Config::Value>(re, im));
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1) GEMM_CLUSTER_ATTRIBUTE
    wgmma_reduce(const __grid_constant__ WgmmaParams params) {
    multiply_block(params, [&](const Unit& unit, const Consumer& who, const Sums<Config>& sums) {
        const Place place(unit, Config::BLOCK_M, Config::BLOCK_N, who.group, who.thread);
        const Store<Config> store(params, unit.batch);
#if GEMM_RETURN_C
        if constexpr (Config::SPLIT > 1) {
            exchange_in<Config>(store, place, who.memory, who.number(), who.rank);
        } else {
            write_sums<Config>(store, place, sums);
        }
#endif
        const RowReduceParams& reduce = params.reduce;
        const Long batch = reduce.first_batch + unit.batch, parts = static_cast<Long>(params.tiles_n) * Config::SPLIT;
        const Long part = static_cast<Long>(unit.tile_n) * Config::SPLIT + (Config::SPLIT > 1 ? who.rank : 0);
        const Long first_column = static_cast<Long>(unit.tile_n) * Config::BLOCK_N;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Long index = place.row + 8 * half;
            const auto row = store.row(index);
            const RowSlot slot{
                (reduce.reduce_batch ? 0 : batch * params.m) + index, (reduce.reduce_batch ? batch * parts : 0) + part,
                (reduce.reduce_batch ? batch * params.n : 0) + first_column, row.inside};
            reduce_row<GEMM_REDUCTIONS, GEMM_PRE_OP, GEMM_ATOMIC, Config::Value>(
                reduce, slot, who.thread % 4, [&](auto fold) {
                    visit_sums(who, sums, half == 1, [&](int column, Config::Value sum) {
                        const Long at = first_column + column;
                        if (row.inside && at < params.n) fold(column, store.finished(sum, row, at, store.right[at]));
                    });
                });
        }
    });
}
