// One fiber is one GPU thread: a stack and the registers that a call preserves.
//
// On x86-64 a switch is a dozen instructions (the System V ABI names rbx, rbp, r12 to r15 as preserved; the floating
// point control words never change here). Elsewhere, or with SIMT_UCONTEXT, the C library's ucontext does the same
// through two system calls.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)

namespace simt {

struct Fiber {
    void* stack_pointer;
};

extern "C" __attribute__((visibility("hidden"))) void simt_switch(Fiber* from, const Fiber* to);

asm(R"(
    .text
    .p2align 4
    .type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size simt_switch, . - simt_switch
)");

inline void prepare(Fiber& fiber, char* stack, size_t bytes, void (*entry)()) {
    // As a call to entry would leave it: 16-byte aligned before the return address, which is null and never used.
    auto* top = reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t(15));
    *--top = 0;
    *--top = reinterpret_cast<uintptr_t>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    fiber.stack_pointer = top;
}

inline void switch_fiber(Fiber& from, const Fiber& to) { simt_switch(&from, &to); }

}  // namespace simt

#else

#include <ucontext.h>

namespace simt {

struct Fiber {
    ucontext_t context;
};

inline void prepare(Fiber& fiber, char* stack, size_t bytes, void (*entry)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}

inline void switch_fiber(Fiber& from, const Fiber& to) { swapcontext(&from.context, &to.context); }

}  // namespace simt

#endif
