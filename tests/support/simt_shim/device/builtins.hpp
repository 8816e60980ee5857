// Fences, traps, cached loads, clocks.
#pragma once

#include "language.hpp"

// One operating system thread runs the machine: program order is memory order.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

[[noreturn]] inline void __trap(SIMT_HERE) { simt::fail(simt::Failure::trap, "__trap at %s:%d", file, line); }

#define assert(condition)                                                                                             \
    ((condition) ? (void)0                                                                                            \
                 : simt::fail(simt::Failure::trap, "assertion failed: %s, at %s:%d", #condition, __FILE__, __LINE__))

extern "C" int printf(const char*, ...) __attribute__((format(printf, 1, 2)));

// Time does not pass here, so that runs repeat.
inline long long clock64() { return 0; }
inline int clock() { return 0; }
inline long long wall_clock64() { return 0; }

template <class T>
inline T __ldg(const T* address) {
    return *address;
}
template <class T>
inline T __ldcg(const T* address) {
    return *address;
}
template <class T>
inline T __ldcs(const T* address) {
    return *address;
}
template <class T>
inline void __stcs(T* address, T value) {
    *address = value;
}
template <class T>
inline void __stcg(T* address, T value) {
    *address = value;
}
