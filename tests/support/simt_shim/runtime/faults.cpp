// Signals that device code raises become failures of the launch; so does a timer's, since an endless loop in device code
// would keep the host from ever handling its own.
//
// The handler runs on its own stack, notes what happened and switches to the scheduler as if the thread had suspended
// itself; the faulting fiber is never resumed. A signal that comes while no device code runs on this operating system
// thread goes to the handler that was there before.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <ucontext.h>

#include "machine.hpp"

// The first byte of the module, from the linker.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;

namespace simt {

uintptr_t module_offset(uintptr_t code) { return code - reinterpret_cast<uintptr_t>(&__ehdr_start); }

static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
constexpr unsigned signal_count = sizeof signals / sizeof *signals;
static struct sigaction earlier[signal_count];
static itimerval earlier_timer;
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

// Whether the signal came while the current fiber ran on its own stack, and not in the middle of a switch.
static bool on_fiber(const ucontext_t* context) {
#if defined(__x86_64__)
    const uintptr_t stack_pointer = uintptr_t(context->uc_mcontext.gregs[REG_RSP]);
#elif defined(__aarch64__)
    const uintptr_t stack_pointer = uintptr_t(context->uc_mcontext.sp);
#else
    const uintptr_t stack_pointer = 0;  // unknown: no limit of time there
    (void)context;
#endif
    const Request& request = *machine.request;
    const char* const stack = request.stacks + machine.current->linear * request.stack_bytes;
    return stack_pointer - reinterpret_cast<uintptr_t>(stack) < request.stack_bytes;
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
    } else if (number == SIGVTALRM) {
        snprintf(report.message, sizeof report.message, "not done after %g seconds", request.seconds);
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
    const bool ours = pthread_equal(owner, pthread_self());
    if (machine.current && ours && (number != SIGVTALRM || on_fiber(static_cast<ucontext_t*>(context)))) {
        note(number, info, static_cast<ucontext_t*>(context));
        suspend();  // never comes back
    }
    if (number == SIGVTALRM) {  // between two fibers, or sent to another thread of the process: try again soon
        const itimerval again = {{0, 0}, {0, 1000}};
        setitimer(ITIMER_VIRTUAL, &again, nullptr);
        if (!ours) pthread_kill(owner, number);
        return;
    }
    for (unsigned i = 0; i < signal_count; ++i)  // not ours: let the instruction raise it again for who was here before
        if (signals[i] == number) sigaction(number, &earlier[i], nullptr);
}

Faults::Faults(double seconds) {
    owner = pthread_self();
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, &earlier_stack);
    struct sigaction action = {};
    action.sa_sigaction = &handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // not deferred: the handler is left by a switch
    sigemptyset(&action.sa_mask);
    for (unsigned i = 0; i < signal_count; ++i) sigaction(signals[i], &action, &earlier[i]);
    itimerval limit = {};
    limit.it_value.tv_sec = long(seconds);
    limit.it_value.tv_usec = long((seconds - double(long(seconds))) * 1e6);
    setitimer(ITIMER_VIRTUAL, &limit, &earlier_timer);
}

Faults::~Faults() {
    setitimer(ITIMER_VIRTUAL, &earlier_timer, nullptr);
    struct sigaction& timer = earlier[signal_count - 1];
    if (timer.sa_handler == SIG_DFL) timer.sa_handler = SIG_IGN;  // a signal on its way must not end the process
    for (unsigned i = 0; i < signal_count; ++i) sigaction(signals[i], &earlier[i], nullptr);
    sigaltstack(&earlier_stack, nullptr);
}

}  // namespace simt
