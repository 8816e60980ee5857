// Barriers, copies and matrix products of one block (device/hopper.hpp). PTX ISA: mbarrier 9.7.13, cp.async.bulk.tensor
// 9.7.9.25, swizzling modes 5.5.6, wgmma 9.7.15.
#include <math.h>
#include <string.h>

#include "machine.hpp"

#include "../device/hopper.hpp"
#include "../device/matrix_unit.hpp"

namespace simt {

namespace {

constexpr unsigned static_base = 0x400, dynamic_base = 0x8010;  // the latter on purpose not aligned to 32
constexpr unsigned group_size = 128, max_groups = 16, max_copies = 1024, max_products = 512;

// ---- state of the block

struct Word {  // of a barrier, in shared memory
    short pending, expected;
    int transactions : 31;
    unsigned phase : 1;
};
static_assert(sizeof(Word) == 8, "a barrier has 64 bits");

struct Copy {
    hopper::Map map;
    int at[4];
    const void* straight;  // or of straight bytes
    unsigned bytes, target, barrier, rank;  // the block that gets it
};

struct Warpgroup {
    hopper::Product products[group_size][max_products];  // by number, round and round
    unsigned batch[max_products];                        // how many commits came before
    unsigned issued[group_size], committed[group_size];
    unsigned done, arrived, rounds;  // products; threads that wait; how often they have met
    int pending;
};

Copy copies[max_copies];
unsigned copy_count;
unsigned cluster_arrived, cluster_rounds;
Warpgroup groups[max_groups];

}  // namespace

void engine_begin() {
    copy_count = cluster_arrived = cluster_rounds = 0;
    for (Warpgroup& group : groups) {
        memset(group.issued, 0, sizeof group.issued);
        memset(group.committed, 0, sizeof group.committed);
        group.done = group.arrived = group.rounds = 0;
    }
}

const char* engine_left() {
    if (copy_count) return "copies are under way";
    for (const Warpgroup& group : groups)
        for (unsigned thread = 0; thread < group_size; ++thread)
            if (group.issued[thread] > group.done) return "products are under way";
    return nullptr;
}

namespace hopper {

// ---- addresses

unsigned shared_address(const void* pointer) {
    const char* const at = static_cast<const char*>(pointer);
    const char* const dynamic = dynamic_shared_of(machine.current->rank);
    if (at >= machine.static_shared && at < machine.static_shared + machine.static_bytes)
        return static_base + unsigned(at - machine.static_shared);
    if (at >= dynamic && at <= dynamic + machine.request->dynamic_bytes) return dynamic_base + unsigned(at - dynamic);
    fail(Failure::memory, "the address of what is not in shared memory");
}

static char* locate(unsigned address, unsigned bytes, unsigned rank) {
    if (rank >= machine.request->cluster) return nullptr;
    if (address >= dynamic_base && address + bytes <= dynamic_base + machine.request->dynamic_bytes)
        return dynamic_shared_of(rank) + (address - dynamic_base);
    if (address >= static_base && address + bytes <= static_base + machine.static_bytes)
        return static_shared_of(rank) + (address - static_base);
    return nullptr;
}

static bool has_ended(unsigned rank) {
    for (unsigned i = 0; i < machine.each; ++i)
        if (machine.threads[rank * machine.each + i].state != State::returned) return false;
    return true;
}

static void* checked(unsigned address, unsigned bytes, unsigned rank) {
    char* const found = locate(address, bytes, rank);
    if (!found) fail(Failure::memory, "%u bytes at %#x are not in shared memory", bytes, address);
    if (has_ended(rank)) fail(Failure::memory, "the shared memory of a block that has ended");
    return found;
}

void* shared_pointer(unsigned address, unsigned bytes) { return checked(address, bytes, machine.current->rank); }

// ---- clusters

struct Rendezvous {
    const unsigned* rounds;
    unsigned round;
};
static bool met(const void* awaited) {
    const Rendezvous& what = *static_cast<const Rendezvous*>(awaited);
    return *what.rounds != what.round;
}

unsigned cluster_rank() { return machine.current->rank; }

void cluster_sync(const char* file, int line) {
    if (++cluster_arrived == machine.count) {
        cluster_arrived = 0;
        ++cluster_rounds;
        return;
    }
    const Rendezvous what{&cluster_rounds, cluster_rounds};
    wait_until(&met, &what, {file, line});
}

float load_remote(unsigned address, unsigned rank) { return *static_cast<float*>(checked(address, 4, rank)); }

// ---- barriers

static Word& word_of(unsigned barrier, unsigned rank) {
    if (barrier % 8) fail(Failure::memory, "a barrier at %#x", barrier);
    return *static_cast<Word*>(checked(barrier, sizeof(Word), rank));
}

static void settle(Word& word) {
    if (word.pending || word.transactions) return;
    word.pending = word.expected;
    word.phase ^= 1;
}

void barrier_init(unsigned barrier, unsigned arrivals) {
    Word& word = word_of(barrier, machine.current->rank);
    word.pending = word.expected = short(arrivals);
    word.transactions = 0;
    word.phase = 0;
}

static void arrive(unsigned barrier, unsigned rank, unsigned bytes) {
    Word& word = word_of(barrier, rank);
    if (word.expected <= 0) fail(Failure::barrier, "an arrival at a barrier that was not initialised");
    if (word.pending == 0) fail(Failure::barrier, "more arrivals at a barrier than it expects");
    word.transactions += int(bytes);
    --word.pending;
    settle(word);
}

void barrier_arrive(unsigned barrier) { arrive(barrier, machine.current->rank, 0); }
void barrier_arrive_remote(unsigned barrier, unsigned rank) { arrive(barrier, rank, 0); }
void barrier_arrive_expecting(unsigned barrier, unsigned bytes) { arrive(barrier, machine.current->rank, bytes); }

struct Awaited {
    unsigned barrier, rank, parity;
};

static bool passed(const void* awaited) {
    const Awaited& what = *static_cast<const Awaited*>(awaited);
    return reinterpret_cast<const Word*>(locate(what.barrier, sizeof(Word), what.rank))->phase != (what.parity & 1);
}

void barrier_wait(unsigned barrier, unsigned parity, const char* file, int line) {
    const Awaited what{barrier, machine.current->rank, parity};
    if (word_of(barrier, what.rank).expected <= 0)
        fail(Failure::barrier, "a wait at a barrier that was not initialised");
    wait_until(&passed, &what, {file, line});
}

// ---- copies

static void begin_copy(const Copy& copy) {
    if (copy_count == max_copies) fail(Failure::launch, "too many copies at once for the shim");
    if (copy.target % 128 && !copy.straight) fail(Failure::memory, "a box copied to %#x", copy.target);
    copies[copy_count++] = copy;
    const Order order = machine.request->order;
    if (order == Order::forward || (order == Order::shuffled && random_below(2))) engine_step();
}

static void must_have_waited() {
    if (machine.request->dependent && !machine.current->waited)
        fail(Failure::race, "a copy begins before its thread has waited for the kernels ahead");
}

void copy_box(unsigned target, const Map& map, const int* at, unsigned barrier, unsigned mask) {
    // "Illegal instruction" on an H200; the manuals speak of addresses and strides alone.
    if (at[0] * 2 % 16) fail(Failure::memory, "a box begins at element %d: no multiple of 16 bytes", at[0]);
    must_have_waited();
    Copy copy{map, {}, nullptr, 2, target, barrier, machine.current->rank};
    memcpy(copy.at, at, sizeof copy.at);
    for (unsigned axis = 0; axis < map.rank; ++axis) copy.bytes *= map.box[axis];
    if (mask == 0) mask = 1u << copy.rank;
    for (copy.rank = 0; mask >> copy.rank; ++copy.rank)
        if (mask >> copy.rank & 1) begin_copy(copy);
}

void copy_straight(unsigned target, const void* from, unsigned bytes, unsigned barrier, unsigned mask) {
    if ((target | bytes) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
        fail(Failure::memory, "%u bytes copied to %#x", bytes, target);
    must_have_waited();
    Copy copy{};
    copy.straight = from;
    copy.bytes = bytes;
    copy.target = target;
    copy.barrier = barrier;
    if (mask == 0) mask = 1u << machine.current->rank;
    for (copy.rank = 0; mask >> copy.rank; ++copy.rank)
        if (mask >> copy.rank & 1) begin_copy(copy);
}

void copy_to_block(unsigned from, int bytes, unsigned barrier, unsigned rank) {
    if ((from | unsigned(bytes)) % 16) fail(Failure::memory, "%d bytes copied from %#x", bytes, from);
    Copy copy{};
    copy.straight = checked(from, unsigned(bytes), machine.current->rank);
    checked(from, unsigned(bytes), rank);
    copy.bytes = unsigned(bytes);
    copy.target = from;
    copy.barrier = barrier;
    copy.rank = rank;
    begin_copy(copy);
}

// Bits 4.. are exchanged with bits 7.. of the address: pieces of 16 bytes change places within 1024 bytes.
static unsigned swizzled(unsigned address, unsigned span) {
    return address ^ ((address >> 3) & (span - 16) & 0x70);
}

static bool perform(const Copy& copy) {
    char* const target = locate(copy.target, copy.bytes, copy.rank);
    if (!target) return false;
    if (copy.straight) {
        memcpy(target, copy.straight, copy.bytes);
        return true;
    }
    const Map& map = copy.map;
    const unsigned span = map.box[0] * 2;  // the swizzle's, and a row of the box
    const unsigned rows = copy.bytes / span;
    for (unsigned row = 0; row < rows; ++row) {
        unsigned long long offset = 0;
        unsigned rest = row;
        bool inside = true;
        for (unsigned axis = 1; axis < map.rank; ++axis) {
            const long long at = copy.at[axis] + long(rest % map.box[axis]);
            rest /= map.box[axis];
            inside = inside && at >= 0 && at < map.extents[axis];
            offset += static_cast<unsigned long long>(at) * map.strides[axis - 1];
        }
        for (unsigned e = 0; e < map.box[0]; ++e) {
            const long long x = copy.at[0] + long(e);
            unsigned short value = 0;
            if (inside && x >= 0 && x < map.extents[0])
                value = reinterpret_cast<const unsigned short*>(map.address + offset)[x];
            memcpy(locate(swizzled(copy.target + row * span + e * 2, span), 2, copy.rank), &value, 2);
        }
    }
    return true;
}

// ---- wgmma

static Warpgroup& group_of(unsigned& thread) {
    const unsigned rank = machine.current->rank, linear = machine.current->linear - rank * machine.each;
    const unsigned group = rank * ((machine.each + group_size - 1) / group_size) + linear / group_size;
    thread = linear % group_size;
    if (group >= max_groups) fail(Failure::launch, "too many warpgroups for the shim");
    return groups[group];
}

void wgmma_issue(const Product& product) {
    unsigned thread;
    Warpgroup& group = group_of(thread);
    const unsigned number = group.issued[thread];
    if (number - group.done == max_products) fail(Failure::launch, "too many products at once for the shim");
    group.products[thread][number % max_products] = product;
    group.batch[number % max_products] = group.committed[thread];
    ++group.issued[thread];
}

void wgmma_fence() {}

void wgmma_commit() {
    unsigned thread;
    ++group_of(thread).committed[thread];
}

// A row of an operand in shared memory: rows of `span` bytes, eight of them a group, 16 halves or 32 bytes at `byte`.
static void read_row(unsigned long long descriptor, unsigned row, unsigned rank, void* to) {
    const unsigned mode = unsigned(descriptor >> 62), span = mode == 1 ? 128 : mode == 2 ? 64 : 32;
    const unsigned start = unsigned(descriptor & 0x3fff) << 4, groups_apart = unsigned(descriptor >> 32 & 0x3fff) << 4;
    const unsigned first = start + row / 8 * groups_apart + row % 8 * span;
    for (unsigned piece = 0; piece < 2; ++piece) {
        const char* const from = locate(swizzled(first + piece * 16, span), 16, rank);
        if (from) memcpy(static_cast<char*>(to) + piece * 16, from, 16);
        else memset(static_cast<char*>(to) + piece * 16, 0xff, 16);
    }
}

// An element of an operand that lies along m or n, `i` of m or n and `k` of 16: PTX ISA 9.7.15.5.1.2.1.3, the canonical
// layouts of MN-major operands, ((T, w, m), (8, k)) : ((1, T, leading), (w T, stride)) in elements with T = 8 of 2
// bytes each and w pieces of 16 bytes in a swizzled row.
static unsigned short read_across(unsigned long long descriptor, unsigned i, unsigned k, unsigned rank) {
    const unsigned mode = unsigned(descriptor >> 62), pieces = mode == 1 ? 8 : mode == 2 ? 4 : 2;
    if (mode == 0) fail(Failure::launch, "the shim has no layout without swizzling");
    const unsigned start = unsigned(descriptor & 0x3fff) << 4;
    const unsigned leading = unsigned(descriptor >> 16 & 0x3fff) << 4;
    const unsigned stride = unsigned(descriptor >> 32 & 0x3fff) << 4;
    const unsigned of_i = i % 8 * 2 + i / 8 % pieces * 16 + i / 8 / pieces * leading;
    const unsigned of_k = k % 8 * pieces * 16 + k / 8 * stride;
    const char* const from = locate(swizzled(start + of_i + of_k, pieces * 16), 2, rank);
    unsigned short value = 0xffff;
    if (from) memcpy(&value, from, 2);
    return value;
}

// A row of an operand in registers (PTX ISA, wgmma, register fragments of matrix A): a lane has two neighbours along k of
// row lane / 4 of its warp's sixteen, then of the eighth row below, then the same eight steps of k further on.
static void read_held(const Warpgroup& group, unsigned number, unsigned row, unsigned short (&halves)[16]) {
    for (unsigned k = 0; k < 16; ++k) {
        const unsigned thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
        const unsigned word = group.products[thread][number].held[row % 16 / 8 + k / 8 * 2];
        halves[k] = static_cast<unsigned short>(word >> k % 2 * 16);
    }
}

static float value_of(unsigned short half, bool bfloat) {
    if (bfloat) {
        const unsigned word = unsigned(half) << 16;
        float value;
        memcpy(&value, &word, 4);
        return value;
    }
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent     ? ldexpf(float(fraction + 1024), exponent - 25)
                                           : ldexpf(float(fraction), -24);
    return half & 0x8000 ? -magnitude : magnitude;
}

static void multiply(Warpgroup& group, unsigned number) {
    number %= max_products;
    const Product& shape = group.products[0][number];
    static float left[64][16], right[256][16];
    static unsigned char left_bytes[64][32], right_bytes[256][32];
    for (unsigned side = 0; side < 2; ++side) {
        const unsigned rows = side ? unsigned(shape.columns) : 64;
        for (unsigned row = 0; row < rows; ++row) {
            unsigned short halves[16];
            const unsigned long long descriptor = side ? shape.right : shape.left;
            if (!side && shape.held) {
                read_held(group, number, row, halves);
            } else if (side ? shape.trans_right : shape.trans_left) {
                for (unsigned k = 0; k < 16; ++k) halves[k] = read_across(descriptor, row, k, machine.current->rank);
            } else {
                read_row(descriptor, row, machine.current->rank, halves);
            }
            memcpy(side ? right_bytes[row] : left_bytes[row], halves, 32);
            for (unsigned k = 0; k < 16; ++k) {
                const float value = value_of(halves[k], shape.bfloat);
                (side ? right : left)[row][k] = side || shape.sign > 0 ? value : -value;
            }
        }
    }
    for (unsigned thread = 0; thread < group_size; ++thread) {
        const Product& mine = group.products[thread][number];
        const unsigned row = thread / 32 * 16 + thread % 32 / 4, count = unsigned(shape.columns) / 2;
        for (unsigned e = 0; e < count; ++e) {
            const unsigned i = row + e / 2 % 2 * 8, j = e / 4 * 8 + thread % 4 * 2 + e % 2;
            if (shape.bytes) {
                unsigned& d = static_cast<unsigned*>(mine.accumulators)[e];
                for (unsigned k = 0; k < 32; ++k) d += unsigned(left_bytes[i][k] * right_bytes[j][k]);
            } else {
                float& d = static_cast<float*>(mine.accumulators)[e];
                d = aligned_sum(mine.keep ? d : 0.0f, left[i], right[j], 16);
            }
        }
    }
}

static bool alike(const Product& a, const Product& b) {
    return a.left == b.left && a.right == b.right && a.columns == b.columns && a.sign == b.sign && a.keep == b.keep &&
           a.bytes == b.bytes && a.trans_left == b.trans_left && a.trans_right == b.trans_right && a.bfloat == b.bfloat &&
           !a.held == !b.held;
}

// All threads of the warpgroup meet; the last one does the products that must be done, in their order.
void wgmma_wait_for(int pending, Place place) {
    unsigned thread;
    Warpgroup& group = group_of(thread);
    if (group.arrived && pending != group.pending) fail(Failure::warp, "threads of a warpgroup wait for different products");
    group.pending = pending;
    if (++group.arrived < group_size) {
        const Rendezvous what{&group.rounds, group.rounds};
        wait_until(&met, &what, place);
        return;
    }
    for (unsigned other = 1; other < group_size; ++other) {
        if (group.issued[other] != group.issued[0] || group.committed[other] != group.committed[0])
            fail(Failure::warp, "threads of a warpgroup have asked for different products");
        for (unsigned number = group.done; number < group.issued[0]; ++number)
            if (!alike(group.products[other][number % max_products], group.products[0][number % max_products]))
                fail(Failure::warp, "threads of a warpgroup have asked for different products");
    }
    const unsigned commits = group.committed[0], complete = commits > unsigned(pending) ? commits - pending : 0;
    while (group.done < group.issued[0] && group.batch[group.done % max_products] < complete)
        multiply(group, group.done++);
    group.arrived = 0;
    ++group.rounds;
}

}  // namespace hopper

bool engine_step() {
    if (!copy_count) return false;
    const unsigned chosen = machine.request->order == Order::shuffled ? random_below(copy_count) : copy_count - 1;
    const Copy copy = copies[chosen];
    copies[chosen] = copies[--copy_count];
    Word* const word = reinterpret_cast<Word*>(hopper::locate(copy.barrier, sizeof(Word), copy.rank));
    if (word && hopper::has_ended(copy.rank)) {
        failed(Failure::memory, "a copy into the shared memory of a block that has ended");
        return false;
    }
    if (!word || !hopper::perform(copy)) {
        failed(Failure::memory, "a copy to %#x, told to a barrier at %#x, is not in shared memory", copy.target, copy.barrier);
        return false;
    }
    word->transactions -= int(copy.bytes);
    hopper::settle(*word);
    return true;
}

}  // namespace simt
