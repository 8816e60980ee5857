#!/usr/bin/env bash
# Part 5: the load test and its report (arguments: those of `python -m benchmarks.device.load run`). Beyond what the other
# parts need, it takes gemmserve[server] and hdrhistogram installed, or as wheels in `.whl/`: see `wheels` in common.sh.
. "$(dirname "$0")/common.sh"
wheels
say kernels that are missing
unpack 60
say load
minutes=$((($(left) - 180) / 60)) # no row takes longer than three
timeout "$(($(left) - 15))" "$PYTHON" -m benchmarks.device.load run --minutes $minutes --output "$OUT/load.json" "$@" 2>&1 |
    tee "$OUT/load.txt"
status=${PIPESTATUS[0]}
[ -f "$OUT/load.json" ] && "$PYTHON" -m benchmarks.device.load report "$OUT/load.json"
say done
exit "$status"
