// cp.async of sm_80 (PTX ISA 9.7.9.25.3): copies from global to shared memory that arrive later, 4, 8 or 16 bytes each.
#pragma once

#include "../platform.cuh"

#if defined(GEMM_CUDA) && __CUDA_ARCH__ >= 800
#define GEMM_ASYNC_COPY 1

template <int BYTES>
GEMM_DEVICE void copy_async(void* shared, const void* global) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    if constexpr (BYTES == 16) {  // .cg leaves the L1 cache alone
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(BYTES) : "memory");
    }
}

// Copies `bytes` (0 .. BYTES) from global to shared memory and writes zeros up to BYTES.
template <int BYTES>
GEMM_DEVICE void copy_async(void* shared, const void* global, int bytes) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    if constexpr (BYTES == 16) {  // .cg leaves the L1 cache alone
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES), "r"(bytes)
                     : "memory");
    }
}

GEMM_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups of this thread's copies are under way.
template <int PENDING>
GEMM_DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#elif defined(GEMM_SHIM)
using namespace simt::ampere;  // at once, which is one of the moments that are allowed
#else  // no copy is asynchronous
GEMM_DEVICE void copy_commit() {}
template <int PENDING>
GEMM_DEVICE void copy_wait() {}
#endif
