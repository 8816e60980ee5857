// What passes between the host (module.py mirrors these structures with ctypes) and the machine.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "language.hpp"

namespace simt {

// A device buffer, for the bounds and race checks of a checked build. Sorted by address, disjoint.
struct Buffer {
    uintptr_t begin;
    uintptr_t end;
};

enum class Order : int { forward, reverse, shuffled };

struct Request {
    uint3 grid;
    uint3 block;
    unsigned cluster;        // blocks next to each other that run together; 1 but for kernels of clusters
    Order order;             // of blocks, of warps in a block and of lanes in a warp
    uint64_t seed;           // of the shuffled order
    void* dynamic_shared;    // poisoned before each block; that of a cluster's blocks one after the other
    size_t dynamic_bytes;    // of one block
    char* stacks;            // one slot of stack_bytes a thread, its lowest guard_bytes inaccessible
    size_t stack_bytes;
    size_t guard_bytes;
    const Buffer* buffers;
    size_t buffer_count;
    double seconds;          // of processor time, after which the launch fails
    int dependent;           // whether kernels ahead may still run: no thread may touch global memory, or return, before it waits
};

struct Report {
    Failure kind;
    uint3 block;
    uint3 thread;
    int access;              // of a memory failure or race: 0 none, 1 read, 2 write
    uintptr_t address;
    uintptr_t code;          // just past the failing instruction, as an offset into the module; 0 if unknown
    uintptr_t other_code;    // of a race: the earlier access
    uint64_t switches;       // how many times a thread was resumed
    char message[1024];
};

// Runs body(argument) once for each thread of the grid.
int run(const Request& request, void (*body)(const void*), const void* argument, Report& report);

// Fills a report of a launch that never began; returns its kind.
int refuse(Report& report, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace simt
