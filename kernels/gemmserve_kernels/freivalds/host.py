"""The check with NumPy: the same figures as cuda/freivalds/freivalds.cu, up to the rounding of double precision."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.freivalds.finding import floor_of
from gemmserve_kernels.freivalds.signs import VECTORS, signs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.problem.problem import GemmProblem

    Array = np.ndarray[Any, Any]
    Block = tuple[slice, ...]

_PANEL: Final = 1 << 16
"""Elements of an operand in double precision at a time: what stays in a processor's cache."""
_ROWS: Final = 1 << 17
"""Rows of the result whose figures are formed at a time, of all products together: some hundredths of a second."""


def figures(problem: GemmProblem, a: Array, b: Array, c: Array | None, d: Array, seed: int) -> Array:
    """(products, 1, 3) figures, as `judged` takes them. The result is not empty."""
    x = signs(seed, problem.n)
    of_a, of_b, of_d = (_HostSide.of(problem, *side) for side in ((a, problem.trans_a), (b, problem.trans_b), (d, "N")))
    of_c = None if c is None or problem.beta == 0 else _HostSide.of(problem, c, "N")
    inner, inner_squares = of_b.times(x)
    found = np.zeros((*problem.batch_shape, 3))
    for block in _blocks((*problem.batch_shape, problem.m), _ROWS):
        batch = block[:-1]
        here = _part(inner, (*batch, slice(None), slice(None))), _part(inner_squares, (*batch, slice(None)))
        expected, size = of_a.at(block).times(*here)
        expected, size = problem.alpha * expected, abs(problem.alpha) ** 2 * size + floor_of(problem)
        if of_c is not None:
            more, squares = of_c.at(block).times(x)
            expected, size = expected + problem.beta * more, size + abs(problem.beta) ** 2 * squares
        returned, squares = of_d.at(block).times(x)
        error, norm = _sum_of_squares(returned - expected), _sum_of_squares(expected)
        known = np.isfinite(norm) & np.isfinite(size)
        error = np.where(known & ~np.isfinite(error), np.inf, error)
        ratio = np.where(error == 0, 0.0, error / (VECTORS * (size + squares)))
        ratio = np.where(np.isfinite(error), ratio, np.inf)
        ratio = np.where(known, ratio, np.nan)
        products = found[batch]
        products[..., 0] += error.sum(-1)
        products[..., 1] += norm.sum(-1)
        products[..., 2] = np.maximum(products[..., 2], ratio.max(-1))  # NaN wins
    return found.reshape(-1, 1, 3)


def _sum_of_squares(x: Array) -> Array:
    return np.asarray((np.square(x.real) + np.square(x.imag)).sum(axis=-1))


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[Block]:
    """Slices that together are an array of that shape, each of at most `most` elements, with a `checkpoint` before it;
    one empty block of an empty array.
    """
    sizes = [min(extent, max(1, most // max(1, math.prod(shape[axis + 1 :])))) for axis, extent in enumerate(shape)]
    cuts = (
        [slice(start, min(start + size, extent)) for start in range(0, max(extent, 1), max(size, 1))]
        for size, extent in zip(sizes, shape, strict=True)
    )
    for block in itertools.product(*cuts):
        checkpoint()
        yield block


def _part(x: Array, block: Block) -> Array:
    """Return that part of an array that is broadcast: whole along axes of one element, and those that it lacks."""
    own = block[len(block) - x.ndim :]
    return x[tuple(slice(None) if extent == 1 else part for part, extent in zip(own, x.shape, strict=True))]


@dataclass(frozen=True)
class _HostSide:
    """Some rows of op(array), in all products or some."""

    planes: tuple[Array, ...]
    conjugate: bool
    wide: type[Any]

    @classmethod
    def of(cls, problem: GemmProblem, array: Array, trans: str) -> _HostSide:
        planes = tuple(array) if problem.planar else (array,)
        planes = tuple(plane.swapaxes(-1, -2) if trans in {"T", "C"} else plane for plane in planes)
        return cls(planes, trans in {"C", "R"}, np.complex128 if problem.dtype.kind == "c" else np.float64)

    def at(self, block: Block) -> _HostSide:
        """Return the side cut to those products and rows."""
        return replace(self, planes=tuple(_part(plane, (*block, slice(None))) for plane in self.planes))

    def times(self, x: Array, weights: Array | None = None) -> tuple[Array, Array]:
        """The matrices by x, and their squared magnitudes by `weights`, by ones without, in double precision, panel by
        panel.
        """
        rows, columns = self.planes[0].shape[-2], x.shape[-2]
        planes = [np.broadcast_to(plane, (*plane.shape[:-1], columns)) for plane in self.planes]  # of C
        batch_shape = np.broadcast_shapes(planes[0].shape[:-2], x.shape[:-2])
        products = np.zeros((*batch_shape, rows, VECTORS), self.wide)
        squares = np.zeros((*batch_shape, rows))
        for block in _blocks((*batch_shape, rows, columns), _PANEL):
            *batch, lines, along = block
            panel = _part(planes[0], block).astype(self.wide)
            if len(planes) > 1:
                panel.imag = _part(planes[1], block)
            if self.conjugate:
                np.conjugate(panel, out=panel)
            products[(*batch, lines)] += panel @ _part(x, (*batch, along, slice(None)))
            of_columns = np.ones(panel.shape[-1]) if weights is None else _part(weights, (*batch, along))
            squares[(*batch, lines)] += _squares(panel, of_columns)
        return products, squares


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
