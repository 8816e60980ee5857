#!/usr/bin/env bash
# Part 4: the whole service on the device. Beyond what the other parts need, it takes gemmserve[server] installed: the
# wheels in `.whl/`, if there are any, are put into a folder of their own first (`pip wheel . -w .whl --no-deps` makes the
# project's).
. "$(dirname "$0")/common.sh"
if [ -d .whl ]; then
    say wheels
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$scratch/site" .whl/*.whl || exit
    export PYTHONPATH=$scratch/site
fi
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}examples
say kernels that are missing
unpack 60
say service
timeout "$(($(left) - 5))" "$PYTHON" benchmarks/device/service.py --output "$OUT/service.json" "$@" 2>&1 | tee "$OUT/service.txt"
say done
