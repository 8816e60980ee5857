#!/usr/bin/env bash
# The suite beside a newer cuBLAS than the machine's. Carry: .rival/partNofM of cut_rival.py, whichever fit; called again
# with the others. With some of them it compiles what the suite's table needs; with the last it puts the library together
# and measures (arguments: those of benchmarks/kernels/run.py, by default --tables second-wave).
. "$(dirname "$0")/common.sh"
kept=$scratch/rival
mkdir -p "$kept"
for part in "${RIVAL:-.rival}"/part*of*; do [ -f "$part" ] && cp "$part" "$kept/"; done
parts=("$kept"/part*of*)
ls -l "${parts[@]}" || exit
[ ${#parts[@]} -lt "${parts[0]##*of}" ] && {
    say kernels, while parts are missing
    timeout 240 "$PYTHON" benchmarks/kernels/precompile.py --tables second-wave --jobs "$(least "$(nproc)" 16)" | tail -3
    exit
}
export GEMMSERVE_RIVAL_CUBLAS=$kept/librivals.so.13
[ -f "$GEMMSERVE_RIVAL_CUBLAS" ] || {
    say library
    cat "${parts[@]}" | tar xJ -C "$kept" || exit
}
"$PYTHON" benchmarks/kernels/newest_blas.py || exit
resume second-wave.json
[ $# -gt 0 ] || set -- --tables second-wave
for _ in 1 2 3 4; do
    [ "$(left)" -gt 50 ] || break
    seconds=$(($(left) - 30))
    say "suite, $seconds s"
    timeout $((seconds + 20)) "$PYTHON" benchmarks/kernels/run.py --patience 90 --seconds $seconds \
        --output "$OUT/second-wave.json" "$@" >> "$OUT/second-wave.txt" 2>&1
    status=$?; echo "rc $status"
    again $status || break
done
grep -n "failed\|Traceback\|Error" "$OUT/second-wave.txt" | head -20
grep "(target" "$OUT/second-wave.txt" | grep -v ": None .*target None" | tail -45
say done
