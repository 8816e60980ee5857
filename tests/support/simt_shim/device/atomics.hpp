// Atomic functions. Fibers are switched only at barriers and warp operations, so a plain read and write is atomic.
// The types are those that CUDA has on every device since sm_60; others are refused at compile time.
#pragma once

#include "language.hpp"

namespace simt {

#ifdef SIMT_CHECKED
void atomic_access(const volatile void* address, unsigned bytes);
#else
inline void atomic_access(const volatile void*, unsigned) {}
#endif

template <class T>
struct Same {
    typedef T type;
};
template <class T>
using Value = typename Same<T>::type;  // not deduced: atomicAdd(&unsigned, 1) is an unsigned addition

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;
template <class T, class... Ts>
constexpr bool one_of = (same<T, Ts> || ...);

// The read and write of an atomic are no data race: the checker is told of the access, not of its parts.
template <class T, class F>
__attribute__((noinline, no_sanitize("thread"))) T atomically(T* address, T operand, F change) {
    atomic_access(address, sizeof(T));
    const T old = *address;
    *address = change(old, operand);
    return old;
}

}  // namespace simt

#define SIMT_ATOMIC(name, expression, ...)                                                              \
    template <class T>                                                                                  \
    inline T name(T* address, simt::Value<T> operand) {                                                 \
        static_assert(simt::one_of<T, __VA_ARGS__>, #name " has no form for this type");                \
        return simt::atomically(address, operand, [](T old, T value) -> T { return T(expression); });   \
    }

SIMT_ATOMIC(atomicAdd, old + value, int, unsigned, unsigned long long, float, double)
SIMT_ATOMIC(atomicSub, old - value, int, unsigned)
SIMT_ATOMIC(atomicExch, value, int, unsigned, unsigned long long, float)
SIMT_ATOMIC(atomicMin, value < old ? value : old, int, unsigned, long long, unsigned long long)
SIMT_ATOMIC(atomicMax, value > old ? value : old, int, unsigned, long long, unsigned long long)
SIMT_ATOMIC(atomicAnd, old & value, int, unsigned, unsigned long long)
SIMT_ATOMIC(atomicOr, old | value, int, unsigned, unsigned long long)
SIMT_ATOMIC(atomicXor, old ^ value, int, unsigned, unsigned long long)
SIMT_ATOMIC(atomicInc, old >= value ? 0u : old + 1u, unsigned)
SIMT_ATOMIC(atomicDec, old == 0u || old > value ? value : old - 1u, unsigned)

#undef SIMT_ATOMIC

template <class T>
inline T atomicCAS(T* address, simt::Value<T> compare, simt::Value<T> operand) {
    static_assert(simt::one_of<T, int, unsigned, unsigned long long, unsigned short>,
                  "atomicCAS has no form for this type");
    return simt::atomically(address, operand, [compare](T old, T value) -> T { return old == compare ? value : old; });
}
