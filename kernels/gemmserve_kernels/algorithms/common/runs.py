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
_SMALL: Final = 512**2
_MEDIUM: Final = 768**2
"""Elements of all results below which tensor cores do not keep up with a BLAS that cuts k into many parts, runs are
short, and runs are not long. At 512^2 one sum of each element has cuBLAS's own errors on an H200, below up to 2.5 times
as large ones."""
_CUT: Final = {"complex128": 1024**2, "float64": 2048**2}
"""The same where a k of some thousand steps is cut, by dtype; `_MEDIUM` of others. Data dense in 64 steps of k are
off by 1.3 to 2.3 u in float64 by cuBLAS 13 (1024 x 1024 x 4096, 1536 x 1536 x 2048 to 8192), by 3.1 to 4.5 u in one
sum. From there on both have one."""


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


def is_cut(problem: GemmProblem | GemmReduceProblem) -> bool:
    """Whether it would cut a k of some thousand steps."""
    return _elements(problem) < _CUT.get(problem.dtype.name, _MEDIUM)


def _elements(problem: GemmProblem | GemmReduceProblem) -> int:
    return problem.batch * problem.m * problem.n
