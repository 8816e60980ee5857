// What lanes of a warp tell each other.
#pragma once

#include "platform.cuh"

// The same variable of lane `lane ^ step`.
template <class T>
GEMM_DEVICE T of_neighbour(T x, int step) {
    static_assert(sizeof(T) % 4 == 0, "whole words");
    union Words {
        T value;
        unsigned word[sizeof(T) / 4];
        GEMM_DEVICE Words() {}
    } words;
    words.value = x;
#pragma unroll
    for (unsigned i = 0; i < sizeof(T) / 4; ++i) words.word[i] = __shfl_xor_sync(0xffffffffu, words.word[i], step);
    return words.value;
}
