// Entry points: a kernel's parameter types are taken from its declaration; its arguments come as cuLaunchKernel takes
// them, an array of pointers to values, and sizes are compared, so that a host structure that disagrees is an error.
#pragma once

#include "launch.hpp"

namespace simt {

template <unsigned... indices>
struct Indices {};
template <unsigned count, unsigned... indices>
struct Counted : Counted<count - 1, count - 1, indices...> {};
template <unsigned... indices>
struct Counted<0, indices...> {
    typedef Indices<indices...> type;
};

template <class... Parameters>
struct Kernel {
    void (*function)(Parameters...);
    void** arguments;

    // Not instrumented in checked builds: they copy from the host's memory, as the driver does.
    template <unsigned... indices>
    __attribute__((noinline, no_sanitize("thread"))) void call(Indices<indices...>) const {
        function(*static_cast<Parameters*>(arguments[indices])...);
    }

    __attribute__((no_sanitize("thread"))) static void body(const void* self) {
        static_cast<const Kernel*>(self)->call(typename Counted<sizeof...(Parameters)>::type());
    }
};

template <class... Parameters>
int launch(void (*function)(Parameters...), const Request& request, void** arguments, const size_t* sizes, int count,
           Report& report) {
    const size_t wanted[] = {sizeof(Parameters)..., 0};
    if (count != int(sizeof...(Parameters)))
        return refuse(report, "the kernel takes %d arguments, not %d", int(sizeof...(Parameters)), count);
    for (int i = 0; i < count; ++i)
        if (sizes[i] != wanted[i])
            return refuse(report, "argument %d of the kernel has %zu bytes, not %zu", i, wanted[i], sizes[i]);
    const Kernel<Parameters...> kernel{function, arguments};
    return run(request, &Kernel<Parameters...>::body, &kernel, report);
}

}  // namespace simt

#define SIMT_KERNEL(name)                                                                                         \
    extern "C" __attribute__((visibility("default"))) int simt_launch_##name(                                     \
        const simt::Request* request, void** arguments, const size_t* sizes, int count, simt::Report* report) {   \
        return simt::launch(&name, *request, arguments, sizes, count, *report);                                   \
    }
