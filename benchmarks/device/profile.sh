#!/usr/bin/env bash
# Part 3: compute-sanitizer over every kernel, what Nsight Compute says of the main ones, the largest tests. What an
# earlier run finished in the same $OUT is not done again.
declare -F say > /dev/null || . "$(dirname "$0")/common.sh"
say kernels that are missing
unpack 60
for tool in memcheck racecheck initcheck; do
    [ -f "$OUT/$tool.done" ] && continue
    [ "$(left)" -gt 35 ] || break
    say $tool
    timeout "$(least $(($(left) - 15)) 130)" compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 20 \
        "$PYTHON" tests/gpu/sanitize.py > "$OUT/$tool.txt" 2>&1
    status=$?; echo "rc $status"
    [ $status = 124 ] || [ $status = 127 ] || touch "$OUT/$tool.done"
    grep -v -e '^[a-z0-9 ,-]*: [0-9.]*e-' "$OUT/$tool.txt" | tail -12 | cut -c1-200
done
metrics=$(paste -sd, <<'END'
sm__throughput.avg.pct_of_peak_sustained_elapsed
sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active
l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed
lts__throughput.avg.pct_of_peak_sustained_elapsed
dram__throughput.avg.pct_of_peak_sustained_elapsed
gpu__time_duration.sum
sm__warps_active.avg.pct_of_peak_sustained_active
smsp__cycles_active.avg
launch__registers_per_thread
END
)
while read -r product; do
    name=$OUT/ncu-${product// /-}.csv
    [ -s "$name" ] && continue
    [ "$(left)" -gt 70 ] || break
    say "ncu $product"
    timeout 45 ncu --clock-control none --metrics "$metrics" --csv --page raw --launch-count 8 \
        -k 'regex:^(wgmma|mma_|small|ozaki|split|balance|fallback|gemm)' \
        "$PYTHON" benchmarks/device/one.py $product < /dev/null > "$name.part" 2>> "$OUT/ncu.log" &&
        mv "$name.part" "$name" || tail -3 "$name.part" "$OUT/ncu.log"
done <<'END'
3456 4096 4096 complex64 auto
1024 1024 1024 complex64 auto
3456 4096 4096 complex64 3xfp16-3m
3456 4096 4096 complex64 3xtf32
8192 8192 8192 complex128 ozaki
50000x16 16 16 complex64 auto
END
if [ ! -f "$OUT/largest.done" ] && [ "$(left)" -gt 45 ]; then
    say largest tests
    seconds=$(($(left) - 15))
    timeout -k 10 -s INT $seconds "${PYTEST[@]}" --timeout $seconds tests/gpu \
        -k "two_to_the_31 or past_two" > "$OUT/largest.txt" 2>&1
    status=$?; echo "rc $status"
    [ $status = 124 ] || touch "$OUT/largest.done"
    tail -5 "$OUT/largest.txt"
fi
say done
