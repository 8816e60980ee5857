// Elements of results that were computed another way than planned, because of their data. They grow as long as the process
// lives; gemmserve_kernels.device.element_counts reads them.
#pragma once

#include "../platform.cuh"

struct ElementCounters {
    unsigned long long wide;   // from three bfloat16 parts
    unsigned long long plain;  // in plain arithmetic of the data's own width, or a larger one
};

// Adds a number of elements, which may be negative: counters wrap around.
GEMM_DEVICE void add_elements(unsigned long long& counter, Long elements) {
    atomicAdd(&counter, static_cast<unsigned long long>(elements));
}

// The number of the `extent` places from `first` on that lie before `end`.
GEMM_DEVICE Long clipped(Long first, int extent, Long end) {
    const Long left = end - first;
    return left <= 0 ? 0 : left < extent ? left : extent;
}
