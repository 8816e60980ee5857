"""The pre-pass in every shape of blocks and clusters, on the CPU shim, against the NumPy model bit for bit.

The shim has no clusters: one of its blocks stands for all blocks of one (cuda/splits/queue.cuh).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_models import splits as plane_models
from simt_cases import random
from simt_shim import ShimLauncher
from simt_shim.module import Order

from gemmserve_kernels.algorithms.common import verdict
from gemmserve_kernels.algorithms.splits import split
from gemmserve_kernels.algorithms.splits.geometry import Geometry, geometry_of
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.device.struct_params import StoredArray

H200 = KNOWN["H200"]
TINY = Geometry(threads=64, blocks=2, held=1, strip=128, patches=1, cluster=1)


class ClusterLauncher(ShimLauncher):
    """Runs the blocks of a cluster as one."""

    cluster = 1

    def launch(self, source, entry, *, grid, block, shared, **rest):
        super().launch(
            source, entry, grid=grid // self.cluster, block=block * self.cluster, shared=shared * self.cluster, **rest
        )


@pytest.fixture
def launcher():
    return ClusterLauncher(replace(H200, sm_count=2), order=Order("shuffled", 1))


def check(launcher, geometry, monkeypatch, matrices, *, rows, k, trans, dtype="complex64", scheme="3xfp16"):
    """Both operands in one launch; op(A) is rows x k, op(B) k x (rows + 5)."""
    monkeypatch.setattr(split, "geometry_of", lambda k, spec: geometry)
    split.plan.cache_clear()
    each = verdict.words(matrices, rows + 5)
    words = launcher.zeros((4 + 2 * each,), np.dtype(np.int32))
    arrays, operands, bases = [], [], []
    for i, (name, extent) in enumerate((("a", (rows, k)), ("b", (k, rows + 5)))):
        shape = (matrices, *(extent if trans[i] == "N" else extent[::-1]))
        array = random(i, dtype, *shape)
        array[0, 0] *= np.float32(2.0**40) if name == "a" else 1
        arrays.append(launcher.array(array))
        stored, base = StoredArray.of(launcher, arrays[i])
        side = split.SplitSide.of(stored, (matrices,), trans[i], left=name == "a", planar=False)
        operands.append(split.allocate(launcher, scheme, side, name, verdict.Deficits(words, 4 + i * each)))
        bases.append(base)
    how = split.plan(launcher.spec, scheme, *(operand.side for operand in operands))
    launcher.cluster = how.cluster
    split.run(launcher, *operands, *bases, launcher.pointer(words))
    split.plan.cache_clear()
    for i, name in enumerate("ab"):
        found = words[5 + i * each :][: 4 * matrices].reshape(matrices, 4)
        doubtful = 0
        for matrix in range(matrices):
            x = np.array(arrays[i])[matrix]
            x = x.T if trans[i] == "T" else x
            model = plane_models.split(np.ascontiguousarray(x if name == "a" else x.T), scheme, name)
            data = operands[i].planes.data[matrix]
            np.testing.assert_array_equal(data[..., :k], model.planes)
            assert not data[..., k:].any()
            np.testing.assert_array_equal(operands[i].planes.exponents[matrix], model.exponents)
            np.testing.assert_array_equal(found[matrix], plane_models.group_counts(model.counts)[0])
            doubtful += int(verdict.is_doubtful(model.counts, k).sum())
        assert words[4 + i * each] == doubtful
    return how


@pytest.mark.parametrize(
    ("geometry", "k", "trans"),
    [
        (replace(TINY, cluster=4, ranks=4, strip=32), 470, "NN"),  # a vector is four blocks'
        (replace(TINY, cluster=4, ranks=2, strip=64, patches=2, stages=1), 1000, "TN"),
        (replace(TINY, cluster=2, ranks=2, held=2), 2500, "NN"),  # longer than what is held
    ],
)
def test_clusters(launcher, monkeypatch, geometry, k, trans):
    how = check(launcher, geometry, monkeypatch, 2, rows=21, k=k, trans=trans)
    assert how.cluster == geometry.cluster


@pytest.mark.parametrize(("strip", "dtype"), [(64, "float32"), (32, "complex64")])
def test_strips(launcher, monkeypatch, strip, dtype):
    check(launcher, replace(TINY, strip=strip), monkeypatch, 1, rows=70, k=90, trans="TN", dtype=dtype)


@pytest.mark.parametrize("k", [1, 64, 65, 128, 129, 256, 300, 512, 1000, 2048, 4096, 8192, 16384, 40000])
def test_what_hopper_holds(k):
    """Up to 16384 steps of k everything is read once, whichever way it lies."""
    geometry = geometry_of(k, H200)
    if geometry.alone:
        assert k <= geometry.alone <= max(64, 2 * k)
        assert geometry.alone - k < 256
    else:
        assert geometry.along_k >= min(k, 65536)
        assert geometry.across_k >= min(k, 16384)
        assert geometry.cluster % geometry.ranks == 0
        assert geometry.team(k) in {32, 64, 128, 256, 512}
    for complex_data in (False, True):
        shared = max(geometry.shared_bytes(k, complex_data=complex_data, along=along) for along in (False, True))
        assert shared % 16 == 0
        assert geometry.blocks * (shared + 1024) <= 228 * 1024
        assert shared <= H200.shared_per_block


@pytest.mark.parametrize(
    ("k", "rows", "dtype", "trans"),
    [
        (64, 32, "complex64", "NN"),  # whole units
        (64, 59, "complex64", "TN"),
        (50, 37, "float32", "NN"),  # a part of a vector's pitch
        (64, 91, "float32", "TT"),
        (128, 27, "complex64", "NN"),
        (101, 40, "float32", "NT"),
        (256, 19, "complex64", "TN"),  # one stage, and a whole warp for a vector
        (200, 35, "float32", "NN"),
        (1, 40, "complex64", "NN"),
        (512, 21, "complex64", "TN"),  # two runs of a lane
        (700, 13, "complex64", "NN"),
        (768, 16, "float32", "TT"),
        (1024, 8, "complex64", "NT"),
        (1000, 19, "float32", "NN"),
    ],
)
@pytest.mark.parametrize("scheme", ["3xfp16", "3xfp16-3m"])
def test_vectors_held_whole(launcher, monkeypatch, k, rows, dtype, trans, scheme):
    """Each block has units of both operands and of several matrices."""
    if scheme == "3xfp16-3m" and dtype == "float32":
        scheme = "1xfp16"
    geometry = geometry_of(k, H200)
    assert geometry.alone
    how = check(launcher, geometry, monkeypatch, 9, rows=rows, k=k, trans=trans, dtype=dtype, scheme=scheme)
    assert how.grid <= 2 * geometry.blocks


@pytest.mark.parametrize(
    ("matrices", "rows", "scheme", "blocks"),
    [
        (64, 1024, "3xfp16", 3 * 132),  # 4096 units: as many blocks as fit
        (64, 1024, "6xbf16", 2 * 132),  # more registers
        (1, 16, "3xfp16", 2),  # one unit of either operand
        (1, 3000, "3xfp16", 2 * 94),
    ],
)
def test_blocks_that_hold_vectors(matrices, rows, scheme, blocks):
    k, item = 256, 4
    a = StoredArray((matrices, rows, k), (rows * k * item, k * item, item), np.dtype(np.float32), 0)
    b = StoredArray((matrices, k, rows), (rows * k * item, rows * item, item), np.dtype(np.float32), 0)
    sides = [split.SplitSide.of(x, (matrices,), "N", left=left, planar=False) for x, left in ((a, True), (b, False))]
    plan = split.plan(H200, scheme, *sides)
    assert plan.grid == blocks
    assert dict(plan.source.defines)["MIN_BLOCKS"] == str(plan.geometry.blocks)


def test_vectors_held_whole_with_narrow_strips(launcher, monkeypatch):
    geometry = geometry_of(200, KNOWN["MI300X"])
    check(launcher, geometry, monkeypatch, 3, rows=43, k=200, trans="NT")


def test_vectors_held_whole_where_shared_memory_is_scarce():
    for name, least in (("RTX5090", 5), ("A100", 2), ("MI300X", 3), ("RX7900XTX", 3)):
        for k in (64, 128, 256):
            geometry = geometry_of(k, KNOWN[name])
            shared = geometry.shared_bytes(k, complex_data=True, along=True)
            assert shared <= KNOWN[name].shared_per_block
            assert least <= geometry.blocks <= KNOWN[name].shared_per_sm // shared


@pytest.mark.parametrize(("cluster", "trans"), [(1, "NN"), (1, "NT"), (1, "TN"), (1, "TT"), (2, "TN")])
def test_units_of_a_batch_come_in_chunks(launcher, monkeypatch, trans, cluster):
    """Chunks that end within a matrix and beyond it; a device of few blocks, each of which has several."""
    geometry = replace(TINY, cluster=cluster, ranks=1, stages=3)
    rows = 83 if trans in {"NN", "NT"} else 150
    how = check(launcher, geometry, monkeypatch, 23, rows=rows, k=70, trans=trans)
    chunks = how.params.a.chunk, how.params.b.chunk
    assert max(chunks) > 1
    for params in (how.params.a, how.params.b):
        assert params.chunk == 1 or params.units * params.matrices > params.groups * params.chunk
