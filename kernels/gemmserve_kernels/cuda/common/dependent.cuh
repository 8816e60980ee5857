// Programmatic dependent launch (CUDA C++ programming guide): a kernel whose launch says so may start before the one
// ahead of it on the stream has ended. Nothing where the device has no such thing.
#pragma once

#include "platform.cuh"

#if defined(GEMM_CUDA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Until all kernels ahead have ended and what they wrote can be seen. Every thread of a dependent kernel comes here
// before it touches global memory, and before it returns: else the kernel behind could miss what is two ahead of it.
GEMM_DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel may take the place that blocks of this one leave, once all of them have come here or returned.
GEMM_DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#elif defined(GEMM_SHIM)
using simt::wait_for_previous;  // notes who has waited
GEMM_DEVICE void let_next_start() {}
#else
GEMM_DEVICE void wait_for_previous() {}
GEMM_DEVICE void let_next_start() {}
#endif
