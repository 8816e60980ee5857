"""What a product could reach at best: the rates of the units that it uses, measured in the same run, and the bytes it
must move over the rate of a copy."""

from __future__ import annotations

import numpy as np

from gemmserve_kernels.algorithms.ozaki.moduli import needed

RATES = ("copy", "fp16", "int8", "tf32", "fp32", "fp64")
"""Rates of a large copy (bytes read and written a second) and of the vendor's large products (operations a second)."""


CUDA_R_32I = 10
"""Value of library_types.h; CuPy has no name for it."""


def seconds(row, rates):
    """The least that a row's arithmetic and traffic take, or None where it is not known.

    `row`: dtype, compute, algorithm, arithmetic, bits, flops (8 m n k for complex), nbytes, m, n and k.
    """
    unit = _unit(row)
    if unit is None or rates.get(unit[0]) is None or rates.get("copy") is None:
        return None
    rate, work = unit
    return max(row["flops"] * work / rates[rate], row["nbytes"] / rates["copy"])


def _unit(row):
    """The unit, and operations of it for one of the product's."""
    arithmetic, dtype = row["arithmetic"], row["dtype"]
    is_complex = dtype.startswith("complex")
    algorithm = row.get("algorithm")
    if algorithm == "sums":  # passes over memory alone
        return "fp64", 0.0
    if algorithm == "gram":  # k^2 m of A^H A and k^2 n of the forms, half of each by symmetry
        return "fp64", row["k"] * (row["m"] + row["n"]) / (2 * row["m"] * row["n"])
    if algorithm == "screen":  # the product that rules elements out
        return "fp16", 1.0
    if arithmetic == "3xfp16":
        return "fp16", 3.0
    if arithmetic == "3xfp16-3m":
        return "fp16", 3.0 * 3 / 4
    if arithmetic == "1xfp16":
        return "fp16", 1.0
    if arithmetic in {"3xtf32", "1xtf32", "tf32"}:
        return "tf32", 3.0 if arithmetic == "3xtf32" else 1.0
    if arithmetic == "ozaki":  # one product modulo each number, two of complex ones, which have four of their own
        return "int8", needed(row["k"], np.dtype(dtype)) * (2 / 4 if is_complex else 1)
    if row.get("bits") is not None:  # emulated: how many products of integers is not told
        return None
    if row["compute"] in {"tf32", "1xtf32"} or "TF32" in row["who"]:
        return "tf32", 1.0
    if "3m" in row["who"]:
        return "fp64", 3 / 4
    if dtype == "float16":
        return "fp16", 1.0
    return ("fp64" if dtype in {"float64", "complex128"} or row["compute"] == "fp64" else "fp32"), 1.0


def measured(cupy, clock, size=8192):
    """The rates of this device, by name; None where the BLAS refuses. On random data: zeros run faster."""
    from cupy.cuda import cublas, runtime

    rng = cupy.random.default_rng(1)
    normal = rng.standard_normal((size, size), np.float32)
    rates = {"copy": _copy(cupy, clock, 16 * size * size)}
    kinds = {
        "fp16": (np.float16, np.float32, cublas.CUBLAS_COMPUTE_32F),
        "int8": (np.int8, np.int32, cublas.CUBLAS_COMPUTE_32I),
        "tf32": (np.float32, np.float32, cublas.CUBLAS_COMPUTE_32F_FAST_TF32),
        "fp32": (np.float32, np.float32, cublas.CUBLAS_COMPUTE_32F),
        "fp64": (np.float64, np.float64, cublas.CUBLAS_COMPUTE_64F),
    }
    names = {"float16": "R_16F", "float32": "R_32F", "float64": "R_64F", "int8": "R_8I"}
    types = {name: getattr(runtime, f"CUDA_{suffix}") for name, suffix in names.items()} | {"int32": CUDA_R_32I}
    for name, (given, result, compute) in kinds.items():
        extent = size // 2 if name in {"fp32", "fp64"} else size
        x = normal[:extent, :extent]
        x = cupy.ascontiguousarray((x * 40).astype(given) if given == np.int8 else x.astype(given))
        d = cupy.empty((extent, extent), result)
        codes = [types[np.dtype(t).name] for t in (given, result)]

        def run(_, x=x, d=d, codes=codes, compute=compute, extent=extent, result=result):
            factors = np.array([1, 0], np.int32 if result == np.int32 else result)
            address = factors.ctypes.data
            cublas.gemmEx(
                cupy.cuda.device.get_cublas_handle(), cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, extent, extent, extent,
                address, x.data.ptr, codes[0], extent, x.data.ptr, codes[0], extent,
                address + factors.itemsize, d.data.ptr, codes[1], extent, compute, cublas.CUBLAS_GEMM_DEFAULT,
            )  # fmt: skip

        try:
            run(0)
        except cublas.CUBLASError as error:
            print(f"no ceiling of {name}: {error}")
            rates[name] = None
            continue
        # The best of a few: a ceiling, not what a throttled device does.
        rates[name] = 2 * extent**3 / min(clock.device(run, 0, 2) for _ in range(5))
    return rates


def _copy(cupy, clock, nbytes):
    source, target = (cupy.zeros(nbytes, cupy.uint8) for _ in range(2))
    source.view(np.uint32)[...] = cupy.arange(nbytes // 4).astype(np.uint32)
    return 2 * nbytes / min(clock.device(lambda _: cupy.copyto(target, source), 0, 4) for _ in range(5))
