// Random numbers from a counter: the same on any device, and on the host (gemmserve_kernels.freivalds.signs).
#pragma once

#include "../platform.cuh"

// Bits of number `index` of the generator SplitMix64 whose state is `seed`: G. L. Steele Jr., D. Lea, C. H. Flood, Fast
// splittable pseudorandom number generators, OOPSLA 2014; constants as in S. Vigna's splitmix64.c (public domain).
GEMM_DEVICE unsigned long long random_bits(unsigned long long seed, Long index) {
    unsigned long long z = seed + (static_cast<unsigned long long>(index) + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// A number of [0, extent) in stratum `stratum` of 2^bits, by 32 random bits: uniform up to 2^-32 of a stratum.
GEMM_DEVICE Long in_stratum(Long extent, Long stratum, int bits, unsigned word) {
    const unsigned long long fraction = (static_cast<unsigned long long>(stratum) << 32 | word) << (32 - bits);
    return static_cast<Long>(__umul64hi(fraction, static_cast<unsigned long long>(extent)));
}
