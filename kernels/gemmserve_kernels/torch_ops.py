"""Operators of PyTorch: `torch.ops.gemmserve.gemm`, with gradients, and `torch.ops.gemmserve.gemm_reduce`.

    import gemmserve_kernels.torch_ops  # registers them

    d = torch.ops.gemmserve.gemm(a, b, trans_a="C", compute="3xfp16")
    power = torch.ops.gemmserve.gemm_reduce(weights, snapshots, reduce="sumsq", axis="n")

They run on tensors in the host's memory and on CUDA and ROCm devices, on torch's current stream, under `torch.compile`
too. Importing this module imports torch, which gemmserve_kernels does not ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from gemmserve_kernels.dispatch.gemm import gemm as _gemm
from gemmserve_kernels.dispatch.gemm_reduce import gemm_reduce as _gemm_reduce
from gemmserve_kernels.problem.errors import DtypeUnsupported
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

if TYPE_CHECKING:
    import numpy as np

__all__ = ["gemm", "gemm_reduce"]

_DTYPES: Final = {
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
_TORCH: Final = {name: dtype for dtype, name in _DTYPES.items()} | {"int64": torch.int64}
_ADJOINT: Final = {"N": "C", "T": "R", "C": "N", "R": "T"}
"""op(X)^H by a letter: ("N" -> X^H) and so on."""


@torch.library.custom_op(
    "gemmserve::gemm",
    mutates_args=(),
    schema='(Tensor a, Tensor b, Tensor? c=None, *, Scalar alpha=1, Scalar? beta=None, str trans_a="N", '
    'str trans_b="N", str compute="auto") -> Tensor',
)
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: complex = 1,
    beta: complex | None = None,
    trans_a: str = "N",
    trans_b: str = "N",
    compute: str = "auto",
) -> torch.Tensor:
    """Return alpha * op(A) op(B) + beta * C: `gemmserve_kernels.gemm`, differentiable in a, b and c.

    Gradients are products of the same compute mode. Raises what `gemmserve_kernels.gemm` raises.
    """
    options: dict[str, Any] = {"alpha": alpha, "beta": beta, "trans_a": trans_a, "trans_b": trans_b, "compute": compute}
    with torch.no_grad():
        result: torch.Tensor = _gemm(a, b, c, **options)
    return result


@torch.library.custom_op(
    "gemmserve::gemm_reduce",
    mutates_args=(),
    schema='(Tensor a, Tensor b, *, str reduce="sum", str axis="m", bool batch=False, str pre_op="identity", '
    'Scalar alpha=1, str trans_a="N", str trans_b="N", str compute="auto") -> Tensor',
)
def gemm_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    reduce: str = "sum",
    axis: str = "m",
    batch: bool = False,
    pre_op: str = "identity",
    alpha: complex = 1,
    trans_a: str = "N",
    trans_b: str = "N",
    compute: str = "auto",
) -> torch.Tensor:
    """Return one reduction of alpha * op(A) op(B): `gemmserve_kernels.gemm_reduce`, without gradients.

    `axis` is "m" (rows) or "n" (columns); with `batch` the batch is reduced too.
    Raises what `gemmserve_kernels.gemm_reduce` raises.
    """
    options: dict[str, Any] = {
        "pre_op": pre_op,
        "alpha": alpha,
        "trans_a": trans_a,
        "trans_b": trans_b,
        "compute": compute,
    }
    with torch.no_grad():
        result: torch.Tensor = _gemm_reduce(a, b, reduce=reduce, axis=_axes(axis, batch=batch), **options)
    return result


@gemm.register_fake
def _gemm_shape(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """An empty tensor of the result's shape and dtype, for torch.compile."""
    problem = GemmProblem.build(_outline(a), _outline(b), None if c is None else _outline(c), **options)
    return a.new_empty(problem.result_shape, dtype=_torch_dtype(problem.result_dtype))


@gemm_reduce.register_fake
def _gemm_reduce_shape(
    a: torch.Tensor, b: torch.Tensor, *, reduce: str = "sum", axis: str = "m", batch: bool = False, **options: Any
) -> torch.Tensor:
    """An empty tensor of the result's shape and dtype, for torch.compile."""
    problem = GemmReduceProblem.build(_outline(a), _outline(b), reduce=reduce, axis=_axes(axis, batch=batch), **options)
    shape, dtype = problem.results[reduce]
    return a.new_empty(shape, dtype=_torch_dtype(dtype))


def _axes(axis: str, *, batch: bool) -> list[str]:
    return [axis, "batch"] if batch else [axis]


def _outline(tensor: torch.Tensor) -> Operand:
    if tensor.dtype not in _DTYPES:
        raise DtypeUnsupported(f"{tensor.dtype} is none of {', '.join(_DTYPES.values())}")
    return Operand.contiguous(tuple(tensor.shape), _DTYPES[tensor.dtype])


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return _TORCH[dtype.name]


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], **_: Any) -> None:
    """Keep what gradients need. Called by autograd after `gemm`, in the caller's thread."""
    a, b, c = inputs
    ctx.save_for_backward(a, b)
    ctx.shape_c = None if c is None else (c.shape, c.dtype)
    ctx.options = tuple(keyword_only_inputs[name] for name in ("alpha", "beta", "trans_a", "trans_b", "compute"))


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of a, b and c, conjugate Wirtinger as torch has them. Called by autograd, in a thread of its own.

    With D = alpha A' B' and A' = op(A): the gradient of A' is conj(alpha) G B'^H, that of B' is conj(alpha) A'^H G.
    """
    a, b = ctx.saved_tensors
    alpha, beta, trans_a, trans_b, compute = ctx.options
    needs_a, needs_b, *needs_c = ctx.needs_input_grad  # of c only where it was given
    scale = alpha.conjugate()
    grad_a = grad_b = grad_c = None
    if needs_a:
        grad_a = gemm(grad, b, alpha=scale, trans_b=_ADJOINT[trans_b], compute=compute)
        grad_a = _reduced(_undone(grad_a, trans_a), a.shape, a.dtype)
    if needs_b:
        grad_b = gemm(a, grad, alpha=scale, trans_a=_ADJOINT[trans_a], compute=compute)
        grad_b = _reduced(_undone(grad_b, trans_b), b.shape, b.dtype)
    if any(needs_c):
        grad_c = _reduced(grad if beta is None else grad * beta.conjugate(), *ctx.shape_c)  # None is 1, with a c
    return (grad_a, grad_b, grad_c)[: len(ctx.needs_input_grad)]


def _undone(gradient: torch.Tensor, trans: str) -> torch.Tensor:
    """Return the gradient of X from that of op(X)."""
    gradient = gradient.mT if trans in {"T", "C"} else gradient
    return gradient.conj() if trans in {"C", "R"} else gradient


def _reduced(gradient: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient summed over what was broadcast, its real part where the operand is real."""
    if gradient.is_complex() and not dtype.is_complex:
        gradient = gradient.real
    return gradient.sum_to_size(shape).to(dtype)


gemm.register_autograd(_gradients, setup_context=_keep)
