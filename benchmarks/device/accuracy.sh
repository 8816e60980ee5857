#!/usr/bin/env bash
# Elements of products, on hostile data: the tests, then the curves (arguments: those of benchmarks/kernels/accuracy.py)
# and their report. TESTS=0: the curves alone.
. "$(dirname "$0")/common.sh"
resume accuracy.json
say kernels that are missing
unpack 90
if [ "${TESTS:-1}" = 1 ]; then # few processes: each holds some 8 GB of the device's memory
    say tests
    more=()
    "$PYTHON" -c 'import xdist, pytest_timeout' 2> /dev/null && more=(-n 3 --timeout 120 --timeout-method thread)
    timeout -k 10 -s INT 300 "${PYTEST[@]}" "${more[@]}" tests/gpu/test_accuracy.py \
        > "$OUT/accuracy-tests.txt" 2>&1; echo "rc $?"
    tail -60 "$OUT/accuracy-tests.txt" | cut -c1-260
fi
for _ in 1 2 3; do
    [ "$(left)" -gt 40 ] || break
    seconds=$(($(left) - 30))
    say "curves, $seconds s"
    timeout $((seconds + 20)) "$PYTHON" benchmarks/kernels/accuracy.py --seconds $seconds \
        --output "$OUT/accuracy.json" "$@" >> "$OUT/accuracy.txt" 2>&1
    status=$?; echo "rc $status"
    again $status || break
done
tail -1 "$OUT/accuracy.txt"
grep -c " u, vendor" "$OUT/accuracy.txt"
[ -f "$OUT/accuracy.json" ] && timeout 60 "$PYTHON" benchmarks/kernels/accuracy_report.py "$OUT/accuracy.json"
grep "^- \`" "$OUT/accuracy.md" | cut -c1-220
say done
