"""After the pre-pass: products whose operands are graded along k, which scaled rows and columns do not serve.

An operand is *flat* where at every k some vector reaches 2**-4 of its own largest magnitude. Two flat operands are
multiplied from their planes, but for the vectors that the pre-pass flags. Otherwise the kernel, launched for every
product and over at once in the usual case, looks again, for each matrix pair of the batch:

1. Where neither is flat, k is balanced: D, exact powers of two, makes the columns of A D**-1 alike and B becomes D B,
   so that the product does not change. Both are split again, in place. What meets only zeros becomes zero.
2. Every row of A (column of B) is flagged that loses too much with the weights w_k its elements have in the product,
   the largest relative magnitudes of B's row k (A's column k).
3. Where scaled and unscaled magnitudes disagree over k by more than 2**8, such weights say nothing of the norm of the
   product (a diagonal matrix of any grading has rows that are all alike): the whole pair is flagged. The same where an
   operand is shared by other pairs of the batch.

The bound. With planes of 11 bits each, an element x of a vector scaled to [2**14, 2**15) is kept to within
max(2**-22 |x|, 2**-25). Call lost what exceeds 2**-21 |x|, sum_k lost_ik = E_i; L_i = sum_k |x_ik|, for real and
imaginary parts each. A real product of row i by column j then differs by at most

    sum_k (2**-21 |a_ik| + lost_ik) |b_kj| + the same with the sides exchanged + the products of two low planes.

The first terms are roundings of 22 bits, which add up as the roundings of FP32 do. What is lost does not: with flat
operands |b_kj| lies between 2**-4 and 1 of one magnitude for some j at every k, so the sum of lost_ik |b_kj| over k is
less than 2**8 E_i / L_i of sum_k |a_ik| |b_kj|, both summed over the columns. A vector is flagged where
2**8 E_i > 2**-25 L_i, with weights where 2**8 sum_k w_k lost_ik > 2**-25 sum_k w_k |a_ik|: what is lost stays below
half a unit of FP32's last place of the norm of what is summed. For one plane (`1xfp16`) the same holds with 2**-10 for
2**-21 and 2**-14 for 2**-25. The bound is one of norms, of the real and of the imaginary part each.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.arguments import BATCH_DIMS, coalesce
from gemmserve_kernels.compiler import KernelSource
from gemmserve_kernels.planes import split
from gemmserve_kernels.planes.split import SplitOperandParams
from gemmserve_kernels.tiling import flag

if TYPE_CHECKING:
    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.planes.layout import Scheme
    from gemmserve_kernels.planes.split import Side, SplitOperand

DEPENDENT: Final = True
"""The kernel waits for the one ahead of it (cuda/common/dependent.cuh)."""
_THREADS: Final = 256
_SMALL_K: Final = 512
_SMALL_THREADS: Final = 128


class BalanceParams(ctypes.Structure):
    """Mirror of BalanceParams in cuda/balance.cu."""

    _fields_ = (
        ("a", SplitOperandParams),
        ("b", SplitOperandParams),
        ("more_a", ctypes.c_int64),
        ("more_b", ctypes.c_int64),
        ("pairs", ctypes.c_int64),
        ("status", ctypes.c_int64),
        ("pair_shape", ctypes.c_int64 * BATCH_DIMS),
        ("matrix_a", ctypes.c_int64 * BATCH_DIMS),
        ("matrix_b", ctypes.c_int64 * BATCH_DIMS),
        ("parts", ctypes.c_int64),
        ("first_block", ctypes.c_int64),
        ("shared_a", ctypes.c_int32),
        ("shared_b", ctypes.c_int32),
    )


@lru_cache(maxsize=1024)
def _plan(
    spec: DeviceSpec, scheme: Scheme, a: Side, b: Side, batch_shape: tuple[int, ...]
) -> tuple[KernelSource, BalanceParams, int]:
    """The kernel, its arguments relative to the operands, and its blocks."""
    threads = _THREADS if a.k > _SMALL_K else _SMALL_THREADS
    defines = {
        "COMPLEX": flag(a.complex),
        "PLANAR": flag(a.planar),
        "LOW": flag(scheme != "1xfp16"),
        "GAUSS": flag(scheme == "3xfp16-3m"),
        "THREADS": str(threads),
        "CLUSTER": "1",
    }
    pairs = math.prod(batch_shape)
    shape, (steps_a, steps_b) = coalesce(batch_shape, [a.batch_strides, b.batch_strides])
    if len(shape) > BATCH_DIMS:
        raise ValueError(f"a batch of more than {BATCH_DIMS} axes")
    parts = max(1, min(a.rows + b.rows, spec.sm_count // pairs))
    params = BalanceParams(
        a=split.operand_params(a),
        b=split.operand_params(b),
        parts=parts,
        shared_a=a.matrices < pairs,
        shared_b=b.matrices < pairs,
    )
    missing = BATCH_DIMS - len(shape)
    params.pair_shape[:] = (1,) * missing + shape
    params.matrix_a[:] = (0,) * missing + steps_a
    params.matrix_b[:] = (0,) * missing + steps_b
    return KernelSource("balance", tuple(defines.items())), params, parts * pairs


def run(
    launcher: Launcher,
    batch_shape: tuple[int, ...],
    a: SplitOperand,
    b: SplitOperand,
    base_a: int,
    base_b: int,
    *,
    more_a: int,
    more_b: int,
    pairs: int,
    status: int,
) -> None:
    """Balances and flags where it must. `more_*`, `pairs`, `status` are addresses of int32, zero before: flags of the
    vectors beside those of the operands, of the matrix pairs, and whether anything is flagged.
    """
    source, relative, blocks = _plan(launcher.spec, a.planes.scheme, a.side, b.side, batch_shape)
    params = BalanceParams.from_buffer_copy(relative)
    split.place(launcher, params.a, a, base_a)
    split.place(launcher, params.b, b, base_b)
    params.more_a, params.more_b, params.pairs, params.status = more_a, more_b, pairs, status
    threads = int(dict(source.defines)["THREADS"])
    for first in range(0, blocks, launcher.max_grid):
        params.first_block = first
        grid = min(blocks - first, launcher.max_grid)
        launcher.launch(source, "balance", grid=grid, block=threads, shared=0, params=params, dependent=DEPENDENT)
