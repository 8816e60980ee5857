// Checked builds: every load and store of the kernel is looked at.
//
// The compiler's -fsanitize=thread puts a call before each memory access. The calls are answered here instead of by
// ThreadSanitizer's library, since it is GPU threads, barriers and buffers that matter:
//   - an access to global memory must lie inside one buffer that the host registered;
//   - shared memory must have been written by the same block before it is read;
//   - two threads must not touch the same bytes, one of them writing, unless a barrier orders them. Whether they race
//     does not depend on the order in which the fibers happen to run.
//
// For each granule of two bytes (float16 is the smallest type of the kernels) the shadow keeps the last write and the
// last read, or the fact that several threads of a warp, or of several warps, have read. Accesses of one block are
// ordered when a __syncthreads lies between them or, inside a warp, a __syncwarp. Accesses of different blocks are
// ordered only by atomics: a block that has performed an atomic operation is taken to have seen what earlier blocks
// published (the idiom of the last block that combines partial results).
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "machine.hpp"

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start, _end;

namespace simt {

constexpr unsigned granule_bytes = 2;

// Who made an access, and when. Epoch 0: nobody yet.
struct Mark {
    uintptr_t code;
    unsigned epoch;
    unsigned block;
    unsigned short thread;
    unsigned short warp_epoch;
    bool atomic;
    enum Extent : unsigned char { thread_, warp_, block_ } extent;  // of readers since the last order
};

struct Cell {
    Mark write;
    Mark read;
};

struct Region {
    uintptr_t begin;
    uintptr_t end;
    Cell* cells;
    bool shared;
};

enum class Access { read = 1, write = 2, atomic = 3 };

static Region* regions;  // sorted by address: the buffers, then two of shared memory
static size_t region_count;
static size_t last_hit;

static size_t shadow_bytes(const Region& region) {
    return (region.end - region.begin + granule_bytes) / granule_bytes * sizeof(Cell) + sizeof(Cell);
}

static bool add(uintptr_t begin, uintptr_t end, bool shared) {
    if (begin == end) return true;
    Region region{begin, end, nullptr, shared};
    // Zero pages, touched as accesses come.
    void* shadow = mmap(nullptr, shadow_bytes(region), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (shadow == MAP_FAILED) return false;
    region.cells = static_cast<Cell*>(shadow);
    size_t at = region_count++;
    for (; at > 0 && regions[at - 1].begin > begin; --at) regions[at] = regions[at - 1];
    regions[at] = region;
    return true;
}

static size_t table_bytes() { return (machine.request->buffer_count + 2) * sizeof(Region); }

bool checker_begin() {
    const Request& request = *machine.request;
    region_count = last_hit = 0;
    void* table = mmap(nullptr, table_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (table == MAP_FAILED) return false;
    regions = static_cast<Region*>(table);
    const uintptr_t dynamic = reinterpret_cast<uintptr_t>(request.dynamic_shared);
    const uintptr_t fixed = reinterpret_cast<uintptr_t>(machine.static_shared);
    bool done = add(dynamic, dynamic + request.dynamic_bytes, true) && add(fixed, fixed + machine.static_bytes, true);
    for (size_t i = 0; i < request.buffer_count; ++i)
        done = done && add(request.buffers[i].begin, request.buffers[i].end, false);
    return done;
}

void checker_end() {
    for (size_t i = 0; i < region_count; ++i) munmap(regions[i].cells, shadow_bytes(regions[i]));
    munmap(regions, table_bytes());
    regions = nullptr;
    region_count = 0;
}

static Region* region_of(uintptr_t address) {
    if (region_count && regions[last_hit].begin <= address && address < regions[last_hit].end)
        return &regions[last_hit];
    size_t low = 0, high = region_count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (regions[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == region_count || address < regions[low].begin) return nullptr;
    last_hit = low;
    return &regions[low];
}

static unsigned warp_of(unsigned thread) { return thread / warpSize; }

static Mark mark_now(uintptr_t code, bool atomic) {
    const unsigned thread = machine.current->linear;
    return {code,
            machine.epoch,
            machine.block,
            (unsigned short)thread,
            (unsigned short)machine.warp_epoch[warp_of(thread)],
            atomic,
            Mark::thread_};
}

// Whether nothing orders the earlier access before this one.
static bool unordered(const Mark& earlier, const Mark& now) {
    if (earlier.epoch == 0 || (earlier.atomic && now.atomic)) return false;
    if (earlier.block != now.block) return !machine.block_used_atomics;
    if (earlier.epoch != now.epoch) return false;
    if (earlier.extent == Mark::block_) return true;
    if (warp_of(earlier.thread) != warp_of(now.thread)) return true;
    return earlier.warp_epoch == now.warp_epoch && (earlier.extent == Mark::warp_ || earlier.thread != now.thread);
}

// The readers of one epoch, summed up.
static void add_reader(Mark& readers, Mark now) {
    if (readers.epoch == now.epoch && readers.block == now.block) {
        if (readers.extent == Mark::block_ || warp_of(readers.thread) != warp_of(now.thread))
            now.extent = Mark::block_;
        else if (readers.warp_epoch == now.warp_epoch && (readers.extent == Mark::warp_ || readers.thread != now.thread))
            now.extent = Mark::warp_;
    }
    readers = now;
}

static void memory_failure(Failure kind, Access access, uintptr_t address, uintptr_t code) {
    machine.report->access = access == Access::read ? 1 : 2;
    machine.report->address = address;
    machine.report->code = module_offset(code);
    machine.report->kind = kind;
}

static const char* verb(const Mark& mark, bool write) { return mark.atomic ? "atomic access" : write ? "write" : "read"; }

static void report_race(const Region& region, Access access, uintptr_t address, uintptr_t code, const Mark& earlier,
                        bool earlier_write) {
    memory_failure(Failure::race, access, address, code);
    machine.report->other_code = module_offset(earlier.code);
    const unsigned t = earlier.thread;
    const uint3 who = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
    const char* const self = access == Access::atomic ? "atomic access" : access == Access::write ? "write" : "read";
    if (earlier.block == machine.block)
        fail(Failure::race, "data race in %s memory: this %s and the %s by thread (%u, %u, %u) have no barrier between",
             region.shared ? "shared" : "global", self, verb(earlier, earlier_write), who.x, who.y, who.z);
    fail(Failure::race, "data race in global memory: this %s and the %s by thread (%u, %u, %u) of another block", self,
         verb(earlier, earlier_write), who.x, who.y, who.z);
}

// The thread's own stack, the module's constants: memory that no other thread can reach.
static bool is_private(uintptr_t address) {
    const Request& request = *machine.request;
    const char* const stack = request.stacks + machine.current->linear * request.stack_bytes;
    return address - reinterpret_cast<uintptr_t>(stack) < request.stack_bytes ||
           address - reinterpret_cast<uintptr_t>(&__ehdr_start) <
               reinterpret_cast<uintptr_t>(&_end) - reinterpret_cast<uintptr_t>(&__ehdr_start);
}

static void touch(const volatile void* pointer, size_t bytes, Access access, uintptr_t code) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (!machine.current || bytes == 0 || is_private(address)) return;
    const Region* region = region_of(address);
    if (!region || address + bytes > region->end) {
        memory_failure(Failure::memory, access, region ? region->end : address, code);
        fail(Failure::memory, "invalid %s of %zu bytes", access == Access::read ? "read" : "write", bytes);
    }
    if (!region->shared && machine.request->dependent && !machine.current->waited) {
        memory_failure(Failure::race, access, address, code);
        fail(Failure::race, "data race in global memory: the kernels ahead have not been waited for");
    }
    const Mark now = mark_now(code, access == Access::atomic);
    if (access == Access::atomic && !region->shared) machine.block_used_atomics = true;
    Cell* const first = region->cells + (address - region->begin) / granule_bytes;
    Cell* const last = region->cells + (address + bytes - 1 - region->begin) / granule_bytes;
    for (Cell* cell = first; cell <= last; ++cell) {
        const uintptr_t at = region->begin + size_t(cell - region->cells) * granule_bytes;
        if (region->shared && cell->write.block != machine.block) {
            if (access != Access::write) {
                memory_failure(Failure::memory, access, at, code);
                fail(Failure::memory, "read of shared memory that the block has not written");
            }
            *cell = Cell();  // what an earlier block left
        }
        if (unordered(cell->write, now)) report_race(*region, access, at, code, cell->write, true);
        if (access == Access::read) {
            add_reader(cell->read, now);
        } else {
            if (unordered(cell->read, now)) report_race(*region, access, at, code, cell->read, false);
            cell->write = now;
        }
    }
}

void atomic_access(const volatile void* address, unsigned bytes) {
    touch(address, bytes, Access::atomic, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}

}  // namespace simt

// ---- what the compiler calls (compiler-rt/lib/tsan/rtl/tsan_interface.h lists the names)

#define SIMT_EXPORT extern "C" __attribute__((visibility("hidden")))
#define SIMT_CODE reinterpret_cast<uintptr_t>(__builtin_return_address(0))

#define SIMT_ACCESSES(bytes)                                                                                         \
    SIMT_EXPORT void __tsan_read##bytes(void* p) { simt::touch(p, bytes, simt::Access::read, SIMT_CODE); }           \
    SIMT_EXPORT void __tsan_write##bytes(void* p) { simt::touch(p, bytes, simt::Access::write, SIMT_CODE); }         \
    SIMT_EXPORT void __tsan_unaligned_read##bytes(void* p) { simt::touch(p, bytes, simt::Access::read, SIMT_CODE); } \
    SIMT_EXPORT void __tsan_unaligned_write##bytes(void* p) { simt::touch(p, bytes, simt::Access::write, SIMT_CODE); }

SIMT_ACCESSES(1)
SIMT_ACCESSES(2)
SIMT_ACCESSES(4)
SIMT_ACCESSES(8)
SIMT_ACCESSES(16)

SIMT_EXPORT void __tsan_read_range(void* p, size_t bytes) { simt::touch(p, bytes, simt::Access::read, SIMT_CODE); }
SIMT_EXPORT void __tsan_write_range(void* p, size_t bytes) { simt::touch(p, bytes, simt::Access::write, SIMT_CODE); }

SIMT_EXPORT void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
    simt::touch(from, bytes, simt::Access::read, SIMT_CODE);
    simt::touch(to, bytes, simt::Access::write, SIMT_CODE);
    return memcpy(to, from, bytes);
}
SIMT_EXPORT void* __tsan_memmove(void* to, const void* from, size_t bytes) {
    simt::touch(from, bytes, simt::Access::read, SIMT_CODE);
    simt::touch(to, bytes, simt::Access::write, SIMT_CODE);
    return memmove(to, from, bytes);
}
SIMT_EXPORT void* __tsan_memset(void* to, int value, size_t bytes) {
    simt::touch(to, bytes, simt::Access::write, SIMT_CODE);
    return memset(to, value, bytes);
}

SIMT_EXPORT void __tsan_init() {}
SIMT_EXPORT void __tsan_func_entry(void*) {}
SIMT_EXPORT void __tsan_func_exit() {}
