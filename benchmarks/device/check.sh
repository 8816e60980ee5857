#!/usr/bin/env bash
# Part 1: the kernels are right (tests/gpu), what the pre-pass takes, the table that `auto` decides by.
. "$(dirname "$0")/common.sh"
say environment
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
"$PYTHON" -c "
import cupy, numpy; from cupy.cuda import nvrtc
print('cupy', cupy.__version__, 'numpy', numpy.__version__, 'nvrtc', nvrtc.getVersion())"
say kernels that are missing
unpack 120
say every kernel once
timeout 60 "$PYTHON" tests/gpu/sanitize.py > "$OUT/smoke.txt" 2>&1; echo "rc $?"
grep -v -e 'e-' "$OUT/smoke.txt" | tail -15
say tests
timeout -k 10 -s INT 170 "${PYTEST[@]}" -n 12 --timeout 100 --timeout-method thread tests/gpu \
    --ignore tests/gpu/test_accuracy.py -k "not two_to_the_31 and not past_two" > "$OUT/tests.txt" 2>&1
tail -40 "$OUT/tests.txt" | cut -c1-220
say planes
GEMMSERVE_KERNEL_CACHE=$planes_cache timeout 90 "$PYTHON" benchmarks/kernels/tune_split.py --budget 70 \
    --output "$OUT/split.json" > "$OUT/split.txt" 2>&1; echo "rc $?"
tail -60 "$OUT/split.txt"
say table
resume sm_90a.json
for _ in 1 2 3; do
    [ "$(left)" -gt 40 ] || break
    seconds=$(($(left) - 30))
    timeout $((seconds + 15)) "$PYTHON" benchmarks/kernels/tune_dispatch.py --missing --patience 30 \
        --seconds $seconds --output "$OUT/sm_90a.json" >> "$OUT/tune.txt" 2>&1
    status=$?; echo "rc $status"
    again $status || break
done
grep -v us: "$OUT/tune.txt" | head; tail -3 "$OUT/tune.txt" | cut -c1-300
grep -c us: "$OUT/tune.txt"
timeout 20 "$PYTHON" benchmarks/kernels/tune_dispatch.py --check --output "$OUT/sm_90a.json" --worst 12
cp "$OUT/sm_90a.json" "$scratch/tables/" # for suite.sh on this machine, should it be given another $OUT
say done
