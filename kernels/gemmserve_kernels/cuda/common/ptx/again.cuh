// Numbers of which the compiler does not see that it has them already: what follows from them is computed again where it is
// used, and takes no registers through a loop.
#pragma once

#include "../platform.cuh"

#if defined(GEMM_CUDA)

// threadIdx.x and blockIdx.x.
GEMM_DEVICE int thread_again() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
GEMM_DEVICE unsigned block_again() {
    unsigned x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}
GEMM_DEVICE int once_more(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
template <class T>
GEMM_DEVICE T* once_more(T* x) {
    asm volatile("" : "+l"(x));
    return x;
}

#elif defined(GEMM_SHIM)
using namespace simt::ampere;
#else
GEMM_DEVICE int once_more(int x) { return x; }
template <class T>
GEMM_DEVICE T* once_more(T* x) { return x; }
#endif
