"""ctypes mirrors of cuda/ozaki/params.cuh, and the constants that fill them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from gemmserve_kernels.algorithms.ozaki.bound import WHOLE, limit, whole
from gemmserve_kernels.algorithms.ozaki.moduli import LIMB, LIMBS, MODULI, limbs
from gemmserve_kernels.device.struct_params import BATCH_DIMS, GemmParams, MatrixParams

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.ozaki.moduli import Moduli

_COUNT = len(MODULI)


class LineParams(ctypes.Structure):
    """Mirror of LineParams."""

    _fields_ = (
        ("x", MatrixParams),
        ("batch_shape", ctypes.c_int64 * BATCH_DIMS),
        ("first", ctypes.c_int64),
        ("lines", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("codes", ctypes.c_uint64),
    )


class TallyParams(ctypes.Structure):
    """Mirror of TallyParams."""

    _fields_ = (
        ("sums", ctypes.c_uint64),
        ("arrivals", ctypes.c_uint64),
        ("deficits", ctypes.c_uint64),
        ("least", ctypes.c_uint64),
        ("doubt", ctypes.c_uint64),
        ("groups", ctypes.c_int64),
        ("limit", ctypes.c_uint32),
        ("counts", ctypes.c_int32),
        ("step", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    )


class ScaleParams(ctypes.Structure):
    """Mirror of ScaleParams."""

    _fields_ = (("line", LineParams), ("target", ctypes.c_double), ("tally", TallyParams))


class ConvertParams(ctypes.Structure):
    """Mirror of ConvertParams."""

    _fields_ = (
        ("line", LineParams),
        ("first_line", ctypes.c_int64),
        ("panel", ctypes.c_int64),
        ("pitch", ctypes.c_int64),
        ("plane", ctypes.c_int64),
        ("residues", ctypes.c_uint64),
        ("modulus", ctypes.c_float * _COUNT),
        ("inverse", ctypes.c_float * _COUNT),
        ("digit", ctypes.c_float * 3 * _COUNT),
        ("conjugate", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("tally", TallyParams),
        ("partner", ctypes.c_uint64),
        ("partner_step", ctypes.c_int64),
        ("partner_groups", ctypes.c_int64),
    )


class JudgedParams(ctypes.Structure):
    """Mirror of JudgedParams in cuda/common/judging/judged.cuh."""

    _fields_ = (
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("doubt_a", ctypes.c_uint64),
        ("doubt_b", ctypes.c_uint64),
        ("failing", ctypes.c_uint64),
        ("a_step", ctypes.c_int64),
        ("b_step", ctypes.c_int64),
        ("limit", ctypes.c_uint32),
        ("judged", ctypes.c_uint32),
    )


class MultiplyParams(ctypes.Structure):
    """Mirror of MultiplyParams."""

    _fields_ = (
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("products", ctypes.c_uint64),
        ("matrices", ctypes.c_int64),
        ("a_planes", ctypes.c_int64),
        ("b_planes", ctypes.c_int64),
        ("a_plane", ctypes.c_int64),
        ("b_plane", ctypes.c_int64),
        ("a_first", ctypes.c_int64),
        ("b_first", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("tiles_m", ctypes.c_int64),
        ("tiles_n", ctypes.c_int64),
        ("pitch", ctypes.c_int64),
        ("modulus", ctypes.c_uint32 * _COUNT),
        ("reciprocal", ctypes.c_uint32 * _COUNT),
        ("bias", ctypes.c_uint32 * _COUNT),
        ("reserved", ctypes.c_uint32),
        ("judged", JudgedParams),
    )


class RemainderParams(ctypes.Structure):
    """Mirror of RemainderParams."""

    _fields_ = (
        ("c", MatrixParams),
        ("d", MatrixParams),
        ("batch_shape", ctypes.c_int64 * BATCH_DIMS),
        ("first", ctypes.c_int64),
        ("matrices", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("first_column", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("tiles_m", ctypes.c_int64),
        ("tiles_n", ctypes.c_int64),
        ("patches_m", ctypes.c_int64),
        ("patches_n", ctypes.c_int64),
        ("products", ctypes.c_uint64),
        ("a_codes", ctypes.c_uint64),
        ("b_codes", ctypes.c_uint64),
        ("a_codes_step", ctypes.c_int64),
        ("b_codes_step", ctypes.c_int64),
        ("patches", ctypes.c_uint64),
        ("weight", ctypes.c_double * LIMBS * _COUNT),
        ("product", ctypes.c_double * LIMBS),
        ("inverse_product", ctypes.c_double),
        ("unit", ctypes.c_double),
        ("alpha", ctypes.c_double * 2),
        ("beta", ctypes.c_double * 2),
        ("least", ctypes.c_float),
        ("least_alone", ctypes.c_float),
        ("judged", JudgedParams),
    )


class PatchParams(ctypes.Structure):
    """Mirror of PatchParams in ozaki_patch.cu."""

    _fields_ = (
        ("gemm", GemmParams),
        ("patches", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("counters", ctypes.c_uint64),
    )


def tally_constants(params: TallyParams, moduli: Moduli, k: int, *, complex_: bool) -> None:
    """Set the weights of what is counted; a little less than the theorem has, for float32 rounds."""
    params.limit = limit(k)
    params.step = WHOLE * (1 - 2.0**-20) / whole(moduli, k, complex_=complex_)


def convert_constants(params: ConvertParams, moduli: Moduli) -> None:
    """The moduli, their inverses, and powers of 2**15 modulo each."""
    for i, p in enumerate(moduli.moduli):
        params.modulus[i] = p
        params.inverse[i] = 1 / p
        params.digit[i][:] = moduli.digits[i]


def multiply_constants(params: MultiplyParams, moduli: Moduli) -> None:
    """For `reduce` in cuda/ozaki/layout.cuh. The bias is the multiple of p next above 2**30: sums stay positive."""
    for i, p in enumerate(moduli.moduli):
        params.modulus[i] = p
        params.reciprocal[i] = (1 << 39) // p
        params.bias[i] = -(-(1 << 30) // p) * p


def combine_constants(params: RemainderParams, moduli: Moduli, k: int) -> None:
    """Weights and product in limbs, and the least |scaled product|**2 that is not suspicious.

    For random operands it is 1 / k on average, between 0.4 / k and 1 / k for the scales that lines can have. An eighth
    of that in 64 to 128 neighbouring elements makes their relative error 2.8 times what was asked for.
    """
    for i, weight in enumerate(moduli.weights):
        params.weight[i][:] = limbs(weight)
    params.product[:] = limbs(moduli.product)
    params.inverse_product = (1 << 2 * LIMB) / moduli.product
    params.unit = 1 / moduli.target(k) ** 2
    params.least = 1 / (8 * k)
    params.least_alone = 1e-5 / k
