"""What the host of the Hopper kernel hands over: an emulated device does in NumPy what the arguments say."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest

from gemmserve_kernels.algorithms.common.splits import PITCH, PLANES, Planes
from gemmserve_kernels.algorithms.wgmma import gemm as wgmma
from gemmserve_kernels.algorithms.wgmma.plan import WgmmaParams
from gemmserve_kernels.device import tensor_map
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, Operand

H200 = KNOWN["H200"]
TYPES = {"Half": "f2", "float": "f4", "Complex<float>": "c8"}


def _read(address, dtype, shape, strides):
    """The array at `address`, strides in bytes."""
    dtype = np.dtype(dtype)
    low = sum(min(0, (extent - 1) * step) for extent, step in zip(shape, strides, strict=True))
    high = sum(max(0, (extent - 1) * step) for extent, step in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = (ctypes.c_uint8 * (high - low)).from_address(address + low)
    return np.ndarray(shape, dtype, memory, offset=-low, strides=strides)


class EmulatedDevice:
    """Runs `wgmma_gemm` by its arguments; `encoded` remembers what each tensor map stands for."""

    spec = H200
    max_grid = 2**31 - 1

    def __init__(self):
        self.launched = []
        self.encoded = []

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype)

    def pointer(self, array):
        return array.ctypes.data

    def tensor_map(self, box, address):
        self.encoded.append((box, address))
        found = tensor_map.TensorMap()
        found.words[0] = len(self.encoded) - 1
        return found

    def launch(self, source, entry, *, grid, block, shared, params, dependent=False):
        self.launched.append((entry, grid, block, shared, dict(source.defines)))
        if entry == "wgmma_gemm":
            self._multiply(dict(source.defines), params)

    def _operand(self, side, box, params):
        """Planes and exponents, (batch..., planes, rows, k), (batch..., rows), as the kernel finds them."""
        encoded, address = self.encoded[box.words[0]]
        pitch, rows, count, matrices = encoded.extents
        data = _read(
            address, "f2", (matrices, count, rows, pitch), (2 * count * rows * pitch, 2 * rows * pitch, 2 * pitch, 2)
        )
        exponents = _read(side.exponents, "i4", (matrices, rows), (4 * rows, 4))
        shape = tuple(params.batch_shape)
        index = np.full(shape, side.first_matrix)
        for axis, (extent, step) in enumerate(zip(shape, side.batch_stride, strict=True)):
            index = index + (np.arange(extent) * step).reshape((-1,) + (1,) * (len(shape) - axis - 1))
        return data[index].astype(np.float64), exponents[index]

    def _matrix(self, matrix, dtype, params):
        item = np.dtype(dtype).itemsize
        shape = (*params.batch_shape, params.m, params.n)
        strides = tuple(item * step for step in (*matrix.batch_stride, matrix.row_stride, matrix.column_stride))
        return [_read(address, dtype, shape, strides) for address in (matrix.re, matrix.im)]

    def _multiply(self, defines, params):
        left, left_exponents = self._operand(params.left, params.map_left, params)
        right, right_exponents = self._operand(params.right, params.map_right, params)
        assert left.shape[-2:-1] + right.shape[-2:-1] == (params.m, params.n)
        block_k = int(defines["BLOCK_K"])
        assert params.k_blocks * block_k <= -(-left.shape[-1] // block_k) * block_k
        k = params.k_blocks * block_k
        left, right = left[..., :k], right[..., :k].swapaxes(-1, -2)

        def value(planes, first, last):
            return sum(planes[..., index, :, :] for index in range(first, last))

        scheme, is_complex, swapped = (int(defines[name]) for name in ("SCHEME", "COMPLEX", "SWAPPED"))
        count = left.shape[-3]
        if not is_complex:
            total = value(left, 0, count) @ value(right, 0, count)
        elif scheme == 1:
            starts = [(4, 0), (0, 2), (2, 4)]
            p = [
                value(left, b if swapped else a, (b if swapped else a) + 2)
                @ value(right, a if swapped else b, (a if swapped else b) + 2)
                for a, b in starts
            ]
            total = (p[0] - p[2]) + 1j * (p[0] + p[1])
        else:
            left = left[..., 0::2, :, :].sum(axis=-3) + 1j * left[..., 1::2, :, :].sum(axis=-3)
            right = right[..., 0::2, :, :].sum(axis=-3) + 1j * right[..., 1::2, :, :].sum(axis=-3)
            total = left @ right
        total = total * np.exp2((left_exponents[..., :, None] + right_exponents[..., None, :]).astype(float))
        alpha, beta = (complex(*pair) if is_complex else pair[0] for pair in (params.alpha, params.beta))
        planar = int(defines["PLANAR"])
        d_re, d_im = self._matrix(params.d, TYPES[defines["TYPE_D"]], params)
        result = alpha * total
        if beta != 0:
            c_re, c_im = self._matrix(params.c, TYPES[defines["TYPE_C"]], params)
            result = result + beta * (c_re + 1j * c_im if planar else c_re)
        if planar:
            d_re[...], d_im[...] = result.real, result.imag
        else:
            d_re[...] = result


@pytest.fixture
def device():
    return EmulatedDevice()


def _planes(x, scheme, side, batch_shape):
    """`x` of small integers, (..., rows, k): exact in the first part of every plane pair."""
    lead, (rows, k) = x.shape[:-2], x.shape[-2:]
    flat = x.reshape(-1, rows, k)
    zero = np.zeros(flat.shape)
    if x.dtype.kind != "c":
        stored = [flat, zero]
    elif scheme == "3xfp16-3m":
        middle = flat.imag if side == "a" else flat.imag - flat.real
        stored = [flat.real, zero, middle, zero, flat.real + flat.imag, zero]
    else:
        stored = [flat.real, flat.imag, zero, zero]
    count = len(PLANES[scheme, x.dtype.kind == "c", side])
    pitch = -(-k // PITCH) * PITCH
    data = np.zeros((len(flat), count, rows, pitch), np.float16)
    data[..., :k] = np.stack(stored[:count], axis=1)
    exponents = np.arange(len(flat) * rows, dtype=np.int32).reshape(len(flat), rows) % 5 - 2
    lead = (1,) * (len(batch_shape) - len(lead)) + lead
    steps = [0 if extent == 1 else math.prod(lead[axis + 1 :]) for axis, extent in enumerate(lead)]
    found = Planes(scheme, x.dtype.kind == "c", side, data, exponents, len(flat), rows, k, pitch, tuple(steps))
    return found, x * np.exp2(exponents.reshape(*x.shape[:-2], rows, 1)).astype(np.float32)


def _integers(rng, shape, dtype):
    x = rng.integers(-3, 4, shape)
    return (x + 1j * rng.integers(-3, 4, shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def _run(device, scheme, dtype, extents, *, a=(), b=(), c=None, out="C", config=None, layout="interleaved", **options):
    m, n, k = extents
    rng = np.random.default_rng(7)
    left, right = _integers(rng, (*a, m, k), dtype), _integers(rng, (*b, n, k), dtype)
    batch = np.broadcast_shapes(a, b)
    (left_planes, left), (right_planes, right) = _planes(left, scheme, "a", batch), _planes(right, scheme, "b", batch)
    stored = [left, right.swapaxes(-1, -2)]
    addend = None if c is None else _integers(rng, c, dtype)
    if layout == "planar":
        stored = [np.stack([x.real, x.imag]) for x in stored]
        addend = None if addend is None else np.stack([addend.real, addend.imag])
    problem = GemmProblem.build(
        *(Operand.of(x) for x in stored), None if addend is None else Operand.of(addend), layout=layout, **options
    )
    tile = wgmma.resolve(config, problem, H200, scheme)
    shape = problem.result_shape
    if out == "F":
        result = np.full((*shape[:-2], n, m), np.nan, problem.result_dtype).swapaxes(-1, -2)
    else:
        result = np.full(shape, np.nan, problem.result_dtype)
    wgmma.multiply(device, problem, tile, left_planes, right_planes, addend, result)
    expected = reference.oracle_gemm(problem, *stored, addend)
    np.testing.assert_allclose(reference.logical(problem, result), expected, rtol=1e-6)
    return tile


CASES = {
    "plain": {"extents": (70, 50, 90)},
    "columns next to each other": {"extents": (70, 50, 90), "out": "F", "c": (70, 50), "beta": 2},
    "one row": {"extents": (1, 50, 3), "out": "F"},
    "batch of A": {"extents": (9, 7, 5), "a": (3,), "alpha": -2},
    "batch of B": {"extents": (9, 7, 5), "b": (3,), "c": (1, 9, 1), "beta": 1},
    "both broadcast": {"extents": (9, 7, 5), "a": (4, 1, 2), "b": (3, 1), "c": (3, 1, 9, 7), "beta": -1},
    "more axes than a launch has": {"extents": (9, 7, 5), "a": (2, 1, 2, 1, 2, 1), "b": (2, 1, 2, 1, 2)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("3xfp16", "c8"), ("3xfp16-3m", "c8"), ("1xfp16", "c8"), ("3xfp16", "f4"), ("1xfp16", "f4")],
)
def test_the_arguments_describe_the_product(device, scheme, dtype, case):
    _run(device, scheme, dtype, **case)


@pytest.mark.parametrize("scheme", ["3xfp16", "3xfp16-3m", "1xfp16"])
@pytest.mark.parametrize("out", ["C", "F"])
def test_planar(device, scheme, out):
    _run(
        device, scheme, "c8", (20, 30, 40), a=(2,), c=(20, 30), out=out, layout="planar", alpha=1 - 2j, beta=2j
    )  # fmt: skip


def test_launch_shapes(device):
    tile = _run(device, "3xfp16", "c8", (300, 260, 64), config=GemmConfig(block_m=128, block_n=128, split_k=1))
    entry, grid, block, shared, _ = device.launched[-1]
    assert (entry, grid, block, shared) == ("wgmma_gemm", 9, 384, tile.shared_bytes)


def test_a_persistent_grid_is_the_device(device):
    _run(device, "3xfp16", "c8", (300, 260, 64), a=(30,), config=GemmConfig(block_m=128, block_n=128, split_k=1))
    assert device.launched[-1][1] == H200.sm_count


def test_a_cluster_fills_whole_clusters(device):
    config = GemmConfig(block_m=128, block_n=128, block_k=32, cluster=2, split_k=1)
    _run(device, "3xfp16", "c8", (300, 260, 64), config=config)
    assert device.launched[-1][1] == 12  # two rows of clusters, three columns, two blocks each


def test_split_over_a_cluster(device):
    _run(device, "3xfp16", "c8", (60, 60, 256), config=GemmConfig(split_k=4))
    (entry, grid, *_, defines) = device.launched[-1]
    assert (entry, grid, defines["SPLIT"], defines["PARTIAL"]) == ("wgmma_gemm", 4, "4", "0")


def test_split_over_grids_is_combined(device):
    _run(device, "3xfp16", "c8", (60, 60, 2048), config=GemmConfig(split_k=12))
    (first, grid, *_, defines), (second, blocks, threads, shared, _) = device.launched
    assert (first, grid, defines["SPLIT"], defines["PARTIAL"]) == ("wgmma_gemm", 12, "4", "1")
    assert (second, threads, shared) == ("wgmma_combine", 256, 0)
    assert (blocks - 1) * threads < 60 * 60 <= blocks * threads


def test_boxes(device):
    _run(device, "3xfp16", "c8", (130, 70, 100), config=GemmConfig(block_m=128, block_n=64, block_k=32, split_k=1))
    assert [box.box for box, _ in device.encoded] == [(32, 128, 4, 1), (32, 64, 4, 1)]
    assert [box.extents for box, _ in device.encoded] == [(128, 130, 4, 1), (128, 70, 4, 1)]
    device.encoded.clear()
    _run(device, "3xfp16", "f4", (130, 300, 64), config=GemmConfig(block_m=128, block_n=256, cluster=2, split_k=1))
    assert [box.box for box, _ in device.encoded] == [(64, 128, 2, 1), (64, 256, 1, 1)]  # a plane each
    device.encoded.clear()
    _run(device, "1xfp16", "f4", (130, 300, 64), config=GemmConfig(block_m=128, block_n=256, cluster=2, split_k=1))
    assert [box.box for box, _ in device.encoded] == [(64, 128, 1, 1), (64, 128, 1, 1)]  # half of the rows each


def test_vectors_only_where_every_row_is_aligned(device):
    _run(device, "3xfp16", "c8", (20, 31, 40))
    assert device.launched[-1][-1]["VECTOR_D"] == "0"
    _run(device, "3xfp16", "f4", (20, 30, 40))
    assert device.launched[-1][-1]["VECTOR_D"] == "1"


def test_arguments_have_the_kernels_layout():
    """Tensor maps come first, and the whole is a multiple of their alignment, as nvcc lays it out."""
    assert WgmmaParams.map_left.offset == 0
    assert WgmmaParams.map_right.offset == 128
    assert WgmmaParams.left.offset == 256
    assert WgmmaParams.alpha.offset % 8 == 0
    assert ctypes.sizeof(WgmmaParams) % 64 == 0
