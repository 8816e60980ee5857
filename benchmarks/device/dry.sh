#!/usr/bin/env bash
# PYTHON for the scripts beside it on a machine without a GPU: NumPy in CuPy's place, everything small. Says nothing of a
# device; finds what is wrong with the scripts.
#   PYTHON=benchmarks/device/dry.sh OUT=/tmp/dry LIMIT=200 bash benchmarks/device/check.sh
export CUPY_ON_NUMPY_L2_MIB=1
real=python3
[ -x .venv/bin/python ] && real=.venv/bin/python
stand_in=("$real" tests/support/cupy_on_numpy/run.py)
case "$*" in
    -c*) PYTHONPATH=tests/support/cupy_on_numpy:$PYTHONPATH exec "$real" "$@" ;;
    *precompile.py*) exec "$real" "$@" --list ;;
    *tune_dispatch.py*--check*) exec "$real" "$@" ;;
    *tune_dispatch.py*) exec "${stand_in[@]}" "$@" --shrink 64 --rounds 1 --budget 0.001 --dtypes float16 ;;
    *kernels/accuracy.py*) exec "${stand_in[@]}" "$@" --shrink 256 --kinds normal exp-6n dominant-term ;;
    *accuracy_report.py*) exec "$real" "$@" ;;
    *kernels/run.py*) exec "${stand_in[@]}" "$@" --shrink 64 --rounds 1 --budget 0.001 --quick ;;
    *tune_split.py*) exec "$real" "$@" --fake ;;
    -m*) shift; exec "${stand_in[@]}" -m "$@" --collect-only ;;
    *) exec "${stand_in[@]}" "$@" ;;
esac
