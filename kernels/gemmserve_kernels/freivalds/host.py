"""The check with NumPy: the same figures as cuda/freivalds.cu, up to the rounding of double precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.freivalds.finding import floor_of
from gemmserve_kernels.freivalds.signs import VECTORS, signs
from gemmserve_kernels.interruption import checkpoint

if TYPE_CHECKING:
    from gemmserve_kernels.problem import GemmProblem

    Array = np.ndarray[Any, Any]

_PANEL_BYTES: Final = 1 << 20
"""Of an operand in double precision at a time: what stays in a processor's cache."""


def figures(problem: GemmProblem, a: Array, b: Array, c: Array | None, d: Array, seed: int) -> Array:
    """(products, 1, 3) figures, as `judged` takes them. The result is not empty."""
    x = signs(seed, problem.n)
    inner, inner_squares = _times(problem, b, problem.trans_b, x, np.ones(problem.n))
    expected, size = _times(problem, a, problem.trans_a, inner, inner_squares)
    expected, size = problem.alpha * expected, abs(problem.alpha) ** 2 * size + floor_of(problem)
    if c is not None and problem.beta != 0:
        of_c, squares = _times(problem, c, "N", x, np.ones(problem.n))
        expected, size = expected + problem.beta * of_c, size + abs(problem.beta) ** 2 * squares
    of_d, squares = _times(problem, d, "N", x, np.ones(problem.n))
    error, norm = _sum_of_squares(of_d - expected), _sum_of_squares(expected)
    known = np.isfinite(norm) & np.isfinite(size)
    error = np.where(known & ~np.isfinite(error), np.inf, error)
    ratio = np.where(error == 0, 0.0, error / (VECTORS * (size + squares)))
    ratio = np.where(np.isfinite(error), ratio, np.inf)
    ratio = np.where(known, ratio, np.nan)
    shape = (*problem.batch_shape, problem.m)
    of_rows = [np.broadcast_to(array, shape).reshape(-1, problem.m) for array in (error, norm, ratio)]
    return np.stack([of_rows[0].sum(-1), of_rows[1].sum(-1), of_rows[2].max(-1)], axis=-1)[:, None]


def _sum_of_squares(x: Array) -> Array:
    return np.asarray((np.square(x.real) + np.square(x.imag)).sum(axis=-1))


def _times(problem: GemmProblem, array: Array, trans: str, x: Array, square_weights: Array) -> tuple[Array, Array]:
    """op(array) x, and its squared magnitudes times `square_weights`, in double precision, panel by panel of rows."""
    planes = list(array) if problem.planar else [array]
    planes = [plane.swapaxes(-1, -2) if trans in {"T", "C"} else plane for plane in planes]
    columns = x.shape[-2]
    planes = [np.broadcast_to(plane, (*plane.shape[:-1], columns)) for plane in planes]  # of C
    rows = planes[0].shape[-2]
    matrices = max(1, planes[0].size // max(1, rows * columns))
    step = max(1, _PANEL_BYTES // (16 * max(1, columns) * matrices))
    wide = np.complex128 if problem.dtype.kind == "c" else np.float64
    products, squares = [], []
    for start in range(0, max(1, rows), step):
        checkpoint()
        panel = planes[0][..., start : start + step, :].astype(wide)
        if problem.planar:
            panel.imag = planes[1][..., start : start + step, :]
        if trans in {"C", "R"}:
            np.conjugate(panel, out=panel)
        products.append(panel @ x)
        squares.append(_squares(panel, square_weights))
    return np.concatenate(products, axis=-2), np.concatenate(squares, axis=-1)


def _squares(panel: Array, weights: Array) -> Array:
    """The squared magnitudes times `weights`; destroys the panel."""
    if panel.flags.c_contiguous:
        parts = panel.view(np.float64)
        np.square(parts, out=parts)
        twice = weights if parts.shape == panel.shape else np.repeat(weights, 2, axis=-1)
        return np.asarray((parts @ twice[..., None])[..., 0])
    magnitudes = np.square(panel.real)
    if panel.dtype.kind == "c":
        magnitudes += np.square(panel.imag)
    return np.asarray((magnitudes @ weights[..., None])[..., 0])
