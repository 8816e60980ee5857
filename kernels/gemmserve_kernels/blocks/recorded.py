"""Record of which algorithm computes each shape of block, made once for the whole product.

A block that has to be computed again, later or elsewhere, is computed by the same algorithm: what is recorded overrules
what a plan would choose then, as `GemmConfig.algorithm` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from gemmserve_kernels.dispatch.routes import plan_gemm
from gemmserve_kernels.problem.vocabulary import AlgorithmName

if TYPE_CHECKING:
    from gemmserve_kernels.blocks.grid import Grid
    from gemmserve_kernels.device.spec import DeviceSpec

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Recorded:
    """Algorithms of the blocks of a grid with these `sides`, by matrices, rows and columns of a block."""

    sides: tuple[int, int, int]
    algorithms: dict[Shape, AlgorithmName]

    @classmethod
    def of(cls, grid: Grid, spec: DeviceSpec) -> Recorded:
        """Return what a device takes for each shape of block. Raises ComputeUnsupported, ConfigInfeasible."""
        found: dict[Shape, AlgorithmName] = {}
        for index in range(grid.count):
            shape = grid.block(index).shape
            if shape not in found:
                found[shape] = plan_gemm(grid.block_problem(index), spec).algorithm
        return cls(grid.sides, found)

    def algorithm(self, grid: Grid, index: int) -> AlgorithmName:
        """Return the algorithm of a block. Raises KeyError where the grid is another one."""
        if grid.sides != self.sides:
            raise KeyError(f"recorded for blocks of {self.sides}, not of {grid.sides}")
        return self.algorithms[grid.block(index).shape]

    def dump(self) -> dict[str, Any]:
        """Return the record as JSON has it."""
        shapes = {"x".join(map(str, shape)): name for shape, name in self.algorithms.items()}
        return {"sides": list(self.sides), "algorithms": shapes}

    @classmethod
    def load(cls, document: dict[str, Any]) -> Recorded:
        """Return what `dump` has written. Raises KeyError, ValueError for anything else."""
        rows, columns, matrices = (int(side) for side in document["sides"])
        found: dict[Shape, AlgorithmName] = {}
        for text, name in document["algorithms"].items():
            if name not in get_args(AlgorithmName):
                raise ValueError(f"{name!r} is no algorithm")
            count, m, n = (int(extent) for extent in text.split("x"))
            found[count, m, n] = name
        return cls((rows, columns, matrices), found)
