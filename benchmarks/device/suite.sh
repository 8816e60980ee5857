#!/usr/bin/env bash
# Part 2: the suite (arguments: those of benchmarks/kernels/run.py), then part 3 if there is time. The table is that of
# the package; where it has none, the one that check.sh measured is put there.
. "$(dirname "$0")/common.sh"
resume suite.json
for table in "$OUT/sm_90a.json" "$scratch/tables/sm_90a.json"; do
    [ -f $tables/sm_90a.json ] || { [ -f "$table" ] && mkdir -p $tables && cp "$table" $tables/; }
done
ls -l $tables
say kernels that are missing
unpack 90
for _ in 1 2 3 4; do
    [ "$(left)" -gt 50 ] || break
    seconds=$(($(left) - 30))
    say "suite, $seconds s"
    timeout $((seconds + 20)) "$PYTHON" benchmarks/kernels/run.py --patience 60 --seconds $seconds \
        --output "$OUT/suite.json" "$@" >> "$OUT/suite.txt" 2>&1
    status=$?; echo "rc $status"
    again $status || break
done
grep -n "failed\|Traceback\|Error" "$OUT/suite.txt" | head -20
grep "(target" "$OUT/suite.txt" | tail -45
[ "$(left)" -gt 150 ] && . benchmarks/device/profile.sh
say done
