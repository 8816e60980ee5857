"""Products have the same bits whenever they are repeated, beside other work on the device too.

What waits for nothing but time shows here: stores that queue, blocks that start late, a device that other processes use
in turns.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest

from gemmserve_kernels import GemmConfig, gemm, gemm_reduce

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

REPEATS = 160
OTHER_PROCESS = """
import cupy
x = cupy.random.standard_normal((2048, 2048))
print("ready", flush=True)
while True:
    for _ in range(4):
        x @ x
    cupy.cuda.get_current_stream().synchronize()
"""


def case(dtype, m, n, k, compute="auto", algorithm=None, batch=0, spread=1, **tile):
    """Magnitudes are exp(spread N(0, 1)): those of 6 leave `3xfp16` to double precision."""
    config = GemmConfig(algorithm=algorithm, **tile) if algorithm else None
    shape = "x".join(map(str, (*((batch,) if batch else ()), m, n, k)))
    spread_name = f"spread{spread}" if spread != 1 else ""
    name = "-".join(str(x) for x in (dtype, shape, compute, algorithm, *tile.values(), spread_name) if x)
    return pytest.param(dtype, batch, m, n, k, spread, {"compute": compute, "config": config}, id=name)


CASES = (
    case("complex128", 1536, 1536, 512, "fp64", "dmma"),
    *(case("complex128", 1536, 1536, 512, "fp64", "dmma", block_m=m, block_n=64) for m in (64, 128)),
    *(
        case("float64", 2000, 2000, 256, "fp64", "dmma", block_m=m, block_n=n)
        for m, n in ((64, 64), (128, 64), (128, 128))
    ),
    case("complex128", 200, 170, 90, "fp64", "dmma"),
    case("complex128", 2048, 2048, 1024, "ozaki"),
    case("float64", 2048, 2048, 2048, "ozaki"),
    case("complex64", 3456, 2048, 2048, "ozaki"),
    case("complex64", 2048, 2048, 1024, "3xfp16", "wgmma"),
    case("float32", 4096, 4096, 512, "3xfp16", "wgmma"),
    case("complex64", 1024, 1024, 512, "3xfp16", "fused"),
    case("complex64", 4096, 2048, 64, "3xfp16", "fused"),
    case("complex64", 64, 8192, 4096, "3xfp16", "fused"),  # tall tiles
    case("complex64", 8192, 64, 2048, "3xfp16", "fused"),
    case("complex64", 2048, 1024, 512, "3xfp16", "wgmma", spread=6),
    case("float32", 2048, 1024, 512, "3xfp16", "wgmma", spread=6),
    case("complex64", 1536, 1536, 512, "3xfp16", "mma"),
    case("complex64", 2048, 2048, 1024, "tf32"),
    case("complex64", 64, 64, 64, batch=2000),
    case("complex64", 128, 128, 128, batch=500),
    case("complex128", 128, 128, 128, batch=300),
    case("complex64", 700, 515, 300, "fp32", "simt"),
)
REDUCTIONS = (
    ("complex128", 1536, 1536, 512, ("absmax",), {}),
    ("complex128", 1536, 1536, 512, ("sumsq", "absmax"), {"compute": "fp64", "config": GemmConfig(algorithm="dmma")}),
    ("complex64", 2048, 2048, 1024, ("absmax",), {}),
    ("complex64", 2048, 2048, 1024, ("sumsq", "absmax"), {}),
)


def operands(dtype, batch, m, n, k, spread=1):
    rng = cupy.random.default_rng(5)
    outer = (batch,) if batch else ()

    def drawn(*shape):
        x = cupy.exp(spread * rng.standard_normal((*outer, *shape)))
        return (x + 1j * rng.standard_normal(x.shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)

    return drawn(m, k), drawn(k, n)


def hold(multiply):
    """`multiply` () -> arrays by name: all of `REPEATS` have the same bits."""
    results = [{name: x.tobytes() for name, x in multiply().items()} for _ in range(3)]
    for name in results[0]:
        bits, count = Counter(result[name] for result in results).most_common(1)[0]
        assert count == 3, f"{name}: {4 - count} kinds of bits in three results"
        reference = cupy.asarray(np.frombuffer(bits, np.uint8))
        for turn in range(REPEATS):
            found = cupy.ascontiguousarray(multiply()[name]).view(np.uint8).ravel()
            wrong = int((found != reference).sum())
            assert wrong == 0, f"{name}: {wrong} bytes differ the {turn + 4}th time"


@pytest.fixture(scope="module", params=["alone", "beside a stream", "beside processes"])
def beside(request):
    """The device does other work meanwhile, of this process or of others."""
    if request.param == "beside a stream":
        over = threading.Event()

        def work():
            with cupy.cuda.Stream(non_blocking=True) as stream:
                x = cupy.random.standard_normal((1024, 1024))
                while not over.is_set():
                    for _ in range(6):
                        x @ x
                    stream.synchronize()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
    elif request.param == "beside processes":
        others = [subprocess.Popen([sys.executable, "-c", OTHER_PROCESS], stdout=subprocess.PIPE) for _ in range(3)]
        try:
            for other in others:
                assert other.stdout.readline() == b"ready\n"
            yield
        finally:
            for other in others:
                other.kill()
                other.communicate()
    else:
        yield


@pytest.mark.parametrize(("dtype", "batch", "m", "n", "k", "spread", "options"), CASES)
def test_products(beside, dtype, batch, m, n, k, spread, options):
    a, b = operands(dtype, batch, m, n, k, spread)
    hold(lambda: {"d": gemm(a, b, **options)})


@pytest.mark.parametrize(
    ("dtype", "m", "n", "k", "reduce", "options"),
    [pytest.param(*each, id=f"{each[0]}-{'-'.join(each[4])}-{'dmma' if each[5] else 'auto'}") for each in REDUCTIONS],
)
def test_reductions(beside, dtype, m, n, k, reduce, options):
    a, b = operands(dtype, 0, m, n, k)
    hold(lambda: gemm_reduce(a, b, reduce=list(reduce), axis="n", **options))
