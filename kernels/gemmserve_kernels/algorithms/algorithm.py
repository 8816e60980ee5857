"""Protocol of every algorithm's package, and which package does a route's products and reductions.

A route is a pair of an algorithm's name and the arithmetic that it does, as ("wgmma", "3xfp16"). The modules are loaded
when they are first asked for: together they take as long as the rest of the package. The portable kernels (`simt`) take
every problem and are asked nothing; the vendor's BLAS and NumPy (`cpu`) run no launches of ours.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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


@cache
def product_algorithm(name: str, arithmetic: str) -> ProductAlgorithm:
    """Return the module that does a route's products. Raises KeyError where there is none."""
    match name, arithmetic:
        case "small", _:
            from gemmserve_kernels.algorithms.small import gemm as small

            return small
        case "wgmma", "fp16":
            from gemmserve_kernels.algorithms.wgmma.direct import gemm as direct

            return direct
        case "mma", "1xtf32" | "3xtf32":
            from gemmserve_kernels.algorithms.mma import gemm as mma

            return mma
        case "mfma", "plain" | "xf32":
            from gemmserve_kernels.algorithms.mfma import gemm as mfma

            return mfma
        case "ozaki", _:
            from gemmserve_kernels.algorithms.ozaki import gemm as ozaki

            return ozaki
        case "wgmma" | "mma" | "mfma", _:
            from gemmserve_kernels.algorithms.splits import gemm as splits

            return splits
    raise KeyError((name, arithmetic))


@cache
def reduction_algorithm(name: str, arithmetic: str) -> ReductionAlgorithm:
    """Return the module that does a route's reductions. Raises KeyError where there is none."""
    match name, arithmetic:
        case "sums", _:
            from gemmserve_kernels.algorithms.sums import gemm_reduce as sums

            return sums
        case "gram", _:
            from gemmserve_kernels.algorithms.gram import gemm_reduce as gram

            return gram
        case "wgmma", "fp16":
            from gemmserve_kernels.algorithms.wgmma.direct import gemm_reduce as direct

            return direct
        case "mma", "1xtf32" | "3xtf32":
            from gemmserve_kernels.algorithms.mma import gemm_reduce as mma

            return mma
        case "mfma", "plain" | "xf32":
            from gemmserve_kernels.algorithms.mfma import gemm_reduce as mfma

            return mfma
        case "wgmma" | "mma" | "mfma", _:
            from gemmserve_kernels.algorithms.splits import gemm_reduce as splits

            return splits
    raise KeyError((name, arithmetic))
