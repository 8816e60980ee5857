# Sourced by the scripts beside it, which run from the root of the repository.
#   OUT     where results go, and where a script finds how far it came the last time (default: out)
#   LIMIT   seconds that a script may take, its last step included (default: 570)
#   PYTHON  the interpreter (default: that of .venv, or python3)
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
export PYTHONPATH=client:kernels:service:tests/support PYTHONUNBUFFERED=1 OPENBLAS_NUM_THREADS=2
OUT=${OUT:-out} LIMIT=${LIMIT:-570}
[ -n "${PYTHON:-}" ] || { [ -x .venv/bin/python ] && PYTHON=.venv/bin/python || PYTHON=python3; }
began=${began:-$SECONDS}
kernels=benchmarks/device/kernels # git-ignored: what prepare.sh made, results to go on from
tables=kernels/gemmserve_kernels/dispatch/tables
scratch=${TMPDIR:-/tmp}/gemmserve-device
case $PYTHON in *dry.sh) scratch+=-dry tables=$scratch/package ;; esac
export GEMMSERVE_KERNEL_CACHE=$scratch/kernels CUPY_CACHE_DIR=$scratch/cupy
planes_cache=$scratch/planes # the variants of tune_split.py, so that --prune leaves them alone
mkdir -p "$OUT" "$kernels" "$scratch"/{kernels,planes,tables}

# Without the suite's settings and its conftest.py: the machine need not have what they import.
PYTEST=("$PYTHON" -m pytest -c /dev/null --rootdir=. --noconftest --import-mode=importlib -p no:cacheprovider
    -o "markers=gpu: needs a GPU" -q --tb=short -rfE)

say() { echo "== $((SECONDS - began)) s: $*"; }
left() { echo $((LIMIT - SECONDS + began)); }
least() { echo $(($1 < $2 ? $1 : $2)); }
unpack() { # what prepare.sh compiled, then what is still missing, in $1 seconds at most
    [ -f $kernels/kernels.tar.xz ] && tar xJf $kernels/kernels.tar.xz -C "$scratch"
    set -- "$1" $kernels/*.jsonl
    [ -f "${2:-}" ] || return
    timeout "$1" "$PYTHON" benchmarks/kernels/precompile.py --sources "${@:2}" --jobs "$(least "$(nproc)" 16)" 2>&1 | tail -5
}
wheels() { # finds those of .whl/ behind the sources; the project's own (`pip wheel . -w .whl --no-deps`) is for its commands
    [ -d .whl ] || return
    say wheels
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$scratch/site" .whl/*.whl || exit
    export PYTHONPATH=$PYTHONPATH:$scratch/site
}
resume() { # finds result $1 of an earlier run
    [ -f "$OUT/$1" ] || { [ -f "$kernels/$1" ] && cp "$kernels/$1" "$OUT/$1"; }
}
again() { # 0 where the process of a script with this exit status died in one case, which the next passes over
    case $1 in 0 | 2 | 3 | 4) return 1 ;; esac
}
