"""Products that are launched again and again: other addresses, streams, threads, graphs; the same bits every time."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from simt_cases import random

from gemmserve_kernels import DeviceSpec, GemmConfig, GemmProblem, Operand, gemm, gemm_reduce, plan, prepare
from gemmserve_kernels.algorithms.mfma.tile import ARCHITECTURES

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

CONFIGS = {
    "simt": {"config": GemmConfig(algorithm="simt")},
    "mma planes": {"config": GemmConfig(algorithm="mma"), "compute": "3xfp16"},
    "wgmma": {"config": GemmConfig(algorithm="wgmma"), "compute": "3xfp16"},
    "mfma": {"config": GemmConfig(algorithm="mfma")},
    "mfma planes": {"config": GemmConfig(algorithm="mfma"), "compute": "3xfp16"},
    "3xtf32": {"config": GemmConfig(algorithm="mma"), "compute": "3xtf32"},
    "auto": {},
}
every_config = pytest.mark.parametrize("name", CONFIGS)


def options_of(name):
    spec = DeviceSpec.current()
    compute = CONFIGS[name].get("compute", "auto")
    algorithm = getattr(CONFIGS[name].get("config"), "algorithm", None)
    foreign = {"wgmma": spec.arch != "sm_90a", "mma": spec.kind != "cuda", "mfma": spec.arch not in ARCHITECTURES}
    if name == "mfma" and "fp32" not in ARCHITECTURES.get(spec.arch, {}):
        pytest.skip(f"{spec.name} multiplies float16 alone that way")
    if compute not in spec.compute_modes or foreign.get(algorithm, False):
        pytest.skip(f"{spec.name} has no {name}")
    return CONFIGS[name]


def pair(seed, m=300, n=260, k=330):
    return random(seed, "complex64", m, k), random(seed + 1, "complex64", k, n)


def agree(result, a, b):
    expected = a.astype("c16") @ b
    assert np.linalg.norm(result.get() - expected) <= 1e-6 * np.linalg.norm(expected)


@every_config
def test_other_addresses(name):
    options, kept = options_of(name), []
    for seed in range(0, 12, 2):
        a, b = pair(seed)
        result = gemm(cupy.asarray(a), cupy.asarray(b), **options)
        kept.append(result)  # so that memory does not repeat itself
        agree(result, a, b)


@every_config
def test_the_same_bits_every_time(name):
    """Kernels of one product may overlap at their ends: one that started too early would show here."""
    options = options_of(name)
    a, b = (cupy.asarray(x) for x in pair(1, 512, 512, 512))
    first = gemm(a, b, **options)
    out = cupy.empty_like(first)
    wrong = cupy.zeros((), bool)
    for _ in range(300):
        gemm(a, b, out=out, **options)
        wrong |= (out.view(cupy.uint32) != first.view(cupy.uint32)).any()
    assert not bool(wrong)


@every_config
def test_threads_with_streams_of_their_own(name):
    options = options_of(name)
    device, failures = cupy.cuda.Device(), []

    def work(seed):
        a, b = pair(seed)
        try:
            with device, cupy.cuda.Stream(non_blocking=True) as stream:
                x, y = cupy.asarray(a), cupy.asarray(b)
                results = [gemm(x, y, **options) for _ in range(20)]
                stream.synchronize()
                for result in results:
                    agree(result, a, b)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(10 * seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("runs", [1, 5], ids=["single launches before", "graphs of its own before"])
@every_config
def test_in_a_graph(name, runs):
    options = options_of(name)
    # Large enough that `auto` takes a kernel of ours: CuPy lets nobody capture the vendor's BLAS.
    sizes = {"m": 1024, "n": 1100, "k": 1030} if name == "auto" else {}
    a, b = pair(3, **sizes)
    if (
        name == "auto"
        and plan(GemmProblem.build(Operand.of(a), Operand.of(b)), DeviceSpec.current()).algorithm == "vendor"
    ):
        pytest.skip("the vendor's BLAS is the fastest here")
    x, y = cupy.asarray(a), cupy.asarray(b)
    out = cupy.empty((len(a), b.shape[1]), "c8")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(runs):
            gemm(x, y, out=out, **options)  # loads the kernels; memory is in the pool from here on
        stream.synchronize()
        stream.begin_capture()
        gemm(x, y, out=out, **options)
        graph = stream.end_capture()
        for seed in (3, 7):
            a, b = pair(seed, **sizes)
            x.set(a)
            y.set(b)
            out.fill(0)
            graph.launch(stream)
            stream.synchronize()
            agree(out, a, b)


@every_config
def test_everything_moves_and_stays_in_turns(name):
    """Kernels of a graph are set anew where their arrays have moved: each array alone, all, and none."""
    options, kept = options_of(name), []
    (a, b), (c, d) = pair(1), pair(11)
    sources = {"a": [a, c], "b": [b, d]}
    places = {side: [cupy.asarray(x) for x in both] for side, both in sources.items()}
    out = [cupy.empty((300, 260), "c8") for _ in range(2)]
    for turn in (0, 0, 0, 0, 1, 3, 2, 6, 7, 7, 5, 4, 0, 0):
        i, j, k = turn & 1, turn >> 1 & 1, turn >> 2
        out[k].fill(cupy.nan)
        gemm(places["a"][i], places["b"][j], out=out[k], **options)
        kept.append(out[k].copy())
        agree(kept[-1], sources["a"][i], sources["b"][j])


@every_config
def test_two_streams_in_turns(name):
    options, streams = options_of(name), [cupy.cuda.Stream(non_blocking=True) for _ in range(6)]
    a, b = pair(3, 500, 400, 700)
    x, y = cupy.asarray(a), cupy.asarray(b)
    expected = gemm(x, y, **options)
    cupy.cuda.Device().synchronize()
    results = []
    for number in range(60):
        with streams[number % 2 if number < 40 else number % 6]:
            results.append(gemm(x, y, **options))
    cupy.cuda.Device().synchronize()
    for result in results:
        assert (result.view(cupy.uint32) == expected.view(cupy.uint32)).all()


@pytest.mark.parametrize("axis", ["m", "n"])
def test_reductions_repeat_too(axis):
    a, b = pair(5)
    x, y = cupy.asarray(a), cupy.asarray(b)
    names = ["sum", "absmax", "argmax"]
    first = gemm_reduce(x, y, reduce=names, axis=axis)
    for _ in range(50):
        again = gemm_reduce(x, y, reduce=names, axis=axis)
        for name in names:
            assert (again[name] == first[name]).all()
    expected = np.abs(a.astype("c16") @ b).max(0 if axis == "m" else 1)
    np.testing.assert_allclose(first["absmax"].get(), expected, rtol=1e-5)


def test_prepared_operands_of_several_addresses():
    options_of("wgmma")
    a, b = pair(1)
    y = cupy.asarray(b)
    right = prepare(y, "b", "3xfp16")
    for seed in (1, 11, 21):
        a, _ = pair(seed)
        x = cupy.asarray(a)
        plain = gemm(x, y, compute="3xfp16")
        for left in (x, prepare(x, "a", "3xfp16")):
            result = gemm(left, right, compute="3xfp16")
            assert (result.view(cupy.uint32) == plain.view(cupy.uint32)).all()
