"""ShimLauncher: the kernels' own host code on the CPU; guarded memory; every barrier of the kernels is needed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import pytest
from simt_shim import ORDERS, LaunchError, MemoryFault, Order, ShimError, ShimLauncher

from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

DEVICES = {32: KNOWN["H200"], 64: KNOWN["MI300X"]}
TILE = GemmConfig(block_m=16, block_n=16, block_k=4, thread_m=2, thread_n=2)


@dataclass(frozen=True)
class TextSource:
    """A kernel source given as text, where the launcher wants a KernelSource."""

    text: str


def _random(*shape):
    rng = np.random.default_rng(5)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)


def _gemm(launcher, config=TILE):
    a, b, c = (launcher.array(_random(*shape)) for shape in ((2, 37, 21), (2, 21, 18), (37, 18)))
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c), alpha=0.5, beta=2j)
    out = launcher.empty(problem.result_shape, problem.result_dtype)
    simt.run_gemm(launcher, problem, config, a, b, c, out)
    return out, 0.5 * (a @ b) + 2j * c


def _gemm_reduce(launcher, config=TILE):
    a, b = (launcher.array(_random(*shape)) for shape in ((2, 37, 21), (2, 21, 18)))
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce=["sum", "absmax"])
    return simt.run_gemm_reduce(launcher, problem, config, a, b), a @ b


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("warp_size", [32, 64])
@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_the_host_code_runs_unchanged(order, warp_size, checked):
    launcher = ShimLauncher(DEVICES[warp_size], order=order, checked=checked)
    out, expected = _gemm(launcher)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    results, product = _gemm_reduce(launcher)
    np.testing.assert_allclose(results["sum"], product.sum(axis=-2), atol=1e-4)
    np.testing.assert_allclose(results["absmax"], abs(product).max(axis=-2), rtol=1e-5)
    assert launcher.launches == ["gemm", "gemm_reduce", "gemm_reduce_finish"]


def test_results_do_not_depend_on_the_order():
    outs = [_gemm(ShimLauncher(DEVICES[32], order=Order("shuffled", seed)))[0] for seed in range(3)]
    sums = [_gemm_reduce(ShimLauncher(DEVICES[64], order=Order("shuffled", seed)))[0]["sum"] for seed in range(3)]
    assert len({out.tobytes() for out in outs}) == 1
    assert len({out.tobytes() for out in sums}) == 1


class WithoutBarrier(ShimLauncher):
    """Takes one __syncthreads out of every source."""

    number = 0

    def launch(self, source, entry, **options):
        parts = source.text.split("__syncthreads();")
        text = "__syncthreads();".join(parts[: self.number + 1]) + "".join(
            part if i == 0 else "__syncthreads();" + part for i, part in enumerate(parts[self.number + 1 :])
        )
        super().launch(TextSource(text), entry, **options)


def _barriers(name):
    """Line by line, the barriers of the flattened source."""
    return KernelSource(name, ()).text.count("__syncthreads();")


@pytest.mark.parametrize(
    ("run", "stages", "number"),
    [(_gemm, 1, n) for n in range(_barriers("gemm"))]
    + [(_gemm_reduce, 1, n) for n in range(_barriers("gemm_reduce"))]
    # The barrier before the store belongs to one stage alone.
    + [(_gemm, 2, n) for n in range(_barriers("gemm")) if n != 1],
)
def test_every_barrier_of_the_kernels_is_needed_and_missed(run, stages, number):
    launcher = WithoutBarrier(DEVICES[32], checked=True)
    launcher.number = number
    with pytest.raises(ShimError, match=r"data race in shared memory|the block has not written"):
        run(launcher, replace(TILE, stages=stages))


def test_memory_is_poisoned_zeroed_and_copied():
    launcher = ShimLauncher(DEVICES[32])
    empty = launcher.empty((3, 5), np.dtype(np.float32))
    assert np.isnan(empty).all()
    assert launcher.pointer(empty) % 256 == 0
    assert not launcher.zeros((7,), np.dtype(np.complex128)).any()
    assert launcher.empty((0, 4), np.dtype(np.float64)).shape == (0, 4)

    strided = np.arange(60.0).reshape(5, 12)[::-1, 1::3]
    copy = launcher.array(strided)
    np.testing.assert_array_equal(copy, strided)
    assert copy.strides == strided.strides
    between = np.lib.stride_tricks.as_strided(copy[:, 0:], strided.shape, strided.strides)
    assert not np.isnan(between).any()
    gap = np.ndarray((1,), np.float64, copy.base, copy.ctypes.data - copy.base.ctypes.data + 8)
    assert np.isnan(gap).all()
    broadcast = launcher.array(np.broadcast_to(np.float32(3), (4, 4)))
    assert broadcast.strides == (0, 0)
    assert (broadcast == 3).all()


class Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("index", ctypes.c_int64))


STORE = TextSource(
    "struct Params { float* out; long long index; };\n"
    'extern "C" __global__ void store(Params p) { p.out[p.index] = 1; }'
)


def _store(launcher, array, index):
    params = Params(launcher.pointer(array), index)
    launcher.launch(STORE, "store", grid=1, block=1, shared=0, params=params)


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_a_write_next_to_a_buffer(checked):
    for index, where in ((-1, "4 bytes before"), (10, "0 bytes past the end of"), (500, "1960 bytes past the end of")):
        launcher = ShimLauncher(DEVICES[32], checked=checked)
        array = launcher.empty((10,), np.dtype(np.float32))
        _store(launcher, array, 9)
        assert array[9] == 1
        with pytest.raises(MemoryFault, match=f"{where} a buffer of 40 bytes"):
            _store(launcher, array, index)


def test_a_checked_launcher_knows_plain_arrays_too():
    launcher = ShimLauncher(DEVICES[32], checked=True)
    array = np.zeros(10, np.float32)
    _store(launcher, array[2:5], 2)
    assert array[4] == 1
    with pytest.raises(MemoryFault, match=r"0 bytes past the end of an array of shape \(3,\)"):
        _store(launcher, array[2:5], 3)


def test_limits_of_the_device():
    launcher = ShimLauncher(DEVICES[64], max_grid=4)
    options = {"block": 1, "params": Params(None, 0)}
    with pytest.raises(LaunchError, match="5 blocks, and the device takes 4"):
        launcher.launch(STORE, "store", grid=5, shared=0, **options)
    with pytest.raises(LaunchError, match="65537 bytes of shared memory a block, and AMD Instinct MI300X has 65536"):
        launcher.launch(STORE, "store", grid=1, shared=65537, **options)


def test_a_long_grid_is_launched_in_turns():
    launcher = ShimLauncher(DEVICES[32], max_grid=5)
    out, expected = _gemm(launcher)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    assert launcher.launches == ["gemm"] * 3
