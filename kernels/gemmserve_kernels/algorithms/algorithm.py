"""Protocol of every algorithm's package, and which package does a route's products and reductions.

A route is a pair of an algorithm's name and the arithmetic that it does, as ("wgmma", "3xfp16"). The modules are loaded
when they are first asked for: together they take as long as the rest of the package. The portable kernels (`simt`) take
every problem and are asked nothing; products by the vendor's BLAS and NumPy (`cpu`) run no launches of ours.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig

P_contra = TypeVar("P_contra", GemmProblem, GemmReduceProblem, contravariant=True)


class Algorithm(Protocol[P_contra]):
    """A way to compute problems of one kind; a module is one."""

    def supports(self, problem: P_contra, spec: DeviceSpec, /) -> str | None:
        """Return why it cannot run `problem` on `spec`, in one line; None where it can."""

    def resolve(self, config: GemmConfig | None, problem: P_contra, spec: DeviceSpec, /) -> Any:
        """Return the tile for operands that lie as fresh arrays do. Raises ConfigInfeasible naming the limit."""


class ProductAlgorithm(Algorithm[GemmProblem], Protocol):
    """A `gemm` module of an algorithm's package."""

    def run_gemm(
        self, launcher: Launcher, problem: GemmProblem, config: GemmConfig | None, a: Any, b: Any, c: Any, out: Any, /
    ) -> None:
        """Write alpha op(a) op(b) + beta c into `out`. Raises ConfigInfeasible, CompileError."""


class ReductionAlgorithm(Algorithm[GemmReduceProblem], Protocol):
    """A `gemm_reduce` module of an algorithm's package."""

    def run_gemm_reduce(
        self,
        launcher: Launcher,
        problem: GemmReduceProblem,
        config: GemmConfig | None,
        a: Any,
        b: Any,
        results: dict[str, Any],
        /,
    ) -> Any:
        """Write the reductions of alpha op(a) op(b) into `results`. Raises ConfigInfeasible, CompileError."""


_OWN: Final = {
    "wgmma": ("wgmma.direct", {"fp16"}),
    "mma": ("mma", {"1xtf32", "3xtf32"}),
    "mfma": ("mfma", {"plain", "xf32"}),
}
"""Packages of algorithms that multiply operands as they are in these arithmetics, in all others planes (`splits`)."""


def _package(name: str, arithmetic: str, others: tuple[str, ...]) -> str:
    """Return the package of a route, `others` being those of one. Raises KeyError where there is none."""
    if name in others:
        return name
    package, arithmetics = _OWN[name]
    return package if arithmetic in arithmetics else "splits"


@cache
def product_algorithm(name: str, arithmetic: str) -> ProductAlgorithm:
    """Return the module that does a route's products. Raises KeyError where there is none."""
    package = _package(name, arithmetic, ("simt", "small", "fused", "dmma", "ozaki"))
    return cast("ProductAlgorithm", import_module(f"gemmserve_kernels.algorithms.{package}.gemm"))


@cache
def reduction_algorithm(name: str, arithmetic: str) -> ReductionAlgorithm:
    """Return the module that does a route's reductions. Raises KeyError where there is none."""
    package = _package(name, arithmetic, ("simt", "dmma", "ozaki", "sums", "gram", "screen", "vendor"))
    return cast("ReductionAlgorithm", import_module(f"gemmserve_kernels.algorithms.{package}.gemm_reduce"))
