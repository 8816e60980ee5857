// Reductions of the rows of alpha op(A) op(B) on Hopper's tensor cores: wgmma_gemm's product, whose tiles leave partials
// instead of D (or beside it). combine.cu folds them. The host's side is gemmserve_kernels.algorithms.wgmma.gemm.
#include "kernel.cuh"
#include "../epilogue/quad.cuh"

// Puts the finished elements into the place of the sums, once for all reductions.
template <class Store>
GEMM_DEVICE void finish_sums(const Store& store, const Place& place, Sums<Config>& sums) {
    if constexpr (Config::DIRECT && Config::ACCUMULATIONS == 0) {
        if (!store.scales) return;  // they are finished
    }
    const auto upper = store.row(place.row, 0), lower = store.row(place.row + 8, 1);
#pragma unroll
    for (int part = 0; part < Config::PARTS; ++part) {
#pragma unroll
        for (int eight = 0; eight < Config::INSTRUCTION_N / 8; ++eight) {
            const int number = part * (Config::INSTRUCTION_N / 8) + eight;
            const auto columns = store.columns(place.column, number);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& re = sums[0][part][4 * eight + e];
                float& im = sums[Config::COMPONENTS - 1][part][4 * eight + e];
                const auto value = store.finished(
                    make<Config::Value>(re, im), e < 2 ? upper : lower, columns.first + e % 2, columns.exponents[e % 2]);
                re = real_part(value);
                if constexpr (Config::COMPONENTS == 2) im = imaginary_part(value);
            }
        }
    }
}

// Calls visit(column, element) for a thread's elements in its upper or lower row, `column` counting in the tile.
template <class Store, class Visit>
GEMM_DEVICE void visit_elements(
    const Store& store, const Consumer& who, const Place& place, const Sums<Config>& sums, bool lower,
    Visit visit) {
    constexpr int EIGHTS = Config::BLOCK_N / 8, SHARE = EIGHTS / Config::SPLIT, IM = Config::COMPONENTS - 1;
    const int first = who.thread % 4 * 2, at = lower ? 2 : 0;
    if constexpr (Config::SPLIT > 1) {
        const auto row = store.row(place.row + (lower ? 8 : 0), lower);
#pragma unroll 1
        for (int i = 0; i < SHARE; ++i) {
            const int eight = static_cast<int>(who.rank) * SHARE + i;
            float re[4], im[4];
            exchanged<Config>(who.memory, who.number(), eight, re, im);
            const auto columns = store.columns(place.column, eight);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const auto sum = make<Config::Value>(re[at + e], im[at + e]);
                visit(8 * eight + first + e, store.finished(sum, row, columns.first + e, columns.exponents[e]));
            }
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

// What of a unit's result goes where. PLAIN: of the store.
template <bool PLAIN>
GEMM_DEVICE void reduce_unit(
    const WgmmaParams& params, const Unit& unit, const Consumer& who, const Place& place,
    const Store<Config, PLAIN>& store, Sums<Config>& sums) {
#if GEMM_RETURN_C
    if constexpr (Config::SPLIT > 1) {
        exchange_in<Config>(store, place, who.memory, who.number(), who.rank);
    } else {
        write_sums<Config>(store, place, sums);
    }
#endif
    if constexpr (Config::SPLIT == 1) finish_sums(store, place, sums);
    const RowReduceParams& reduce = params.reduce;
    const Long batch = reduce.first_batch + unit.batch, parts = static_cast<Long>(params.tiles_n) * Config::SPLIT;
    const Long part = static_cast<Long>(unit.tile_n) * Config::SPLIT + (Config::SPLIT > 1 ? who.rank : 0);
    const Long first_column = static_cast<Long>(unit.tile_n) * Config::BLOCK_N, left = params.n - first_column;
    const int columns = PLAIN || left > Config::BLOCK_N ? Config::BLOCK_N : static_cast<int>(left);
    const Long index = place.row + 8 * (who.thread % 2);
    const RowSlot slot{
        (reduce.reduce_batch ? 0 : batch * params.m) + index, (reduce.reduce_batch ? batch * parts : 0) + part,
        (reduce.reduce_batch ? batch * params.n : 0) + first_column, index < params.m};
    reduce_rows<GEMM_REDUCTIONS, GEMM_PRE_OP, GEMM_ATOMIC, Config::Value>(
        reduce, slot, who.thread % 4, [&](bool lower, auto fold) {
            visit_elements(store, who, place, sums, lower, [&](int column, Config::Value element) {
                if (PLAIN || column < columns) fold(column, element);
            });
        });
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1) GEMM_CLUSTER_ATTRIBUTE
    wgmma_reduce(const __grid_constant__ WgmmaParams params) {
    multiply_block(params, [&](const Work& work, const Consumer& who, const auto& exponents, Sums<Config>& sums) {
        const Unit& unit = work.unit;
        const Place place(unit, Config::BLOCK_M, Config::BLOCK_N, who.group, who.thread);
        const Store<Config> store(params, work.at);
        if constexpr (Config::SPLIT == 1) {  // else elements are not there before they are visited
            if (store.is_plain(static_cast<Long>(unit.tile_n) * Config::BLOCK_N, exponents)) {
                reduce_unit<true>(params, unit, who, place, Store<Config, true>(store, exponents), sums);
                return;
            }
        }
        reduce_unit<false>(params, unit, who, place, store, sums);
    });
}
