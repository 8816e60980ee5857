"""The suite's machine: ours as dispatched, each of our algorithms by name, prepared operands, and every rival."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np

from gemmserve_kernels import ConfigInfeasible, DeviceError, GemmConfig, gemm, prepare
from gemmserve_kernels.bench.targets import Contender, GpuTarget
from gemmserve_kernels.dispatch import candidates, plan

BLAS_LIBRARIES = ("libcublas.so.13", "libcublas.so.12")
PREPARED_FROM = 4e8
"""Operations of the smallest product whose operands are worth preparing."""


class SuiteTarget(GpuTarget):
    """A GPU with more contenders than `gemmserve bench` shows."""

    forced = True
    """Whether to show our other algorithms by name."""
    prepared = False
    """Whether to show ours on operands that were prepared beforehand."""

    def contenders(self, case, operands, *, rival):
        """Ours first, then our algorithms by name, ours on prepared operands, the rivals."""
        base = super().contenders(case, operands, rival=rival)
        if case.op != "gemm":
            return base
        sets = self.sets(operands)
        ours, rivals = base[:1], base[1:]
        if self.forced:
            ours += [self._named(case, sets, each.algorithm) for each in candidates(case.problem(), self.spec)]
        if self.prepared and case.layout == "interleaved" and case.problem().flops() > PREPARED_FROM:
            ours.append(self._with_prepared(case, sets))
        if rival and case.compute in {"auto", "3xfp16"} and case.dtype in {"complex64", "float32"}:
            rivals.append(self._vendor(case, sets, "tf32", "cuBLAS FAST_TF32"))
        if rival and case.dtype == "complex128" and case.batch == 1 and case.trans_a == case.trans_b == "N":
            rivals.append(Contender("cuBLAS zgemm3m", "vendor", lambda i: zgemm3m(**sets[i % len(sets)])))
        return [each for each in ours + rivals if each is not None]

    def _named(self, case, sets, algorithm):
        named = replace(case, config=GemmConfig(algorithm=algorithm))
        if plan(case.problem(), self.spec).algorithm == algorithm or algorithm == "vendor":
            return None  # that is ours, or the rival
        return self.ours(named, sets, algorithm, algorithm)

    def _with_prepared(self, case, sets):
        chosen = plan(case.problem(), self.spec)
        if chosen.arithmetic == "plain":
            return None
        kept = [
            {
                side: prepare(arrays[side], side, case.compute, trans=getattr(case, f"trans_{side}"))
                for side in ("a", "b")
            }
            for arrays in sets[:2]
        ]
        options = case.options()
        return Contender(
            "prepared",
            chosen.algorithm,
            lambda i: {"d": gemm(kept[i % len(kept)]["a"], kept[i % len(kept)]["b"], **options)},
        )

    def _vendor(self, case, sets, compute, who):
        named = replace(case, compute=compute, config=GemmConfig(algorithm="vendor"))
        try:
            plan(named.problem(), self.spec)
        except ConfigInfeasible:
            return None
        return self.ours(named, sets, who, "vendor")


def zgemm3m(a, b):
    """A B of complex128 matrices in C order by cuBLAS's Gauss variant, which CuPy does not wrap."""
    import cupy

    (m, k), n = a.shape, b.shape[1]
    d = cupy.empty((m, n), np.complex128)
    factors = np.array([1, 0], np.complex128)
    one, zero = (ctypes.c_void_p(factors.ctypes.data + 16 * i) for i in (0, 1))
    handle = ctypes.c_void_p(cupy.cuda.device.get_cublas_handle())
    pointers = [ctypes.c_void_p(x.data.ptr) for x in (b, a, d)]
    status = _blas().cublasZgemm3m(handle, 0, 0, n, m, k, one, pointers[0], n, pointers[1], k, zero, pointers[2], n)
    if status:
        raise DeviceError(f"cublasZgemm3m: status {status}")
    return {"d": d}


def _blas():
    for name in BLAS_LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DeviceError("cuBLAS cannot be loaded")
