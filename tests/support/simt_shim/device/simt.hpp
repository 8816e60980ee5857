// The device language for one kernel source. The shim includes this before the source, and puts SIMT_KERNEL lines
// after it.
#pragma once

#include "kernel.hpp"  // first: it needs system headers, which the keywords of the device language would break

#include "amd.hpp"
#include "ampere.hpp"
#include "atomics.hpp"
#include "builtins.hpp"
#include "half.hpp"
#include "hopper.hpp"
#include "language.hpp"
#include "math.hpp"
#include "vector_types.hpp"
#include "warp.hpp"
