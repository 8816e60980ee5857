"""Runs of k, summed up one after another before their sums are added, of products so small that a BLAS cuts k. Pure.

A BLAS cuts k between blocks where there are few tiles for a device, which makes its errors smaller. One long sum of 131
complex double numbers of one sign is off by 23 u where cuBLAS 13 on an H200 has 11, and by 16 u where it has 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

_TINY_K: Final = 2048
"""Steps of k up to which a tiny product is one. Longer sums are cut into parts by kernels of tensor cores, too."""
_TINY: Final = 128**2
_SMALL: Final = 384**2
_MEDIUM: Final = 768**2
"""Elements of all results below which tensor cores do not keep up with a BLAS that cuts k into many parts, runs are
short, and runs are not long. From there on cuBLAS 13 on an H200 has no smaller errors than they have."""


def is_tiny(problem: GemmProblem | GemmReduceProblem) -> bool:
    """Whether a BLAS cuts k of `problem` so that its errors are smaller than those of complex numbers in parts of
    float16, of whose sums tensor cores cut off what is small.
    """
    return problem.dtype.name == "complex64" and problem.k <= _TINY_K and _elements(problem) < _TINY


def is_small(problem: GemmProblem | GemmReduceProblem) -> bool:
    """Whether a BLAS would cut a short k of `problem`, too."""
    return _elements(problem) < _SMALL


def is_medium(problem: GemmProblem | GemmReduceProblem) -> bool:
    """Whether it would cut a k of some hundred steps."""
    return _elements(problem) < _MEDIUM


def _elements(problem: GemmProblem | GemmReduceProblem) -> int:
    return problem.batch * problem.m * problem.n
