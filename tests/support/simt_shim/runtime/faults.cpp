// Signals that device code raises become failures of the launch.
//
// The handler runs on its own stack, notes what happened and switches to the scheduler as if the thread had suspended
// itself; the faulting fiber is never resumed. A signal that comes while no device code runs on this operating system
// thread goes to the handler that was there before.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include "machine.hpp"

// The first byte of the module, from the linker.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;

namespace simt {

uintptr_t module_offset(uintptr_t code) { return code - reinterpret_cast<uintptr_t>(&__ehdr_start); }

static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction earlier[4];
static stack_t earlier_stack;
static char handler_stack[256 * 1024];  // the kernel saves AVX-512 and AMX state here: above the usual 8 KiB
static pthread_t owner;

// The faulting instruction and whether it wrote.
static uintptr_t code_of(const ucontext_t* context) {
#if defined(__x86_64__)
    return uintptr_t(context->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    return uintptr_t(context->uc_mcontext.pc);
#else
    (void)context;
    return 0;
#endif
}

static int access_of(const ucontext_t* context) {
#if defined(__x86_64__)
    return context->uc_mcontext.gregs[REG_ERR] & 2 ? 2 : 1;  // bit 1 of the page fault's error code: a write
#else
    (void)context;
    return 0;
#endif
}

static void note(int number, const siginfo_t* info, const ucontext_t* context) {
    Report& report = *machine.report;
    const Request& request = *machine.request;
    const uintptr_t code = code_of(context);
    report.block = blockIdx;
    report.thread = machine.current->index;
    report.code = code ? module_offset(code) + 1 : 0;  // past it, as a return address is
    report.kind = Failure::trap;
    if (number == SIGFPE) {
        snprintf(report.message, sizeof report.message, "integer division by zero");
    } else if (number == SIGILL) {
        snprintf(report.message, sizeof report.message, "trap");
    } else {
        report.kind = Failure::memory;
        report.address = reinterpret_cast<uintptr_t>(info->si_addr);
        report.access = access_of(context);
        const uintptr_t stacks = reinterpret_cast<uintptr_t>(request.stacks);
        const uintptr_t offset = report.address - stacks;
        if (report.address >= stacks && offset < machine.count * request.stack_bytes &&
            offset % request.stack_bytes < request.guard_bytes)
            snprintf(report.message, sizeof report.message, "stack overflow: a thread has %zu KiB for local arrays",
                     (request.stack_bytes - request.guard_bytes) / 1024);
        else
            snprintf(report.message, sizeof report.message, "invalid %s", report.access == 2 ? "write" : "read");
    }
}

static void handle(int number, siginfo_t* info, void* context) {
    if (machine.current && pthread_equal(owner, pthread_self())) {
        note(number, info, static_cast<ucontext_t*>(context));
        suspend();  // never comes back
    }
    for (unsigned i = 0; i < 4; ++i)  // not ours: let the instruction raise it again for whoever was there before
        if (signals[i] == number) sigaction(number, &earlier[i], nullptr);
}

Faults::Faults() {
    owner = pthread_self();
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, &earlier_stack);
    struct sigaction action = {};
    action.sa_sigaction = &handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // not deferred: the handler is left by a switch
    sigemptyset(&action.sa_mask);
    for (unsigned i = 0; i < 4; ++i) sigaction(signals[i], &action, &earlier[i]);
}

Faults::~Faults() {
    for (unsigned i = 0; i < 4; ++i) sigaction(signals[i], &earlier[i], nullptr);
    sigaltstack(&earlier_stack, nullptr);
}

}  // namespace simt
