"""Protocols of the modules that multiply planes: `wgmma`, `mma` and `mfma`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.partials import Partials
    from gemmserve_kernels.algorithms.common.splits import Planes, Scheme
    from gemmserve_kernels.algorithms.common.verdict import Judged
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem


class PlanesAlgorithm(Protocol):
    """A module that multiplies planes of some schemes. `tile` is what its `resolve_planes` returns."""

    def supports_planes(self, problem: GemmProblem, scheme: Scheme, spec: DeviceSpec, /) -> str | None:
        """Return why it cannot, in one line; None where it can."""

    def resolve_planes(
        self, config: GemmConfig | None, problem: GemmProblem, scheme: Scheme, spec: DeviceSpec, /
    ) -> Any:
        """Return the tile. Raises ConfigInfeasible naming the limit."""

    def multiply(
        self, launcher: Launcher, problem: GemmProblem, tile: Any, a: Planes, b: Planes, c: Any, out: Any, /
    ) -> None:
        """Write alpha (planes of a times planes of b) 2^(exponents) + beta c into `out`, for the whole batch."""

    def partials_length(self, problem: GemmReduceProblem, tile: Any, /) -> int:
        """Return how many partials `multiply_reduce` leaves for each output of one product."""

    def multiply_reduce(
        self,
        launcher: Launcher,
        problem: GemmReduceProblem,
        tile: Any,
        a: Planes,
        b: Planes,
        partials: Partials,
        first_matrix: int,
        c: Any,
        /,
    ) -> None:
        """Leave partials of the problem's batch from `first_matrix` on; the product in `c` if any."""


class WideningAlgorithm(PlanesAlgorithm, Protocol):
    """A module that also multiplies bfloat16 planes, and only the tiles that one of the two kinds of planes serves."""

    def wide_tile(self, problem: GemmProblem, scheme: Scheme, spec: DeviceSpec, alike: Any = None, /) -> Any:
        """Return the tile of the wide way; for reductions one that leaves as many partials as `alike`."""

    def multiply(
        self,
        launcher: Launcher,
        problem: GemmProblem,
        tile: Any,
        a: Planes,
        b: Planes,
        c: Any,
        out: Any,
        judged: Judged | None = None,
        /,
    ) -> None:
        """As PlanesAlgorithm has it, or the elements of the tiles that `judged` names."""

    def multiply_reduce(
        self,
        launcher: Launcher,
        problem: GemmReduceProblem,
        tile: Any,
        a: Planes,
        b: Planes,
        partials: Partials,
        first_matrix: int,
        c: Any,
        judged: Judged | None = None,
        /,
    ) -> None:
        """As PlanesAlgorithm has it, or the partials of the tiles that `judged` names."""
