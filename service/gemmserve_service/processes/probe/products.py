"""Times of products of operands that a device has, by dtype and size, as warm as long work makes the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels import gemm
from gemmserve_kernels.planning.rates import MeasuredProduct, flops_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gemmserve_kernels import DeviceSpec
    from gemmserve_service.processes.probe.amounts import Amounts, Deadline

FIRST: Final = "complex64"
DTYPES: Final = (FIRST, "float32", "complex128", "float64", "float16")
_CALLS: Final = 3
"""Products that a measurement makes at least, the one that is compiled for among them."""
_CHUNK_S: Final = 0.01
"""Seconds of calls after which the device is waited for."""
_WARM: Final = 0.5
"""Share of a measurement that does not count: clocks fall while a device gets warm."""
_OPERANDS: Final = 4
"""Share of the device's memory, as its reciprocal, that a product's operands and result take at most; planes need as
much again.
"""


def product_times(spec: DeviceSpec, amounts: Amounts, deadline: Deadline) -> tuple[list[MeasuredProduct], list[str]]:
    """Return squares that were timed, and which were left out for want of time or memory. On the GPU that CuPy uses in
    this thread, or the CPU. What has to be compiled puts the deadline off. Raises DeviceError.
    """
    found: list[MeasuredProduct] = []
    skipped: list[str] = []
    last: dict[str, float] = {}  # operations a second, from which the time of the next larger product is guessed
    for n, dtype in _squares(amounts):
        flops = flops_of(dtype, n, n, n)
        needed_s = max(amounts.slice_s, _CALLS * flops / last[dtype]) if dtype in last else amounts.slice_s
        fits = 3 * n * n * np.dtype(dtype).itemsize * _OPERANDS <= spec.memory_bytes
        if not fits or not deadline.allows(needed_s):
            skipped.append(f"{dtype} {n}: {'no time' if fits else 'too little memory'}")
            continue
        seconds, first_s = _square(spec, dtype, n, amounts.slice_s)
        deadline.put_off(max(0.0, first_s - seconds))
        last[dtype] = flops / seconds
        found.append(MeasuredProduct(dtype, "auto", n, n, n, seconds))
    return found, skipped


def _squares(amounts: Amounts) -> list[tuple[int, str]]:
    """The smallest of every dtype first, the largest last: the device is warm by then."""
    kinds = {dtype: amounts.first_extents if dtype == FIRST else amounts.extents for dtype in DTYPES}
    return [
        (n, dtype) for n in sorted({*amounts.first_extents, *amounts.extents}) for dtype in DTYPES if n in kinds[dtype]
    ]


def _square(spec: DeviceSpec, dtype: str, n: int, slice_s: float) -> tuple[float, float]:
    """Return the seconds of n x n x n: the mean over what counts of a slice, one product at least; and those of the
    first one, which compiles or loads what it needs.
    """
    xp: Any = np
    if spec.kind != "cpu":
        import cupy as xp  # type: ignore[no-redef]

    def wait() -> None:
        if spec.kind != "cpu":
            xp.cuda.get_current_stream().synchronize()

    a, b = (_operand(xp, n, dtype, seed) for seed in (1, 2))
    start = time.perf_counter()
    gemm(a, b)
    wait()
    first_s = time.perf_counter() - start
    count = 1
    times: list[float] = []
    begun = time.perf_counter()
    while not times or time.perf_counter() - begun < slice_s:
        start = time.perf_counter()
        for _ in range(count):
            gemm(a, b)
        wait()
        taken = time.perf_counter() - start
        times.append(taken / count)
        count = max(1, min(2 * count, round(_CHUNK_S * count / max(taken, 1e-9))))
    counted = times[int(len(times) * _WARM) :]
    return sum(counted) / len(counted), first_s


def _operand(xp: Any, n: int, dtype: str, seed: int) -> Any:
    """A matrix whose mantissas are as good as random, since a device's clock depends on them: the products of two
    vectors' elements, made where it lies, for even a large one takes no time so.
    """
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    parts = rng.uniform(0.5, 2.0, (2, n)) * rng.choice([-1, 1], (2, n))
    turned = parts * np.exp(1j * rng.uniform(0, 1, (2, n))) if kind.kind == "c" else parts
    rows, columns = (xp.asarray(part.astype(kind)) for part in turned)
    return rows[:, None] * columns[None, :]


def fastest(products: Iterable[MeasuredProduct], dtype: str) -> float:
    """Return the highest operations a second of a dtype; 0 where none was timed."""
    return max((each.flops / each.seconds for each in products if each.dtype == dtype), default=0.0)
