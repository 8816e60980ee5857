"""Which operands in double precision the copy engine can fetch, and what it is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gemmserve_kernels.algorithms.dmma.engine import Source
from gemmserve_kernels.device.struct_params import MatrixView

BASE = 1 << 20


def view(rows=100, k=64, strides=(64, 1), batch=(), dtype=np.float64, at=BASE):
    return MatrixView(at, at, np.dtype(dtype), rows, k, *strides, batch)


def source(of, batch_shape=(1, 1, 1, 1), *, along_k=True):
    return Source.of(of, batch_shape, along_k=along_k, block=128, block_k=16)


def test_a_matrix_along_k():
    found = source(view())
    assert found.address == BASE
    assert found.box.extents == (4 * 64, 100, 1, 1)
    assert found.box.box == (64, 128, 1, 1)
    assert found.box.byte_strides[0] == 512
    assert found.batch_strides == (0, 0, 0, 0)


def test_a_matrix_across_k():
    found = source(view(strides=(1, 102)), along_k=False)
    assert found.box.extents == (4 * 100, 64, 1, 1)
    assert found.box.box == (64, 16, 1, 1)
    assert found.box.byte_strides[0] == 816


def test_complex_numbers_are_eight_words():
    found = source(view(dtype=np.complex128, strides=(65, 1)))
    assert found.box.extents[0] == 8 * 64
    assert found.box.byte_strides[0] == 16 * 65


def test_a_batch_is_one_axis():
    """A step of 640 elements divides both strides; a stride of 0 repeats a matrix."""
    found = source(view(batch=(1920, 0, 1280)), (1, 3, 5, 2))
    assert found.box.extents[3] == 1 + 2 * 3 + 2
    assert found.box.byte_strides[2] == 640 * 8
    assert found.batch_strides == (0, 3, 0, 2)


@pytest.mark.parametrize(
    "of",
    [
        view(strides=(65, 1)),
        view(strides=(64, 2)),
        view(strides=(-64, 1)),
        view(strides=(0, 1)),
        view(at=BASE + 8),
        view(strides=(1 << 37, 1)),
        view(k=1 << 29, strides=(1 << 29, 1)),
    ],
    ids=["odd rows", "not neighbours", "backwards", "repeated rows", "off the boundary", "far apart", "too long"],
)
def test_what_it_cannot_fetch(of):
    assert source(of) is None


@pytest.mark.parametrize("stride", [641, -640])
def test_a_batch_that_it_cannot_fetch(stride):
    assert source(view(batch=(stride,)), (1, 1, 1, 3)) is None


def test_a_single_row_or_step_has_any_stride():
    assert source(view(rows=1, strides=(7, 1))) is not None
    assert source(replace(view(), columns=1, column_stride=5)) is not None
