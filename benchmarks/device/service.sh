#!/usr/bin/env bash
# Part 4: the whole service on the device. Beyond what the other parts need, it takes gemmserve[server] installed, or as
# wheels in `.whl/`: see `wheels` in common.sh.
. "$(dirname "$0")/common.sh"
wheels
export PYTHONPATH=$PYTHONPATH:examples
say kernels that are missing
unpack 60
say service
timeout "$(($(left) - 5))" "$PYTHON" benchmarks/device/service.py --output "$OUT/service.json" "$@" 2>&1 | tee "$OUT/service.txt"
say done
