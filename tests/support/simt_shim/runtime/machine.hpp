// The state of the machine, shared by the scheduler (machine.cpp), the signal handler (faults.cpp) and the checker.
#pragma once

#include "../device/launch.hpp"
#include "../device/warp.hpp"
#include "fiber.hpp"

namespace simt {

enum class State : unsigned char { ready, at_barrier, at_collective, waiting, returned };

struct Thread {
    Fiber fiber;
    uint3 index;
    unsigned linear;  // in its cluster, whose blocks are whole warps
    unsigned rank;    // of its block in the cluster
    State state;
    Place place;  // of the barrier or collective at which it waits, or of what else it waits for

    int predicate;  // brought to a barrier
    Votes votes;    // taken from it

    const char* collective;
    LaneMask lanes;
    void* operand;
    Combine combine;

    bool (*condition)(const void*);  // of a waiting thread: whether it may go on
    const void* awaited;

    bool waited;  // for the kernels ahead
};

struct Machine {
    const Request* request;
    Report* report;
    void (*body)(const void*);
    const void* argument;

    Fiber scheduler;
    Thread* threads;  // of the cluster, mostly one block, by linear index
    unsigned capacity;
    unsigned count;
    unsigned each;    // threads of one block
    unsigned first;   // the cluster's first block
    Thread* current;  // null while the scheduler runs
    unsigned warps;

    // What orders memory accesses. Numbers grow over the whole launch and start at 1.
    unsigned block;              // number of the block in execution order
    unsigned epoch;              // a new one for each block and after each of its barriers
    unsigned* warp_epoch;        // by warp, grows at each __syncwarp
    bool block_used_atomics;     // the block has read a location that others write atomically

    char* static_shared;         // the module's thread-local block
    size_t static_bytes;
    char* static_kept;           // what the cluster's other blocks have there
    unsigned resident;           // whose static shared memory is in place
};

extern Machine machine;

// Where the shared memory of a block of the cluster is at present.
inline char* static_shared_of(unsigned rank) {
    return rank == machine.resident ? machine.static_shared : machine.static_kept + rank * machine.static_bytes;
}
inline char* dynamic_shared_of(unsigned rank) {
    return static_cast<char*>(machine.request->dynamic_shared) + rank * machine.request->dynamic_bytes;
}

// Back to the scheduler, which never resumes a thread that failed.
void suspend();

// hopper.cpp: forgets the last block's barriers and copies; does one thing that is under way, false where nothing is;
// what a block has left undone when its threads have returned, or null.
void engine_begin();
bool engine_step();
const char* engine_left();

unsigned random_below(unsigned bound);

// A failure that was found outside of any thread.
void failed(Failure kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

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
