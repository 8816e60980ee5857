"""Checkpoints: who is asked, and that a computation ends where the answer is no."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gemmserve_kernels import gemm, gemm_reduce
from gemmserve_kernels.device.interruption import checkpoint, interruptible, pieces


class StopError(Exception):
    pass


def test_the_innermost_is_asked_and_only_in_its_own_thread():
    asked = []
    checkpoint()
    with interruptible(lambda: asked.append("outer")):
        checkpoint()
        with interruptible(lambda: asked.append("inner")):
            checkpoint()
        other = threading.Thread(target=checkpoint)
        other.start()
        other.join()
        checkpoint()
    checkpoint()
    assert asked == ["outer", "inner", "outer"]


def test_pieces_are_the_array_and_small():
    array = np.arange(7 * 5 * 300).reshape(7, 5, 300)[:, ::2]
    asked = []
    with interruptible(lambda: asked.append(None)):
        found = list(pieces(array, 1000))
    assert len(asked) == len(found) > 1
    assert max(piece.nbytes for piece in found) <= 1000
    for piece in found:
        piece[...] = -1
    assert (array == -1).all()
    assert [piece.shape for piece in pieces(np.zeros((3, 0)), 8)] == [(3, 0)]
    assert [piece.shape for piece in pieces(np.zeros(()), 1)] == [()]


def stops_after(count):
    left = iter(range(count))

    def stop():
        if next(left, None) is None:
            raise StopError

    return stop


@pytest.mark.parametrize(
    "product",
    [
        lambda: gemm_reduce(np.ones((1 << 20, 1), "f4"), np.ones((1, 16), "f4"), reduce="absmax"),
        lambda: gemm_reduce(np.ones((1 << 20, 0), "f4"), np.ones((0, 16), "f4"), return_c=True),
        lambda: gemm_reduce(np.ones((1 << 16, 64), "f4"), np.ones((64, 512), "f4"), reduce="sumsq"),
        lambda: gemm(np.ones((64, 1 << 18)), np.ones((1 << 18, 2))),
        lambda: gemm(np.ones((1000, 2), "f2"), np.ones((2, 4000), "f2")),
    ],
    ids=["reduced", "nothing", "gram", "long", "blocks"],
)
def test_a_product_can_be_interrupted(product):
    with interruptible(stops_after(2)), pytest.raises(StopError):
        product()
    product()


@pytest.mark.parametrize("dtype", ["f4", "c16"])
def test_sums_in_parts_are_the_sums(dtype, monkeypatch):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((5, 1000), (1000, 7)))
    c = np.ones((5, 7), dtype)
    whole = gemm(a, b), gemm(a, b, c, alpha=2, beta=3), gemm_reduce(a, b)
    monkeypatch.setattr("gemmserve_kernels.algorithms.cpu.gemm._LONG_K", 64)
    parts = gemm(a, b), gemm(a, b, c, alpha=2, beta=3), gemm_reduce(a, b)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)
