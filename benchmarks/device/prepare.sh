#!/usr/bin/env bash
# Before (no GPU needed): lists every kernel that the three parts need, compiles them with JOBS processes, packs them into
# benchmarks/device/kernels/kernels.tar.xz. Again after any change of kernels; what has not changed is not compiled again.
# TESTS=0: without listing anew what tests/gpu alone needs. LIST=1: compiles and packs nothing.
. "$(dirname "$0")/common.sh"
set -u
stand_in=tests/support/cupy_on_numpy/run.py
jobs=${JOBS:-2}
if [ "${TESTS:-1}" = 1 ]; then # minutes
    rm -f $kernels/tests.jsonl $kernels/sanitize.jsonl
    for file in tests/gpu/test_*.py; do
        CUPY_ON_NUMPY_SOURCES=$PWD/$kernels/tests.jsonl PYTHONPATH=$PYTHONPATH:benchmarks/device timeout 240 nice -n 5 \
            "$PYTHON" $stand_in -m pytest -c /dev/null --rootdir=. --import-mode=importlib -o markers="gpu: needs a GPU" \
            -q -p lenient --tb=line -p no:cacheprovider -p no:warnings "$file" \
            -k "not two_to_the_31 and not headline and not past_two and not large" 2>&1 | tail -1
    done
    CUPY_ON_NUMPY_SOURCES=$PWD/$kernels/sanitize.jsonl "$PYTHON" $stand_in tests/gpu/sanitize.py | tail -1
fi
nice -n 5 "$PYTHON" benchmarks/kernels/precompile.py --suite --table --list --write $kernels/suite.jsonl
[ "${LIST:-0}" = 1 ] && exit
nice -n 5 "$PYTHON" benchmarks/kernels/precompile.py --sources $kernels/*.jsonl --jobs "$jobs" --prune
GEMMSERVE_KERNEL_CACHE=$planes_cache nice -n 5 "$PYTHON" benchmarks/kernels/tune_split.py --precompile --prune --jobs "$jobs"
tar cJf $kernels/kernels.tar.xz -C "$scratch" kernels planes
ls -l $kernels
