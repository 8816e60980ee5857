"""Kinds of products whose first one on a fresh server is timed: every dtype, reductions, a program, every mode."""

from __future__ import annotations

from gemmserve_kernels.problem.vocabulary import COMPUTE_MODES

DTYPES = ("complex64", "float32", "complex128", "float64", "float16")
REDUCTIONS = ("sum", "sumsq", "absmax")
DOUBLE = ("fp64", "ozaki")
"""Modes of 64-bit data."""


def kinds(sizes, modes=COMPUTE_MODES):
    """Return the kinds that a device with these compute modes has, what is asked most often first.

    Each is {op, dtype, n, compute, reduce}; `sizes` are extents from small to large, `reduce` is for reductions alone.
    """
    middle = sizes[len(sizes) // 2]
    found = [kind("gemm", dtype, n) for dtype in DTYPES[:2] for n in sizes]
    found += [kind("program", "complex64", middle)]
    found += [kind("gemm_reduce", "complex64", middle, reduce=reduce) for reduce in REDUCTIONS]
    found += [kind("gemm", dtype, n) for dtype in DTYPES[2:] for n in sizes]
    named = [(mode, "complex128" if mode in DOUBLE else "complex64") for mode in modes if mode != "auto"]
    for n in (middle, *(n for n in sizes if n != middle)):
        found += [kind("gemm", dtype, n, compute=mode) for mode, dtype in named]
    return found


def kind(op, dtype, n, *, compute="auto", reduce=None):
    """Return one kind."""
    return {"op": op, "dtype": dtype, "n": n, "compute": compute, "reduce": reduce}


def label(each):
    """Return its words: gemm complex64 1024, gemm_reduce sum complex64 1024, gemm complex64 1024 3xtf32."""
    words = (each["op"], each["reduce"], each["dtype"], str(each["n"]), each["compute"])
    return " ".join(word for word in words if word not in {None, "auto"})
