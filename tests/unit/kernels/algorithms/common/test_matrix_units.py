"""The way from arrays to launches that kernels for matrix units share: pieces of a batch, addresses, who is first."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gemmserve_kernels.algorithms.common.matrix_units import pieces, rebase, run_stored, set_exponents
from gemmserve_kernels.algorithms.common.operands import Operands, written
from gemmserve_kernels.algorithms.common.splits import Planes
from gemmserve_kernels.algorithms.mfma.plan import MfmaParams
from gemmserve_kernels.algorithms.mfma.tile import MfmaTile
from gemmserve_kernels.device.struct_params import BATCH_DIMS, StoredArray
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

TILE = MfmaTile(64, 32, 16, 32, 32)


def stored(shape, dtype="float32", phase=0):
    array = np.zeros(shape, dtype)
    return StoredArray(shape, array.strides, array.dtype, phase)


def views_of(problem, a, b, c=None, d=None):
    operands = Operands.of(problem, a, b)
    return [operands.a, operands.b, *written(problem, c, d)]


def test_a_piece_has_the_tiles_of_its_matrices_and_the_scalars_of_the_product():
    a, b, d = stored((3, 70, 40)), stored((40, 33)), stored((3, 70, 33))
    operands = [Operand.contiguous(x.shape, x.dtype) for x in (a, b, d)]
    problem = GemmProblem.build(*operands, alpha=2, beta=-1)
    ((gemm, tiles, first, exponents),) = pieces(problem, TILE, views_of(problem, a, b, d, d), (True, False))
    assert (gemm.m, gemm.n, gemm.k, gemm.tiles_m, gemm.tiles_n, tiles, first) == (70, 33, 40, 2, 2, 12, 0)
    assert (list(gemm.alpha), list(gemm.beta)) == ([2, 0], [-1, 0])
    assert (gemm.conjugate_a, gemm.conjugate_b) == (1, 0)
    assert list(exponents) == []
    assert gemm.b.batch_stride[-1] == 0
    assert gemm.d.batch_stride[-1] == 70 * 33


def test_a_batch_of_many_axes_is_cut_in_pieces_that_count_their_matrices():
    """Every other matrix along each axis, so that no two axes are one."""
    shape = tuple(range(2, 2 + BATCH_DIMS + 1))
    array = np.zeros((*(2 * extent for extent in shape), 8, 8), "f4")[(slice(None, None, 2),) * len(shape)]
    x = StoredArray(array.shape, array.strides, array.dtype, 0)
    problem = GemmProblem.build(Operand.of(array), Operand.of(array))
    found = list(pieces(problem, TILE, views_of(problem, x, x, x, x), (False, False)))
    assert [first for _, _, first, _ in found] == [0, problem.batch // 2]
    assert [tiles for _, tiles, _, _ in found] == [problem.batch // 2] * 2
    assert [gemm.a.re for gemm, *_ in found] == [0, array.strides[0]]


def test_a_reduction_has_no_beta_and_needs_no_product():
    a = stored((40, 40))
    operand = Operand.contiguous(a.shape, a.dtype)
    problem = GemmReduceProblem.build(operand, operand, reduce=["max"])
    ((gemm, *_),) = pieces(problem, TILE, views_of(problem, a, a), (False, False))
    assert list(gemm.beta) == [0, 0]
    assert (gemm.d.re, gemm.d.row_stride) == (0, 0)


def test_where_planes_and_their_exponents_lie():
    layout = Planes("3xfp16", True, "a", "data", "exponents", 2, 70, 100, 128, (1, 0)).layout()
    assert (layout.data, layout.exponents) == (None, None)
    view = layout.first_plane()
    assert (view.rows, view.columns, view.row_stride, view.column_stride) == (70, 100, 128, 1)
    assert view.batch_strides == (4 * 70 * 128, 0)
    assert layout.row_exponents().batch_strides == (70, 0)
    params = MfmaParams()
    set_exponents(params, [layout.row_exponents(), layout.row_exponents().shifted(3)])
    assert list(params.exponents) == [0, 12]
    assert params.exponent_stride[1][BATCH_DIMS - 2] == 70
    for matrix, start in zip("abcd", itertools.count(1), strict=False):
        getattr(params.work.gemm, matrix).im = start
    rebase(params.work.gemm, params, [100, 200, 300, 400], [1000, 2000])
    assert [getattr(params.work.gemm, matrix).re for matrix in "abcd"] == [100, 200, 300, 400]
    assert [getattr(params.work.gemm, matrix).im for matrix in "abcd"] == [101, 202, 303, 404]
    assert list(params.exponents) == [1000, 2012]


class Machine:
    """A launcher by which arrays are addresses."""

    @staticmethod
    def pointer(array):
        return array.ctypes.data


class Recorder:
    def __init__(self, *, swapped):
        self.swapped, self.length, self.bases = swapped, 1, []

    def launch(self, launcher, bases, exponents=(0, 0), *, partials=None, first_matrix=0):
        self.bases = list(bases)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("beta", [0, 1])
def test_a_and_b_change_places_and_c_is_not_looked_at_without_beta(swapped, beta):
    a, b, c, out = (np.zeros((8, 8), "f4") for _ in range(4))
    operand = Operand.of(a)
    problem = GemmProblem.build(operand, operand, operand, beta=beta)
    plan, seen = Recorder(swapped=swapped), []

    def plan_of(*arrays):
        seen.extend(arrays)
        return plan

    run_stored(Machine, problem, plan_of, a, b, c, out)
    first = [b, a] if swapped else [a, b]
    expected = [StoredArray.of(Machine, x) for x in (*first, c if beta else out, out)]
    assert plan.bases == [base for _, base in expected]
    assert seen[2:] == [found for found, _ in expected[2:]]
