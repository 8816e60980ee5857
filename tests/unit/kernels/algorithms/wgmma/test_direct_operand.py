"""Which float16 operands the copy engine can read as they lie, and what it is told."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gemmserve_kernels.algorithms.wgmma.direct import gemm
from gemmserve_kernels.algorithms.wgmma.direct.operand import direct_side, unfit
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.device.struct_params import MatrixView
from gemmserve_kernels.problem.problem import GemmProblem, Operand

HALF = np.dtype(np.float16)
H200 = KNOWN["H200"]


def view(rows, k, row_stride, k_stride, batch=(), *, phase=0):
    return MatrixView(phase, phase, HALF, rows, k, row_stride, k_stride, batch)


@pytest.mark.parametrize(
    ("matrix", "batch", "across"),
    [
        (view(40, 24, 24, 1), (), False),
        (view(40, 24, 1, 40), (), True),
        (view(40, 24, 32, 1, (0, 1280)), (5, 2), False),
        (view(1, 24, 7, 1), (), False),
        (view(1, 24, 7, 8), (), True),
        (view(40, 1, 8, 7), (), False),
        (view(40, 1, 1, 7), (), True),
        (view(1, 1, 3, 5), (), False),
        (view(40, 24, 24, 1, (3,)), (1,), False),
        (view(40, 24, 8, 1), (), False),
    ],
)
def test_what_fits(matrix, batch, across):
    assert unfit(matrix, batch) is None
    assert direct_side(matrix, batch).across is across


@pytest.mark.parametrize(
    ("matrix", "batch", "reason"),
    [
        (view(40, 23, 23, 1), (), "strides of 46 and 2 bytes"),
        (view(40, 24, 24, 2), (), "strides of 48 and 4 bytes"),
        (view(40, 24, -24, 1), (), "strides of -48"),
        (view(40, 24, 0, 1), (), "strides of 0"),
        (view(40, 24, 24, 0), (), "and 0 bytes"),
        (view(40, 24, 24, 1, (965,)), (2,), "1930 bytes apart"),
        (view(40, 24, 24, 1, phase=6), (), "begins 6 bytes past"),
        (view(40, 24, 24, 1, (-960,), phase=2), (3,), "begins 2 bytes past"),
        (view(40, 24, 1 << 39, 1), (), "2\\^40"),
        (view((1 << 31) - 8, 8, 8, 1), (), "too large"),
        (view(8, 8, 8, 1, (8, 1 << 36)), (2, 2), "too large"),
    ],
)
def test_what_does_not(matrix, batch, reason):
    assert re.search(reason, unfit(matrix, batch) or "")


def test_matrices_are_found_by_steps():
    """Steps of the largest size that divides all strides; the last matrix first; an outer axis broadcast."""
    side = direct_side(view(40, 24, 24, 1, (0, -960, 2880), phase=16), (4, 3, 2))
    assert (side.step, side.batch_strides, side.first, side.matrices) == (1920, (0, -1, 3), 2, 6)
    assert side.offset == 16 - 2 * 1920
    box = side.box(64, 128, 1)
    assert (box.extents, box.box) == ((24, 40, 1, 6), (64, 128, 1, 1))
    assert box.byte_strides == (48, 1920, 1920)


def test_other_strides_are_copied_where_the_copy_is_not_too_large():
    """Each matrix once."""
    odd, whole = np.zeros((40, 23), HALF), np.zeros((23, 32), HALF)
    assert gemm.supports(problem(odd, whole), H200) is None
    assert gemm.copies(problem(odd, whole)) == (2 * 40 * 24 * 2, 1)
    assert gemm.copies(problem(whole[:, ::2], odd[::-1], trans_a="T", trans_b="T")) == (2 * (23 * 16 + 40 * 24) * 2, 2)
    assert gemm.copies(problem(whole, whole, trans_a="T")) == (0, 0)
    batch = np.broadcast_to(odd, (1000, 40, 23))
    assert gemm.copies(problem(batch, whole)) == (2 * 40 * 24 * 2, 1)
    large = np.lib.stride_tricks.as_strided(np.empty(1, HALF), (1 << 20, 131), (262, 2))
    for pair, name in (((large, np.zeros((131, 8), HALF)), "a"), ((np.zeros((8, 131), HALF), large.T), "b")):
        reason = gemm.supports(problem(*pair), H200) or ""
        assert reason.startswith(f"{name}: a matrix of 1048576 x 131 with strides of 262 and 2 bytes")
        assert reason.endswith("a copy would take more than 256 MiB")


def test_a_box_across_is_one_column():
    box = direct_side(view(130, 70, 1, 136), ()).box(32, 128, 1)
    assert (box.extents, box.box, box.byte_strides[0]) == ((130, 70, 1, 1), (64, 32, 1, 1), 272)


def test_strides_of_what_has_one_element_are_made_up():
    for matrix in (view(1, 24, 3, 1), view(30, 1, 1, 3), view(1, 1, 0, 0)):
        box = direct_side(matrix, ()).box(64, 64, 1)
        assert all(stride > 0 and stride % 16 == 0 for stride in box.byte_strides)


def problem(a, b, **options):
    return GemmProblem.build(Operand.of(a), Operand.of(b), **options)


def test_supported_problems():
    a, b = np.zeros((40, 24), HALF), np.zeros((24, 32), HALF)
    assert gemm.supports(problem(a, b), H200) is None
    assert gemm.supports(problem(a, b, trans_a="R", order="F"), H200) is None
    assert gemm.supports(problem(a.T, a, trans_b="R"), H200) is None
    assert "Hopper" in (gemm.supports(problem(a, b), KNOWN["A100"]) or "")
    assert "float32" in (gemm.supports(problem(a, b.astype("f4")), H200) or "")
    assert "empty" in (gemm.supports(problem(a[:, :0], b[:0]), H200) or "")
    assert "alpha" in (gemm.supports(problem(a, b, alpha=0), H200) or "")
