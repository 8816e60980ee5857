// The keywords and builtin variables of CUDA and HIP, for a C++17 compiler on the CPU.
//
// __shared__ becomes a static thread_local variable. The machine runs every fiber of a block on one operating system
// thread, so each of them sees the same object, and all such variables of a module lie in one contiguous block of
// thread-local storage whose bounds the dynamic linker tells: the machine poisons that block before each thread block
// (machine.cpp). A dedicated section would do for plain variables, but GCC before 14 ignores section attributes on the
// static variables of templates. The price: write `alignas(16) __shared__ float tile[64]` or
// `__shared__ __align__(16) float tile[64]`; C++ forbids alignas after the keyword.
#pragma once

#include "vector_types.hpp"

#define GEMM_SHIM 1

#define __global__
#define __device__
#define __host__
#define __managed__
#define __constant__ static
#define __shared__ static thread_local
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __restrict__ __restrict
#define __align__(bytes) __attribute__((aligned(bytes)))

// Where a barrier, a warp operation or a trap stands in the kernel source.
#define SIMT_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// The machine writes these before it resumes a thread.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

static constexpr int warpSize = SIMT_WARP_SIZE;

namespace simt {

struct Place {
    const char* file;
    int line;
};

// What __syncthreads_count, _and and _or add to the barrier.
struct Votes {
    int count;      // threads whose predicate was true
    bool unanimous; // all of them
};

Votes barrier(int predicate, Place place);

// Suspends this thread until the condition holds.
void wait_until(bool (*condition)(const void*), const void* awaited, Place place);

// For the kernels ahead, which may still run where the launch is a dependent one.
void wait_for_previous();

// The dynamic shared memory of the block, 16-byte aligned, as the launch sized it.
void* dynamic_shared();

enum class Failure : int { none, barrier, warp, memory, race, trap, launch };

// Ends the launch with a message; the host raises it as an exception.
[[noreturn]] void fail(Failure kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace simt

// The kernels' spelling of `extern __shared__`, which C++ has no way to say with a run-time size.
#define GEMM_DYNAMIC_SHARED(name) unsigned char* const name = static_cast<unsigned char*>(simt::dynamic_shared())

inline void __syncthreads(SIMT_HERE) { simt::barrier(1, {file, line}); }
inline int __syncthreads_count(int predicate, SIMT_HERE) { return simt::barrier(predicate, {file, line}).count; }
inline int __syncthreads_and(int predicate, SIMT_HERE) { return simt::barrier(predicate, {file, line}).unanimous; }
inline int __syncthreads_or(int predicate, SIMT_HERE) { return simt::barrier(predicate, {file, line}).count > 0; }
