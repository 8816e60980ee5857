"""Matrix products and fused reductions of them, on NumPy and CuPy arrays.

    from gemmserve_kernels import gemm, gemm_reduce, prepare

    d = gemm(a, b, c, alpha=2, beta=1j, trans_a="C")
    d = gemm(prepare(a, "a"), b)  # many times with the same a
    power = gemm_reduce(weights, snapshots, reduce="sumsq", axis="n")

NumPy arrays are multiplied on the CPU, CuPy arrays on their GPU.
"""

from __future__ import annotations

from gemmserve_kernels.algorithms.common.prepared_operand import PreparedOperand
from gemmserve_kernels.device.element_counts import ElementCounts, read_element_counts
from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_kernels.dispatch.gemm import gemm
from gemmserve_kernels.dispatch.gemm_reduce import gemm_reduce
from gemmserve_kernels.dispatch.prepare import prepare
from gemmserve_kernels.dispatch.routes import Plan, plan
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import (
    ComputeUnsupported,
    ConfigInfeasible,
    DeviceError,
    DtypeUnsupported,
    KernelError,
    NotPositiveDefinite,
    OutOfDeviceMemory,
    ParameterInvalid,
    ShapeMismatch,
    SingularMatrix,
)
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

__all__ = [
    "ComputeUnsupported",
    "ConfigInfeasible",
    "DeviceError",
    "DeviceSpec",
    "DtypeUnsupported",
    "ElementCounts",
    "GemmConfig",
    "GemmProblem",
    "GemmReduceProblem",
    "KernelError",
    "NotPositiveDefinite",
    "Operand",
    "OutOfDeviceMemory",
    "ParameterInvalid",
    "Plan",
    "PreparedOperand",
    "ShapeMismatch",
    "SingularMatrix",
    "gemm",
    "gemm_reduce",
    "plan",
    "prepare",
    "read_element_counts",
]
