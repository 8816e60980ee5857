"""What a reduction takes beside its operands and results, as its launches are planned for an H200: to the byte, without
a device.
"""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_kernels import Operand, plan
from gemmserve_kernels.device.replay import record
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.problem import GemmReduceProblem

MIB = 1 << 20
SPEC = KNOWN["H200"]


def argument(recorder, operand):
    size = operand.dtype.itemsize
    return recorder.argument(operand.shape, operand.dtype, tuple(stride * size for stride in operand.strides))


@pytest.mark.parametrize(
    ("dtype", "extents", "planes"),
    [
        ("complex64", (16, 2048, 2048, 1024), True),
        ("complex64", (256, 512, 512, 64), True),
        ("float32", (64, 1024, 1024, 256), True),
        ("float16", (64, 1024, 1024, 1024), False),
    ],
)
def test_planes_and_little_more(dtype, extents, planes):
    batch, m, n, k = extents
    a, b = (Operand.contiguous(shape, np.dtype(dtype)) for shape in ((batch, m, k), (batch, k, n)))
    problem = GemmReduceProblem.build(a, b, reduce="absmax" if dtype == "complex64" else "max", axis="m")
    chosen = plan(problem, SPEC)
    assert chosen.algorithm == "wgmma"

    def run(recorder):
        arrays = [argument(recorder, problem.a), argument(recorder, problem.b)]
        results = {
            name: argument(recorder, Operand.contiguous(shape, np.dtype(dtype)))
            for name, (shape, dtype) in problem.results.items()
        }
        arguments = recorder.array_count
        chosen.run_gemm_reduce(recorder, problem, *arrays, results)
        return arguments

    workspace = record(SPEC, 2**31 - 1, run).workspace
    # Planes of the wide way are half as large again as their operands, and made in chunks of 384 MiB at most; the
    # product would be larger.
    size = min(3 * batch * (m + n) * k * np.dtype(dtype).itemsize // 2, 384 * MIB) if planes else 0
    assert size * 15 // 16 <= workspace <= size + 64 * MIB
    assert workspace < batch * m * n * np.dtype(dtype).itemsize
