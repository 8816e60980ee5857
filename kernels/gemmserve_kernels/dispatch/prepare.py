"""`prepare`: one operand of many products split or reduced to residues once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.prepared_operand import PreparedOperand
from gemmserve_kernels.algorithms.common.splits import SCHEMES, WIDE
from gemmserve_kernels.problem.arrays import library, on_elements
from gemmserve_kernels.problem.validation import COMPUTE_MODES, LAYOUTS, TRANS, choice

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.splits import Scheme
    from gemmserve_kernels.device.launch import Launcher

_SIDES: Final = ("a", "b")


def prepare(
    array: Any, side: str, compute: str = "auto", *, trans: str = "N", layout: str = "interleaved"
) -> PreparedOperand:
    """Prepares `array`, the operand "a" or "b" (`side`) of products with that transposition, layout and compute mode.

    `gemm` takes what this returns in the place of the array, for any partner, with the same result. Waits for the
    device. Only operands none of whose vectors is in doubt (`common.verdict`) keep planes; others, a NumPy array, a
    dtype or a mode that has nothing to prepare are merely carried along. Raises ParameterInvalid.
    """
    choice(side, _SIDES, "side")
    choice(trans, TRANS, "trans")
    choice(layout, LAYOUTS, "layout")
    choice(compute, COMPUTE_MODES, "compute")
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
    if array.size == 0 or array.ndim < (3 if layout == "planar" else 2) or launcher.spec.kind != "cuda":
        return carried
    dtype = np.dtype(array.dtype)
    if dtype.name in {"float64", "complex128"} or compute == "ozaki":
        return _residues(launcher, carried)
    scheme = SCHEMES.get(compute)
    if dtype.name not in {"float32", "complex64"} or scheme not in WIDE:
        return carried
    return _planes(launcher, carried, scheme)


def _carried(array: Any, side: str, trans: str, layout: str, compute: str) -> PreparedOperand:
    return PreparedOperand(array, "a" if side == "a" else "b", trans, layout, compute, None)


def _residues(launcher: Launcher, operand: PreparedOperand) -> PreparedOperand:
    if launcher.spec.arch != "sm_90a" or operand.compute == "fp64":
        return operand
    from gemmserve_kernels.algorithms.ozaki import gemm as ozaki

    planar = operand.layout == "planar"
    payload = ozaki.prepare_operand(launcher, operand.source, operand.side, operand.trans, planar=planar)
    return _with(operand, payload)


def _planes(launcher: Launcher, operand: PreparedOperand, scheme: Scheme) -> PreparedOperand:
    from gemmserve_kernels.algorithms.common import verdict
    from gemmserve_kernels.algorithms.splits import split
    from gemmserve_kernels.device.struct_params import BATCH_DIMS, StoredArray, coalesce

    planar = operand.layout == "planar"
    stored, base = StoredArray.of(launcher, operand.source)
    batch = stored.shape[1:-2] if planar else stored.shape[:-2]
    left = operand.side == "a"
    side = split.Side.of(stored, batch, operand.trans, left=left, planar=planar)
    axes, _ = coalesce(side.batch_shape, [side.view.batch_strides])
    if len(axes) > BATCH_DIMS or (scheme == "3xfp16-3m" and not side.complex):
        return operand
    words = launcher.zeros((4 + verdict.words(side.matrices, side.rows),), np.dtype(np.int32))
    payload = split.allocate(launcher, scheme, side, operand.side, verdict.Deficits(words, 4))
    split.run(launcher, payload if left else None, None if left else payload, base, base, launcher.pointer(words))
    host = words if isinstance(words, np.ndarray) else words.get()
    if host[4]:
        return operand
    return _with(operand, payload)


def _with(operand: PreparedOperand, payload: Any) -> PreparedOperand:
    return PreparedOperand(operand.source, operand.side, operand.trans, operand.layout, operand.compute, payload)
