// What is applied to the product's elements before they are reduced; numpy.abs and numpy.square.
#pragma once

#include "../common/numbers/types.cuh"

enum PreOp { IDENTITY, ABS, SQUARE };

template <PreOp OP, class Acc>
using PreOpValue = Select<OP == ABS, Real<Acc>, Acc>;

template <PreOp OP, class Acc>
GEMM_DEVICE PreOpValue<OP, Acc> apply(Acc x) {
    if constexpr (OP == ABS) {
        return magnitude(x);
    } else if constexpr (OP == SQUARE) {
        Acc square{};
        multiply_accumulate(square, x, x);
        return square;
    } else {
        return x;
    }
}
