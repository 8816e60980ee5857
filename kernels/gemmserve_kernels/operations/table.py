"""Table of the operations, by the name that programs give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gemmserve_kernels.operations.elementwise import Add, Multiply
from gemmserve_kernels.operations.linalg.cholesky import Cholesky
from gemmserve_kernels.operations.linalg.expm import Expm
from gemmserve_kernels.operations.linalg.herk import Herk
from gemmserve_kernels.operations.linalg.solve import Inv, Solve
from gemmserve_kernels.operations.sum import Sum
from gemmserve_kernels.operations.triangle import Triangle

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.operations.operation import Operation

OPERATIONS: Final[dict[str, Callable[..., Operation]]] = {
    kind.name: kind.build for kind in (Add, Multiply, Sum, Herk, Solve, Inv, Cholesky, Expm, Triangle)
}
"""Functions that check operands and parameters, given by keyword, and return the operation. They raise KernelError."""
