// The scheduler: runs the blocks of a grid one after another, and the threads of a block as fibers.
//
// A warp is stepped until no lane of it can go on: each ready lane runs until it returns, waits at __syncthreads or at
// a warp operation; complete groups of the latter are then combined and released. In forward and reverse order a warp
// runs on until the barrier, so that warps are as far apart as they can be; in shuffled order the next warp, the order
// of its lanes and the order of blocks are random. Between two synchronisations a thread is never interrupted.
//
// A thread may also wait for a condition (a barrier of Hopper's, hopper.cpp); it is looked at whenever its warp could go
// on. Where no thread can, the engines that work beside the threads take a step. Blocks of a cluster run together; each
// has its own shared memory, the static part of which is put in place whenever one of its threads is resumed.
#include "machine.hpp"

#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {

Machine machine;

// ---- failures

static void describe(Failure kind, const char* format, va_list arguments) {
    Report& report = *machine.report;
    report.kind = kind;
    report.block = blockIdx;
    if (machine.current) report.thread = machine.current->index;
    vsnprintf(report.message, sizeof report.message, format, arguments);
}

void failed(Failure kind, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    describe(kind, format, arguments);
    va_end(arguments);
}

void fail(Failure kind, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    describe(kind, format, arguments);
    va_end(arguments);
    suspend();
    __builtin_unreachable();
}

int refuse(Report& report, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(report.message, sizeof report.message, format, arguments);
    va_end(arguments);
    report.kind = Failure::launch;
    return int(report.kind);
}

// ---- what threads call

void suspend() { switch_fiber(machine.current->fiber, machine.scheduler); }

void* dynamic_shared() { return dynamic_shared_of(machine.current->rank); }

unsigned lane() { return machine.current->linear % warpSize; }

Votes barrier(int predicate, Place place) {
    Thread& self = *machine.current;
    self.predicate = predicate;
    self.place = place;
    self.state = State::at_barrier;
    suspend();
    return self.votes;
}

void collective(const char* name, LaneMask lanes, void* operand, Combine combine, Place place) {
    Thread& self = *machine.current;
    if (!(lanes >> lane() & 1))
        fail(Failure::warp, "%s at %s:%d: lane %u calls it with mask 0x%llx, which does not name it", name, place.file,
             place.line, lane(), lanes);
    self.collective = name;
    self.lanes = lanes;
    self.operand = operand;
    self.combine = combine;
    self.place = place;
    self.state = State::at_collective;
    suspend();
}

void wait_until(bool (*condition)(const void*), const void* awaited, Place place) {
    if (condition(awaited)) return;
    Thread& self = *machine.current;
    self.condition = condition;
    self.awaited = awaited;
    self.place = place;
    self.state = State::waiting;
    suspend();
}

static LaneMask live_lanes_of(unsigned warp) {
    LaneMask live = 0;
    for (unsigned i = warp * warpSize, lane = 0; lane < unsigned(warpSize) && i < machine.count; ++i, ++lane)
        if (machine.threads[i].state != State::returned) live |= 1ull << lane;
    return live;
}

LaneMask live_lanes() { return live_lanes_of(machine.current->linear / warpSize); }

void wait_for_previous() { machine.current->waited = true; }

static void fiber_main() {
    machine.body(machine.argument);
    if (machine.request->dependent && !machine.current->waited) {
        fail(Failure::race, "a thread returns before it has waited for the kernels ahead");
    }
    machine.current->state = State::returned;
    suspend();
}

// ---- order

// xorshift64*: Marsaglia (2003), Vigna (2016). Any generator would do.
static uint64_t random_state;
unsigned random_below(unsigned bound) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return unsigned((random_state * 0x2545f4914f6cdd1dull >> 32) % bound);
}

static void arrange(unsigned* items, unsigned count) {
    const Order order = machine.request->order;
    for (unsigned i = 0; i < count; ++i) items[i] = order == Order::reverse ? count - 1 - i : i;
    if (order != Order::shuffled) return;
    for (unsigned i = count; i > 1; --i) {
        const unsigned j = random_below(i), item = items[i - 1];
        items[i - 1] = items[j];
        items[j] = item;
    }
}

// ---- warps

static bool same_operation(const Thread& a, const Thread& b) {
    return b.state == State::at_collective && a.lanes == b.lanes && a.place.line == b.place.line &&
           strcmp(a.collective, b.collective) == 0 && strcmp(a.place.file, b.place.file) == 0;
}

// Combines and releases each group of lanes that has met. True if any lane may go on.
static bool release_groups(unsigned warp) {
    Thread* const lanes = machine.threads + warp * warpSize;
    const LaneMask live = live_lanes_of(warp);
    bool released = false;
    for (unsigned first = 0; first < unsigned(warpSize); ++first) {
        if (!(live >> first & 1) || lanes[first].state != State::at_collective) continue;
        const LaneMask wanted = lanes[first].lanes & live;
        bool met = true;
        for (unsigned lane = 0; lane < unsigned(warpSize) && met; ++lane)
            met = !(wanted >> lane & 1) || same_operation(lanes[first], lanes[lane]);
        if (!met) continue;
        Group group{wanted, {}};
        for (unsigned lane = 0; lane < unsigned(warpSize); ++lane)
            if (wanted >> lane & 1) group.operand[lane] = lanes[lane].operand;
        if (lanes[first].combine)
            lanes[first].combine(group);
        else
            ++machine.warp_epoch[warp];
        for (unsigned lane = 0; lane < unsigned(warpSize); ++lane)
            if (wanted >> lane & 1) lanes[lane].state = State::ready;
        released = true;
    }
    return released;
}

static bool has_ready_lane(unsigned warp) {
    bool ready = false;
    for (unsigned i = warp * warpSize; i < machine.count && i < (warp + 1) * warpSize; ++i) {
        Thread& thread = machine.threads[i];
        if (thread.state == State::waiting && thread.condition(thread.awaited)) thread.state = State::ready;
        ready = ready || thread.state == State::ready;
    }
    return ready;
}

static void locate_block(unsigned block) {
    blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / (gridDim.x * gridDim.y)};
}

static void make_resident(unsigned rank) {
    if (machine.resident == rank) return;
    memcpy(machine.static_kept + machine.resident * machine.static_bytes, machine.static_shared, machine.static_bytes);
    memcpy(machine.static_shared, machine.static_kept + rank * machine.static_bytes, machine.static_bytes);
    machine.resident = rank;
    locate_block(machine.first + rank);
}

// Runs each ready lane once. False after a failure.
static bool step(unsigned warp) {
    unsigned order[warpSize];
    const unsigned first = warp * warpSize, left = machine.count - first;
    const unsigned lanes = left < unsigned(warpSize) ? left : unsigned(warpSize);
    arrange(order, lanes);
    for (unsigned i = 0; i < lanes; ++i) {
        Thread& thread = machine.threads[first + order[i]];
        if (thread.state != State::ready) continue;
        machine.current = &thread;
        threadIdx = thread.index;
        make_resident(thread.rank);
        ++machine.report->switches;
        switch_fiber(machine.scheduler, thread.fiber);
        if (machine.report->kind != Failure::none) return false;
        machine.current = nullptr;
    }
    release_groups(warp);
    return true;
}

// ---- blocks

// Every thread is stuck or has returned, and they are not all at one barrier: say who waits where.
static void report_stuck() {
    unsigned waiting = 0, returned = 0;
    const Thread *at_barrier = nullptr, *elsewhere = nullptr, *gone = nullptr, *at_collective = nullptr;
    const Thread* in_vain = nullptr;
    for (unsigned i = 0; i < machine.count; ++i) {
        const Thread& thread = machine.threads[i];
        if (thread.state == State::waiting) {
            if (!in_vain) in_vain = &thread;
        } else if (thread.state == State::at_barrier) {
            ++waiting;
            if (!at_barrier) at_barrier = &thread;
            if (thread.place.line != at_barrier->place.line || strcmp(thread.place.file, at_barrier->place.file) != 0)
                if (!elsewhere) elsewhere = &thread;
        } else if (thread.state == State::returned) {
            ++returned;
            if (!gone) gone = &thread;
        } else if (!at_collective) {
            at_collective = &thread;
        }
    }
    if (in_vain) {
        machine.report->thread = in_vain->index;
        failed(Failure::barrier, "deadlock: thread (%u, %u, %u) waits in vain at %s:%d", in_vain->index.x,
               in_vain->index.y, in_vain->index.z, in_vain->place.file, in_vain->place.line);
    } else if (at_collective) {
        const Thread& self = *at_collective;
        const unsigned warp = self.linear / warpSize;
        const LaneMask wanted = self.lanes & live_lanes_of(warp);
        const Thread* absent = nullptr;
        for (unsigned lane = 0; lane < unsigned(warpSize) && !absent; ++lane)
            if (wanted >> lane & 1 && !same_operation(self, machine.threads[warp * warpSize + lane]))
                absent = &machine.threads[warp * warpSize + lane];
        machine.report->thread = self.index;
        failed(Failure::warp,
               "divergent %s: lane %u of warp %u waits at %s:%d with mask 0x%llx for lane %u, which waits at %s, %s:%d",
               self.collective, self.linear % warpSize, warp, self.place.file, self.place.line, self.lanes,
               absent->linear % warpSize, absent->state == State::at_barrier ? "__syncthreads" : absent->collective,
               absent->place.file, absent->place.line);
    } else if (elsewhere) {
        machine.report->thread = elsewhere->index;
        failed(Failure::barrier,
               "divergent barrier: thread (%u, %u, %u) waits at __syncthreads, %s:%d, while thread (%u, %u, %u) waits "
               "at %s:%d",
               elsewhere->index.x, elsewhere->index.y, elsewhere->index.z, elsewhere->place.file, elsewhere->place.line,
               at_barrier->index.x, at_barrier->index.y, at_barrier->index.z, at_barrier->place.file,
               at_barrier->place.line);
    } else {
        machine.report->thread = at_barrier->index;
        failed(Failure::barrier,
               "divergent barrier: %u of %u threads wait at __syncthreads, %s:%d, and %u have returned, the first of "
               "them (%u, %u, %u)",
               waiting, machine.count, at_barrier->place.file, at_barrier->place.line, returned, gone->index.x,
               gone->index.y, gone->index.z);
    }
}

// Releases the barrier if every thread of a block waits at the same one.
static bool release_barrier(unsigned rank) {
    Thread* const threads = machine.threads + rank * machine.each;
    const Thread& first = threads[0];
    Votes votes{0, true};
    for (unsigned i = 0; i < machine.each; ++i) {
        const Thread& thread = threads[i];
        if (thread.state != State::at_barrier || thread.place.line != first.place.line ||
            strcmp(thread.place.file, first.place.file) != 0)
            return false;
        votes.count += thread.predicate != 0;
        votes.unanimous = votes.unanimous && thread.predicate;
    }
    for (unsigned i = 0; i < machine.each; ++i) {
        threads[i].votes = votes;
        threads[i].state = State::ready;
    }
    ++machine.epoch;
    return true;
}

static bool release_barriers() {
    bool released = false;
    for (unsigned rank = 0; rank < machine.request->cluster; ++rank) released = release_barrier(rank) || released;
    return released;
}

// Steps warps until none has a ready lane. False after a failure.
static bool run_warps(const unsigned* warps) {
    if (machine.request->order != Order::shuffled) {
        for (bool any = true; any;) {
            any = false;
            for (unsigned i = 0; i < machine.warps; ++i)
                while (has_ready_lane(warps[i])) {
                    any = true;
                    if (!step(warps[i])) return false;
                }
        }
        return true;
    }
    for (;;) {
        unsigned candidates = 0, chosen = 0;
        for (unsigned warp = 0; warp < machine.warps; ++warp)  // one of the ready warps, each as likely
            if (has_ready_lane(warp) && random_below(++candidates) == 0) chosen = warp;
        if (!candidates) return true;
        if (!step(chosen)) return false;
    }
}

// The same with the engines, which come in when no thread can go on: what they do is as late as it can be.
static bool run_to_barrier(const unsigned* warps) {
    do {
        if (!run_warps(warps)) return false;
    } while (engine_step());
    return machine.report->kind == Failure::none;
}

// The blocks of one cluster, mostly one.
static bool run_blocks(const unsigned* warps) {
    const Request& request = *machine.request;
    ++machine.block;
    ++machine.epoch;
    machine.block_used_atomics = false;
    engine_begin();
    if (request.dynamic_bytes) memset(request.dynamic_shared, 0xff, request.dynamic_bytes * request.cluster);
    if (machine.static_bytes) memset(machine.static_shared, 0xff, machine.static_bytes);
    if (machine.static_kept) memset(machine.static_kept, 0xff, machine.static_bytes * request.cluster);
    machine.resident = 0;
    locate_block(machine.first);
    for (unsigned i = 0; i < machine.count; ++i) {
        Thread& thread = machine.threads[i];
        const unsigned within = i % machine.each;
        thread = Thread();
        thread.linear = i;
        thread.rank = i / machine.each;
        thread.index = {within % blockDim.x, within / blockDim.x % blockDim.y, within / (blockDim.x * blockDim.y)};
        char* const slot = request.stacks + i * request.stack_bytes;
        prepare(thread.fiber, slot + request.guard_bytes, request.stack_bytes - request.guard_bytes, &fiber_main);
    }
    for (;;) {
        if (!run_to_barrier(warps)) return false;
        bool finished = true;
        for (unsigned i = 0; i < machine.count && finished; ++i)
            finished = machine.threads[i].state == State::returned;
        if (finished) {
            if (const char* left = engine_left()) failed(Failure::barrier, "the block has ended, but %s", left);
            return machine.report->kind == Failure::none;
        }
        if (!release_barriers()) {
            report_stuck();
            return false;
        }
    }
}

// The module's thread-local block is its static shared memory: nothing else in it is thread_local. The ELF handling of
// thread-local storage (Drepper, 2013) names the function that finds the calling thread's block, and makes it at first.
struct TlsIndex {
    unsigned long module, offset;
};
extern "C" void* __tls_get_addr(TlsIndex*);

static int find_thread_local_block(dl_phdr_info* info, size_t, void*) {
    const uintptr_t here = reinterpret_cast<uintptr_t>(&machine);
    size_t bytes = 0;
    bool ours = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& segment = info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
        if (segment.p_type == PT_LOAD && begin <= here && here < begin + segment.p_memsz) ours = true;
        if (segment.p_type == PT_TLS) bytes = segment.p_memsz;
    }
    if (!ours) return 0;
    TlsIndex index{info->dlpi_tls_modid, 0};
    machine.static_bytes = bytes;
    machine.static_shared = bytes ? static_cast<char*>(__tls_get_addr(&index)) : nullptr;
    return 1;
}

static void find_static_shared() { dl_iterate_phdr(&find_thread_local_block, nullptr); }

static bool allocate(unsigned threads) {
    if (threads > machine.capacity) {
        free(machine.threads);
        free(machine.warp_epoch);
        machine.threads = static_cast<Thread*>(malloc(threads * sizeof(Thread)));
        machine.warp_epoch = static_cast<unsigned*>(malloc(threads * sizeof(unsigned)));
        machine.capacity = machine.threads && machine.warp_epoch ? threads : 0;
    }
    return threads <= machine.capacity;
}

int run(const Request& request, void (*body)(const void*), const void* argument, Report& report) {
    machine.request = &request;
    machine.report = &report;
    machine.body = body;
    machine.argument = argument;
    machine.current = nullptr;
    machine.each = request.block.x * request.block.y * request.block.z;
    machine.count = machine.each * request.cluster;
    machine.warps = (machine.count + warpSize - 1) / warpSize;
    machine.block = machine.epoch = 0;
    blockDim = request.block;
    gridDim = request.grid;
    random_state = (request.seed + 1) * 0x9e3779b97f4a7c15ull;  // never zero, from which xorshift does not move

    find_static_shared();
    const unsigned blocks = request.grid.x * request.grid.y * request.grid.z / request.cluster;  // or clusters
    if (request.cluster > 1 && (request.grid.x % request.cluster || machine.each % warpSize))
        return refuse(report, "clusters of %u blocks, of %u in all of %u threads", request.cluster, request.grid.x, machine.each);
    machine.static_kept = request.cluster > 1 ? static_cast<char*>(malloc(machine.static_bytes * request.cluster)) : nullptr;
    unsigned* const order = static_cast<unsigned*>(malloc((blocks + machine.warps) * sizeof(unsigned)));
    if (!order || !allocate(machine.count) || !checker_begin()) {
        free(order);
        return refuse(report, "out of host memory");
    }
    memset(machine.warp_epoch, 0, machine.warps * sizeof(unsigned));
    arrange(order, blocks);
    unsigned* const warps = order + blocks;
    {
        const Faults faults(request.seconds);
        for (unsigned i = 0; i < blocks; ++i) {
            machine.first = order[i] * request.cluster;
            arrange(warps, machine.warps);
            if (!run_blocks(warps)) break;
        }
    }
    checker_end();
    free(order);
    free(machine.static_kept);
    machine.current = nullptr;
    return int(report.kind);
}

}  // namespace simt

// Where the module's static shared memory is for the calling thread of the host, and its size.
extern "C" __attribute__((visibility("default"))) size_t simt_static_shared(void** address) {
    simt::find_static_shared();
    *address = simt::machine.static_shared;
    return simt::machine.static_bytes;
}
