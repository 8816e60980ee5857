"""`prepare`: one operand of many products split or reduced to residues once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.prepared_operand import PreparedOperand
from gemmserve_kernels.algorithms.common.splits import SCHEMES, WIDE
from gemmserve_kernels.dispatch.interchange import interchanged
from gemmserve_kernels.dispatch.routes import plan_gemm
from gemmserve_kernels.problem.arrays import is_foreign, library, on_elements
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem
from gemmserve_kernels.problem.validation import choice
from gemmserve_kernels.problem.vocabulary import COMPUTE_MODES, LAYOUTS, TRANS

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec

_SIDES: Final = ("a", "b")


def prepare(
    array: Any, side: str, compute: str = "auto", *, trans: str = "N", layout: str = "interleaved"
) -> PreparedOperand:
    """Prepares `array`, the operand "a" or "b" (`side`) of products with that transposition, layout and compute mode.

    `gemm` takes what this returns in the place of the array, for any partner, with the same result. Waits for the
    device. Only operands none of whose vectors is in doubt (`common.verdict`) keep planes; others, a NumPy array, a
    dtype or a mode that has nothing to prepare are merely carried along. What `auto` takes depends on the partner, too:
    it is made for partners with as many lines as the array has; for others name the mode, "3xfp16" or "ozaki". Raises
    ParameterInvalid.
    """
    choice(side, _SIDES, "side")
    choice(trans, TRANS, "trans")
    choice(layout, LAYOUTS, "layout")
    choice(compute, COMPUTE_MODES, "compute")
    if is_foreign(array):
        with interchanged({side: array}) as (arrays, _):
            return prepare(arrays[side], side, compute, trans=trans, layout=layout)
    if library(array) != "cupy":
        return _carried(array, side, trans, layout, compute)
    from gemmserve_kernels.device.launch import CupyLauncher
    from gemmserve_kernels.device.spec import DeviceSpec, device_errors

    with array.device, device_errors():
        array = on_elements(array)
        launcher = CupyLauncher(DeviceSpec.of(array.device.id))
        return prepare_on(launcher, array, side, compute, trans=trans, layout=layout)


def prepare_on(
    launcher: Launcher, array: Any, side: str, compute: str = "auto", *, trans: str = "N", layout: str = "interleaved"
) -> PreparedOperand:
    """`prepare` on the device behind `launcher`, whose array it is."""
    carried = _carried(array, side, trans, layout, compute)
    planar = layout == "planar"
    if array.size == 0 or array.ndim < (3 if planar else 2) or launcher.spec.kind != "cuda":
        return carried
    dtype = np.dtype(array.dtype)
    if dtype.name in {"float64", "complex128"} or compute == "ozaki" or _is_large(array, carried, launcher.spec):
        if not launcher.spec.has_wgmma or compute == "fp64":
            return carried
        from gemmserve_kernels.algorithms.ozaki import gemm as ozaki

        return replace(carried, payload=ozaki.prepare_operand(launcher, array, carried.side, trans, planar=planar))
    scheme = SCHEMES.get(compute)
    if dtype.name not in {"float32", "complex64"} or scheme not in WIDE:
        return carried
    from gemmserve_kernels.algorithms.splits import prepass

    payload = prepass.prepare_operand(launcher, array, carried.side, trans, planar=planar, scheme=scheme)
    return replace(carried, payload=payload)


def _is_large(array: Any, operand: PreparedOperand, spec: DeviceSpec) -> bool:
    """Whether `auto` makes products of an operand by as many lines as it has itself of residues, not of planes."""
    if operand.compute != "auto" or np.dtype(array.dtype).name not in {"complex64", "float32"}:
        return False
    own = Operand.of(array)
    matrix = own.shape[-2:] if operand.trans in {"N", "R"} else own.shape[:-3:-1]
    partner = Operand.contiguous((*own.shape[: 1 if operand.layout == "planar" else 0], *matrix[::-1]), own.dtype)
    pair = (own, partner) if operand.side == "a" else (partner, own)
    options: dict[str, Any] = {f"trans_{operand.side}": operand.trans, "layout": operand.layout}
    return plan_gemm(GemmProblem.build(*pair, **options), spec).arithmetic == "ozaki"


def _carried(array: Any, side: str, trans: str, layout: str, compute: str) -> PreparedOperand:
    return PreparedOperand(array, "a" if side == "a" else "b", trans, layout, compute, None)
