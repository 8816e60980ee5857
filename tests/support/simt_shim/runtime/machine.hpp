// The state of the machine, shared by the scheduler (machine.cpp), the signal handler (faults.cpp) and the checker.
#pragma once

#include "../device/launch.hpp"
#include "../device/warp.hpp"
#include "fiber.hpp"

namespace simt {

enum class State : unsigned char { ready, at_barrier, at_collective, returned };

struct Thread {
    Fiber fiber;
    uint3 index;
    unsigned linear;
    State state;
    Place place;  // of the barrier or collective at which it waits

    int predicate;  // brought to a barrier
    Votes votes;    // taken from it

    const char* collective;
    LaneMask lanes;
    void* operand;
    Combine combine;
};

struct Machine {
    const Request* request;
    Report* report;
    void (*body)(const void*);
    const void* argument;

    Fiber scheduler;
    Thread* threads;  // of the block, by linear index
    unsigned capacity;
    unsigned count;
    Thread* current;  // null while the scheduler runs
    unsigned warps;

    // What orders memory accesses. Numbers grow over the whole launch and start at 1.
    unsigned block;              // number of the block in execution order
    unsigned epoch;              // a new one for each block and after each of its barriers
    unsigned* warp_epoch;        // by warp, grows at each __syncwarp
    bool block_used_atomics;     // the block has read a location that others write atomically

    char* static_shared;         // the module's thread-local block
    size_t static_bytes;
};

extern Machine machine;

// Back to the scheduler, which never resumes a thread that failed.
void suspend();

// faults.cpp: signals of device code become failures while a Faults object lives, and so does running for too long.
class Faults {
public:
    explicit Faults(double seconds);
    ~Faults();
};

uintptr_t module_offset(uintptr_t code);

// checker.cpp in checked builds.
#ifdef SIMT_CHECKED
bool checker_begin();
void checker_end();
#else
inline bool checker_begin() { return true; }
inline void checker_end() {}
#endif

}  // namespace simt
