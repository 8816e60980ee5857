// What lanes of a warp tell each other.
#pragma once

#include "../platform.cuh"

// The warp in its block: told by one lane, so that the compiler sees that all lanes have the same, and take the same way.
GEMM_DEVICE int warp_number() {
    const int number = static_cast<int>(threadIdx.x / 32);
#if defined(GEMM_CUDA)
    return __shfl_sync(0xffffffffu, number, 0);
#else
    return number;
#endif
}

// What all lanes of a warp have, told by one of them for the same reason. Of an address in shared memory: descriptors of
// matrices there are then made by the uniform units, ahead of the instructions that take them.
GEMM_DEVICE unsigned of_all_lanes(unsigned x) {
#if defined(GEMM_CUDA)
    return __shfl_sync(0xffffffffu, x, 0);
#else
    return x;
#endif
}

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

// Word i of lane j of a quad becomes word j of lane i.
GEMM_DEVICE void transpose_quad(unsigned (&words)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & step) != 0) continue;
            const unsigned sent = upper ? words[i] : words[i | step];
            const unsigned got = __shfl_xor_sync(0xffffffffu, sent, step);
            if (upper) words[i] = got;
            else words[i | step] = got;
        }
    }
}
