// Reductions along the rows of accumulators: a quad, four neighbouring lanes, holds a row's columns of a warp's tile
// (PTX ISA, fragments of mma.m16n8 and wgmma.m64nN). Partials go from registers to global memory, by shuffles alone.
#pragma once

#include "../common/memory/lanes.cuh"
#include "pre_op.cuh"
#include "reductions.cuh"

// Where the partials of one row go.
struct RowSlot {
    Long output;  // of the row, in a result
    Long number;  // of the partial among those of an output
    Long first;   // index of the columns' first one in what is reduced
    bool inside;  // whether the row exists
};

// Every reduction in MASK of the two rows that a quad has elements of. `each(lower, fold)` calls fold(column, value) for the
// lane's own elements of one, as often as asked; all lanes of the warp come here together. `lane` counts in the quad: even
// ones have the upper row's slot in `slot` and gather that row, odd ones the lower one.
template <unsigned MASK, PreOp OP, bool ATOMIC, class Acc, class Elements>
GEMM_DEVICE void reduce_rows(const RowReduceParams& params, const RowSlot& slot, int lane, const Elements& each) {
    for_each_reduction<MASK, PreOpValue<OP, Acc>>([&](auto reduction) {
        using Each = decltype(reduction);
        const auto local = [&](bool lower) {
            return fold_elements<Each>([&](auto fold) {
                each(lower, [&](int column, Acc value) { fold(apply<OP>(value), column); });
            });
        };
        const auto upper = local(false), lower = local(true);
        const bool odd = lane & 1;
        typename Each::Partial partial = Each::lift(odd ? lower : upper, slot.first);
        Each::merge(partial, of_neighbour(Each::lift(odd ? upper : lower, slot.first), 1));
        Each::merge(partial, of_neighbour(partial, 2));
        if (lane >= 2 || !slot.inside) return;
        if constexpr (ATOMIC && Each::ADDS) {
            Each::store_atomically(params.partial, slot.output, partial);
        } else {
            Each::store(params.partial, slot.number * params.outputs + slot.output, partial);
        }
    });
}
